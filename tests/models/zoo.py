"""Real training steps, small: real architectures whose activations dominate their weights.

``STEPS[name]()`` builds one, the same every time. The forward of its model computes the loss, so
that forward and loss are one graph. Each takes well under a second on one core and holds 20 to
150 MiB above its parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models.networks import (
    ChunkedCrossEntropy,
    RunningScale,
    SharedWeights,
    UNet,
    UnrolledLSTM,
)
from tests.models.steps import TrainingStep

SEED: Final = 1234


class LanguageModel(nn.Module):
    """A Hugging Face causal language model and its loss, in one graph.

    The loss is computed here: GPT-2 called with ``labels=`` breaks the graph in two.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        logits = self.network(tokens, use_cache=False).logits
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class MaskedLanguageModel(nn.Module):
    """A Hugging Face masked language model and its loss, in one graph."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        logits = self.network(tokens).logits
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)


class EncoderDecoder(nn.Module):
    """A Hugging Face encoder and decoder and their loss, in one graph."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, source: Tensor, tokens: Tensor, labels: Tensor) -> Tensor:
        logits = self.network(source, decoder_input_ids=tokens, use_cache=False).logits
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class ImageClassifier(nn.Module):
    """A Hugging Face image classifier and its loss, in one graph."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.network(images).logits, labels)


def _tokens(batch: int, length: int, vocabulary: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(SEED)
    tokens = torch.randint(0, vocabulary, (batch, length + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def _images(batch: int, size: int, classes: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(SEED)
    images = torch.randn(batch, 3, size, size, generator=generator)
    return images, torch.randint(0, classes, (batch,), generator=generator)


def _step(name: str, build: Callable[[], nn.Module], args: tuple[Tensor, ...]) -> TrainingStep:
    torch.manual_seed(SEED)
    return TrainingStep(name, build().train(), args)


def gpt2() -> TrainingStep:
    """GPT-2, four layers, no dropout."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=4, n_embd=128, n_head=4, vocab_size=512, n_positions=128, use_cache=False,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, attn_implementation="sdpa",
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return _step("gpt2", lambda: LanguageModel(GPT2LMHeadModel(config)), _tokens(8, 128, 512))


def llama() -> TrainingStep:
    """Llama, four layers, two query heads to a key head."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        num_hidden_layers=4, hidden_size=128, intermediate_size=344, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=512, max_position_embeddings=128, use_cache=False,
        attn_implementation="sdpa",
    )  # fmt: skip
    return _step("llama", lambda: LanguageModel(LlamaForCausalLM(config)), _tokens(8, 128, 512))


def bert() -> TrainingStep:
    """BERT, three layers, dropout 0.1: recomputing must replay the masks."""
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        num_hidden_layers=3, hidden_size=128, intermediate_size=512, num_attention_heads=4,
        vocab_size=512, max_position_embeddings=128, attn_implementation="sdpa",
        hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1,
    )  # fmt: skip
    tokens, labels = _tokens(8, 96, 512)
    labels = labels.masked_fill(torch.arange(96) % 3 != 0, -100)
    return _step("bert", lambda: MaskedLanguageModel(BertForMaskedLM(config)), (tokens, labels))


def resnet() -> TrainingStep:
    """ResNet with batch norm in training mode: running statistics move once a step."""
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(
        embedding_size=16, hidden_sizes=[16, 32, 64, 96], depths=[2, 2, 2, 2],
        layer_type="basic", num_labels=10,
    )  # fmt: skip
    build = lambda: ImageClassifier(ResNetForImageClassification(config))  # noqa: E731
    return _step("resnet", build, _images(24, 96, 10))


def vit() -> TrainingStep:
    """Vision transformer, four layers."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        num_hidden_layers=4, hidden_size=128, intermediate_size=512, num_attention_heads=4,
        image_size=64, patch_size=8, num_labels=10, attn_implementation="sdpa",
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    build = lambda: ImageClassifier(ViTForImageClassification(config))  # noqa: E731
    return _step("vit", build, _images(16, 64, 10))


def convnext() -> TrainingStep:
    """ConvNeXt: depthwise convolutions, channels moved to the back and forth."""
    from transformers import ConvNextConfig, ConvNextForImageClassification

    config = ConvNextConfig(
        hidden_sizes=[16, 32, 64, 96], depths=[2, 2, 2, 2], image_size=96, num_labels=10,
        drop_path_rate=0.0,
    )  # fmt: skip
    build = lambda: ImageClassifier(ConvNextForImageClassification(config))  # noqa: E731
    return _step("convnext", build, _images(16, 96, 10))


