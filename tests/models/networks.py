"""Small networks written out here: shapes of computation the Hugging Face models do not have."""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class ResidualBlock(nn.Module):
    """Two times group norm, SiLU, convolution; a 1x1 convolution where the width changes."""

    def __init__(self, width_in: int, width_out: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(4, width_in), nn.GroupNorm(4, width_out)
        self.conv1 = nn.Conv2d(width_in, width_out, 3, padding=1)
        self.conv2 = nn.Conv2d(width_out, width_out, 3, padding=1)
        same = width_in == width_out
        self.skip: nn.Module = nn.Identity() if same else nn.Conv2d(width_in, width_out, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv1(F.silu(self.norm1(x)))
        return self.skip(x) + self.conv2(F.silu(self.norm2(h)))


class UNet(nn.Module):
    """Encoder and decoder joined by skip connections: values with very long lives."""

    def __init__(self, widths: tuple[int, ...] = (16, 24, 32, 48)) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, widths[0], 3, padding=1)
        pairs = list(itertools.pairwise(widths))
        self.encoder = nn.ModuleList(ResidualBlock(w, w) for w in widths[:-1])
        self.down = nn.ModuleList(nn.Conv2d(a, b, 3, stride=2, padding=1) for a, b in pairs)
        self.middle = ResidualBlock(widths[-1], widths[-1])
        self.up = nn.ModuleList(nn.Conv2d(b, a, 3, padding=1) for a, b in reversed(pairs))
        self.decoder = nn.ModuleList(ResidualBlock(2 * a, a) for a, _ in reversed(pairs))
        self.head = nn.Conv2d(widths[0], 3, 1)

    def forward(self, image: Tensor, target: Tensor) -> Tensor:
        x, skips = self.stem(image), []
        for block, down in zip(self.encoder, self.down, strict=True):
            x = block(x)
            skips.append(x)
            x = down(x)
        x = self.middle(x)
        for up, block in zip(self.up, self.decoder, strict=True):
            x = up(F.interpolate(x, scale_factor=2.0, mode="nearest"))
            x = block(torch.cat((x, skips.pop()), dim=1))
        return F.mse_loss(self.head(x), target)


class UnrolledLSTM(nn.Module):
    """Cells written out: one graph of many small ops, a chain as long as the sequence."""

    def __init__(self, vocabulary: int = 64, hidden: int = 128) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, hidden)
        self.gates = nn.Linear(2 * hidden, 4 * hidden)
        self.head = nn.Linear(hidden, vocabulary)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        inputs = self.embedding(tokens)
        h = c = torch.zeros_like(inputs[:, 0])
        outputs = []
        for x in inputs.unbind(1):
            i, f, g, o = self.gates(torch.cat((x, h), dim=-1)).chunk(4, dim=-1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
            outputs.append(h)
        logits = self.head(torch.stack(outputs, dim=1))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class SharedWeights(nn.Module):
    """One block applied several times, a tied embedding, and two losses returned as a tuple."""

    def __init__(self, vocabulary: int = 256, hidden: int = 128, repeats: int = 6) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, hidden)
        self.norm, self.grow = nn.LayerNorm(hidden), nn.Linear(hidden, 4 * hidden)
        self.shrink, self.value = nn.Linear(4 * hidden, hidden), nn.Linear(hidden, 1)
        self.repeats = repeats

    def forward(self, tokens: Tensor, labels: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        h = self.embedding(tokens)
        for _ in range(self.repeats):
            h = h + self.shrink(F.gelu(self.grow(self.norm(h))))
        logits = F.linear(self.norm(h), self.embedding.weight)
        token_loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return token_loss, F.smooth_l1_loss(self.value(h.mean(dim=1)), target)


class RunningScale(nn.Module):
    """Every block reads a buffer, then writes it (an exponential moving average).

    Whoever recomputes the read after the write gets wrong gradients and no error.
    """

    def __init__(self, hidden: int = 128, blocks: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(blocks))
        self.head = nn.Linear(hidden, 8)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, hidden).repeat(blocks, 1))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            h = torch.tanh(layer(x))
            x = x + torch.sin(h * self.scale[index].reciprocal()) * self.scale[index].sqrt()
            peak = h.detach().abs().amax(dim=0)
            self.scale[index].mul_(0.75).add_(peak, alpha=0.25)
        self.steps.add_(1)
        return F.cross_entropy(self.head(x) * self.scale.mean(), labels)


class ChunkedCrossEntropy(nn.Module):
    """The logits, not the layers, set the peak; the loss is a loop over chunks of tokens."""

    def __init__(self, vocabulary: int = 2048, hidden: int = 64, chunks: int = 8) -> None:
        super().__init__()
        self.embedding, self.mix = nn.Embedding(vocabulary, hidden), nn.Linear(hidden, hidden)
        self.head, self.chunks = nn.Linear(hidden, vocabulary, bias=False), chunks

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        h = self.embedding(tokens)
        h = (h + F.gelu(self.mix(h))).flatten(0, 1)
        flat = labels.flatten()
        total = h.new_zeros(())
        for rows, wanted in zip(h.chunk(self.chunks), flat.chunk(self.chunks), strict=True):
            logits = self.head(rows)
            total = total + F.cross_entropy(logits, wanted, ignore_index=-100, reduction="sum")
            z_loss = logits.logsumexp(dim=-1).square() * (wanted != -100)
            total = total + 1e-3 * z_loss.sum()
        return total / (flat != -100).sum().clamp(min=1)
