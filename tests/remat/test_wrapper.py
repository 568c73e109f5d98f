"""Replaying generated wrappers: written by hand to the byte, and real ones against the truth."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from remat.executors.wrapper import StepReplay, replay_inference, replay_step
from remat.executors.wrapper_memory import OpBytes
from remat.executors.wrapper_run import Generated, Kind, Moment, TensorSpec
from remat.solvers.errors import RematError

HEADER = """
import torch
from torch._inductor.async_compile import AsyncCompile
aten = torch.ops.aten
assert_size_stride = torch._C._dynamo.guards.assert_size_stride
empty_strided_cpu = torch._C._dynamo.guards._empty_strided_cpu
reinterpret_tensor = torch._C._dynamo.guards._reinterpret_tensor
async_compile = AsyncCompile()
cpp_fused_0 = async_compile.cpp_pybinding(['float*'], r'''anything''')
triton_poi_0 = async_compile.triton('triton_poi_0', '''anything''', device_str='cuda')
"""


def spec(name: str, *shape: int, dtype: torch.dtype = torch.float32) -> TensorSpec:
    stride = torch.empty(shape, device="meta").stride()
    count = torch.Size(shape).numel()
    return TensorSpec(
        name, shape, stride, dtype, torch.device("cpu"), 0, count, name.startswith("tangents")
    )


def wrapper(body: str, *inputs: TensorSpec, kind: Kind = "inference", copied: int = 0) -> Generated:
    names = "".join(f"{given.name}, " for given in inputs)
    lines = [f"{names}= args" if names else "pass", "args.clear()", *body.strip().splitlines()]
    call = "\n".join(f"        {line.strip()}" for line in lines)
    return Generated(
        kind, f"{HEADER}\nclass Runner:\n    def call(self, args):\n{call}\n", inputs, copied
    )


def levels(moments: tuple[Moment, ...]) -> list[tuple[int, int]]:
    """(most, after) of every statement from the third on: the unpacking comes first."""
    return [(moment.peak, moment.after) for moment in moments[2:]]


def replay(body: str, *inputs: TensorSpec, **options: Any) -> list[tuple[int, int]]:
    return levels(replay_inference(wrapper(body, *inputs), **options))


def test_buffers_live_from_allocation_to_their_last_name() -> None:
    body = """
        buf0 = empty_strided_cpu((10, 10), (10, 1), torch.float32)
        cpp_fused_0(x, buf0)
        buf1 = reinterpret_tensor(buf0, (100, ), (1, ), 0); del buf0  # reuse
        del x
        buf2 = empty_strided_cpu((5, ), (1, ), torch.int64)
        triton_poi_0.run(buf1, buf2, 5, stream=get_raw_stream(0))
        del buf1
        return (buf2, )
    """
    found = replay(body, spec("x", 1000))
    assert found == [
        (400, 400), (400, 400), (400, 400), (400, 400), (400, 400), (440, 440), (440, 440),
        (440, 40), (40, 40),
    ]  # fmt: skip


def test_a_name_that_is_bound_again_frees_what_it_named_after_the_statement() -> None:
    body = """
        buf0 = empty_strided_cpu((100, ), (1, ), torch.uint8)
        buf0 = empty_strided_cpu((50, ), (1, ), torch.uint8)
        return ()
    """
    assert replay(body) == [(100, 100), (150, 50), (50, 0)]


def test_a_tuple_keeps_its_members_until_it_is_deleted() -> None:
    body = """
        buf0 = torch.ops.aten.var_mean.correction(x, [1], correction=0, keepdim=True)
        buf1 = buf0[0]
        del buf0
        return (buf1, )
    """
    # Two times eight rows of floats.
    assert replay(body, spec("x", 8, 4)) == [(64, 64), (64, 64), (64, 32), (32, 32)]


def test_sizes_are_rounded_as_the_allocator_rounds() -> None:
    body = """
        buf0 = empty_strided_cpu((3, ), (1, ), torch.float32)
        buf1 = empty_strided_cpu((129, ), (1, ), torch.float32)
        return (buf0, buf1, )
    """
    assert replay(body, granularity=512) == [(512, 512), (1536, 1536), (1536, 1536)]


def test_another_device_counts_nothing() -> None:
    body = """
        buf0 = empty_strided_cpu((3, ), (1, ), torch.float32)
        return (buf0, )
    """
    assert replay(body, device_type="cuda") == [(0, 0), (0, 0)]


def test_a_workspace_counts_while_the_kernel_runs_and_what_is_retained_with_the_result() -> None:
    asked = []

    def workspace(op: Any, args: Any, kwargs: Any, result: Any) -> OpBytes:
        asked.append(str(op))
        return OpBytes(1000, 1) if op is torch.ops.aten.mm.out else OpBytes(0, 7)

    body = """
        buf0 = empty_strided_cpu((4, 4), (4, 1), torch.float32)
        extern_kernels.mm(x, reinterpret_tensor(x, (4, 4), (1, 4), 0), out=buf0)
        buf1 = extern_kernels.bmm(y, y)
        assert_size_stride(buf1, (1, 4, 4), (16, 4, 1), 'torch.ops.aten.bmm')
        del buf1
        return (buf0, )
    """
    found = replay(body, spec("x", 4, 4), spec("y", 1, 4, 4), workspace=workspace)
    assert found == [(64, 64), (1064, 64), (135, 135), (135, 135), (135, 64), (64, 64)]
    assert asked == ["aten.mm.out", "aten.bmm.default"]


def test_views_of_inputs_and_constants_belong_to_others() -> None:
    source = wrapper("buf0 = aten.neg.default(_tensor_constant0)\nreturn (buf0, x, )", spec("x", 9))
    comment = "device(type='cpu') torch.float32 (2, 3) (3, 1) 7f3a"
    constant = Generated(
        "inference", f"_tensor_constant0 = None  # {comment}\n{source.source}", source.inputs
    )
    assert levels(replay_inference(constant)) == [(24, 24), (24, 24)]


def test_buffers_of_a_pool_are_the_pool() -> None:
    body = """
        pool1 = empty_strided_cpu((512, ), (1, ), torch.uint8)
        buf0 = alloc_from_pool(pool1, 128, torch.float32, (3, 3), (3, 1))
        buf1 = alloc_from_pool(pool1, 0, torch.float32, (3, 3), (3, 1))
        del pool1
        del buf0
        del buf1
        return ()
    """
    assert [after for _, after in replay(body)] == [512, 512, 512, 512, 512, 0, 0]


def test_a_wrapper_of_several_parts() -> None:
    source = f"""{HEADER}
