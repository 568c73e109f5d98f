"""Private torch: inductor with a partition of ours. Importing it takes eight seconds.

What inductor's caches do with a custom partition, measured on torch 2.13:

* AOTAutograd's cache is asked first. Its key holds the graph, the example inputs, inductor's whole
  configuration and ``Partitioner.uuid()``. On a hit, in the same process or in another, neither the
  partition nor the inner compiler is called: nothing is known of the two graphs.
* FxGraphCache is asked for each graph that is compiled. Its key holds ``uuid()`` too, so under
  another one even a half that came out the same is compiled again. On a hit (AOTAutograd's cache
  off, or its entry gone) the partition has been called and the source is known.
* Both are on by default, and both reach from one process to the next through inductor's folder. One
  ``uuid()`` for two plans of a graph would run the first plan's code for the second.
"""

from __future__ import annotations

import contextlib
import copy
import difflib
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from torch import fx
from torch._functorch import config as _functorch_config
from torch._guards import TracingContext
from torch._inductor import compile_fx as _compile_fx
from torch._inductor import config as _config
from torch._inductor.custom_graph_pass import CustomPartitionerFn

from remat.passes.torch_private.fusing import held_apart
from remat.passes.torch_private.partition import default_partition, is_region
from remat.solvers.errors import InvalidOption, RematError

PartitionFunction = Callable[..., tuple[fx.GraphModule, fx.GraphModule]]

# Without it torch compiles a backward of static shapes when it is first run.
_AT_ONCE: Final = "force_non_lazy_backward_lowering"

# Where Dynamo says what an input is: of the module, and of a placeholder.
_PARAMETERS: Final = "_param_name_to_source"
_SOURCE: Final = "_dynamo_source"

# What remat sets itself, or cannot follow: the replay reads Python wrappers.
_REFUSED: Final = {
    "custom_partitioner_fn": "remat brings its own partition",
    "cpp_wrapper": "remat reads the peak off Python wrappers",
    "fx_wrapper": "remat reads the peak off Python wrappers",
    "freezing": "it is for inference",
}


@dataclass(frozen=True)
class CompiledHalf:
    """One graph that inductor compiled.

    Attributes:
        kind: ``"forward"``, ``"backward"`` or ``"inference"``.
        source: the generated module.
        names: of the graph's placeholders.
        inputs: the fake tensors (and other things) it was compiled for.
        copied: its first outputs, new contents of inputs, which the caller copies and drops.
    """

    kind: str
    source: str
    names: tuple[str, ...]
    inputs: tuple[Any, ...]
    copied: int


class Partitioner(CustomPartitionerFn):
    """Our partition, as inductor wants it: its digest is part of the key of every cache.

    Inductor pickles its configuration into those keys, so only the digest is pickled.
    """

    def __init__(self, partition: PartitionFunction, key: str) -> None:
        self._partition: PartitionFunction | None = partition
        self.digest = hashlib.sha256(key.encode()).hexdigest()

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **options: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        if self._partition is None:
            raise RematError("a partition that went through pickle has lost its function")
        # Meant for torch's own partitions.
        options.pop("compiler", None)
        if is_region(joint_inputs):
            return default_partition(gm, joint_inputs, options.pop("num_fwd_outputs"), **options)
        return self._partition(gm, joint_inputs, **options)

    def uuid(self) -> str:
        """The digest of everything the partition depends on beside the graph."""
        return self.digest

    def __getstate__(self) -> dict[str, Any]:
        return {"_partition": None, "digest": self.digest}


