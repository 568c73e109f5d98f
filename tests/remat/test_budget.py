"""What ``memory_budget`` means, and how much memory a machine has."""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remat.budget import AUTO_MARGIN, Budget, machine_memory, parse_budget
from remat.budget import _cpu_memory as cpu_memory
from remat.solvers.errors import InvalidOption
from remat.solvers.units import GIB, MIB


def _never() -> NoReturn:
    raise AssertionError("the least peak is expensive, and was not needed")


@pytest.mark.parametrize(
    ("asked", "budget"),
    [
        (None, Budget("none")),
        (1, Budget("bytes", 1)),
        (1.0, Budget("fraction", 1.0)),
        (0.0, Budget("fraction", 0.0)),
        (8 * GIB, Budget("bytes", 8 * GIB)),
        ("8GiB", Budget("bytes", 8 * GIB)),
        (" 512 MB ", Budget("bytes", 512_000_000)),
        ("4096", Budget("bytes", 4096)),
        ("1.5gib", Budget("bytes", 3 * GIB // 2)),
        ("80%", Budget("device_share", 0.8)),
        ("12.5 %", Budget("device_share", 0.125)),
        ("auto", Budget("auto")),
        ("AUTO", Budget("auto")),
    ],
)
def test_what_is_meant(asked: object, budget: Budget) -> None:
    assert parse_budget(asked) == budget


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        (True, "memory_budget=True is a bool"),
        (False, "memory_budget=False is a bool"),
        (float("nan"), "memory_budget=nan is not a number"),
        (-0.1, r"memory_budget=-0.1 is a float outside \[0.0, 1.0\]; an int counts bytes"),
        (8e9, "memory_budget=8000000000.0 is a float outside"),
        (float("inf"), "memory_budget=inf is a float outside"),
        (-1, "memory_budget=-1 is -1 bytes, in which nothing fits"),
        (0, "memory_budget=0 is 0 bytes, in which nothing fits; 0.0 asks for the least peak"),
        ("0GiB", "memory_budget='0GiB' is 0 bytes"),
        ("-8GiB", "memory_budget='-8GiB' is no byte size"),
        ("8 potatoes", "memory_budget='8 potatoes' is no byte size"),
        ("", "memory_budget='' is no byte size"),
        ("0.5", "memory_budget='0.5' has a fraction and no unit"),
        ("%", "memory_budget='%' is no percentage"),
        ("nan%", r"memory_budget='nan%' is outside \(0%, 100%\]"),
        ("0%", r"memory_budget='0%' is outside \(0%, 100%\]"),
        ("101%", r"memory_budget='101%' is outside \(0%, 100%\]"),
        ([8], "memory_budget=.* is a list"),
        (8j, "memory_budget=8j is a complex"),
    ],
)
def test_what_is_refused_and_that_examples_follow(asked: object, why: str) -> None:
    with pytest.raises(InvalidOption, match=f'{why}.*"8GiB".*"80%".*"auto".*0.0.*1.0'):
        parse_budget(asked)


def test_numpy_integers_count_bytes() -> None:
    np = pytest.importorskip("numpy")
    assert parse_budget(np.int64(5)) == Budget("bytes", 5)
    assert parse_budget(np.float64(0.5)) == Budget("fraction", 0.5)


def test_bytes_and_none_and_the_whole_baseline_need_no_least_peak() -> None:
    known = {"baseline_peak": 100, "least_peak": _never, "device_total": 1000}
    assert parse_budget(None).resolve(**known) is None  # type: ignore[arg-type]
    assert parse_budget(64).resolve(**known) == 64  # type: ignore[arg-type]
    assert parse_budget(1.0).resolve(**known) == 100  # type: ignore[arg-type]
    assert parse_budget("80%").resolve(**known) == 800  # type: ignore[arg-type]


