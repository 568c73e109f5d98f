"""Every option: what is taken, what is refused, and that the refusal says what is meant."""

from __future__ import annotations

from typing import Any

import pytest

from remat.options import Options
from remat.plans import Plan
from remat.solvers.errors import InvalidOption, RematError

NAN = float("nan")


def test_defaults() -> None:
    options = Options()
    assert options == Options.make()
    assert (options.solver, options.executor, options.on_unplanned) == ("auto", "eager", "warn")
    assert (options.time_limit, options.gap) == (10.0, 0.0)
    assert options.budget.kind == "none"


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("memory_budget", True, r"memory_budget=True is a bool; write bytes .*8GiB.*80%.*auto"),
        ("time_limit", 0, "time_limit=0: must be a finite number of seconds above 0, like 10.0"),
        ("time_limit", -1.0, "time_limit=-1.0: must be a finite number of seconds"),
        ("time_limit", True, "time_limit=True: must be a finite number"),
        ("time_limit", NAN, "time_limit=nan: must be a finite number"),
        ("time_limit", float("inf"), "time_limit=inf: must be a finite number of seconds"),
        ("time_limit", "10", "time_limit='10': must be a finite number"),
        ("gap", -0.1, "gap=-0.1: must be a share from 0"),
        ("gap", 1, "gap=1: must be a share from 0 up to, but not including, 1, like 0.01"),
        ("gap", NAN, "gap=nan: must be a share"),
        ("gap", False, "gap=False: must be a share"),
        ("every_n_layers", 0, "every_n_layers=0: must be an int of at least 1"),
        ("every_n_layers", 2.0, "every_n_layers=2.0: must be an int of at least 1"),
        ("every_n_layers", True, "every_n_layers=True: must be an int of at least 1"),
        ("solver", 3, 'solver=3: must be a name, like "auto" or "ilp"'),
        ("executor", "inducter", "executor='inducter': must be one of .*did you mean 'inductor'"),
        ("executor", 1, "executor=1: must be one of 'eager', 'inductor', 'cudagraph'"),
        ("on_unplanned", "rise", "on_unplanned='rise': must be one of .*did you mean 'raise'"),
        ("on_unplanned", None, "on_unplanned=None: must be one of 'warn', 'raise', 'ignore'"),
        ("cost", "flop", "cost='flop': must be one of .*did you mean 'flops'"),
        ("device", 0, 'device=0: must be a device or a name, like "cuda", "cpu" or "h100"'),
        ("device", " ", "device=' ': must be a device or a name"),
        ("offload", 2, "offload=2: must be False, True"),
        ("offload", "", "offload='': must be False, True"),
        ("keep", 5, "keep=5: must be names or patterns of modules"),
        ("recompute", ["a", 1], "recompute=.*: must be names or patterns of modules"),
        ("inductor", "max_autotune", "inductor='max_autotune': must be a mapping"),
        ("optimizer", "adam", "optimizer='adam': must be an optimizer, like torch.optim.AdamW"),
        ("plan", 7, "plan=7: must be a Plan, or the path of a stored one"),
        ("plan", "no/such.json", "no such file; write a plan with plan.save"),
    ],
)
def test_bad_values_are_refused_with_an_example(name: str, given: object, message: str) -> None:
    with pytest.raises(InvalidOption, match=message):
        Options.make(**{name: given})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"inductor": {"max_autotune": True}, "executor": "eager"},
            "inductor=.* says nothing to executor='eager'; leave it out",
        ),
    ],
)
def test_what_does_nothing_yet_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidOption, match=message):
        Options.make(**given)


def test_the_idle_values_of_coming_options_are_taken() -> None:
    options = Options.make(offload=False, keep=[], recompute=(), inductor=None, executor=None)
    assert options == Options()


@pytest.mark.parametrize(
    ("wrong", "near"),
    [("memory_bugdet", "memory_budget"), ("every_n_layer", "every_n_layers"), ("costs", "cost")],
)
def test_an_unknown_option_names_the_nearest(wrong: str, near: str) -> None:
    with pytest.raises(InvalidOption, match=f"unknown option '{wrong}'; did you mean '{near}'"):
        Options.make(**{wrong: 1})


def test_an_unknown_option_far_from_all_lists_them() -> None:
    with pytest.raises(
        InvalidOption, match=r"unknown option 'xyzzy' \(known: memory_budget, solver"
    ):
        Options.make(xyzzy=1)


def test_invalid_options_are_value_errors_and_remat_errors() -> None:
    assert issubclass(InvalidOption, ValueError)
    assert issubclass(InvalidOption, RematError)


def test_every_n_layers_chooses_its_solver() -> None:
    assert Options.make(every_n_layers=2).solver == "every_n_layers"
    assert Options.make(every_n_layers=2, solver="auto").solver == "every_n_layers"


def test_every_n_layers_beside_another_solver_would_do_nothing() -> None:
    with pytest.raises(InvalidOption, match="every_n_layers=2 says nothing to solver='ilp'"):
        Options.make(every_n_layers=2, solver="ilp")


def test_a_solver_beside_a_stored_plan_would_do_nothing(plan: Plan) -> None:
    with pytest.raises(InvalidOption, match="solver='sqrt' has nothing to solve"):
        Options.make(plan=plan, solver="sqrt")
    with pytest.raises(InvalidOption, match="solver='every_n_layers' has nothing to solve"):
        Options.make(plan=plan, every_n_layers=2)


def test_a_named_solver_is_looked_up() -> None:
    assert Options.make(solver="keep").solver == "keep"
    with pytest.raises(InvalidOption, match="unknown solver 'keeep'; did you mean 'keep'"):
        Options.make(solver="keeep")


def test_devices_are_names() -> None:
    torch = pytest.importorskip("torch")
    assert Options.make(device=torch.device("cuda", 1)).device == "cuda:1"
    assert Options.make(device="h100").device == "h100"


def test_an_optimizer_is_taken() -> None:
    torch = pytest.importorskip("torch")
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1)
    assert Options.make(optimizer=optimizer).optimizer is optimizer


@pytest.mark.parametrize("field", ["memory_budget", "solver", "plan"])
def test_options_are_frozen(field: str) -> None:
    with pytest.raises(AttributeError):
        setattr(Options(), field, None)


def test_progress_is_a_function() -> None:
    assert Options.make(progress=print).progress is print
    with pytest.raises(InvalidOption, match="progress=3 is not a function"):
        Options.make(progress=3)
