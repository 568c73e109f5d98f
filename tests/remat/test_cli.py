"""The command line: what it prints, what it writes, and its exit codes."""

from __future__ import annotations

import io
import re
import subprocess
import sys
import threading
import types
from pathlib import Path
from typing import Any

import pytest

from remat import __version__
from remat.cli import DONE, FAILED, INTERRUPTED, USAGE, _terminal, main, subcommands
from remat.plans import Plan

Captured = pytest.CaptureFixture[str]


class Planner:
    """Stands in for ``remat.api``: remembers what it was asked."""

    def __init__(self, plan: Plan) -> None:
        self.answer = plan
        self.asked: list[tuple[Any, ...]] = []

    def plan(self, model: Any, args: Any, kwargs: Any, *, loss: Any, **options: Any) -> Plan:
        assert callable(options.pop("progress"))
        self.asked.append((model, args, kwargs, loss, options))
        return self.answer


@pytest.fixture
def planner(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> Planner:
    planner = Planner(plan)
    module = types.ModuleType("remat.api")
    module.plan = planner.plan  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "remat.api", module)
    return planner


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a user's module in it, where the command is run."""
    (tmp_path / "steps_of_a_user.py").write_text(
        "def two(): return print, (1,)\n"
        "def three(): return print, [1], {'end': ''}\n"
        "def four(): return print, (), None, sum\n"
        "class Holder:\n    made = staticmethod(two)\n"
        "def one(): return print\n"
        "def many(): return 1, 2, 3, 4, 5\n"
        "def no_model(): return 1, ()\n"
        "def no_args(): return print, 1\n"
        "def no_kwargs(): return print, (), 1\n"
        "def no_loss(): return print, (), None, 1\n"
        "number = 7\n"
    )
    (tmp_path / "lacks_something.py").write_text("import no_such_module_anywhere\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", ".")])
    for name in ("steps_of_a_user", "lacks_something"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


def test_every_subcommand_follows_the_protocol() -> None:
    commands = subcommands()
    assert {"plan", "show"} <= set(commands)
    for name, command in commands.items():
        assert name == command.NAME
        assert command.HELP
        assert not command.HELP.endswith(".")
        assert callable(command.run)


def test_help_lists_the_subcommands(capsys: Captured) -> None:
    assert main(["--help"]) == DONE
    printed = capsys.readouterr().out
    assert all(name in printed for name in subcommands())


@pytest.mark.parametrize("name", sorted(subcommands()))
def test_every_subcommand_has_help(name: str, capsys: Captured) -> None:
    assert main([name, "--help"]) == DONE
    assert subcommands()[name].HELP.split()[0] in capsys.readouterr().out


def test_version(capsys: Captured) -> None:
    assert main(["--version"]) == DONE
    assert capsys.readouterr().out == f"remat {__version__}\n"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "required: COMMAND"),
        (["shwo"], "invalid choice: 'shwo'"),
        (["show"], "required: PLAN.json"),
        (["plan", "train:step"], "required: --memory-budget"),
        (["plan", "train", "--memory-budget", "1GiB"], "'train' is not MODULE:FUNCTION, like"),
        (["plan", "a b:f", "--memory-budget", "1GiB"], "'a b:f' is not MODULE:FUNCTION"),
        (["plan", "m:f", "--memory-budget", "1", "--gap", "x"], "--gap: invalid float"),
    ],
)
def test_wrong_usage_is_2(argv: list[str], message: str, capsys: Captured) -> None:
    assert main(argv) == USAGE
    assert message in capsys.readouterr().err


def test_show_prints_the_plan(plan: Plan, tmp_path: Path, capsys: Captured) -> None:
    plan.save(tmp_path / "plan.json")
    assert main(["show", str(tmp_path / "plan.json")]) == DONE
    assert capsys.readouterr().out == f"{plan}\n"


def test_show_of_what_is_not_there_is_1_and_no_traceback(capsys: Captured) -> None:
    assert main(["show", "no/such/plan.json"]) == FAILED
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == "remat show: cannot read no/such/plan.json: No such file or directory\n"


def test_show_of_what_is_no_plan_is_1(tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "plan.json").write_text("{}")
    assert main(["show", str(tmp_path / "plan.json")]) == FAILED
    assert "format is None, this version of remat reads 'remat.plan/1'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("function", "asked"),
    [
        ("two", (print, (1,), None, None)),
        ("Holder.made", (print, (1,), None, None)),
        ("three", (print, (1,), {"end": ""}, None)),
        ("four", (print, (), None, sum)),
    ],
)
def test_plan_asks_for_what_the_function_returned(
    planner: Planner, here: Path, capsys: Captured, function: str, asked: tuple[Any, ...]
) -> None:
    assert main(["plan", f"steps_of_a_user:{function}", "--memory-budget", "8GiB"]) == DONE
    assert planner.asked == [(*asked, {"memory_budget": "8GiB"})]
    assert capsys.readouterr().out == f"{planner.answer}\n"


