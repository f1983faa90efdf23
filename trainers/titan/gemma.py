"""Parts of Gemma 3 that other families lack: norms after each layer as before it, scaled embeddings, GELU."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from torchtitan.models.common import Embedding, TransformerBlock
from torchtitan.models.common.decoder_sharding import norm_config
from torchtitan.models.common.feed_forward import FeedForward
from torchtitan.models.common.nn_modules import RMSNorm
from torchtitan.models.qwen3.sharding import set_qwen3_sharding_config

from trainers.compat.torchtitan import same_config
from trainers.titan.names import RenamingStateDictAdapter


def gelu(x: torch.Tensor) -> torch.Tensor:
    """GELU in its tanh approximation."""
    return nn.functional.gelu(x, approximate="tanh")


def normed(x: torch.Tensor, eps: float, weight: torch.Tensor | None = None) -> torch.Tensor:
    """Apply an RMS norm to the last dimension in float32, and round its result."""
    return nn.functional.rms_norm(x.float(), x.shape[-1:], weight, eps).type_as(x)


class GemmaNorm(RMSNorm):  # type: ignore[misc]
    """Norm in float32 that multiplies by 1 + weight."""

    Config = same_config(RMSNorm)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Apply the norm to the last dimension."""
        return normed(input, self.eps, 1.0 + self.weight.float())


class ScaledEmbedding(Embedding):  # type: ignore[misc]
    """Embedding multiplied by the square root of its width, rounded to the precision of the arithmetic."""

    Config = same_config(Embedding)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Embeddings of tokens, [B, T] -> [B, T, D]."""
        out: torch.Tensor = super().forward(input)
        kind = out.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else out.dtype
        return out * torch.tensor(math.sqrt(self.embedding_dim), dtype=dtype).item()


class GemmaFeedForward(FeedForward):  # type: ignore[misc]
    """TorchTitan's feed-forward layer with the tanh approximation of GELU in place of SiLU."""

    Config = same_config(FeedForward)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the layer, [B, T, D] -> [B, T, D]."""
        out: torch.Tensor = self.w2(gelu(self.w1(x)) * self.w3(x))
        return out


class GemmaBlock(TransformerBlock):  # type: ignore[misc]
    """Transformer block with norms before and after attention, and before and after the feed-forward layer."""

    @dataclass(kw_only=True, slots=True)
    class Config(TransformerBlock.Config):  # type: ignore[misc]
        """TorchTitan's fields and the norms that follow each layer."""

        attention_out_norm: RMSNorm.Config
        ffn_out_norm: RMSNorm.Config

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.attention, self.feed_forward = config.attention.build(), config.feed_forward.build()
        self.attention_norm, self.attention_out_norm = config.attention_norm.build(), config.attention_out_norm.build()
        self.ffn_norm, self.ffn_out_norm = config.ffn_norm.build(), config.ffn_out_norm.build()

    def forward(self, x: torch.Tensor, attention_masks: Any, positions: torch.Tensor | None = None) -> torch.Tensor:
        """Apply the block, [B, T, D] -> [B, T, D]."""
        x = x + self.attention_out_norm(self.attention(self.attention_norm(x), attention_masks, positions))
        out: torch.Tensor = x + self.ffn_out_norm(self.feed_forward(self.ffn_norm(x)))
        return out


class GemmaStateDictAdapter(RenamingStateDictAdapter):
    """Adapter with the names of Gemma's norms."""

    block_names: ClassVar[Mapping[str, str]] = {
        "post_attention_layernorm.weight": "attention_out_norm.weight",
        "pre_feedforward_layernorm.weight": "ffn_norm.weight",
        "post_feedforward_layernorm.weight": "ffn_out_norm.weight",
    }


def shard_gemma(config: Any) -> None:
    """Set in a model's config how tensor parallelism splits it, like `set_qwen3_sharding_config`."""
    set_qwen3_sharding_config(config, enable_sp=True, enable_ep=False)
    for layer in config.layers:
        layer.attention_out_norm.sharding_config = layer.ffn_out_norm.sharding_config = norm_config(enable_sp=True)
