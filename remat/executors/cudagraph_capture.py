"""Recording and replaying: everything but the raw calls, which are a :class:`Recorder`'s.

What the rules of CUDA graphs ask for, and where it is done:

* a graph reads and writes fixed addresses: inputs that come at other ones in every call (a batch, a
  gradient that arrives) are copied into static tensors; all others must lie where they lay when
  the graph was recorded, which is checked before every replay;
* what a replay returns lies in the graph's memory and is overwritten by the next: the caller gets
  copies, but for what the next graph of the same step reads;
* libraries make handles and workspaces when first used on a stream: every graph first runs once as
  it is, on the stream that will record it;
* graphs that share a pool must be replayed in the order they were recorded in, and one's results
  used before the other overwrites them: a forward and its backward share one, and a second forward
  before that backward gets graphs and a pool of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import torch

from remat.passes.pinned import Pinned
from remat.passes.tiers import JoinedTier, OwnTiers
from remat.passes.torch_private.capturing import borrowed
from remat.passes.transfers import is_token
from remat.solvers.errors import RematError
from remat.solvers.units import format_bytes

IN_FLIGHT: Final = 4
"""Forwards that may wait for their backward at a time; each has a pool of its own."""


class Recording(Protocol):
    """A recorded graph."""

    def replay(self) -> None:
        """Queue it on the current stream."""


class Recorder(Protocol):
    """The raw calls."""

    def new_pool(self) -> Any:
        """A handle of a memory pool that graphs share."""

    def warm_up(self, function: Callable[[], Any]) -> Any:
        """Run on the stream that records, after what is queued and before what comes."""

    def record(self, function: Callable[[], Any], pool: Any) -> tuple[Any, Recording]:
        """Record what ``function`` queues, without running it; what it returned, and the graph."""

    def new_tier(self, device: torch.device) -> JoinedTier:
        """Where one recording offloads values of a device to."""

    def register(self, generators: Sequence[torch.Generator]) -> None:
        """Generators that graphs draw from, beside the device's default one."""