@pytest.mark.parametrize(
    ("text", "budget"), [("0.5", 0.5), ("1.", 1.0), (".25", 0.25), ("1", "1"), ("80%", "80%")]
)
def test_a_budget_with_a_point_is_a_fraction(
    planner: Planner, here: Path, text: str, budget: object
) -> None:
    assert main(["plan", "steps_of_a_user:two", "--memory-budget", text]) == DONE
    assert planner.asked[0][-1] == {"memory_budget": budget}


def test_plan_passes_the_options_that_were_given(planner: Planner, here: Path) -> None:
    line = "plan steps_of_a_user:two --memory-budget auto --every-n-layers 2 --time-limit 3 "
    assert main((line + "--gap 0.01 --device h100 --cost roofline").split()) == DONE
    assert planner.asked[0][-1] == {
        "memory_budget": "auto",
        "every_n_layers": 2,
        "time_limit": 3.0,
        "gap": 0.01,
        "device": "h100",
        "cost": "roofline",
    }


@pytest.mark.parametrize(
    ("step", "message"),
    [
        ("steps_of_nobody:two", "there is no module 'steps_of_nobody' here or among"),
        ("steps_of_a_user.deeper:two", "there is no module 'steps_of_a_user.deeper' here"),
        ("steps_of_a_user:zero", "module 'steps_of_a_user' has no 'zero'"),
        ("steps_of_a_user:number", "steps_of_a_user:number is a int, not a function"),
        ("steps_of_a_user:one", "must return (model, args), (model, args, kwargs) or"),
        ("steps_of_a_user:many", "returned a tuple of 5; it must return (model, args)"),
        ("steps_of_a_user:no_model", "the model is a int; it must be a module"),
        ("steps_of_a_user:no_args", "args is a int; it must be a tuple, like (batch,)"),
        ("steps_of_a_user:no_kwargs", "kwargs is a int; it must be a dict"),
        ("steps_of_a_user:no_loss", "loss is a int; it must be a function"),
    ],
)
def test_a_function_that_gives_no_step_is_1(
    planner: Planner, here: Path, capsys: Captured, step: str, message: str
) -> None:
    assert main(["plan", step, "--memory-budget", "8GiB"]) == FAILED
    assert message in capsys.readouterr().err
    assert planner.asked == []


def test_what_the_users_module_lacks_is_the_users_traceback(planner: Planner, here: Path) -> None:
    with pytest.raises(ModuleNotFoundError, match="no_such_module_anywhere"):
        main(["plan", "lacks_something:f", "--memory-budget", "8GiB"])


def test_a_bad_option_is_1_before_the_model_is_built(
    planner: Planner, here: Path, capsys: Captured
) -> None:
    assert main(["plan", "steps_of_nobody:two", "--memory-budget", "8 potatoes"]) == FAILED
    assert "memory_budget='8 potatoes' is no byte size" in capsys.readouterr().err


def test_the_plan_is_stored(planner: Planner, here: Path) -> None:
    line = ["plan", "steps_of_a_user:two", "--memory-budget", "8GiB", "-o", "plan.json"]
    assert main(line) == DONE
    assert Plan.load(here / "plan.json") == planner.answer


def test_a_file_is_overwritten_only_by_force(
    planner: Planner, here: Path, capsys: Captured
) -> None:
    (here / "plan.json").write_text("mine")
    line = ["plan", "steps_of_a_user:two", "--memory-budget", "8GiB", "-o", "plan.json"]
    assert main(line) == FAILED
    assert "plan.json is there already; add --force to overwrite it" in capsys.readouterr().err
    assert (here / "plan.json").read_text() == "mine"
    assert planner.asked == []
    assert main([*line, "--force"]) == DONE
    assert Plan.load(here / "plan.json") == planner.answer


@pytest.mark.parametrize(
    ("output", "message"),
    [(".", "name a file in it"), ("no/plan.json", "there is no folder no; make it first")],
)
def test_an_output_that_cannot_be_is_known_before(
    planner: Planner, here: Path, capsys: Captured, output: str, message: str
) -> None:
    line = ["plan", "steps_of_a_user:two", "--memory-budget", "8GiB", "--force", "-o", output]
    assert main(line) == FAILED
    assert message in capsys.readouterr().err
    assert planner.asked == []


