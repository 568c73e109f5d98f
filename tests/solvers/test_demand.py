"""What has to run before an op can: everything missing, once, each after what it reads."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from strategies import chain, problems

from remat.solvers.demand import missing_ops
from remat.solvers.problem import Problem


@given(problems(max_forward=7, max_deferred=2), st.data())
def test_what_is_missing_runs_once_after_what_it_reads_and_no_more(
    problem: Problem, data: st.DataObject
) -> None:
    every = range(len(problem.values))
    some = st.sets(st.sampled_from(every)) if every else st.just(set[int]())
    present, wanted = data.draw(some), data.draw(some)
    ran = missing_ops(problem, present, sorted(wanted))
    assert len(set(ran)) == len(ran)
    there = present | {v for v in every if problem.producer[v] < 0}
    for index in ran:
        assert set(problem.ops[index].reads) <= there
        assert not set(problem.ops[index].writes) <= present
        there |= set(problem.ops[index].writes)
    assert wanted <= there
    read = {v for index in ran for v in problem.ops[index].reads}
    for index in ran:
        assert (set(problem.ops[index].writes) - present) & (wanted | read)


def test_the_first_operand_is_made_first_and_chains_may_be_long() -> None:
    problem = chain([1] * 5001, [1.0] * 5000)
    assert missing_ops(problem, set(), [5000]) == list(range(5000))
    assert missing_ops(problem, {1}, [3, 2]) == [1, 2]
    assert missing_ops(chain([1] * 3, [1.0] * 2), {1}, [1]) == []
