"""Adapters (LoRA) separate from the weights of vLLM's layers, for arithmetic in bfloat16: y = W x + B (A x).

bfloat16(W + B A) would lose most of a small B A: an element of W changes only by more than half of its last bit
(docs/lora.md has measurements). Here B (A x) is computed in float32, and only the sum is rounded. vLLM creates each
layer through its quantization config, so this module registers one that quantizes nothing and gives layers A and B.
Every process of an engine must import this module.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.linear import (
    LinearBase,
    QKVParallelLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
)
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

from trainers.generator.arguments import ADAPTERS
from trainers.model.adapter import DOWN, PREFIX, UP


@register_quantization_config(ADAPTERS)
class _AdapterConfig(QuantizationConfig):  # type: ignore[misc]
    """Quantization config that adds adapters of a rank to linear layers, and changes no other layer."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank

    @classmethod
    def get_name(cls) -> str:
        return ADAPTERS

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        return 0

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []  # the config comes from `engine_arguments`

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> _AdapterConfig:
        return cls(config["rank"])

    def get_quant_method(self, layer: nn.Module, prefix: str) -> AdapterMethod | None:
        return AdapterMethod(self.rank) if isinstance(layer, LinearBase) else None


class AdapterMethod(UnquantizedLinearMethod):  # type: ignore[misc]
    """A linear layer with an adapter, which is zero until `load_adapters`.

    vLLM fuses some layers (queries, keys and values; gate and up). `lora_a` is their A matrices stacked,
    [parts * rank, in], and `lora_b` their B matrices, [out, rank]; both are this process's shards, in float32.
    """

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank

    def create_weights(
        self,
        layer: nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        *sizes: Any,
        **attributes: Any,
    ) -> None:
        """Create W as vLLM does, then A and B."""
        super().create_weights(layer, input_size_per_partition, output_partition_sizes, *sizes, **attributes)
        self.parts = output_partition_sizes
        shapes = {"a": (len(self.parts) * self.rank, input_size_per_partition), "b": (sum(self.parts), self.rank)}
        for name, shape in shapes.items():
            factor = nn.Parameter(torch.zeros(shape, dtype=torch.float32), requires_grad=False)
            factor.output_dim = 0  # type: ignore[attr-defined]  # the dimension by which vLLM's loaders shard B
            layer.register_parameter(f"lora_{name}", factor)

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Compute W x + B (A x), with one rounding of the sum."""
        base: torch.Tensor = super().apply(layer, x, bias)
        down = torch.split(nn.functional.linear(x.float(), layer.lora_a), self.rank, dim=-1)
        ups = torch.split(layer.lora_b, self.parts)
        delta = torch.cat([nn.functional.linear(part, up) for part, up in zip(down, ups, strict=True)], dim=-1)
        return (base.float() + delta).to(base.dtype)


def load_adapters(model: nn.Module, published: Mapping[str, torch.Tensor]) -> None:
    """Load the adapters of a published version (`trainers.model.merging.scaled`) into a model."""
    joined: Mapping[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    for name, layer in model.named_modules():
        method = getattr(layer, "quant_method", None)
        if not isinstance(method, AdapterMethod):
            continue
        parent, _, last = name.rpartition(".")
        parts, parent = joined.get(last, [last]), re.sub(r"\.attn$", ".self_attn", parent)  # vLLM's name in gpt-oss
        for number, part in enumerate(parts):
            key = f"{PREFIX}{parent}.{part}"
            if part == "v_proj" and _keys_are_values(model, name):
                key = f"{PREFIX}{parent}.k_proj"
            if key + UP not in published:  # not in `lora.targets`
                continue
            down, up = published[key + DOWN], published[key + UP].to(layer.lora_b)
            columns = layer.lora_a.shape[1]
            if part == "in_proj_z":  # the fourth part of vLLM's layer, whose first three are `in_proj_qkv`
                number = 3
            if isinstance(layer, RowParallelLinear):
                down = down[:, layer.tp_rank * columns : (layer.tp_rank + 1) * columns]
                layer.lora_b.data.copy_(up)
            elif len(parts) < 2:  # also of fused layers whose weight is one in the model's files too
                layer.weight_loader(layer.lora_b, up)
                down = down.repeat(len(method.parts), 1)
            elif isinstance(layer, QKVParallelLinear):
                layer.weight_loader(layer.lora_b, up, part[0])
            elif part == "in_proj_qkv":
                layer.weight_loader(layer.lora_b, up, (0, 1, 2))
                down = down.repeat(3, 1)
            else:
                layer.weight_loader(layer.lora_b, up, number)
            layer.lora_a.data[number * method.rank : number * method.rank + len(down)].copy_(down)


def _keys_are_values(model: Any, name: str) -> bool:
    """Whether a layer of Gemma 4 has no value projection in the model's files."""
    config: Any = getattr(model, "config", None)
    number = re.search(r"\.layers\.(\d+)\.", name)
    if number is None or not getattr(config, "attention_k_eq_v", False):
        return False
    return bool(config.layer_types[int(number[1])] == "full_attention")