def test_a_reader_that_leaves_early_is_no_error(plan: Plan, tmp_path: Path) -> None:
    """``remat show plan.json | head``: here the reader is gone before the first byte."""
    plan.save(tmp_path / "plan.json")
    reader = subprocess.Popen([sys.executable, "-c", ""], stdin=subprocess.PIPE)
    reader.wait()
    command = [sys.executable, "-m", "remat.cli", "show", str(tmp_path / "plan.json")]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, stdout=reader.stdin, stderr=subprocess.PIPE, text=True)
    assert reader.stdin is not None
    reader.stdin.close()
    assert (done.returncode, done.stderr) == (DONE, "")


def test_a_small_export_to_a_reader_that_left_is_no_error_either() -> None:
    """It fits into Python's buffer, which is flushed last of all."""
    reader = subprocess.Popen([sys.executable, "-c", ""], stdin=subprocess.PIPE)
    reader.wait()
    done = _command(["export", "--to", "schema"], stdout=reader.stdin)
    assert reader.stdin is not None
    reader.stdin.close()
    assert (done.returncode, done.stderr) == (DONE, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here")
def test_a_full_disk_behind_stdout_is_1_and_no_traceback() -> None:
    with open("/dev/full", "w") as full:
        done = _command(["export", "--to", "schema"], stdout=full)
    assert (done.returncode, done.stderr) == (
        FAILED, "remat export: cannot print: No space left on device\n"
    )  # fmt: skip


def _command(arguments: list[str], stdout: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "remat.cli", *arguments]
    root = Path(__file__).parents[2]
    return subprocess.run(command, cwd=root, stdout=stdout, stderr=subprocess.PIPE, text=True)


def test_data_is_utf_8_whatever_the_locale(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    _terminal.print_data("größer → €")
    assert raw.getvalue().decode() == "größer → €"


def test_closed_streams_are_no_error(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``remat show plan.json >&- 2>&-``: Python has None for both."""
    plan.save(tmp_path / "plan.json")
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    assert main(["show", str(tmp_path / "plan.json")]) == DONE
    assert main(["compare", str(tmp_path / "plan.json"), str(tmp_path / "plan.json")]) == DONE


def test_what_cannot_be_written_is_1_and_the_old_file_stays(
    planner: Planner, here: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    (here / "plan.json").write_text("mine")
    monkeypatch.setattr(Path, "replace", full)
    line = ["plan", "steps_of_a_user:two", "--memory-budget", "8GiB", "--force", "-o", "plan.json"]
    assert main(line) == FAILED
    assert "remat plan: cannot write plan.json: No space left on device" in capsys.readouterr().err
    assert (here / "plan.json").read_text() == "mine"
    assert [path.name for path in here.iterdir() if path.suffix == ".tmp"] == []


def test_an_interruption_is_no_traceback(
    planner: Planner, here: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(sys.modules["remat.api"], "plan", interrupted)
    assert main(["plan", "steps_of_a_user:two", "--memory-budget", "8GiB"]) == INTERRUPTED
    assert capsys.readouterr().err == "remat plan: interrupted\n"


class Terminal(io.StringIO):
    """A stderr that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_a_spinner_turns_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    from rich.status import Status

    started = threading.Event()
    begin = Status.start

    def start(status: Status) -> None:
        begin(status)
        started.set()

    monkeypatch.setattr(Status, "start", start)
    monkeypatch.setattr(_terminal, "SPINNER_DELAY", 0.0)
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with _terminal.spinner("planning") as show:
        assert started.wait(60)
        show(None, 1.0)
        show(2.0, 1.9)
        threading.Event().wait(0.3)  # the status paints itself some twelve times a second
    assert "planning" in terminal.getvalue()
    assert "a plan of 2.00 s, at most 5.00% from the best" in terminal.getvalue()


@pytest.mark.parametrize("stream", [Terminal(), io.StringIO()])
def test_no_spinner_for_what_is_quick_or_piped(
    stream: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_terminal, "SPINNER_DELAY", 1e6 if stream.isatty() else 0.0)
    monkeypatch.setattr(sys, "stderr", stream)
    with _terminal.spinner("planning"):
        pass
    assert stream.getvalue() == ""


def test_a_report_is_coloured_on_a_terminal_and_complete(
    plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    _terminal.print_report(str(plan))
    shown = terminal.getvalue()
    assert "\x1b[" in shown
    assert re.sub(r"\x1b\[[0-9;]*m", "", shown) == f"{plan}\n"
