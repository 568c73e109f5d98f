"""What ``remat demo`` trains: a byte-level language model on Python's own sources.

Nothing is downloaded: the model has random weights, the text is the standard library.
"""

from __future__ import annotations

import importlib.util
import sysconfig
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from remat.measurement import Measurement, measure
from remat.solvers.errors import InvalidOption, RematError

BYTES: Final = 256  # a token is a byte
TEXT_BYTES: Final = 2**21
SEED: Final = 0
LEARNING_RATE: Final = 1e-3


@dataclass(frozen=True)
class Preset:
    """A model to train: its architecture, and how much it is shown in a step."""

    architecture: str
    layers: int
    hidden: int
    heads: int
    sequence: int
    batch: int

    def __str__(self) -> str:
        return (
            f"{self.architecture}, {self.layers} layers, hidden {self.hidden}, "
            f"sequence {self.sequence}, batch {self.batch}"
        )


PRESETS: Final = {
    "tiny": Preset("GPT-2", layers=4, hidden=128, heads=4, sequence=128, batch=8),
    "small": Preset("GPT-2", layers=8, hidden=256, heads=8, sequence=256, batch=4),
    "gpt2": Preset("GPT-2", layers=12, hidden=768, heads=12, sequence=256, batch=4),
    "llama": Preset("Llama", layers=4, hidden=128, heads=4, sequence=128, batch=8),
}


class ByteModel(nn.Module):
    """A Hugging Face causal language model and its loss, in one graph."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        logits = self.network(tokens, use_cache=False).logits
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def build_model(preset: Preset) -> ByteModel:
    """The model, with the same random weights every time.

    Raises:
        RematError: transformers is not installed.
    """
    if importlib.util.find_spec("transformers") is None:
        raise RematError(
            "the models of the demo come from Hugging Face transformers, which is not installed; "
            'run: pip install "remat[demo]" (or: pip install transformers)'
        )
    import transformers

    shared = dict(vocab_size=BYTES, use_cache=False, bos_token_id=0, eos_token_id=0)
    network: nn.Module
    torch.manual_seed(SEED)
    if preset.architecture == "GPT-2":
        config = transformers.GPT2Config(
            n_layer=preset.layers, n_embd=preset.hidden, n_head=preset.heads,
            n_positions=preset.sequence, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **shared,
        )  # fmt: skip
        network = transformers.GPT2LMHeadModel(config)
    else:
        config = transformers.LlamaConfig(
            num_hidden_layers=preset.layers, hidden_size=preset.hidden,
            intermediate_size=8 * preset.hidden // 3, num_attention_heads=preset.heads,
            num_key_value_heads=preset.heads // 2, max_position_embeddings=preset.sequence,
            **shared,
        )  # fmt: skip
        network = transformers.LlamaForCausalLM(config)
    return ByteModel(network).train()


def python_sources() -> Tensor:
    """Up to two mebibytes of the standard library's own text, in alphabetical order.

    Raises:
        RematError: this Python comes without its sources.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    text = bytearray()
    for path in sorted(folder.glob("*.py")):
        text += path.read_bytes()
        if len(text) >= TEXT_BYTES:
            break
    if len(text) < 2**16:
        raise RematError(
            f"{folder} holds {len(text)} bytes of Python sources, too few to train on; "
            "run the demo with a Python that was installed with its standard library"
        )
    return torch.frombuffer(text[:TEXT_BYTES], dtype=torch.uint8).clone()


class Batches:
    """Pieces of the text at random places, the same ones every time; one batch is alive."""

    def __init__(self, text: Tensor, preset: Preset) -> None:
        self._text, self._preset = text, preset
        self._generator = torch.Generator().manual_seed(SEED)
        shape = (preset.batch, preset.sequence)
        self.tokens = torch.zeros(shape, dtype=torch.long)
        self.labels = torch.zeros(shape, dtype=torch.long)

    def advance(self) -> None:
        """Overwrite the batch with the next one."""
        room = len(self._text) - self._preset.sequence - 1
        for row in range(self._preset.batch):
            start = int(torch.randint(room, (), generator=self._generator))
            piece = self._text[start : start + self._preset.sequence + 1]
            self.tokens[row], self.labels[row] = piece[:-1], piece[1:]


@dataclass
class Training:
    """One run and what it left behind.

    Attributes:
        losses: of every step.
        seconds: wall time of every step; the first one compiles.
        measurement: of the last step, from the first op of forward to the last of the optimizer.
        gradients: of the last step, by parameter.
        parameters: after the last step.
    """

    losses: list[Tensor] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    measurement: Measurement | None = None
    gradients: dict[str, Tensor] = field(default_factory=dict)
    parameters: dict[str, Tensor] = field(default_factory=dict)

    @property
    def step_seconds(self) -> float:
        """The fastest step, without the first, which compiles, and the last, which is watched.

        Whatever else the machine does can only slow a step down.
        """
        return min(self.seconds[1:-1] or self.seconds[-1:])

    @property
    def peak(self) -> int:
        """Measured peak bytes of the last step."""
        if self.measurement is None:
            raise RematError("the run was not measured; train at least one step")
        return self.measurement.peak


def train(
    preset: Preset,
    text: Tensor,
    steps: int,
    compile_model: Callable[[nn.Module, torch.optim.Optimizer], Callable[..., Tensor]],
    tick: Callable[[], None] = lambda: None,
) -> Training:
    """Train from the same weights on the same batches; ``tick`` is called after every step.

    Raises:
        InvalidOption: fewer than two steps: the last one is watched, and one compiles before.
    """
    if steps < 2:
        raise InvalidOption(f"steps={steps}: the demo needs at least 2 steps to compare")
    model, batches, result = build_model(preset), Batches(text, preset), Training()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, foreach=False)
    _make_state(model, optimizer)
    run = compile_model(model, optimizer)

    def step() -> Tensor:
        loss = run(batches.tokens, batches.labels)
        loss.backward()
        optimizer.step()
        return loss.detach()

    for index in range(steps):
        optimizer.zero_grad(set_to_none=True)
        batches.advance()
        begin = time.perf_counter()
        if index < steps - 1:
            result.losses.append(step())
        else:
            resident = (model, optimizer, batches.tokens, batches.labels)
            measured = measure(lambda: result.losses.append(step()), resident, warmup=0)
            result.measurement = measured
        result.seconds.append(time.perf_counter() - begin)
        tick()
    _take_copies(result, model)
    return result


def _make_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Make the optimizer's state before anything is planned: it is there during every step."""
    rate = optimizer.param_groups[0]["lr"]
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.step()
    optimizer.param_groups[0]["lr"] = rate
    optimizer.zero_grad(set_to_none=True)
    states: Any = optimizer.state.values()
    for state in states:
        state["step"].zero_()


def _take_copies(result: Training, model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        result.parameters[name] = parameter.detach().clone()
        if parameter.grad is not None:
            result.gradients[name] = parameter.grad.clone()


def same_numbers(left: Training, right: Training) -> dict[str, bool]:
    """Whether losses, gradients and parameters are equal, each bit for bit."""
    losses = [{str(i): loss for i, loss in enumerate(run.losses)} for run in (left, right)]
    return {
        "losses": _same(*losses),
        "gradients": _same(left.gradients, right.gradients),
        "parameters": _same(left.parameters, right.parameters),
    }


def _same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(
        torch.equal(_bits(left[name]), _bits(right[name])) for name in left
    )


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)
