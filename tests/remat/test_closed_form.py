"""The closed form of stored boundaries, held against what a Llama really keeps."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaModel

from remat.cost.closed_form import boundary_bytes
from remat.solvers.errors import InvalidOption

LAYERS, BATCH, SEQUENCE, HIDDEN = 3, 2, 16, 32


def _stored_bytes(dtype: torch.dtype) -> int:
    """Bytes that autograd keeps of a chain of checkpointed Llama layers, parameters left out."""
    config = LlamaConfig(
        num_hidden_layers=LAYERS, hidden_size=HIDDEN, intermediate_size=48, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=64, attn_implementation="sdpa",
    )  # fmt: skip
    model = LlamaModel(config).to(dtype)
    stream = torch.randn(BATCH, SEQUENCE, HIDDEN, dtype=dtype, requires_grad=True)
    rotary = model.rotary_emb(stream, torch.arange(SEQUENCE).unsqueeze(0))
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        x = stream
        for layer in model.layers:
            # The rotary tables are constants of the run, shared by all layers: bound, not passed.
            run = lambda h, layer=layer: layer(h, position_embeddings=rotary)  # noqa: E731
            x = checkpoint(run, x, use_reentrant=True)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_checkpointed_llama_layers_store_exactly_this(dtype: torch.dtype) -> None:
    assert _stored_bytes(dtype) == boundary_bytes(LAYERS, BATCH, SEQUENCE, HIDDEN, dtype.itemsize)


def test_llama_8b_at_a_sequence_of_8192() -> None:
    assert boundary_bytes(32, 1, 8192, 4096, 2) == 2 * 2**30


@pytest.mark.parametrize("name", ["layers", "batch", "sequence", "hidden", "bytes_per_element"])
def test_sizes_below_one_are_refused_by_name(name: str) -> None:
    sizes = dict.fromkeys(("layers", "batch", "sequence", "hidden", "bytes_per_element"), 1)
    with pytest.raises(InvalidOption, match=f"{name} is 0; it must be at least 1"):
        boundary_bytes(**{**sizes, name: 0})
