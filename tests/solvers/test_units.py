"""Sizes and durations as people write and read them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remat.solvers.errors import InvalidOption
from remat.solvers.units import format_bytes, format_seconds, parse_bytes


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("8GiB", 8 * 2**30),
        ("512 MB", 512 * 10**6),
        (" 1.5gib ", 3 * 2**29),
        ("4096", 4096),
        ("4096b", 4096),
        ("1_000", 1000),
        ("2TiB", 2 * 2**40),
        ("3 kb", 3000),
        ("0", 0),
    ],
)
def test_sizes_are_read(text, count):
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "GiB", "-1", "8 GiBs", "1e9", "8GiB 3", "½ GB", "nan", "80%"])
def test_what_is_no_size_is_refused_with_an_example(text):
    with pytest.raises(InvalidOption, match='is not a byte size; write it like "8GiB"') as caught:
        parse_bytes(text)
    assert repr(text) in str(caught.value)


@given(st.integers(0, 2**60))
def test_an_integer_is_read_exactly(count):
    assert parse_bytes(str(count)) == count
    assert parse_bytes(f"{count} KiB") == count * 2**10


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (84, "84 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1.95 * 2**30, "1.95 GiB"),
        (411.4 * 2**20, "411.4 MiB"),
        (3 * 2**40, "3.00 TiB"),
        (-2048, "-2.00 KiB"),
    ],
)
def test_sizes_are_written(count, text):
    assert format_bytes(count) == text


@given(st.integers(0, 2**50))
def test_a_written_size_is_read_back_within_half_a_percent(count):
    text = format_bytes(count)
    assert parse_bytes(text.replace(" B", "")) == pytest.approx(count, rel=0.006)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0.00 s"), (1.24, "1.24 s"), (0.0351, "35.1 ms"), (0.00082, "820 us"), (90, "90.00 s")],
)
def test_durations_are_written(seconds, text):
    assert format_seconds(seconds) == text
