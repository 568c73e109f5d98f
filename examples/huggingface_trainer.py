"""Hugging Face's Trainer: remat beside gradient checkpointing, peaks and times in one table.

    pip install transformers accelerate
    python examples/huggingface_trainer.py

The model is compiled in place, so the Trainer needs no change:

    model.compile(backend="remat", options={"memory_budget": "2GiB"})
    Trainer(model=model, args=arguments, train_dataset=data).train()

Every row trains the same GPT-2, of random weights, on the same batches. remat is given, as its
budget, the peak that each kind of checkpointing reached, so its rows say what the same memory costs
in time. Peaks are those of forward and backward; the optimizer's state, which is the same for all,
is left out. Times are those of the fastest step.
"""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import torch
import transformers

import remat
from remat.backend import plans_of
from remat.solvers.units import format_bytes, format_seconds


class MeasuringTrainer(transformers.Trainer):
    """A Trainer that times every step and measures the peak of the last."""

    seconds: list[float]
    losses: list[float]
    measurement: remat.measurement.Measurement

    def training_step(self, model: Any, inputs: Any, *rest: Any, **named: Any) -> torch.Tensor:
        """One forward and backward."""
        losses: list[torch.Tensor] = []

        def step() -> None:
            losses.append(
                super(MeasuringTrainer, self).training_step(model, inputs, *rest, **named)
            )

        if self.state.global_step == self.args.max_steps - 1:
            self.measurement = remat.measure(step, resident=(model, inputs), warmup=0)
        else:
            begin = time.perf_counter()
            step()
            self.seconds.append(time.perf_counter() - begin)
        self.losses.append(losses[0].item())
        return losses[0]


@dataclasses.dataclass
class Result:
    """What one way of training took: bytes, seconds, and the losses."""

    name: str
    peak: int
    seconds: float
    losses: list[float]


def train(
    name: str, settings: argparse.Namespace, remat_options: Any = None, **given: Any
) -> Result:
    """Train from the same weights on the same data.

    Args:
        remat_options: for ``model.compile(backend="remat", options=…)``; None: not compiled.
        given: more for ``TrainingArguments``.
    """
    torch._dynamo.reset()
    transformers.set_seed(0)
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            n_layer=settings.layers, n_embd=settings.hidden, n_head=4, vocab_size=512,
            n_positions=settings.sequence, use_cache=False, bos_token_id=0, eos_token_id=0,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )
    )  # fmt: skip
    # Without it transformers warns that there is none, and the warning breaks the graph in two.
    model.loss_type = "ForCausalLM"
    if remat_options is not None:
        model.compile(backend="remat", options=remat_options)
    tokens = torch.randint(512, (settings.batch * settings.steps, settings.sequence))
    data = [{"input_ids": row, "labels": row} for row in tokens]
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            output_dir=folder, max_steps=settings.steps, report_to=[], save_strategy="no",
            per_device_train_batch_size=settings.batch, logging_strategy="no", disable_tqdm=True,
            use_cpu=not torch.cuda.is_available(), dataloader_pin_memory=False, **given,
        )  # fmt: skip
        trainer = MeasuringTrainer(model=model, args=arguments, train_dataset=data)
        trainer.seconds, trainer.losses = [], []
        trainer.train()
    # The first steps compile, and remat watches the allocator in two of them.
    seconds = min(trainer.seconds[3:] or trainer.seconds)
    return Result(name, trainer.measurement.peak, seconds, trainer.losses)


def checkpointing(every_n_layers: int | None = None) -> dict[str, Any]:
    """``TrainingArguments`` for checkpointing, under the name this version of transformers has."""
    fields = {field.name for field in dataclasses.fields(transformers.TrainingArguments)}
    new = "activation_checkpointing"
    name = new if new in fields else "gradient_checkpointing"
    more = {"use_reentrant": False}
    if every_n_layers is not None:
        if name != new:
            return {}
        more["every_n_layers"] = every_n_layers
    return {name: True, f"{name}_kwargs": more}


def main(argv: Sequence[str] | None = None) -> list[Result]:
    """Train in each way and print the table."""
    settings = parse(argv)
    n = settings.every_n_layers
    common = {"executor": settings.executor, "time_limit": settings.time_limit}
    plain = train("plain", settings)
    rows = [plain]

    def add_remat(name: str, **options: Any) -> None:
        given = {**common, **options}
        rows.append(train(f"remat, {name}", settings, given))
        for plan in plans_of(given):
            print(f"remat, {name}\n{str(plan).split(chr(10) * 2)[0]}\n")

    checkpointed = train("gradient_checkpointing=True", settings, **checkpointing())
    rows.append(checkpointed)
    add_remat("memory_budget = that peak", memory_budget=checkpointed.peak)
    if n and (some := checkpointing(n)):
        every_n = train(f"every_n_layers={n}", settings, **some)
        rows.append(every_n)
        add_remat("memory_budget = that peak", memory_budget=every_n.peak)
        add_remat(f"every_n_layers={n}", every_n_layers=n)
    print(table(rows))
    return rows


def table(rows: Sequence[Result]) -> str:
    """Peaks in bytes, times as they are and as ratios to the first row."""
    plain = rows[0]
    lines = [f"{'':<34}{'peak':>11}{'ratio':>7}{'step':>11}{'ratio':>7}{'last loss':>11}"]
    for row in rows:
        lines.append(
            f"{row.name:<34}{format_bytes(row.peak):>11}{row.peak / plain.peak:>7.2f}"
            f"{format_seconds(row.seconds):>11}{row.seconds / plain.seconds:>7.2f}"
            f"{row.losses[-1]:>11.6f}"
        )
    return "\n".join(lines)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--every-n-layers", type=int, default=2, help="0 leaves its rows out")
    parser.add_argument("--executor", choices=("eager", "inductor"), default=None)
    parser.add_argument("--time-limit", type=float, default=10.0, help="seconds for the solver")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
