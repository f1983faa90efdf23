"""Fused projections, as Phi 3 and 4 have them: one matrix of queries, keys and values, and one of gate and up.

Their files have all rows of one projection after those of another. In the trainer the rows of a group of heads, and of
a unit of the feed-forward layer, are adjacent, so that tensor parallelism can split the matrices anywhere between
groups. The adapter of weight names reorders the rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from torchtitan.models.common.attention import BaseQKVLinear, FusedQKVLinear
from torchtitan.models.common.decoder_sharding import (
    colwise_config,
    norm_config,
    rowwise_config,
    set_decoder_sharding_config,
    set_gqa_attention_sharding,
    set_gqa_inner_attention_local_map,
)
from torchtitan.models.common.linear import Linear
from torchtitan.protocols.module import Module
from torchtitan.protocols.sharding import ShardingConfig

from trainers.compat.torchtitan import same_config
from trainers.titan.names import RenamingStateDictAdapter

QKV, GATE_UP = "attention.qkv_linear.wqkv.weight", "feed_forward.w13.weight"


class FusedQKV(FusedQKVLinear):  # type: ignore[misc]
    """TorchTitan's fused projection, without its hooks that save three copies in place of the weight itself."""

    Config = same_config(FusedQKVLinear)

    def __init__(self, config: Any) -> None:
        BaseQKVLinear.__init__(self, config)
        self.wqkv = config.wqkv.build()
        self.heads_per_kv = config.n_heads // config.n_kv_heads
        self.r_dim = self.heads_per_kv + 2


class FusedFeedForward(Module):  # type: ignore[misc]
    """Feed-forward layer whose gate and up projection are one matrix, with the rows of a unit adjacent."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):  # type: ignore[misc]
        """One config for each matrix."""

        w13: Linear.Config
        w2: Linear.Config

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.w13, self.w2 = config.w13.build(), config.w2.build()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the layer, [B, T, D] -> [B, T, D]."""
        gate, up = self.w13(x).unflatten(-1, (-1, 2)).unbind(-1)
        out: torch.Tensor = self.w2(nn.functional.silu(gate) * up)
        return out


class FusedStateDictAdapter(RenamingStateDictAdapter):
    """Adapter between the weight names, and row orders, of this module and those of Phi's files."""

    block_names: ClassVar[Mapping[str, str]] = {"self_attn.qkv_proj.weight": QKV, "mlp.gate_up_proj.weight": GATE_UP}

    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Convert a state dict of the trainer."""
        ordered = {
            name: item if (rows := self._rows(name)) is None else item[rows] for name, item in state_dict.items()
        }
        converted: dict[str, Any] = super().to_hf(ordered)
        return converted

    def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]:
        """Convert a state dict of Phi's files."""
        converted: Mapping[str, Any] = super().from_hf(hf_state_dict)
        return {
            name: item if (rows := self._rows(name)) is None else torch.empty_like(item).index_copy_(0, rows, item)
            for name, item in converted.items()
        }

    def _rows(self, name: str) -> torch.Tensor | None:
        """Index of the trainer's row that each row in the files equals; None: the same order."""
        block = self.model_config.layers[0]
        if name.endswith(GATE_UP):
            return torch.arange(block.feed_forward.w13.out_features).view(-1, 2).T.flatten()
        if name.endswith(QKV):
            qkv = block.attention.qkv_linear
            group = qkv.n_heads // qkv.n_kv_heads
            rows = torch.arange(qkv.wqkv.out_features).view(qkv.n_kv_heads, group + 2, qkv.head_dim)
            return torch.cat([part.flatten() for part in rows.tensor_split([group, group + 1], 1)])
        return None


def shard_fused(config: Any) -> None:
    """Set in a model's config how tensor parallelism splits it, like `set_llama3_sharding_config`."""
    set_decoder_sharding_config(config, enable_sp=True)
    for layer in config.layers:
        layer.attention_norm.sharding_config = layer.ffn_norm.sharding_config = norm_config(enable_sp=True)
        set_gqa_attention_sharding(layer.attention, enable_sp=True)
        set_gqa_inner_attention_local_map(layer.attention.inner_attention)
        feed_forward = layer.feed_forward
        feed_forward.w13.sharding_config = colwise_config()
        feed_forward.w2.sharding_config = rowwise_config(output_sp=True)
        feed_forward.sharding_config = ShardingConfig(
            in_src_shardings={"x": layer.attention.sharding_config.in_src_shardings["x_BLD"]},
            in_dst_shardings={"x": layer.attention.sharding_config.in_dst_shardings["x_BLD"]},
        )
