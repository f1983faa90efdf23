"""Adapters (LoRA) beside the weights of vLLM's layers, for arithmetic in bfloat16: y = W x + B (A x).

bfloat16(W + B A) would lose most of a small B A: an element of W changes only if its change is above half of its last
place (docs/lora.md has figures). Here B (A x) is computed in float32 and added before the one rounding. vLLM makes each
layer by its quantization config, so a config is registered with it that quantizes nothing, and gives layers A and B.
Importing this module registers it; every process of an engine must.
"""

from __future__ import annotations

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
class AdapterConfig(QuantizationConfig):  # type: ignore[misc]
    """Linear layers of the blocks with adapters of this rank."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank

    @classmethod
    def get_name(cls) -> str:
        """In `quantization_config`."""
        return ADAPTERS

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        """Any that models have."""
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        """Of a GPU: any."""
        return 0

    @staticmethod
    def get_config_filenames() -> list[str]:
        """No file has the config: `engine_arguments` does."""
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> AdapterConfig:
        """From `quantization_config`."""
        return cls(config["rank"])

    def get_quant_method(self, layer: nn.Module, prefix: str) -> AdapterMethod | None:
        """How a layer computes; None: as ever."""
        return AdapterMethod(self.rank) if isinstance(layer, LinearBase) else None


class AdapterMethod(UnquantizedLinearMethod):  # type: ignore[misc]
    """A linear layer with an adapter, of zeros until `load_adapters`.

    A layer may be several that vLLM has joined (queries, keys and values; gate and up): `lora_a` is all their A, one
    below the other, [parts * rank, in], and `lora_b` all their B, [out, rank]; both float32, and this process's shards.
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
        """W as ever, A and B."""
        super().create_weights(layer, input_size_per_partition, output_partition_sizes, *sizes, **attributes)
        self.parts = output_partition_sizes
        shapes = {"a": (len(self.parts) * self.rank, input_size_per_partition), "b": (sum(self.parts), self.rank)}
        for name, shape in shapes.items():
            factor = nn.Parameter(torch.zeros(shape, dtype=torch.float32), requires_grad=False)
            factor.output_dim = 0  # type: ignore[attr-defined]  # what vLLM's loaders shard B by
            layer.register_parameter(f"lora_{name}", factor)

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """W x + B (A x), rounded once."""
        base: torch.Tensor = super().apply(layer, x, bias)
        down = torch.split(nn.functional.linear(x.float(), layer.lora_a), self.rank, dim=-1)
        ups = torch.split(layer.lora_b, self.parts)
        delta = torch.cat([nn.functional.linear(own, up) for own, up in zip(down, ups, strict=True)], dim=-1)
        return (base.float() + delta).to(base.dtype)


def load_adapters(model: nn.Module, published: Mapping[str, torch.Tensor]) -> None:
    """Make a model's adapters those of a version that was published (`trainers.weights.adapter.scaled`)."""
    joined: Mapping[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    for name, layer in model.named_modules():
        method = getattr(layer, "quant_method", None)
        if not isinstance(method, AdapterMethod):
            continue
        parent, _, last = name.rpartition(".")
        for number, part in enumerate(joined.get(last, [last])):
            key = f"{PREFIX}{parent}.{part}"
            if key + UP not in published:  # `lora.targets` leaves it out
                continue
            down, up = published[key + DOWN], published[key + UP].to(layer.lora_b)
            columns = layer.lora_a.shape[1]
            if isinstance(layer, RowParallelLinear):
                down = down[:, layer.tp_rank * columns : (layer.tp_rank + 1) * columns]
                layer.lora_b.data.copy_(up)
            elif isinstance(layer, QKVParallelLinear):
                layer.weight_loader(layer.lora_b, up, part[0])
            elif len(method.parts) > 1:
                layer.weight_loader(layer.lora_b, up, number)
            else:
                layer.weight_loader(layer.lora_b, up)
            layer.lora_a.data[number * method.rank : (number + 1) * method.rank].copy_(down)