def partition_0(args):
    x, = args
    args.clear()
    buf0 = empty_strided_cpu((10, ), (1, ), torch.float32)
    buf1 = empty_strided_cpu((10, ), (1, ), torch.float32)
    del buf0
    return (buf1, )

class Runner:
    def call(self, args):
        x, = args
        args.clear()
        with torch.cuda._DeviceGuard(0):
            torch.cuda.set_device(0)
            partition0_args = [x]
            del x
            (buf1,) = self.partitions[0](partition0_args)
            del partition0_args
            return (buf1, )

runner = Runner(partitions=[partition_0])
call = runner.call
"""
    moments = replay_inference(Generated("inference", source, (spec("x", 10),)))
    assert max(moment.peak for moment in moments) == 80
    assert moments[-1].after == 40


@pytest.mark.parametrize(
    "line",
    [
        "buf0 = something_new(x)",
        "buf0 = extern_kernels.something_new(x)",
        "buf0 = torch.something_new(x)",
        "buf0 = torch.ops.aten.something_new.default(x)",
        "for i in range(3): pass",
        "s0 = x.item()",
    ],
)
def test_a_statement_that_means_nothing_is_named(line: str) -> None:
    body = f"buf9 = empty_strided_cpu((3, ), (1, ), torch.float32)\n{line}\nreturn ()"
    with pytest.raises(RematError, match=r"line \d+ of the \w+ wrapper means nothing") as found:
        replay(body, spec("x"))
    assert f"`{line}`" in str(found.value)


def test_other_wrappers_are_refused() -> None:
    with pytest.raises(RematError, match=r"no Python code .* turn its option cpp_wrapper off"):
        replay_inference(Generated("inference", "void call(float* x) {}", ()))
    with pytest.raises(RematError, match="no function call"):
        replay_inference(Generated("inference", "x = 1", ()))


BRANCHES = """
def true_graph_0(args):
    a, = args
    args.clear()
    t = empty_strided_cpu((TRUE, ), (1, ), torch.uint8)
    cpp_fused_0(a, t)
    del t
    u = empty_strided_cpu((10, ), (1, ), torch.uint8)
    return (u, )