@dataclass
class Captured:
    """One graph: run as it is at first, recorded at the second call, replayed from then on.

    Args:
        run: takes a list of inputs, which it empties, and returns a sequence of outputs.
        static: for each input, whether it comes at the same address in every call.
        unread: inputs that the graph does not read, which may lie anywhere.
        written: inputs that the graph writes into.
        lent: outputs that are handed out as they lie in the graph's memory, for the next graph of
            the pool to read. Who asks for :meth:`loans` owns that memory, and may free it while
            that graph is recorded.
        warm: whether it has run before.
        name: of the graph, for errors.
        tiers: where its values are offloaded to; None: to tiers of its own.
    """

    run: Callable[[list[Any]], Sequence[Any]]
    static: Sequence[bool]
    recorder: Recorder
    pool: Any
    written: frozenset[int] = frozenset()
    unread: frozenset[int] = frozenset()
    lent: frozenset[int] = frozenset()
    warm: bool = False
    name: str = "the step"
    recording: Recording | None = None
    tiers: OwnTiers | None = None
    _copies: dict[int, torch.Tensor] = field(default_factory=dict)
    _addresses: dict[int, int] = field(default_factory=dict)
    _outputs: list[Any] = field(default_factory=list)
    _returned: dict[int, int] = field(default_factory=dict)
    _fixed: set[int] = field(default_factory=set)
    _owned: list[torch.Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tiers = self.tiers or OwnTiers(self.recorder.new_tier)

    def __call__(
        self, inputs: Sequence[Any], owned: Callable[[], list[torch.Tensor]] = list
    ) -> list[Any]:
        """Run the graph.

        Args:
            owned: asked for when the graph is recorded: the tensors that own the memory of inputs
                which another graph has lent.

        Raises:
            RematError: an input that must stay in place has moved, or recording failed.
        """
        if not self.warm:
            self.warm = True
            return list(self.recorder.warm_up(lambda: self._run(list(inputs))))
        if self.recording is None:
            self._record(inputs, {_place(tensor): tensor for tensor in owned()})
        else:
            self._fill(inputs)
        assert self.recording is not None
        self.recording.replay()
        for index in self.written & self._copies.keys():
            _once(inputs[index]).copy_(_once(self._copies[index]))
        return [self._given_out(index, inputs) for index in range(len(self._outputs))]

    def loans(self) -> list[torch.Tensor]:
        """The tensors that own what was lent; they are forgotten here."""
        owned, self._owned = self._owned, []
        return owned

    def lent_addresses(self) -> frozenset[int]:
        """Where what it lends lies, in its pool or in copies of inputs."""
        lent = (
            self._copies.get(self._returned[index]) if index in self._returned else output
            for index, output in enumerate(self._outputs)
            if index in self.lent - self._fixed
        )
        tensors = (item for item in lent if isinstance(item, torch.Tensor) and item.numel())
        return frozenset(tensor.data_ptr() for tensor in tensors)

    @property
    def copied_bytes(self) -> int:
        """Bytes of the copies of inputs."""
        return sum(copy.untyped_storage().nbytes() for copy in self._copies.values())

    def _record(self, inputs: Sequence[Any], owned: dict[Any, torch.Tensor]) -> None:
        given: list[Any] = []
        for index, (item, static) in enumerate(zip(inputs, self.static, strict=True)):
            if not isinstance(item, torch.Tensor) or index in self.unread:
                given.append(item)
            elif static:
                self._addresses[index] = item.data_ptr()
                given.append(owned.pop(_place(item), item))
            else:
                self._copies[index] = _copy(item)
                given.append(self._copies[index])
        if owned:
            raise RematError(
                f"{len(owned)} tensors that forward lent were not given to {self.name}; report this"
            )
        stays = zip(given, self.static, strict=True)
        fixed = {
            item.untyped_storage().data_ptr()
            for item, static in stays
            if static and isinstance(item, torch.Tensor)
        }
        by_identity = {id(item): index for index, item in enumerate(given)}
        # Nothing here may hold what the graph frees while it is recorded: its list is emptied.
        assert self.tiers is not None
        self.tiers.join()  # a recording cannot wait for what was queued before it
        outputs, self.recording = self.recorder.record(lambda: self._run(given), self.pool)
        for index, output in enumerate(outputs):
            known = by_identity.get(id(output)) if isinstance(output, torch.Tensor) else None
            if known is not None:
                self._returned[index] = known
            elif self._is_lent(index, output):
                if output.untyped_storage().data_ptr() in fixed:
                    self._fixed.add(index)  # a view of a parameter
                else:
                    self._owned.append(output)
                    output = borrowed(output)
            self._outputs.append(output)

    def _run(self, given: list[Any]) -> Sequence[Any]:
        assert self.tiers is not None
        with self.tiers.used():
            return self.run(given)

    def _is_lent(self, index: int, output: Any) -> bool:
        """A token is not: who drops it says that nobody needs the room of its value any more."""
        return index in self.lent and isinstance(output, torch.Tensor) and not is_token(output)

    def _fill(self, inputs: Sequence[Any]) -> None:
        for index, copy in self._copies.items():
            _once(copy).copy_(_once(inputs[index]))
        for index, address in self._addresses.items():
            if inputs[index].data_ptr() != address:
                self._refuse_moved(index, inputs[index])

    def _refuse_moved(self, index: int, item: torch.Tensor) -> None:
        raise RematError(
            f"input {index} of {self.name} (shape {tuple(item.shape)}) has moved since its CUDA "
            "graph was recorded, which reads and writes the old address: parameters, buffers and "
            "optimizer state must stay where they are. Write into them (copy_, load_state_dict) "
            "instead of replacing them, or compile again after replacing them"
        )

    def _given_out(self, index: int, inputs: Sequence[Any]) -> Any:
        """Copies of the graph's memory, or that memory if it is lent; inputs are themselves."""
        output, known = self._outputs[index], self._returned.get(index)
        if known is not None:
            lends_copy = index in self.lent and known in self._copies
            return self._copies[known] if lends_copy else inputs[known]
        if index in self.lent or not isinstance(output, torch.Tensor):
            return output
        return _copy(output)


@dataclass(eq=False)
class Slot:
    """A forward and its backward, which share a pool.

    Attributes:
        spent: the backward has run over what this forward saved.
    """

    forward: Captured
    pool: Any
    backward: Captured | None = None
    spent: bool = True
    saved: frozenset[int] = frozenset()


class Slots:
    """As many forwards and backwards as wait for each other at a time.

    Args:
        make: makes the captured forward for a fresh pool.
        holds: whether what :meth:`waits` was told of still waits for its backward.
    """

    def __init__(
        self, recorder: Recorder, make: Callable[[Any], Captured], holds: Callable[[Any], bool]
    ) -> None:
        self._recorder = recorder
        self._make = make
        self._holds = holds
        self._slots: list[Slot] = []
        self._waiting: dict[int, Any] = {}

    def free(self) -> Slot:
        """A slot that no call waits in, made if there is none.

        Raises:
            RematError: too many wait.
        """
        for index, slot in enumerate(self._slots):
            waiting = self._waiting.get(index)
            if waiting is None or not self._holds(waiting):
                self._waiting.pop(index, None)
                return slot
        if len(self._slots) >= IN_FLIGHT:
            raise RematError(
                f"{IN_FLIGHT} forwards wait for their backward, and each holds a pool of memory of "
                "its own; a captured forward keeps what it saves at fixed addresses. Call "
                'backward() after each forward, or write executor="eager"'
            )
        pool = self._recorder.new_pool()
        self._slots.append(Slot(self._make(pool), pool))
        return self._slots[-1]

    def renew(self, slot: Slot) -> None:
        """Forget what was recorded in it: a recording has failed, and what it owned is gone."""
        index, pool = self._slots.index(slot), self._recorder.new_pool()
        self._slots[index] = Slot(self._make(pool), pool)
        self._waiting.pop(index, None)

    def __len__(self) -> int:
        return len(self._slots)

    def waits(self, slot: Slot, call: Any) -> None:
        """``call`` has run forward in this slot, and its backward may come."""
        self._waiting[self._slots.index(slot)] = call

    def of(self, saved: Sequence[Any]) -> Slot | None:
        """The slot whose recorded forward saved these tensors, or None if none did.

        Raises:
            RematError: two did.
        """
        addresses = {t.data_ptr() for t in saved if isinstance(t, torch.Tensor) and t.numel()}
        found = [slot for slot in self._slots if slot.saved & addresses]
        if len(found) > 1:
            raise RematError(
                "backward was given tensors that two captured forwards have saved; report this"
            )
        return found[0] if found else None


def _place(tensor: torch.Tensor) -> Any:
    """Where a tensor lies: a view may begin where its base does."""
    return tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of the same layout, with nothing of its history."""
    with torch.no_grad():
        made = torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
        )
        _once(made).copy_(_once(tensor))
        return made


def _once(tensor: torch.Tensor) -> torch.Tensor:
    """A view of every element once: torch refuses to write into what was expanded."""
    strides = enumerate(tensor.stride())
    repeated = [d for d, stride in strides if stride == 0 and tensor.shape[d] > 1]
    view = tensor.detach()
    for dimension in repeated:
        view = view.narrow(dimension, 0, 1)
    return view


class CudaRecorder:
    """The raw calls of torch.

    One stream records every graph, as torch asks of graphs that share a pool.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)
        self.generators: dict[int, torch.Generator] = {}

    def new_pool(self) -> Any:
        """See :class:`Recorder`."""
        return torch.cuda.graph_pool_handle()

    def new_tier(self, device: torch.device) -> JoinedTier:
        """See :class:`Recorder`."""
        return Pinned(device)

    def register(self, generators: Sequence[torch.Generator]) -> None:
        """See :class:`Recorder`."""
        self.generators |= {id(generator): generator for generator in generators}

    def warm_up(self, function: Callable[[], Any]) -> Any:
        """See :class:`Recorder`."""
        current = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            result = function()
        current.wait_stream(self.stream)
        for item in result:
            # Its memory belongs to this stream, and the caller reads it on another.
            if isinstance(item, torch.Tensor) and item.is_cuda:
                item.record_stream(current)
        return result

    def record(self, function: Callable[[], Any], pool: Any) -> tuple[Any, Recording]:
        """See :class:`Recorder`."""
        graph = torch.cuda.CUDAGraph()
        for generator in self.generators.values():
            graph.register_generator_state(generator)
        before = torch.cuda.memory_reserved(self.device)
        try:
            with torch.cuda.graph(
                graph, pool=pool, stream=self.stream, capture_error_mode="thread_local"
            ):
                result = function()
        except RuntimeError as error:
            # Ending the recording fails, too, and hides what went wrong in it.
            first = error.__context__ or error
            raise RematError(
                f"recording a CUDA graph failed: {first}. {format_bytes(before)} were reserved on "
                f'{self.device} before; executor="eager" runs the same plan unrecorded'
            ) from error
        return result, graph
