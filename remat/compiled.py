"""What ``remat.compile`` returns: called like the model, and otherwise the model itself."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Final, NoReturn

import torch
from torch import fx, nn

from remat.capture import fresh_function
from remat.options import Options
from remat.passes.torch_private import dynamo
from remat.plans import Plan, Unplanned
from remat.session import Session
from remat.solvers.errors import RematError
from remat.step_plan import StepPlan

_UNCOMPILED: Final = Unplanned(
    "torch ran this call without compiling it: its limit of graphs for one function is reached "
    "(torch._dynamo.config.recompile_limit; pad inputs to fewer shapes, or raise it), or "
    "compilation is turned off"
)
# Long names: a model may have attributes of its own called _run or _session.
_OWN: Final = ("_remat_model", "_remat_session", "_remat_run", "_remat_lock")


def _backend_of(session: Session) -> Callable[..., Callable[..., Any]]:
    """Its backend, not keeping it alive.

    torch keeps every backend, and what that returned, until the compiler is reset; the session has
    the model and the optimizer.
    """
    reference = weakref.ref(session)

    def backend(graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        runner = weakref.ref(_alive(reference).backend(graph, inputs))
        return lambda *given: _alive(runner)(*given)

    return backend


def _alive(reference: weakref.ref[Any]) -> Any:
    found = reference()
    assert found is not None, "the compiled callable holds it while it is called"
    return found


class Compiled:
    """A compiled function, or, as :class:`CompiledModule`, a compiled module.

    Attributes are those of what was compiled: read, set and deleted there.

    Attributes:
        plans: one :class:`remat.Plan` for each captured graph, that of its latest call; what could
            not be planned stands there with the reason. Empty before the first call.
        step_plan: how the step as a whole shares the budget: several graphs, or one and the code
            outside it; None where the plan of a single graph says all.
    """

    def __init__(self, model: Callable[..., Any], options: Options) -> None:
        owner = model if isinstance(model, nn.Module) else None
        session = Session(options, owner=owner)
        run = torch.compile(fresh_function(model), backend=_backend_of(session), dynamic=False)
        for name, value in zip(_OWN, (model, session, run, threading.RLock()), strict=True):
            object.__setattr__(self, name, value)
        weakref.finalize(self, session.close).atexit = False

    @property
    def plans(self) -> tuple[Plan | Unplanned, ...]:
        """One for each captured graph; see the class."""
        return self._remat_session.plans

    @property
    def step_plan(self) -> StepPlan | None:
        """See the class."""
        return self._remat_session.step_plan

    # A compiler that meets this call runs it as it is: it is compiled already.
    @dynamo.uncompiled
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        session = self._remat_session
        # Threads take turns: a session follows one call at a time.
        with self._remat_lock:
            before = session.calls
            with session.entered((args, kwargs)):
                result = self._call(*args, **kwargs)
            if session.calls == before:
                session.say(_UNCOMPILED)
        return result

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return self._remat_run(*args, **kwargs)
        except dynamo.BackendCompilerFailed as error:
            if isinstance(error.inner_exception, RematError):
                raise error.inner_exception from None
            raise

    @property
    def _orig_mod(self) -> Any:
        """What was compiled, under the name that ``torch.compile`` gives it."""
        return self._remat_model

    def __getattr__(self, name: str) -> Any:
        # A model's own way of being copied would copy the model alone.
        if name in (*_OWN, "__copy__", "__deepcopy__"):
            raise AttributeError(name)
        return getattr(self._remat_model, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in (*_OWN, "plans", "step_plan", "forward"):
            raise AttributeError(f"{name} of a compiled model is remat's and cannot be set")
        setattr(self._remat_model, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._remat_model, name)

    def __dir__(self) -> list[str]:
        return sorted({*object.__dir__(self), *dir(self._remat_model)})

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy of the model is compiled anew: compiled code would train the original.
        return type(self), (self._remat_model, self._remat_session.options)

    def __repr__(self) -> str:
        return f"remat.compile({self._remat_model!r})"


class CompiledModule(Compiled, nn.Module):
    """A compiled module: a ``torch.nn.Module`` of the same parameters, under the same names.

    It has no state of its own: every method of a module, overridden or not, is the model's.
    """

    @property
    def forward(self) -> Callable[..., Any]:  # type: ignore[override]
        """The compiled call, with the signature of the model's ``forward``."""
        return functools.wraps(self._remat_model.forward)(partial(type(self).__call__, self))

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Those of the model, with this one in its place."""
        for name, module in self._remat_model.named_modules(memo, prefix, remove_duplicate):
            yield name, self if module is self._remat_model else module

    def modules(self, remove_duplicate: bool = True) -> Iterator[nn.Module]:
        """Those of the model, with this one in its place."""
        for _, module in self.named_modules(remove_duplicate=remove_duplicate):
            yield module

    def compile(self, *_: Any, **__: Any) -> NoReturn:
        """Refused: it is compiled.

        Raises:
            RematError: always.
        """
        raise RematError(
            "this module is compiled by remat.compile already; to compile the model in place "
            'instead, call model.compile(backend="remat", options={...}) on the model itself'
        )

    def _replicate_for_data_parallel(self) -> NoReturn:
        raise RematError(
            "nn.DataParallel copies a module at every call, and a copy would run uncompiled and "
            "unplanned; use DistributedDataParallel, which keeps one process for each device"
        )

    def __len__(self) -> int:
        return len(self._remat_model)

    def __bool__(self) -> bool:
        return True

    def __iter__(self) -> Iterator[Any]:
        return iter(self._remat_model)

    def __getitem__(self, index: Any) -> Any:
        return self._remat_model[index]

    def __contains__(self, item: Any) -> bool:
        return item in self._remat_model


_HOOKS: Final = (
    "register_forward_pre_hook",
    "register_forward_hook",
    "register_full_backward_pre_hook",
    "register_full_backward_hook",
    "register_backward_hook",
)


def _delegated(name: str) -> Callable[..., Any]:
    def method(self: CompiledModule, *args: Any, **kwargs: Any) -> Any:
        if name in _HOOKS and self._remat_session.calls:
            raise RematError(
                f"{name} after the first call: torch compiles the hooks it finds then, and would "
                "never call this one; register it before, or on the model itself, followed by "
                "torch._dynamo.reset()"
            )
        result = getattr(self._remat_model, name)(*args, **kwargs)
        return self if result is self._remat_model else result

    method.__name__, method.__doc__ = name, getattr(nn.Module, name).__doc__
    return method


def _delegate() -> None:
    """Every method of a module is the model's, which may have overridden it."""
    ours = {*vars(Compiled), *vars(CompiledModule)}
    for name, value in vars(nn.Module).items():
        special = name.startswith("__") or name in ("_call_impl", "_wrapped_call_impl")
        if callable(value) and name not in ours and not special:
            setattr(CompiledModule, name, _delegated(name))


_delegate()


def make_compiled(model: Callable[..., Any], options: Options) -> Compiled:
    """The wrapper that suits ``model``."""
    kind = CompiledModule if isinstance(model, nn.Module) else Compiled
    return kind(model, options)
