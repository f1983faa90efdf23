"""Parts of Gemma 4 that Gemma 3 lacks: norms of values, keys that are also values, and a scale for each block."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch
from torch import nn
from torchtitan.models.common.attention import BaseQKVLinear, GQAttention
from torchtitan.models.common.linear import Linear
from torchtitan.models.common.nn_modules import RMSNorm

from trainers.compat.torchtitan import same_config
from trainers.titan.gemma import GemmaBlock, GemmaStateDictAdapter


class Gemma4Norm(RMSNorm):  # type: ignore[misc]
    """RMS norm that multiplies by its weight in float32, before rounding."""

    Config = same_config(RMSNorm)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Apply the norm to the last dimension."""
        weight = self.weight.float()
        return nn.functional.rms_norm(input.float(), self.normalized_shape, weight, self.eps).type_as(input)


class QKLinear(BaseQKVLinear):  # type: ignore[misc]
    """Projections to queries and keys; the keys are also the values."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseQKVLinear.Config):  # type: ignore[misc]
        """One config for each projection."""

        wq: Linear.Config
        wk: Linear.Config

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.wq, self.wk = config.wq.build(), config.wk.build()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Project tokens, [B, T, D] -> [B, T, heads, head dim] each."""
        query, key = (layer(x).unflatten(-1, (-1, self.head_dim)) for layer in (self.wq, self.wk))
        return query, key, key


class Gemma4Attention(GQAttention):  # type: ignore[misc]
    """TorchTitan's attention with a norm of values that has no weight."""

    @dataclass(kw_only=True, slots=True)
    class Config(GQAttention.Config):  # type: ignore[misc]
        """Same fields as TorchTitan's."""

        @classmethod
        def of(cls, plain: GQAttention.Config, *, keys_are_values: bool) -> Gemma4Attention.Config:
            """Build the config from TorchTitan's, which is modified."""
            if keys_are_values:
                qkv = plain.qkv_linear
                plain.qkv_linear = QKLinear.Config(head_dim=qkv.head_dim, wq=qkv.wq, wk=qkv.wkv)
            # for random weights, because attention does not scale scores
            plain.qk_norm.param_init = {"weight": partial(nn.init.constant_, val=plain.head_dim**-0.25)}
            return cls(**{item.name: getattr(plain, item.name) for item in fields(plain) if item.init})

    def forward(self, x: torch.Tensor, attention_masks: Any, positions: torch.Tensor | None = None) -> torch.Tensor:
        """Apply the layer, [B, T, D] -> [B, T, D]."""
        query, key, value = self.qkv_linear(x)
        value = nn.functional.rms_norm(value.float(), value.shape[-1:], None, self.k_norm.eps).type_as(value)
        query, key = self.rope(self.q_norm(query), self.k_norm(key), positions)
        attended = self.inner_attention(
            query, key, value, attention_masks=attention_masks, scale=self.scaling, enable_gqa=self.enable_gqa
        )
        out: torch.Tensor = self.wo(attended.flatten(2))
        return out


class Gemma4Block(GemmaBlock):
    """Gemma 3's block with a scale of its output, which is loaded from the checkpoint and not trained."""

    Config = same_config(GemmaBlock)

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.register_buffer("scale", torch.ones(1))

    def _init_self_buffers(self, *, buffer_device: torch.device | None = None) -> None:
        self.scale.fill_(1.0)

    def forward(self, x: torch.Tensor, attention_masks: Any, positions: torch.Tensor | None = None) -> torch.Tensor:
        """Apply the block, [B, T, D] -> [B, T, D]."""
        out: torch.Tensor = super().forward(x, attention_masks, positions) * self.scale.to(x.dtype)
        return out


class Gemma4StateDictAdapter(GemmaStateDictAdapter):
    """Gemma 3's adapter with the scales of blocks."""

    def __init__(self, model_config: Any, hf_assets_path: str | None) -> None:
        super().__init__(model_config, hf_assets_path)
        self.from_hf_map["model.layers.{}.layer_scalar"] = "layers.{}.scale"

    def _validate_hf_rope_config(self, expected: Any) -> None:
        """Check nothing: `check_hf_config` has checked the positions of both kinds of layers."""