def false_graph_0(args):
    a, = args
    args.clear()
    t = empty_strided_cpu((FALSE, ), (1, ), torch.uint8)
    del a
    u = empty_strided_cpu((10, ), (1, ), torch.uint8)
    del t
    return (u, )

def call(args):
    p, = args
    args.clear()
    buf0 = empty_strided_cpu((100, ), (1, ), torch.uint8)
    buf1 = [None] * 1
    if p.item():
        true_graph_0_args = [buf0]
        del buf0
        buf1 = true_graph_0(true_graph_0_args)
    else:
        false_graph_0_args = [buf0]
        buf1 = false_graph_0(false_graph_0_args)
    buf2 = buf1[0]
    del buf1
    buf3 = empty_strided_cpu((LATER, ), (1, ), torch.uint8)
    return (buf2, buf3, )
"""


@pytest.mark.parametrize(
    ("sizes", "peak"),
    [
        # 100 to choose from, then a branch at its most; what follows the second has buf0 beside.
        ({"TRUE": 500, "FALSE": 5, "LATER": 5}, 600),
        ({"TRUE": 5, "FALSE": 500, "LATER": 5}, 610),
        ({"TRUE": 5, "FALSE": 5, "LATER": 700}, 810),
    ],
)
def test_the_worst_way_through_a_branch_counts(sizes: dict[str, int], peak: int) -> None:
    body = BRANCHES
    for name, size in sizes.items():
        body = body.replace(name, str(size))
    moments = replay_inference(Generated("inference", HEADER + body, (spec("p"),)))
    assert max(moment.peak for moment in moments) == peak


# The outer true branch asks again, and the inner false branch is the one that takes much.
NESTED = """
def inner_true(args):
    a, = args
    args.clear()
    u = empty_strided_cpu((10, ), (1, ), torch.uint8)
    return (u, )

def inner_false(args):
    a, = args
    args.clear()
    t = empty_strided_cpu((5000, ), (1, ), torch.uint8)
    del t
    u = empty_strided_cpu((10, ), (1, ), torch.uint8)
    return (u, )

def outer_true(args):
    a, p = args
    args.clear()
    b = [None] * 1
    if p.item():
        inner_true_args = [a]
        del a
        b = inner_true(inner_true_args)
    else:
        inner_false_args = [a]
        b = inner_false(inner_false_args)
    c = b[0]
    del b
    return (c, )

def outer_false(args):
    a, p = args
    args.clear()
    u = empty_strided_cpu((10, ), (1, ), torch.uint8)
    return (u, )

def call(args):
    p, = args
    args.clear()
    buf0 = empty_strided_cpu((100, ), (1, ), torch.uint8)
    buf1 = [None] * 1
    if p.item():
        outer_true_args = [buf0, p]
        del buf0
        buf1 = outer_true(outer_true_args)
    else:
        outer_false_args = [buf0, p]
        buf1 = outer_false(outer_false_args)
    buf2 = buf1[0]
    del buf1
    return (buf2, )
"""

# The first choice leaves a large result that dies soon, or its operand to the very end.
LASTING = """
def t0(args):
    a, = args
    args.clear()
    t = empty_strided_cpu((1000, ), (1, ), torch.uint8)
    return (reinterpret_tensor(t, (10, ), (1, ), 0), )

def f0(args):
    a, = args
    args.clear()
    u = empty_strided_cpu((10, ), (1, ), torch.uint8)
    return (u, )

