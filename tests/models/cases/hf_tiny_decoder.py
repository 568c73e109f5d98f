"""A tiny Hugging Face Llama: labels, padding mask, ModelOutput, cache, HF's own checkpointing.

Source: huggingface/transformers#26103 / PR #48200 (all-or-nothing checkpointing), #28056, #42489,
        huggingface/trl#1798, topal-team/rockmate#6 (planner tied to transformers 4.36 / torch 2.3).
Hard:   dynamo must get through a real model file (masks, rotary tables, cache classes, kwargs);
        outputs are a ModelOutput with an optional Cache; use_cache=True in training;
        gradient_checkpointing_enable() at the same time; attention dropout.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

EXPECTED = "equal"
LAYERS, HIDDEN = 1, 8
SIZES = {"full": (2, 16)}
"""Layers and hidden size of larger variants, run under the marker ``slow``."""


class Wrap(nn.Module):
    def __init__(self, layers: int, hidden: int) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=40,
            hidden_size=hidden,
            intermediate_size=2 * hidden,
            num_hidden_layers=layers,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=32,
            attention_dropout=0.1,
            tie_word_embeddings=True,
        )
        self.lm = LlamaForCausalLM(config)

    def forward(self, ids: Any, mask: Any, use_cache: bool = False) -> Any:
        return self.lm(input_ids=ids, attention_mask=mask, labels=ids, use_cache=use_cache)


def _b(i: Any) -> Any:
    ids = torch.randint(0, 40, (2, 9), generator=torch.Generator().manual_seed(i))
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    return ids, mask


def build(
    layers: int = LAYERS, hidden: int = HIDDEN
) -> tuple[nn.Module, tuple[Any, ...], Callable[..., Tensor]]:
    torch.manual_seed(0)
    return Wrap(layers, hidden).train(), _b(0), lambda o: o.loss


def steps(model: nn.Module, run: Callable[..., Any]) -> dict[str, Any]:
    res, opt = {}, torch.optim.AdamW(model.parameters(), lr=1e-2)
    for i in range(4):
        if i == 2:
            options = {"use_reentrant": False}
            model.lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
        opt.zero_grad()
        out = run(*_b(i), use_cache=(i == 1))
        out.loss.backward()
        opt.step()
        cache = out.past_key_values
        res[f"loss{i}"], res[f"logits{i}"] = out.loss.detach(), out.logits.detach()
        res[f"cache{i}"] = None if cache is None else cache.get_seq_length()
    return res
