"""Device specs, how they are found, and the store of measured figures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from remat.cost import device as devices
from remat.cost.device import KNOWN, DeviceSpec, find_device, known_gpu
from remat.cost.store import Store, cache_folder, environment
from remat.solvers.errors import InvalidOption


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REMAT_CACHE_DIR", str(tmp_path / "cache"))


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ("h100", "h100-sxm"), ("H100-PCIe", "h100-pcie"), ("a100", "a100-80gb"),
        ("A100 40GB", "a100-40gb"), ("RTX 4090", "rtx-4090"), ("4090", "rtx-4090"),
        ("H200", "h200"), ("l4", "l4"), ("MI300X", "mi300x"),
    ],
)  # fmt: skip
def test_described_devices_are_found_by_name(asked: str, found: str) -> None:
    spec = find_device(asked)
    assert spec.name == found
    assert spec.torch_device is None
    assert spec.granularity == 512


@pytest.mark.parametrize("spec", KNOWN.values(), ids=KNOWN)
def test_every_description_is_complete(spec: DeviceSpec) -> None:
    assert {"float32", "bfloat16", "float16", "float64"} <= set(spec.matrix_rates)
    assert spec.source
    # A matrix product is bound by arithmetic when it is large, pointwise work by bandwidth.
    assert spec.matrix_rate(torch.bfloat16) / spec.bandwidth > 50
    assert spec.matrix_rate(torch.int64) == spec.matrix_rates["float32"]
    assert 2e10 < spec.memory < 2e11


def test_figures_of_the_h100() -> None:
    spec = find_device("h100")
    assert spec.matrix_rate(torch.bfloat16) == pytest.approx(989.4e12)
    assert (spec.memory, spec.bandwidth) == (80 * 10**9, 3.35e12)


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(InvalidOption, match="unknown device 'h10'; did you mean 'h100'"):
        find_device("h10")
    with pytest.raises(InvalidOption, match=r"known: .*mi300x"):
        find_device("")


def test_a_device_that_is_not_here() -> None:
    with pytest.raises(InvalidOption, match="device 'meta' is not one remat has costs for"):
        find_device(torch.device("meta"))
    if not torch.cuda.is_available():
        with pytest.raises(InvalidOption, match=r"'cuda:0' is not here.*name it: a100"):
            find_device("cuda:0")


@pytest.mark.parametrize(
    ("driver", "name"),
    [
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"), ("NVIDIA A100 80GB PCIe", "a100-80gb"),
        ("NVIDIA H100 80GB HBM3", "h100-sxm"), ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H200", "h200"), ("NVIDIA L4", "l4"), ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("AMD Instinct MI300X", "mi300x"), ("NVIDIA GH200 480GB", "gh200"),
        ("NVIDIA B200", "b200"), ("NVIDIA L40S", "l40s"), ("NVIDIA A10", "a10"),
        ("NVIDIA GeForce RTX 3090", "rtx-3090"), ("NVIDIA GeForce RTX 5090", "rtx-5090"),
        ("NVIDIA RTX A6000", "rtx-a6000"),
    ],
)  # fmt: skip
def test_names_of_the_driver(driver: str, name: str) -> None:
    spec = known_gpu(driver)
    assert spec is not None
    assert spec.name == name


@pytest.mark.parametrize(
    "driver", ["NVIDIA L40", "NVIDIA A10G", "NVIDIA GeForce RTX 3090 Ti", "Tesla T4"]
)
def test_other_gpus_are_not_taken_for_known_ones(driver: str) -> None:
    assert known_gpu(driver) is None


def test_the_cpu_is_probed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    probes: list[torch.device] = []

    def probe(device: torch.device) -> dict[str, object]:
        probes.append(device)
        return {"matrix_rates": {"float32": 1e11}, "bandwidth": 1e10, "launch": 1e-6}

    monkeypatch.setattr(devices, "_probe", probe)
    first, second = find_device("cpu"), find_device(None)
    assert first == second
    assert len(probes) == 1
    assert (first.name, first.torch_device, first.granularity) == ("cpu", "cpu", 1)
    assert first.matrix_rate(torch.bfloat16) == 1e11
    assert first.memory > 2**20


def test_the_real_probe_finds_figures_and_keeps_the_threads() -> None:
    threads = torch.get_num_threads()
    figures = devices._probe(torch.device("cpu"))
    assert torch.get_num_threads() == threads
    assert set(figures["matrix_rates"]) == {"float32", "float64", "bfloat16", "float16"}
    assert min(*figures["matrix_rates"].values(), figures["bandwidth"], figures["launch"]) > 0
    json.dumps(figures)


def test_none_is_the_device_of_the_tensors() -> None:
    tensors = [torch.empty(10), torch.empty(1000, device="meta")]
    with pytest.raises(InvalidOption, match="'meta' is not one remat has costs for"):
        find_device(None, tensors)
    assert find_device(None, []).torch_device == "cpu"


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REMAT_CACHE_DIR", "/somewhere")
    assert cache_folder() == Path("/somewhere")
    monkeypatch.delenv("REMAT_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_folder() == Path("/xdg/remat")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache" / "remat"


def test_a_store_merges_what_others_wrote() -> None:
    ours, theirs = Store("test", ("a",)), Store("test", ("a",))
    ours.put("x", 1)
    theirs.put("y", [2, None])
    ours.save()
    theirs.save()
    merged = Store("test", ("a",))
    assert (merged["x"], merged["y"]) == (1, [2, None])
    assert "x" not in Store("test", ("another key",))
    assert [path.suffix for path in cache_folder().iterdir()] == [".json"]


def test_nothing_is_written_where_nothing_is_new() -> None:
    Store("test", ("a",)).save()
    assert not cache_folder().exists()


@pytest.mark.parametrize("content", ["{", "[]", '{"values": 3}'])
def test_a_broken_file_is_named_and_replaced(content: str) -> None:
    store = Store("test", ("a",))
    store.path.parent.mkdir(parents=True)
    store.path.write_text(content)
    with pytest.warns(UserWarning, match=r"cannot read .*test-.*\.json.*measured again"):
        again = Store("test", ("a",))
    again.put("x", 1)
    with pytest.warns(UserWarning, match="cannot read"):
        again.save()
    assert Store("test", ("a",))["x"] == 1


def test_a_folder_that_cannot_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("REMAT_CACHE_DIR", str(tmp_path / "file" / "below"))
    with pytest.warns(UserWarning) as warned:  # noqa: PT030, PT031  (both are read below)
        store = Store("test", ("a",))
        store.put("x", 1)
        store.save()
    assert "Set REMAT_CACHE_DIR" in str(warned[-1].message)
    assert store["x"] == 1


def test_the_environment_tells_threads_apart() -> None:
    cpu = torch.device("cpu")
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        more = environment(cpu)
    finally:
        torch.set_num_threads(threads)
    assert more != environment(cpu)