def call(args):
    p, = args
    args.clear()
    buf0 = empty_strided_cpu((500, ), (1, ), torch.uint8)
    buf1 = [None] * 1
    if p.item():
        t0_args = [buf0]
        del buf0
        buf1 = t0(t0_args)
    else:
        f0_args = [buf0]
        buf1 = f0(f0_args)
    buf2 = buf1[0]
    del buf1
    buf3 = empty_strided_cpu((5, ), (1, ), torch.uint8)
    del buf2
    buf5 = [None] * 1
    if p.item():
        t1_args = [buf3]
        del buf3
        buf5 = t1(t1_args)
    else:
        f1_args = [buf3]
        buf5 = f1(f1_args)
    return (buf5[0], )

def t1(args):
    a, = args
    args.clear()
    u = empty_strided_cpu((10, ), (1, ), torch.uint8)
    return (u, )

def f1(args):
    a, = args
    args.clear()
    t = empty_strided_cpu((5000, ), (1, ), torch.uint8)
    del t
    u = empty_strided_cpu((10, ), (1, ), torch.uint8)
    return (u, )
"""


@pytest.mark.parametrize(("body", "peak"), [(NESTED, 100 + 5000), (LASTING, 500 + 5 + 5000)])
def test_branches_in_branches_and_behind_each_other(body: str, peak: int) -> None:
    moments = replay_inference(Generated("inference", HEADER + body, (spec("p"),)))
    assert max(moment.peak for moment in moments) == peak


@pytest.mark.parametrize("size", [10, 700])
def test_the_larger_results_of_two_branches_stay(size: int) -> None:
    body = BRANCHES.replace("u = empty_strided_cpu((10, )", f"u = empty_strided_cpu(({size}, )", 1)
    for name in ("TRUE", "FALSE", "LATER"):
        body = body.replace(name, "5")
    moments = replay_inference(Generated("inference", HEADER + body, (spec("p"),)))
    assert moments[-1].after == size + 5  # its result and buf3; the operand is the caller's name


LOOP = """
def body_graph_0(args):
    i, x = args
    args.clear()
    y = empty_strided_cpu((100, ), (1, ), torch.uint8)
    cpp_fused_0(x, y)
    del x
    j = empty_strided_cpu((1, ), (1, ), torch.uint8)
    return (j, y, )

def cond_graph_0(args):
    i, x = args
    args.clear()
    c = empty_strided_cpu((), (), torch.bool)
    return (c, )

def call(args):
    x, = args
    args.clear()
    buf1 = empty_strided_cpu((1, ), (1, ), torch.uint8)
    buf0 = [None] * 2
    kept = []
    buf0[0] = buf1
    buf0[1] = x
    cond_graph_0_args = [buf0[0], buf0[1]]
    (buf0_cond_result,) = cond_graph_0(cond_graph_0_args)
    should_loop = buf0_cond_result
    if not should_loop:
        buf0[0] = buf1.clone()
        buf0[1] = x.clone()
    while should_loop:
        body_graph_0_args = [buf0[0], buf0[1]]
        (buf0[0], buf0[1]) = body_graph_0(body_graph_0_args)
        MORE
        cond_graph_0_args = [buf0[0], buf0[1]]
        (buf0_cond_result,) = cond_graph_0(cond_graph_0_args)
        should_loop = buf0_cond_result
    buf2 = buf0[1]
    del buf0
    return (buf2, )
