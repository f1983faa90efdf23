"""LoRA with TorchTitan's converter: adapters on the linear layers of the blocks; all other weights are frozen.

The converter changes the model's config before the model is built, and selects layers by TorchTitan's names. This
module adds separate configs for keys and values, so that one can have an adapter without the other; PEFT's names; and
the row order of Hugging Face's Llama.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torchtitan.components.lora import LoRAConverter
from torchtitan.models.common.attention import BaseQKVLinear, QKVLinear
from torchtitan.models.common.linear import Linear
from torchtitan.protocols.state_dict_adapter import StateDictAdapter

from forge_env.config.recipe import LoRASection
from forge_env.errors import UsageError
from trainers.compat.torchtitan import arguments, set_lora_scaling
from trainers.model.adapter import DOWN, PREFIX, UP, targets
from trainers.titan.parallel import local, whole
from trainers.titan.shards import place_of, start_of


class SeparateQKVLinear(QKVLinear):  # type: ignore[misc]
    """TorchTitan's query, key and value projections, with separate configs for keys and values."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseQKVLinear.Config):  # type: ignore[misc]
        """One config for each projection."""

        wq: Linear.Config
        wk: Linear.Config
        wv: Linear.Config

    def __init__(self, config: Config) -> None:
        BaseQKVLinear.__init__(self, config)
        self.wq, self.wk, self.wv = (each.build() for each in (config.wq, config.wk, config.wv))


@dataclass(frozen=True, slots=True)
class Layer:
    """A linear layer with an adapter, whose weight is [out, into]: its names in TorchTitan's model and in PEFT's files.

    `rows` is the order of its rows in Hugging Face's files, [out]; None: the same order.
    """

    titan: str
    peft: str
    out: int
    into: int
    rows: torch.Tensor | None


class Adapters:
    """The adapters of a model.

    Args:
        section: LoRA section of the recipe.
        hf: the model's `config.json`.
        config: TorchTitan's model config, which is modified; `self.config` is the one with adapters.
        names: TorchTitan's adapter between its weight names and Hugging Face's.
    """

    def __init__(self, section: LoRASection, hf: Mapping[str, Any], config: Any, names: StateDictAdapter) -> None:
        self.section = section
        self.scaling = section.alpha / section.rank
        chosen = set(targets(section, hf))
        for block in config.layers:
            if isinstance(getattr(block.attention, "qkv_linear", None), QKVLinear.Config):
                block.attention.qkv_linear = _separate(block.attention.qkv_linear)
        theirs = {ours: theirs for theirs, ours in names.from_hf_map.items() if ours is not None}
        order: dict[str, torch.Tensor | None] = {}
        self.layers: list[Layer] = []
        for path, linear, _, _ in config.traverse(Linear.Config):
            kind, number = re.sub(r"\d+", "{}", path, count=1), re.search(r"\d+", path)
            name = theirs.get(f"{kind}.weight")
            if number is None or name is None or name.split(".")[-2] not in chosen:
                continue
            if kind not in order:
                order[kind] = place_of(names, f"{path}.weight", (linear.out_features, linear.in_features)).rows
            peft = PREFIX + name.format(number[0]).removesuffix(".weight")
            self.layers.append(Layer(path, peft, linear.out_features, linear.in_features, order[kind]))
        last = sorted({layer.titan.rpartition(".")[2] for layer in self.layers})
        options = LoRAConverter.Config(rank=section.rank, alpha=section.alpha, target_modules=last)
        self.config = LoRAConverter(options).convert(config)

    def fresh(self, seed: int) -> dict[str, torch.Tensor]:
        """Initial adapters, which change nothing yet, by TorchTitan's names: A is random (Kaiming), B is zero."""
        generator = torch.Generator().manual_seed(seed)
        state = {}
        for layer in self.layers:
            down = torch.empty(self.section.rank, layer.into)
            nn.init.kaiming_uniform_(down, a=math.sqrt(5), generator=generator)
            state[f"{layer.titan}.lora_a.weight"] = down
            state[f"{layer.titan}.lora_b.weight"] = torch.zeros(layer.out, self.section.rank)
        return state

    def to_peft(self, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Convert the adapters of a TorchTitan state dict to PEFT's names and row order."""
        adapters = {}
        for layer in self.layers:
            up = state[f"{layer.titan}.lora_b.weight"]
            adapters[layer.peft + DOWN] = state[f"{layer.titan}.lora_a.weight"]
            adapters[layer.peft + UP] = up if layer.rows is None else up[layer.rows]
        return adapters

    def from_peft(self, adapters: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Convert adapters from PEFT's names and row order to a TorchTitan state dict."""
        state: dict[str, torch.Tensor] = {}
        left = dict(adapters)
        for layer in self.layers:
            rank = self.section.rank
            down, up = (
                _take(left, layer.peft + name, shape)
                for name, shape in ((DOWN, (rank, layer.into)), (UP, (layer.out, rank)))
            )
            if layer.rows is not None:
                up = torch.empty_like(up).index_copy_(0, layer.rows, up)
            state[f"{layer.titan}.lora_a.weight"], state[f"{layer.titan}.lora_b.weight"] = down, up
        if left:
            raise UsageError(
                f"{next(iter(left))}: lora.targets has no such layer", fix="use the recipe that trained it"
            )
        return state

    def merge(self, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Add the adapters to the weights of a TorchTitan state dict, and remove them from it.

        A collective: adapters are gathered. Weights are changed shard by shard, in main memory.
        """
        left = dict(state)
        for layer in self.layers:
            down, up = (whole(left.pop(f"{layer.titan}.lora_{name}.weight")).cpu() for name in "ab")
            weight = left[f"{layer.titan}.weight"]
            left[f"{layer.titan}.weight"] = _added(weight, up, down, self.scaling)
        return left

    @contextmanager
    def off(self, module: Any) -> Iterator[None]:
        """Disable the adapters inside this context: `module` computes exactly as the base model."""
        adapted = [module.get_submodule(layer.titan) for layer in self.layers]
        for layer in adapted:
            set_lora_scaling(layer, 0.0)
        try:
            yield
        finally:
            for layer in adapted:
                set_lora_scaling(layer, self.scaling)


def _added(weight: torch.Tensor, up: torch.Tensor, down: torch.Tensor, scaling: float) -> torch.Tensor:
    """W + scaling B A; each rank computes its own shard."""
    shard = local(weight).cpu()
    rows, columns = (slice(first, first + size) for first, size in zip(start_of(weight), shard.shape, strict=True))
    shard = torch.addmm(shard, up[rows], down[:, columns], alpha=scaling)
    if not isinstance(weight, DTensor):
        return shard
    mesh, placements = weight.device_mesh, weight.placements
    return DTensor.from_local(shard, mesh, placements, run_check=False, shape=weight.shape, stride=weight.stride())


def _take(left: dict[str, torch.Tensor], name: str, shape: tuple[int, int]) -> torch.Tensor:
    tensor = left.pop(name, None)
    if tensor is None or tuple(tensor.shape) != shape:
        problem = "is missing" if tensor is None else f"has the shape {tuple(tensor.shape)} instead of {shape}"
        raise UsageError(f"{name} {problem}", fix="use the recipe that trained the adapters")
    return tensor.float()


def _separate(config: Any) -> Any:
    options = arguments(config)
    both = options.pop("wkv")
    return SeparateQKVLinear.Config(**options, wk=replace(both), wv=replace(both))