def check_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """``options`` as inductor names them.

    Raises:
        InvalidOption: inductor has no option of that name, or remat cannot have it set.
    """
    known = _config.get_config_copy()
    found: dict[str, Any] = {}
    for name, value in options.items():
        attribute = name.replace("-", "_")
        if attribute not in known:
            near = difflib.get_close_matches(attribute, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise InvalidOption(
                f"inductor has no option {name!r}{hint} (torch._inductor.list_options() names all)"
            )
        if attribute in _REFUSED and value not in (None, False):
            raise InvalidOption(
                f"inductor option {name!r} cannot be set here: {_REFUSED[attribute]}"
            )
        found[attribute] = value
    return found


def compile_with_partition(
    graph: fx.GraphModule,
    inputs: Sequence[Any],
    *,
    partitioner: Partitioner,
    options: Mapping[str, Any],
    donate: bool,
    hold_apart: bool,
    on_compiled: Callable[[CompiledHalf], None],
) -> Callable[..., Any]:
    """Compile a Dynamo graph with inductor; the graph itself is left as it is.

    Both halves are compiled at once, where stock torch compiles the backward when it is first run
    (a torch without that switch still does, and ``on_compiled`` then comes that late).

    Args:
        options: checked by :func:`check_options`; they hold for this compilation only.
        donate: let backward write into saved tensors, which forbids ``retain_graph``.
        hold_apart: fuse no two ops that a library call lies between; see :mod:`fusing`.
        on_compiled: called for each half that is compiled, or found in inductor's cache.
    """

    def inner(gm: fx.GraphModule, example_inputs: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        copied = _forward_metadata(donate)
        names = tuple(node.name for node in gm.graph.nodes if node.op == "placeholder")
        trivial = trivial_source(gm)
        compiled = _compile_fx.compile_fx_inner(gm, example_inputs, *args, **kwargs)
        kind = "inference" if kwargs.get("is_inference") else "forward"
        kind = "backward" if kwargs.get("is_backward") else kind
        source = getattr(compiled, "source_code", None) or trivial
        if source is None:
            raise RematError(
                f"inductor returned no source for the {kind} graph ({type(compiled).__name__}); "
                'remat cannot tell its peak. Use executor="eager"'
            )
        copied = copied if kind == "forward" else 0
        on_compiled(CompiledHalf(kind, source, names, tuple(example_inputs), copied))
        return compiled

    own = _own_copy(graph)
    patches = {**options, "custom_partitioner_fn": partitioner}
    at_once = {_AT_ONCE: True} if hasattr(_functorch_config, _AT_ONCE) else {}
    apart = held_apart() if hold_apart else contextlib.nullcontext()
    with apart, _functorch_config.patch(at_once):
        run: Any = _compile_fx.compile_fx(own, inputs, inner_compile=inner, config_patches=patches)
    return run


def _own_copy(graph: fx.GraphModule) -> fx.GraphModule:
    """A Dynamo graph for ``compile_fx``, which takes it over, where this one is compiled again.

    Dynamo leaves what it knows of the inputs in attributes that no copy takes along; without them
    parameters count as tensors that come and go, and torch's partition is another one.
    """
    own = fx.GraphModule(graph, copy.deepcopy(graph.graph))
    own.meta = dict(graph.meta)
    if hasattr(graph, _PARAMETERS):
        setattr(own, _PARAMETERS, getattr(graph, _PARAMETERS))
    for old, new in zip(graph.graph.nodes, own.graph.nodes, strict=True):
        if hasattr(old, _SOURCE):
            setattr(new, _SOURCE, getattr(old, _SOURCE))
    return own


def _forward_metadata(donate: bool) -> int:
    """How many outputs of the forward are new contents of inputs; forgets donations if asked to."""
    context = TracingContext.try_get()
    if context is None or context.fw_metadata is None:
        return 0
    if not donate:
        # torch refuses retain_graph for a graph that has any, and for None as well as for some.
        context.fw_metadata.bw_donated_idxs = []
    return int(context.fw_metadata.num_mutated_inp_runtime_indices)


def trivial_source(gm: fx.GraphModule) -> str | None:
    """A wrapper for a graph without calls, for which inductor generates none."""
    if any(node.op not in ("placeholder", "output") for node in gm.graph.nodes):
        return None
    names = [node.name for node in gm.graph.nodes if node.op == "placeholder"]
    (returned,) = gm.graph.output_node().args[0:1]
    assert isinstance(returned, tuple | list)
    unpacked = f"    {', '.join(names)}, = args\n" if names else ""
    values = "".join(f"{value}, " for value in returned)
    return f"def call(args):\n{unpacked}    args.clear()\n    return ({values})\n"
