"""What a problem may be: every refusal names the offender; JSON keeps everything."""

from __future__ import annotations

import gzip
import json
import math
from dataclasses import replace

import pytest
from hypothesis import given
from strategies import chain, problems, renamed

from remat.solvers.errors import InvalidProblem, RematError
from remat.solvers.problem import FORMAT, Op, Problem, Value


def two_ops(**changes: object) -> Problem:
    """w (owned) -> x -> y with a tangent g, every field of op "f" replaceable."""
    values = (
        Value("w", 4, owned=True),
        Value("x", 2),
        Value("y", 1, output="forward"),
        Value("g", 1, tangent=True),
    )
    ops = (
        replace(Op("f", "forward", (0,), (1,), seconds=1.0, flops=3), **changes),  # type: ignore[arg-type]
        Op("h", "forward", (1,), (2,)),
        Op("b", "backward", (3, 1), ()),
    )
    return Problem(values, ops)


def test_a_problem_counts_itself():
    problem = two_ops()
    assert (problem.forward, problem.deferred, problem.backward) == ((0, 1), (), (2,))
    assert problem.producer == (-1, 0, 1, -1)
    assert problem.tangents == (3,)
    assert (problem.base_seconds, problem.base_flops) == (1.0, 3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seconds": math.nan}, r"op 'f' takes nan seconds"),
        ({"seconds": math.inf}, r"op 'f' takes inf seconds"),
        ({"seconds": -1.0}, r"op 'f' takes -1.0 seconds"),
        ({"seconds": "1"}, r"op 'f' takes '1' seconds"),
        ({"seconds": True}, r"op 'f' takes True seconds"),
        ({"reads": (False,)}, r"op 'f' names value False; there are 4"),
        ({"writes": (True,)}, r"op 'f' names value True; there are 4"),
        ({"flops": -1}, r"op 'f' has flops -1"),
        ({"flops": 1.5}, r"op 'f' has flops 1.5"),
        ({"workspace": -2}, r"op 'f' has workspace -2"),
        ({"workspace": True}, r"op 'f' has workspace True"),
        ({"phase": "sideways"}, r"op 'f' has an unknown phase 'sideways'"),
        ({"reads": (9,)}, r"op 'f' names value 9; there are 4"),
        ({"reads": (-1,)}, r"op 'f' names value -1; there are 4"),
        ({"writes": (1.0,)}, r"op 'f' names value 1.0; there are 4"),
        ({"reads": (0, 0)}, r"op 'f' reads a value twice"),
        ({"writes": (1, 1)}, r"op 'f' writes a value twice"),
        ({"writes": (1, 2)}, r"value 'y' has two writers: 'f' and 'h'"),
        ({"writes": (1, 0)}, r"op 'f' writes 'w', which the caller owns"),
        ({"writes": (1, 3)}, r"op 'f' writes 'g', which arrives from outside"),
        ({"writes": ()}, r"op 'h' reads 'x', which nobody writes"),
        ({"reads": (2,)}, r"op 'f' reads 'y' before op 'h' writes it: the ops form a cycle"),
        ({"reads": (1,)}, r"op 'f' reads 'x' before op 'f' writes it: the ops form a cycle"),
        ({"reads": (3,)}, r"forward op 'f' reads 'g', which is backward"),
        ({"name": "h"}, r"two ops are named 'h'"),
    ],
)
def test_an_impossible_op_is_refused_by_name(changes, message):
    with pytest.raises(InvalidProblem, match=message):
        two_ops(**changes)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (Value("x", -1), r"value 'x' has -1 bytes"),
        (Value("x", 1.5), r"value 'x' has 1.5 bytes"),  # type: ignore[arg-type]
        (Value("x", True), r"value 'x' has True bytes"),
        (Value("x", 1, owned=True, tangent=True), r"'x' cannot be both owned and a tangent"),
        (Value("x", 1, output="sideways"), r"'x' has an unknown output 'sideways'"),  # type: ignore[arg-type]
        (Value("x", 1, output="backward"), r"nobody writes the output 'x'"),
    ],
)
def test_an_impossible_value_is_refused_by_name(value, message):
    with pytest.raises(InvalidProblem, match=message):
        Problem((value,), ())


def test_names_are_unique():
    with pytest.raises(InvalidProblem, match="two values are named 'x'"):
        Problem((Value("x", 1), Value("x", 2)), ())


@pytest.mark.parametrize("fixed", [-1, 0.5, None, False])
def test_fixed_bytes_are_a_count(fixed):
    with pytest.raises(InvalidProblem, match=f"fixed_bytes is {fixed!r}"):
        Problem((), (), fixed_bytes=fixed)


