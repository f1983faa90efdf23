"""Parts of gpt-oss that other families lack: attention sinks, and experts with biases and a clamped SwiGLU.

A sink is a learned score of each head that takes part in the softmax and has no value. Experts keep the shapes of
Hugging Face's files, in which elements of gate and up alternate.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torchtitan.models.common.attention import GQAttention
from torchtitan.models.gpt_oss.state_dict_adapter import GptOssStateDictAdapter as TitanStateDictAdapter
from torchtitan.protocols.module import Module

from trainers.compat.torchtitan import arguments, same_config
from trainers.model.folder import SWIGLU_ALPHA, SWIGLU_LIMIT
from trainers.titan.experts import Experts
from trainers.titan.parallel import local


class SinkAttention(GQAttention):  # type: ignore[misc]
    """TorchTitan's attention with a sink for each head."""

    @dataclass(kw_only=True, slots=True)
    class Config(GQAttention.Config):  # type: ignore[misc]
        """Same fields as TorchTitan's."""

        @classmethod
        def of(cls, plain: GQAttention.Config, std: float) -> SinkAttention.Config:
            """Build the config from TorchTitan's, which is modified, with sinks and a bias of the output."""
            plain.wo.bias = True
            return cls(**arguments(plain) | {"param_init": {"sinks": partial(nn.init.normal_, std=std)}})

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.sinks = nn.Parameter(torch.empty(config.n_heads))

    def forward(self, x: torch.Tensor, attention_masks: Any, positions: torch.Tensor | None = None) -> torch.Tensor:
        """Apply the layer, [B, T, D] -> [B, T, D]."""
        query, key, value = self.qkv_linear(x)
        query, key = self.rope(query, key, positions)
        options = {"scale": self.scaling, "enable_gqa": self.enable_gqa, "sinks": self.sinks}
        attended = self.inner_attention(query, key, value, attention_masks=attention_masks, **options)
        out: torch.Tensor = self.wo(attended.flatten(2))
        return out


class ClampedExperts(Experts):
    """Experts with biases and a clamped SwiGLU; gate and up are the even and odd columns of one matrix."""

    Config = same_config(Experts)

    def __init__(self, config: Any) -> None:
        Module.__init__(self)
        self.num_experts = experts = config.num_experts
        dim, hidden = config.dim, config.hidden_dim
        self.gate_up = nn.Parameter(torch.empty(experts, dim, 2 * hidden))
        self.gate_up_bias = nn.Parameter(torch.empty(experts, 2 * hidden))
        self.down = nn.Parameter(torch.empty(experts, hidden, dim))
        self.down_bias = nn.Parameter(torch.empty(experts, dim))

    def apply_experts(self, rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """Apply each expert to its rows, [R, D] -> [R, D]; `ends` [E] are the indices after the last row of each."""
        expert = torch.searchsorted(ends, torch.arange(len(rows), device=rows.device), right=True, out_int32=True)

        def layer(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
            return self.product(rows, weight, ends) + local(bias).to(rows.dtype).index_select(0, expert)

        both = layer(rows, self.gate_up, self.gate_up_bias)
        gate, up = both[:, ::2].clamp(max=SWIGLU_LIMIT), both[:, 1::2].clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
        hidden = (up + 1) * gate * torch.sigmoid(SWIGLU_ALPHA * gate)
        return layer(hidden, self.down, self.down_bias)


class GptOssStateDictAdapter(TitanStateDictAdapter):  # type: ignore[misc]
    """TorchTitan's adapter for gpt-oss with corrected names of the experts' tensors."""

    def __init__(self, model_config: Any, hf_assets_path: str | None) -> None:
        super().__init__(model_config, hf_assets_path)
        for wrong in [name for name in self.from_hf_map if ".experts." in name]:
            del self.from_hf_map[wrong]
        for layer in ("gate_up", "down"):
            for suffix in ("", "_bias"):
                name = f"model.layers.{{}}.mlp.experts.{layer}_proj{suffix}"
                self.from_hf_map[name] = f"layers.{{}}.moe.routed_experts.inner_experts.{layer}{suffix}"
