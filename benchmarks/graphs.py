"""Joint graphs of further real models, for ``benchmarks.solver``.

    python -m benchmarks.graphs FOLDER

Weights are random, sizes are the published ones; nothing is run. Costs are an H100's, by roofline.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

import remat

DEVICE: Final = "h100"
Step = tuple[nn.Module, tuple[Any, ...]]


class _Loss(nn.Module):
    """A Hugging Face model called with keyword arguments, and cross entropy over its logits."""

    def __init__(self, network: nn.Module, names: tuple[str, ...]) -> None:
        super().__init__()
        self.network, self.names = network, names

    def forward(self, labels: Tensor, *inputs: Tensor) -> Tensor:
        given = dict(zip(self.names, inputs, strict=True))
        logits = self.network(**given).logits
        return F.cross_entropy(logits.flatten(0, -2), labels.flatten())


class DenseNet(nn.Module):
    """DenseNet-121 (Huang et al. 2017): every layer reads all before it in its block."""

    def __init__(self, blocks: tuple[int, ...] = (6, 12, 24, 16), growth: int = 32) -> None:
        super().__init__()
        width = 2 * growth
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.MaxPool2d(3, 2, 1),
        )  # fmt: skip
        self.blocks, self.transitions = nn.ModuleList(), nn.ModuleList()
        for index, layers in enumerate(blocks):
            block = nn.ModuleList(self._layer(width + k * growth, growth) for k in range(layers))
            self.blocks.append(block)
            width += layers * growth
            last = index == len(blocks) - 1
            self.transitions.append(nn.Identity() if last else self._transition(width))
            width = width if last else width // 2
        self.norm, self.head = nn.BatchNorm2d(width), nn.Linear(width, 1000)

    @staticmethod
    def _layer(width: int, growth: int) -> nn.Sequential:
        return nn.Sequential(
            nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, 4 * growth, 1, bias=False),
            nn.BatchNorm2d(4 * growth), nn.ReLU(),
            nn.Conv2d(4 * growth, growth, 3, 1, 1, bias=False),
        )  # fmt: skip

    @staticmethod
    def _transition(width: int) -> nn.Sequential:
        return nn.Sequential(
            nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, width // 2, 1, bias=False),
            nn.AvgPool2d(2),
        )  # fmt: skip

    def forward(self, labels: Tensor, images: Tensor) -> Tensor:
        x = self.stem(images)
        for block, transition in zip(self.blocks, self.transitions, strict=True):
            features = [x]
            for layer in block:
                features.append(layer(torch.cat(features, 1)))
            x = transition(torch.cat(features, 1))
        return F.cross_entropy(self.head(F.relu(self.norm(x)).mean((2, 3))), labels)


def _tokens(batch: int, length: int, vocabulary: int = 1000) -> Tensor:
    return torch.randint(0, vocabulary, (batch, length))


def gpt2_medium() -> Step:
    """24 layers, hidden 1024, sequence 1024, batch 4, dropout 0.1."""
    config = transformers.GPT2Config(n_layer=24, n_embd=1024, n_head=16, use_cache=False)
    model = _Loss(transformers.GPT2LMHeadModel(config), ("input_ids",))
    return model, (_tokens(4, 1024), _tokens(4, 1024))


def llama_1b() -> Step:
    """Llama 3.2 1B: 16 layers, hidden 2048, sequence 2048, batch 2."""
    config = transformers.LlamaConfig(
        hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32,
        num_key_value_heads=8, vocab_size=128256, tie_word_embeddings=True, use_cache=False,
    )  # fmt: skip
    model = _Loss(transformers.LlamaForCausalLM(config), ("input_ids",))
    return model, (_tokens(2, 2048), _tokens(2, 2048))


def t5_base() -> Step:
    """12 + 12 layers, hidden 768, sequences of 512, batch 8, dropout 0.1."""
    config = transformers.T5Config(
        d_model=768, d_ff=3072, num_layers=12, num_decoder_layers=12, num_heads=12, use_cache=False
    )
    model = transformers.T5ForConditionalGeneration(config)
    inputs = (_tokens(8, 512), _tokens(8, 512), _tokens(8, 512))
    return _Loss(model, ("input_ids", "decoder_input_ids")), inputs


def whisper_small() -> Step:
    """12 + 12 layers, hidden 768, 3000 frames, 448 tokens, batch 4."""
    config = transformers.WhisperConfig(
        d_model=768, encoder_layers=12, decoder_layers=12, encoder_attention_heads=12,
        decoder_attention_heads=12, encoder_ffn_dim=3072, decoder_ffn_dim=3072, use_cache=False,
    )  # fmt: skip
    model = transformers.WhisperForConditionalGeneration(config)
    inputs = (_tokens(4, 448), torch.randn(4, 80, 3000), _tokens(4, 448))
    return _Loss(model, ("input_features", "decoder_input_ids")), inputs


def densenet121() -> Step:
    """32 images of 224 x 224."""
    return DenseNet(), (torch.randint(0, 1000, (32,)), torch.randn(32, 3, 224, 224))


MODELS: Final[dict[str, Callable[[], Step]]] = {
    build.__name__: build for build in (gpt2_medium, llama_1b, t5_base, whisper_small, densenet121)
}


def main() -> None:
    """Capture each model that is not in the folder yet."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--models", nargs="*", choices=MODELS, default=list(MODELS))
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    for name in arguments.models:
        path = arguments.folder / f"{name}.json.gz"
        if not path.exists():
            model, inputs = MODELS[name]()
            plan = remat.plan(model.train(), inputs, device=DEVICE)
            plan.problem.save(path)
            print(f"{name}: {len(plan.problem.ops)} ops -> {path}", flush=True)


if __name__ == "__main__":
    main()
