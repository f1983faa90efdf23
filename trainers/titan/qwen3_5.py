"""Parts of Qwen 3.5 that other families lack: gated delta layers, and attention whose output is gated.

Three of four layers have no attention: a gated delta layer keeps a matrix for each head, which every token changes
(`trainers.model.delta`). In a packed row each sequence has its own, also if it shares its first tokens with another:
linear layers compute those once, and the rule of the layer once for each sequence.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn
from torchtitan.models.common.attention import GQAttention
from torchtitan.models.common.linear import Linear
from torchtitan.models.common.nn_modules import RMSNorm
from torchtitan.protocols.module import Module

from trainers.compat.torchtitan import arguments
from trainers.model.delta import causal_convolution, gated_delta_rule
from trainers.titan.attention import spread
from trainers.titan.layout import ContextLayout, RowLayout
from trainers.titan.names import RenamingStateDictAdapter


class GatedAttention(GQAttention):  # type: ignore[misc]
    """TorchTitan's attention, multiplied by the sigmoid of a gate that `wq` computes beside each head's query."""

    @dataclass(kw_only=True, slots=True)
    class Config(GQAttention.Config):  # type: ignore[misc]
        """Same fields as TorchTitan's; `wq` has twice as many rows."""

        @classmethod
        def of(cls, plain: GQAttention.Config) -> GatedAttention.Config:
            """Add the gate to a config without one, which is changed."""
            plain.qkv_linear.wq.out_features *= 2
            return cls(**arguments(plain))

    def forward(self, x: torch.Tensor, attention_masks: Any, positions: torch.Tensor | None = None) -> torch.Tensor:
        """Apply the layer, [B, T, D] -> [B, T, D]."""
        both, key, value = self.qkv_linear(x)
        query, gate = both.unflatten(2, (-1, 2)).unbind(3)
        query, key = self.rope(self.q_norm(query), self.k_norm(key), positions)
        seen = self.inner_attention(
            query, key, value, attention_masks=attention_masks, scale=self.scaling, enable_gqa=self.enable_gqa
        )
        out: torch.Tensor = self.wo((seen * torch.sigmoid(gate)).flatten(2))
        return out


class GatedDelta(Module):  # type: ignore[misc]
    """A gated delta layer: convolution, gated delta rule, and a norm that is multiplied by a gate."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):  # type: ignore[misc]
        """Projections to queries, keys and values, the output's gate, the state's decay, and the strength of writing.

        Each of the heads of values has a state; `key_heads`, of queries and keys, is a divisor of their number. The
        convolution covers `width` tokens, and `norm` is that of each head's output.
        """

        key_heads: int
        key_dim: int
        value_heads: int
        width: int
        in_proj_qkv: Linear.Config
        in_proj_z: Linear.Config
        in_proj_a: Linear.Config
        in_proj_b: Linear.Config
        norm: RMSNorm.Config
        out_proj: Linear.Config

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        for name in ("in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "norm", "out_proj"):
            setattr(self, name, getattr(config, name).build())
        self.conv_weight = nn.Parameter(torch.empty(config.in_proj_qkv.out_features, 1, config.width))
        self.A_log = nn.Parameter(torch.empty(config.value_heads))
        self.dt_bias = nn.Parameter(torch.empty(config.value_heads))

    def forward(
        self, x: torch.Tensor, attention_masks: RowLayout, positions: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Apply the layer, [1, T, D] -> [1, T, D]."""
        assert not isinstance(attention_masks, ContextLayout), "rows are not split for this family"
        config, paths = self.config, attention_masks.paths
        qkv, b, a = (layer(x).flatten(0, 1) for layer in (self.in_proj_qkv, self.in_proj_b, self.in_proj_a))
        if paths.take is not None:
            qkv, b, a = (spread(tokens, paths.take) for tokens in (qkv, b, a))
        mixed = causal_convolution(qkv, self.conv_weight[:, 0], paths.positions)
        keys = config.key_heads * config.key_dim
        query, key = (mixed[:, at : at + keys].reshape(len(mixed), config.key_heads, -1) for at in (0, keys))
        value = mixed[:, 2 * keys :].reshape(len(mixed), config.value_heads, -1)
        group = config.value_heads // config.key_heads
        query, key = (part.repeat_interleave(group, 1) for part in (query, key))
        decay = -self.A_log.float().exp() * nn.functional.softplus(a.float() + self.dt_bias.float())
        out = gated_delta_rule(query, key, value, decay, b.float().sigmoid(), paths.lengths)[0].float()
        if paths.last is not None:
            out = out.index_select(0, paths.last)
        normed = nn.functional.rms_norm(out, out.shape[-1:], self.norm.weight.float(), self.norm.eps)
        gate = self.in_proj_z(x).view(normed.shape).float()
        gated: torch.Tensor = self.out_proj((normed * nn.functional.silu(gate)).view(*x.shape[:2], -1).type_as(x))
        return gated


def delta_config(hf: Any, normal: dict[str, Any], residual: dict[str, Any]) -> GatedDelta.Config:
    """Build the config of a gated delta layer from a Hugging Face config."""
    dim, value_heads = hf["hidden_size"], hf["linear_num_value_heads"]
    keys = hf["linear_num_key_heads"] * hf["linear_key_head_dim"]
    values = value_heads * hf["linear_value_head_dim"]
    bound = hf["linear_conv_kernel_dim"] ** -0.5

    def linear(rows: int) -> Linear.Config:
        return Linear.Config(in_features=dim, out_features=rows, param_init=normal)

    return GatedDelta.Config(
        key_heads=hf["linear_num_key_heads"],
        key_dim=hf["linear_key_head_dim"],
        value_heads=value_heads,
        width=hf["linear_conv_kernel_dim"],
        in_proj_qkv=linear(2 * keys + values),
        in_proj_z=linear(values),
        in_proj_a=linear(value_heads),
        in_proj_b=linear(value_heads),
        norm=RMSNorm.Config(
            normalized_shape=hf["linear_value_head_dim"],
            eps=hf["rms_norm_eps"],
            param_init={"weight": nn.init.ones_},
        ),
        out_proj=Linear.Config(in_features=values, out_features=dim, param_init=residual),
        param_init={
            "conv_weight": partial(nn.init.uniform_, a=-bound, b=bound),
            "A_log": partial(nn.init.uniform_, a=0.0, b=math.log(16.0)),
            "dt_bias": nn.init.ones_,
        },
    )


class Qwen35StateDictAdapter(RenamingStateDictAdapter):
    """Adapter with the names of gated delta layers and shared experts."""

    block_names: ClassVar[Mapping[str, str]] = {
        **{
            f"linear_attn.{name}.weight": f"attention.{name}.weight"
            for name in ("in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "norm", "out_proj")
        },
        "linear_attn.conv1d.weight": "attention.conv_weight",
        "linear_attn.A_log": "attention.A_log",
        "linear_attn.dt_bias": "attention.dt_bias",
        "mlp.shared_expert.gate_proj.weight": "moe.shared_experts.w1.weight",
        "mlp.shared_expert.up_proj.weight": "moe.shared_experts.w3.weight",
        "mlp.shared_expert.down_proj.weight": "moe.shared_experts.w2.weight",
        "mlp.shared_expert_gate.weight": "moe.shared_experts.gate.weight",
    }