def test_auto_leaves_a_margin() -> None:
    budget = parse_budget("auto")
    resolved = budget.resolve(baseline_peak=1, least_peak=_never, device_free=1000)
    assert resolved == int(1000 * (1 - AUTO_MARGIN)) < 1000


@given(
    fraction=st.floats(0, 1),
    larger=st.floats(0, 1),
    least=st.integers(1, 2**50),
    more=st.integers(0, 2**50),
)
def test_a_fraction_lies_between_least_and_baseline_and_grows(
    fraction: float, larger: float, least: int, more: int
) -> None:
    small, large = sorted((fraction, larger))

    def resolve(share: float) -> int:
        resolved = parse_budget(share).resolve(baseline_peak=least + more, least_peak=lambda: least)
        assert resolved is not None
        return resolved

    assert least <= resolve(small) <= resolve(large) <= least + more
    assert resolve(0.0) == least


@pytest.mark.parametrize("asked", ["80%", "auto"])
def test_an_unknown_device_memory_is_said(asked: str) -> None:
    budget = parse_budget(asked)
    assert budget.needs_device
    with pytest.raises(InvalidOption, match=f'memory_budget="{asked}": .*unknown; write bytes'):
        budget.resolve(baseline_peak=1, least_peak=_never)


def test_auto_with_nothing_free_is_said() -> None:
    with pytest.raises(InvalidOption, match='"auto": nothing is free on the device'):
        parse_budget("auto").resolve(baseline_peak=1, least_peak=_never, device_free=0)


def test_this_machine_has_memory() -> None:
    total, free = machine_memory("cpu")
    assert MIB < free <= total


def test_the_memory_of_a_device_nobody_knows_is_refused() -> None:
    with pytest.raises(InvalidOption, match="device 'h100' is unknown; write bytes"):
        machine_memory("h100")


def _machine(root: Path, cgroup: str, files: dict[str, str]) -> Path:
    meminfo = "MemTotal:        8388608 kB\nMemFree: 1 kB\nMemAvailable:    4194304 kB\n"
    for name, text in {"proc/meminfo": meminfo, "proc/self/cgroup": cgroup, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_without_a_limit_the_machine_counts(tmp_path: Path) -> None:
    root = _machine(
        tmp_path,
        "0::/user\n",
        {"sys/fs/cgroup/user/memory.max": "max\n", "sys/fs/cgroup/user/memory.current": "5\n"},
    )
    assert cpu_memory(root) == (8 * GIB, 4 * GIB)


def test_the_tightest_cgroup_on_the_way_up_counts(tmp_path: Path) -> None:
    """Version 2; the page cache it could give back (inactive files) is free."""
    root = _machine(
        tmp_path,
        "0::/jobs/one\n",
        {
            "sys/fs/cgroup/jobs/memory.max": f"{2 * GIB}\n",
            "sys/fs/cgroup/jobs/memory.current": f"{GIB}\n",
            "sys/fs/cgroup/jobs/memory.stat": f"anon 1\ninactive_file {GIB // 2}\n",
            "sys/fs/cgroup/jobs/one/memory.max": f"{3 * GIB}\n",
            "sys/fs/cgroup/jobs/one/memory.current": f"{GIB // 4}\n",
        },
    )
    assert cpu_memory(root) == (2 * GIB, 2 * GIB - GIB // 2)


def test_a_container_sees_only_the_mount(tmp_path: Path) -> None:
    """Version 1: the path names a folder of the host that is not there inside."""
    root = _machine(
        tmp_path,
        "9:cpu:/x\n4:memory:/docker/abc\n",
        {
            "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{GIB}\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{GIB // 2}\n",
            "sys/fs/cgroup/memory/memory.stat": f"total_inactive_file {GIB // 4}\n",
        },
    )
    assert cpu_memory(root) == (GIB, 3 * GIB // 4)


@pytest.mark.cuda
def test_cuda_memory() -> None:
    total, free = machine_memory("cuda:0")
    assert 0 < free <= total
