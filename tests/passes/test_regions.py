import torch
from torch import Tensor, nn

from remat.passes.joint import JointGraph
from remat.passes.regions import inline_regions, moved_stack
from remat.passes.storages import Storages
from remat.passes.torch_private import partition as private


@torch.compiler.nested_compile_region
def region(x: Tensor) -> Tensor:
    return x.sin() * x.exp()


@torch.compiler.nested_compile_region
def outer_region(x: Tensor) -> Tensor:
    return region(x).tanh()


def captured(function: object, *args: Tensor) -> tuple[JointGraph, int]:
    seen: list[tuple[JointGraph, int]] = []

    def partition(module, inputs, *, num_fwd_outputs, **options):
        calls = inline_regions(module)
        seen.append((JointGraph.make(module, num_fwd_outputs), calls))
        return private.default_partition(module, inputs, num_fwd_outputs, **options)

    def backend(graph, inputs):
        return private.aot_compile(graph, inputs, partition=partition)

    torch._dynamo.reset()
    torch.compile(function, backend=backend, dynamic=False, fullgraph=True)(*args).backward()
    return seen[0]


def targets(joint: JointGraph) -> list[str]:
    return [str(node.target) for node in joint.nodes if node.op == "call_function"]


def test_two_calls_have_storages_of_their_own() -> None:
    x = torch.ones(4, requires_grad=True)
    joint, calls = captured(lambda x: region(region(x)).square().sum(), x)
    assert calls == 4
    assert "invoke_subgraph" not in targets(joint)
    sines = [node for node in joint.nodes if str(node.target) == "aten.sin.default"]
    assert len(sines) == 2
    storages = Storages.of(joint)
    assert storages.held[sines[0]] != storages.held[sines[1]]
    assert all(storages.created[node] for node in sines)


def test_regions_inside_regions_are_inlined() -> None:
    x = torch.ones(4, requires_grad=True)

    def twice(x: Tensor) -> Tensor:
        return outer_region(outer_region(x)).square().sum()

    joint, _ = captured(twice, x)
    assert "invoke_subgraph" not in targets(joint)
    assert targets(joint).count("aten.tanh.default") == 2
    assert torch.equal(x.grad, plain_gradient(twice))


def plain_gradient(function: object) -> Tensor:
    x = torch.ones(4, requires_grad=True)
    function(x).backward()
    return x.grad


def test_a_graph_without_regions_is_left_alone() -> None:
    x = torch.ones(4, requires_grad=True)
    joint, calls = captured(lambda x: x.sin().sum(), x)
    assert calls == 0
    assert "aten.sin.default" in targets(joint)


def test_modules_of_a_body_are_those_of_the_call() -> None:
    first = {"0": ("L['self'].layers.0", nn.Linear), "1": ("L['self'].layers.0.up", nn.ReLU)}
    call = {"7": ("L['self'].layers.3", nn.Linear)}
    moved = [path for path, _ in moved_stack(first, call).values()]
    assert moved == ["L['self'].layers.3", "L['self'].layers.3.up"]
    assert list(moved_stack({"0": ("elsewhere", nn.GELU)}, call).values()) == [*call.values()]