def unet() -> TrainingStep:
    """U-Net, three levels."""
    generator = torch.Generator().manual_seed(SEED)
    images = torch.randn(2, 4, 3, 64, 64, generator=generator)
    return _step("unet", UNet, (images[0].clone(), images[1].clone()))


def lstm() -> TrainingStep:
    """An LSTM unrolled over 48 steps."""
    return _step("lstm", UnrolledLSTM, _tokens(96, 48, 64))


def shared_weights() -> TrainingStep:
    """One block six times, tied embedding, two losses."""
    tokens, labels = _tokens(8, 128, 256)
    target = torch.linspace(-1.0, 1.0, 8).unsqueeze(1)
    return _step("shared_weights", SharedWeights, (tokens, labels, target))


def running_scale() -> TrainingStep:
    """Buffers that forward reads and then writes."""
    generator = torch.Generator().manual_seed(SEED)
    features = torch.randn(4096, 128, generator=generator)
    labels = torch.randint(0, 8, (4096,), generator=generator)
    return _step("running_scale", RunningScale, (features, labels))


def chunked_cross_entropy() -> TrainingStep:
    """A large vocabulary, the loss in chunks, one chunk without a single label."""
    tokens, labels = _tokens(8, 128, 2048)
    labels[0] = -100
    return _step("chunked_cross_entropy", ChunkedCrossEntropy, (tokens, labels))


def t5() -> TrainingStep:
    """T5, two layers a side: the encoder's output lives through all of the decoder."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        num_layers=2, num_decoder_layers=2, d_model=128, d_kv=32, d_ff=344, num_heads=4,
        vocab_size=512, feed_forward_proj="gated-gelu", dropout_rate=0.0, use_cache=False,
        decoder_start_token_id=0, pad_token_id=0,
    )  # fmt: skip
    source, _ = _tokens(8, 96, 512)
    build = lambda: EncoderDecoder(T5ForConditionalGeneration(config))  # noqa: E731
    return _step("t5", build, (source, *_tokens(8, 64, 512)))


def whisper() -> TrainingStep:
    """Whisper, two layers a side: convolutions before the encoder, one frozen parameter."""
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        encoder_layers=2, decoder_layers=2, d_model=128, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=512, decoder_ffn_dim=512, num_mel_bins=20,
        max_source_positions=128, max_target_positions=64, vocab_size=512, use_cache=False,
        dropout=0.0, attention_dropout=0.0, activation_dropout=0.0, attn_implementation="sdpa",
        pad_token_id=0, bos_token_id=0, eos_token_id=0, decoder_start_token_id=0,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(SEED)
    sound = torch.randn(8, 20, 256, generator=generator)
    build = lambda: EncoderDecoder(WhisperForConditionalGeneration(config))  # noqa: E731
    return _step("whisper", build, (sound, *_tokens(8, 64, 512)))


def qwen3() -> TrainingStep:
    """Qwen3, four layers: queries and keys are normalised head by head."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        num_hidden_layers=4, hidden_size=128, intermediate_size=344, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, vocab_size=512, max_position_embeddings=128,
        use_cache=False, attn_implementation="sdpa",
    )  # fmt: skip
    return _step("qwen3", lambda: LanguageModel(Qwen3ForCausalLM(config)), _tokens(8, 128, 512))


def mixture_of_experts() -> TrainingStep:
    """Qwen3-MoE, three layers, two of four experts a token, their weights gathered by token."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        num_hidden_layers=3, hidden_size=64, moe_intermediate_size=64, intermediate_size=64,
        num_experts=4, num_experts_per_tok=2, norm_topk_prob=True, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, vocab_size=512, max_position_embeddings=64,
        use_cache=False, attn_implementation="sdpa", experts_implementation="batched_mm",
    )  # fmt: skip
    build = lambda: LanguageModel(Qwen3MoeForCausalLM(config))  # noqa: E731
    return _step("mixture_of_experts", build, _tokens(4, 64, 512))


def gpt2_bfloat16() -> TrainingStep:
    """GPT-2 with parameters and activations in bfloat16."""
    step = gpt2()
    return TrainingStep("gpt2_bfloat16", step.model.bfloat16(), step.args)


def llama_bfloat16() -> TrainingStep:
    """Llama in bfloat16: norms and rotary embeddings go through fp32."""
    step = llama()
    return TrainingStep("llama_bfloat16", step.model.bfloat16(), step.args)


STEPS: Final[dict[str, Callable[[], TrainingStep]]] = {
    build.__name__: build
    for build in (
        gpt2, llama, bert, resnet, vit, convnext, unet, lstm, shared_weights, running_scale,
        chunked_cross_entropy, t5, whisper, qwen3, mixture_of_experts, gpt2_bfloat16,
        llama_bfloat16,
    )
}  # fmt: skip