"""


def test_a_loop_holds_two_of_what_it_carries() -> None:
    source = HEADER + LOOP.replace("MORE", "pass")
    moments = replay_inference(Generated("inference", source, (spec("x", 25),)))
    # Two states of 101 bytes, the counter the loop began with, and one answer, held by two names.
    assert max(moment.peak for moment in moments) == 2 * 101 + 1 + 1


def test_a_loop_that_keeps_more_in_every_turn_is_refused() -> None:
    """As torch writes a loop whose backward needs every turn."""
    source = HEADER + LOOP.replace("kept = []", "buf0.extend([[] for _ in range(2)])").replace(
        "MORE", "buf0[2].append(buf0[0]); buf0[3].append(buf0[1])"
    )
    with pytest.raises(RematError, match=r"every turn keeps 101 bytes more.*fixed number of times"):
        replay_inference(Generated("inference", source, (spec("x", 25),)))


def test_a_branch_that_returns_is_refused() -> None:
    source = HEADER + BRANCHES.replace("buf1 = true_graph_0(true_graph_0_args)", "return ()")
    with pytest.raises(RematError, match="a branch that returns"):
        replay_inference(Generated("inference", source.replace("TRUE", "5"), (spec("p"),)))


FORWARD = """
    buf0 = empty_strided_cpu((100, ), (1, ), torch.float32)
    buf1 = empty_strided_cpu((), (), torch.float32)
    buf2 = empty_strided_cpu((7, ), (1, ), torch.float32)
    cpp_fused_0(w, buf0, buf1, buf2)
    return (buf2, buf1, w, buf0, )
"""
BACKWARD = """
    buf3 = empty_strided_cpu((100, ), (1, ), torch.float32)
    cpp_fused_0(w, buf0, tangents_1, buf3)
    del buf0
    del tangents_1
    buf4 = empty_strided_cpu((10, 10), (1, 10), torch.float32)
    return (buf4, )
"""


def step(backward: str = BACKWARD, tangent: TensorSpec | None = None, **options: Any) -> StepReplay:
    w, saved = spec("w", 10, 10), spec("buf0", 100)
    tangent = tangent or spec("tangents_1")
    return replay_step(
        wrapper(FORWARD, w, kind="forward", copied=1),
        wrapper(backward, w, saved, tangent, kind="backward"),
        **options,
    )


def test_a_step() -> None:
    found = step(resident=10_000)
    # Forward: saved 400, loss 4, new content of an input 28; w is resident.
    assert found.forward_peak == 10_000 + 432
    assert found.saved == 400
    # The new content is gone; loss and its gradient stay, so do 400 for each of buf3 and buf4.
    backward = [m.after - 10_000 for m in found.moments if m.kind == "backward"]
    assert backward == [408, 408, 808, 808, 408, 408, 808, 408, 408]
    # The gradient's layout is not the parameter's: it is copied.
    assert found.backward_peak == found.peak == 10_000 + 808
    assert str(found.where).startswith("backward, line ")
    assert "buf3 = empty_strided_cpu" in str(found.where)


def test_a_gradient_of_another_layout_is_copied() -> None:
    copied = "buf4 = empty_strided_cpu((10, 10), (1, 10), torch.float32)\nreturn (buf4, )"
    taken = copied.replace("(1, 10)", "(10, 1)")
    assert step(copied).moments[-1].text == "accumulating gradients"
    assert step(copied).moments[-1].peak == 400 + 408 + 400 - 400
    assert step(taken).moments[-1].text == "return (buf4, )"


def test_a_gradient_that_two_parameters_get_is_copied() -> None:
    w = spec("w", 10)
    forward = wrapper("return (x, )", w, spec("x", 10), kind="forward")
    backward = wrapper(
        "buf0 = empty_strided_cpu((10, ), (1, ), torch.float32)\nreturn (buf0, buf0, )",
        spec("tangents_1", 10), kind="backward",
    )  # fmt: skip
    assert [m.peak for m in replay_step(forward, backward).moments[-2:]] == [80, 80]


def test_the_gradient_of_a_larger_output_dies_with_its_last_name() -> None:
    body = "del tangents_1\ndel buf0\nreturn (None, )"
    large, loss = step(body, spec("tangents_1", 50)), step(body)
    assert [m.after for m in large.moments[-4:]] == [604, 404, 4, 4]
    assert [m.after for m in loss.moments[-4:]] == [408, 408, 8, 8]


def test_halves_of_two_steps_are_refused() -> None:
    w = spec("w", 10, 10)
    with pytest.raises(RematError, match="backward takes 'buf0' where forward saves a tensor of"):
        replay_step(
            wrapper(FORWARD, w, kind="forward"),
            wrapper(BACKWARD, w, spec("buf0", 99), spec("tangents_1"), kind="backward"),
        )