@pytest.mark.parametrize(("reader", "writer"), [("forward", "deferred"), ("deferred", "backward")])
def test_no_phase_reads_a_later_one(reader, writer):
    ops = (Op("w", writer, (), (0,)), Op("r", reader, (0,), ()))
    with pytest.raises(InvalidProblem, match=f"{reader} op 'r' reads 'v', which is {writer}"):
        Problem((Value("v", 1),), ops)


def test_an_owned_value_or_a_tangent_may_be_an_output():
    values = (
        Value("w", 1, owned=True, output="forward"),
        Value("g", 1, tangent=True, output="backward"),
    )
    assert Problem(values, ()).tangents == (1,)


@given(problems())
def test_json_keeps_everything(problem):
    text = json.dumps(problem.to_json(), allow_nan=False)
    again = Problem.from_json(json.loads(text))
    assert again == problem
    assert again.key == problem.key


@given(problems())
def test_files_keep_everything(tmp_path_factory, problem):
    folder = tmp_path_factory.mktemp("problem")
    for name in ("problem.json", "problem.json.gz"):
        problem.save(folder / name)
        assert Problem.load(folder / name) == problem
    plain = (folder / "problem.json").read_bytes()
    assert gzip.decompress((folder / "problem.json.gz").read_bytes()) == plain


def test_the_same_problem_is_the_same_file(tmp_path):
    for name in ("one.json.gz", "two.json.gz"):
        two_ops().save(tmp_path / name)
    assert (tmp_path / "one.json.gz").read_bytes() == (tmp_path / "two.json.gz").read_bytes()


def test_equal_seconds_have_one_key():
    assert two_ops(seconds=1).key == two_ops(seconds=1.0).key
    assert two_ops(seconds=0).key == two_ops(seconds=0.0).key == two_ops(seconds=-0.0).key


def test_the_key_is_stable_across_versions():
    # Stored plans are keyed by it: if this changes, so must the format's number.
    problem = chain([1, 2, 3], [1.0, 2.0])
    expected = "22c811261c2908cd4b39efdfca047c60ff66a3a5d226e18acaf3032f94e04f3f"
    assert problem.key == expected


@given(problems())
def test_the_key_tells_problems_apart(problem):
    assert renamed(problem).key != problem.key or not problem.values + problem.ops
    assert replace(problem, fixed_bytes=problem.fixed_bytes + 1).key != problem.key


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"format": "remat.problem/9"}, "format is 'remat.problem/9', expected 'remat.problem/1'"),
        ({}, "format is None"),
        ([], "format is 'list'"),
        ({"format": FORMAT}, "malformed problem: 'values'"),
        ({"format": FORMAT, "values": [{"name": "x"}], "ops": []}, "malformed problem: .*bytes"),
        ({"format": FORMAT, "values": [{"name": "x", "size": 1}], "ops": []}, "malformed.*size"),
        ({"format": FORMAT, "values": [], "ops": [{"name": "f"}]}, "malformed problem: 'reads'"),
        ({"format": FORMAT, "values": 3, "ops": []}, "malformed problem: .*iterable"),
    ],
)
def test_what_is_no_problem_is_refused(data, message):
    with pytest.raises(InvalidProblem, match=message):
        Problem.from_json(data)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "is not JSON"),
        (b"\xff\xfe", "is not JSON"),
        (gzip.compress(b"not json", mtime=0), "is not JSON"),
        (gzip.compress(b"{}", mtime=0)[:-9], "damaged gzip"),
        (b"\x1f\x8bnonsense", "damaged gzip"),
        (b"[]", "format is 'list'"),
    ],
    ids=["cut json", "no text", "gzip of no json", "cut gzip", "no gzip", "no object"],
)
def test_a_broken_file_is_refused(tmp_path, content, message):
    path = tmp_path / "broken.json"
    path.write_bytes(content)
    with pytest.raises(InvalidProblem, match=message):
        Problem.load(path)


def test_absent_fields_have_defaults():
    row = {"name": "f", "phase": "forward", "reads": [], "writes": [0]}
    data = {"format": FORMAT, "values": [{"name": "x", "bytes": 1}], "ops": [row]}
    problem = Problem.from_json(data)
    assert problem.ops[0].rerunnable
    assert problem.values[0].offloadable
    assert problem.fixed_bytes == 0


def test_refusals_are_errors_of_remat():
    assert issubclass(InvalidProblem, RematError)
    assert issubclass(InvalidProblem, ValueError)
