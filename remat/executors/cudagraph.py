"""The CUDA graph executor: what the eager executor would run is recorded once and replayed.

Two ways. Graphs that are run op by op are recorded here (:mod:`remat.executors.cudagraph_capture`):
forward and backward of ``remat.compile``, each a graph, or the one graph of ``remat.compile_step``.
Where options of inductor's are given, inductor compiles, and its own cudagraph trees record.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import fx

from remat.executors.cudagraph_capture import Captured, CudaRecorder, Recorder, Slot, Slots
from remat.executors.eager import PartitionFunction
from remat.options import Options
from remat.passes.capture_safe import capture_safe, generators_in, refuse_obstacles
from remat.passes.storages import main_device
from remat.passes.torch_private import autograd, capturing
from remat.passes.torch_private import partition as private
from remat.passes.whole_step import StepGraph
from remat.solvers.errors import CaptureError, RematError

DEVICE_TYPE: Final = "cuda"


def as_planned(options: Options) -> Options:
    """Options that say who compiles: inductor, with its cudagraph trees, if it has options."""
    if options.executor != "cudagraph" or options.inductor is None:
        return options
    inner = {**options.inductor, "triton.cudagraphs": True}
    return dataclasses.replace(options, executor="inductor", inductor=inner)


def check_device(inputs: Sequence[Any]) -> torch.device:
    """The CUDA device that most inputs are on.

    Raises:
        CaptureError: there is none; it says what to do.
    """
    device = main_device(item for item in inputs if isinstance(item, torch.Tensor))
    if device.type == "cuda":
        return device
    there = (
        "move the model and its inputs to the CUDA device"
        if torch.cuda.is_available()
        else "this torch sees none, so it can only be planned for one: remat.plan(..., "
        'executor="cudagraph", device="h100")'
    )
    raise CaptureError(
        f'executor="cudagraph" records CUDA graphs, and the step is on the {device.type}: {there}; '
        'or write executor="eager"'
    )


def compile_graph(
    graph: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    partition: PartitionFunction,
    on_inference: Callable[[fx.GraphModule], None],
    recorder: Recorder | None = None,
) -> Callable[..., Any]:
    """Compile one Dynamo graph; its forward and its backward are recorded when they run again.

    Args:
        partition: splits the joint graph if the graph trains.
        on_inference: called with the forward graph if nothing in it needs a gradient; it is not
            recorded.
        recorder: the raw calls; None: those of torch, on the device of the inputs.

    Raises:
        CaptureError: the inputs are on no CUDA device, or something in a graph cannot be recorded.
    """
    if recorder is None:
        recorder = CudaRecorder(check_device(example_inputs))
    pair = _Pair(recorder)

    def split(
        joint: fx.GraphModule, joint_inputs: Any, **torch_options: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        pair.outputs = torch_options["num_fwd_outputs"]
        return partition(joint, joint_inputs, **torch_options)

    def inference(forward: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        on_inference(forward)
        return private.boxed(forward, inputs)

    run = private.aot_compile(
        graph,
        example_inputs,
        partition=split,
        compiler=pair.compile,
        inference_compiler=inference,
    )

    def call(*inputs: Any) -> Any:
        outputs = run(*inputs)
        pair.returned(outputs)
        return outputs

    return call


class _Pair:
    """Forward and backward of one graph: AOTAutograd compiles the one, then the other."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._forward: Callable[..., Any] | None = None
        self._backward: Callable[..., Any] | None = None
        self._static: tuple[bool, ...] = ()
        self._total = 0
        self._warm = False  # backward has run on the thread that records it
        self._latest: Slot | None = None
        self._slots = Slots(recorder, self._new_forward, _holds)
        self.outputs = 0

    def compile(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """The callable of forward, then that of backward, boxed."""
        _check(module, self._recorder)
        run = private.boxed(module, inputs)
        if self._forward is None:
            self._forward = run
            static = capturing.static_inputs()
            self._static = tuple(index in static for index in range(len(inputs)))
            self._total = len(module.graph.output_node().args[0])  # type: ignore[arg-type]
            return capturing.boxed(self._run_forward)
        self._backward = run
        return capturing.boxed(self._run_backward)

    def _new_forward(self, pool: Any) -> Captured:
        assert self._forward is not None
        lent = frozenset(range(self.outputs, self._total))
        return Captured(
            self._forward, self._static, self._recorder, pool, lent=lent, name="forward"
        )

    def _run_forward(self, inputs: list[Any]) -> list[Any]:
        slot = self._latest = self._slots.free()
        outputs = slot.forward(inputs)
        inputs.clear()
        slot.spent = False
        slot.saved = slot.forward.lent_addresses()
        return outputs

    def _run_backward(self, inputs: list[Any]) -> list[Any]:
        assert self._backward is not None
        saved = inputs[: self._total - self.outputs]
        slot = self._slots.of(saved)
        if slot is None:
            # Its forward was not recorded: this is the first call.
            self._warm = True
            return list(self._recorder.warm_up(lambda: self._backward(inputs)))  # type: ignore[misc]
        if slot.spent:
            raise RematError(
                "a second backward through one forward (retain_graph=True): the first one has "
                'written over what forward saved. Write executor="eager" for such a step'
            )
        if slot.backward is None:
            static = (True,) * len(saved) + (False,) * (len(inputs) - len(saved))
            slot.backward = Captured(
                self._backward,
                static,
                self._recorder,
                slot.pool,
                warm=self._warm,
                name="backward",
                tiers=slot.forward.tiers,
            )
        slot.spent = True
        del saved
        given, inputs[:] = list(inputs), []
        ran = False
        try:
            outputs = slot.backward(given, slot.forward.loans)
            ran = True
        finally:
            if not ran and slot.backward.recording is None:  # or it only ran as it is
                self._slots.renew(slot)
        return outputs

    def returned(self, outputs: Any) -> None:
        """Remember that what forward saved waits for its backward."""
        node = autograd.backward_node(outputs)
        if node is not None and self._latest is not None:
            self._slots.waits(self._latest, weakref.ref(node))
        self._latest = None


def _holds(reference: Any) -> bool:
    node = reference()
    return node is not None and bool(autograd.count_holding([node]))


def _tensors(items: Sequence[Any]) -> list[torch.Tensor]:
    return [item for item in items if isinstance(item, torch.Tensor)]


def _check(module: fx.GraphModule, recorder: Recorder) -> None:
    """Refuse what cannot be recorded, and let the recorder know what is drawn from."""
    generators = generators_in(module, DEVICE_TYPE)
    refuse_obstacles(capture_safe(module, device_type=DEVICE_TYPE, generators=generators))
    recorder.register(generators)


def whole_step(
    step: StepGraph,
    made: fx.GraphModule,
    static: Sequence[bool],
    *,
    inputs: Sequence[Any] = (),
    recorder: Recorder | None = None,
) -> Callable[..., Any]:
    """The graph of a whole step, recorded at its second call.

    Args:
        made: what was emitted for ``step``.
        static: for each input, whether it stays at one address.
        inputs: of the first call, which tell the device.

    Raises:
        CaptureError: the inputs are on no CUDA device, or something cannot be recorded.
    """
    if recorder is None:
        recorder = CudaRecorder(check_device(inputs))
    _check(made, recorder)
    targets = {update.target.name for update in step.updates}
    written = frozenset(i for i, node in enumerate(step.inputs) if node.name in targets)
    taken = made.graph.find_nodes(op="placeholder")
    # Gradients of the step before, say, which this one drops.
    unread = frozenset(index for index, node in enumerate(taken) if not node.users)
    captured = Captured(
        lambda given: made(*given),
        static,
        recorder,
        recorder.new_pool(),
        written=written,
        unread=unread,
    )

    def call(*given: Any) -> list[Any]:
        return captured(given)

    return call
