"""LoRA with TorchTitan's converter: adapters on the linear layers of the blocks, everything else frozen.

The converter works on the model's config before it is built and knows layers by TorchTitan's names. What is ours: keys
and values get configs of their own, so that one can have an adapter without the other; the names of PEFT; the order of
rows that Hugging Face's Llama has.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
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
from trainers.model.adapter import DOWN, PREFIX, UP, targets
from trainers.titan.parallel import whole
from trainers.titan.shards import place_of, start_of


class SeparateQKVLinear(QKVLinear):  # type: ignore[misc]
    """TorchTitan's projections, of which keys and values have configs of their own."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseQKVLinear.Config):  # type: ignore[misc]
        """One for each projection."""

        wq: Linear.Config
        wk: Linear.Config
        wv: Linear.Config

    def __init__(self, config: Config) -> None:
        BaseQKVLinear.__init__(self, config)
        self.wq, self.wk, self.wv = (each.build() for each in (config.wq, config.wk, config.wv))


@dataclass(frozen=True, slots=True)
class Layer:
    """A linear layer with an adapter.

    Attributes:
        titan: its name in TorchTitan's model.
        peft: in PEFT's files.
        out: its rows.
        into: its columns.
        rows: the order in which Hugging Face has its rows, [out]; None: the same.
    """

    titan: str
    peft: str
    out: int
    into: int
    rows: torch.Tensor | None


class Adapters:
    """The adapters of a model.

    Args:
        section: of the recipe.
        hf: the model's `config.json`.
        config: TorchTitan's model config, which is changed.
        names: TorchTitan's adapter between both worlds' names of weights.

    Attributes:
        config: the model config with adapters.
        layers: that have one.
        scaling: the factor of B A.
    """

    def __init__(self, section: LoRASection, hf: Mapping[str, Any], config: Any, names: StateDictAdapter) -> None:
        self.section = section
        self.scaling = section.alpha / section.rank
        chosen = set(targets(section, hf))
        for block in config.layers:
            block.attention.qkv_linear = _separate(block.attention.qkv_linear)
        theirs = {ours: theirs for theirs, ours in names.from_hf_map.items() if ours is not None}
        order: dict[str, torch.Tensor | None] = {}
        self.layers: list[Layer] = []
        for place, linear, _, _ in config.traverse(Linear.Config):
            kind, number = re.sub(r"\d+", "{}", place, count=1), re.search(r"\d+", place)
            name = theirs.get(f"{kind}.weight")
            if number is None or name is None or name.split(".")[-2] not in chosen:
                continue
            if kind not in order:
                order[kind] = place_of(names, f"{place}.weight", (linear.out_features, linear.in_features)).rows
            peft = PREFIX + name.format(number[0]).removesuffix(".weight")
            self.layers.append(Layer(place, peft, linear.out_features, linear.in_features, order[kind]))
        last = sorted({layer.titan.rpartition(".")[2] for layer in self.layers})
        options = LoRAConverter.Config(rank=section.rank, alpha=section.alpha, target_modules=last)
        self.config = LoRAConverter(options).convert(config)

    @property
    def parameters(self) -> int:
        """Of all adapters."""
        return sum(self.section.rank * (layer.out + layer.into) for layer in self.layers)

    def fresh(self, seed: int) -> dict[str, torch.Tensor]:
        """Adapters that change nothing yet, by TorchTitan's names: A is random (Kaiming), B is zero."""
        generator = torch.Generator().manual_seed(seed)
        state = {}
        for layer in self.layers:
            down = torch.empty(self.section.rank, layer.into)
            nn.init.kaiming_uniform_(down, a=math.sqrt(5), generator=generator)
            state[f"{layer.titan}.lora_a.weight"] = down
            state[f"{layer.titan}.lora_b.weight"] = torch.zeros(layer.out, self.section.rank)
        return state

    def to_peft(self, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The adapters of a TorchTitan state dict under PEFT's names."""
        found = {}
        for layer in self.layers:
            up = state[f"{layer.titan}.lora_b.weight"]
            found[layer.peft + DOWN] = state[f"{layer.titan}.lora_a.weight"]
            found[layer.peft + UP] = up if layer.rows is None else up[layer.rows]
        return found

    def from_peft(self, adapters: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Back again.

        Raises:
            UsageError: they are not those of this model and these layers.
        """
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
            raise UsageError(f"{next(iter(left))}: lora.targets has no such layer", fix="use the recipe it was made by")
        return state

    def merge(self, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """A TorchTitan state dict without adapters, which are added to the weights: shard by shard, in main memory.

        A collective: adapters are gathered.
        """
        left = dict(state)
        for layer in self.layers:
            down, up = (whole(left.pop(f"{layer.titan}.lora_{name}.weight")).cpu() for name in "ab")
            weight = left[f"{layer.titan}.weight"]
            left[f"{layer.titan}.weight"] = _added(weight, up, down, self.scaling)
        return left

    @contextmanager
    def off(self, module: Any) -> Iterator[None]:
        """Inside, `module` computes as the base model, exactly."""
        adapted = [module.get_submodule(layer.titan) for layer in self.layers]
        for layer in adapted:
            layer._lora_scaling = 0.0
        try:
            yield
        finally:
            for layer in adapted:
                layer._lora_scaling = self.scaling


def _added(weight: torch.Tensor, up: torch.Tensor, down: torch.Tensor, scaling: float) -> torch.Tensor:
    """W + scaling B A, of which each rank computes its shard."""
    local = (weight.to_local() if isinstance(weight, DTensor) else weight).cpu()
    rows, columns = (slice(first, first + size) for first, size in zip(start_of(weight), local.shape, strict=True))
    local = torch.addmm(local, up[rows], down[:, columns], alpha=scaling)
    if not isinstance(weight, DTensor):
        return local
    mesh, placements = weight.device_mesh, weight.placements
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=weight.shape, stride=weight.stride())


def _take(left: dict[str, torch.Tensor], name: str, shape: tuple[int, int]) -> torch.Tensor:
    tensor = left.pop(name, None)
    if tensor is None or tuple(tensor.shape) != shape:
        found = "is missing" if tensor is None else f"has the shape {tuple(tensor.shape)} instead of {shape}"
        raise UsageError(f"{name} {found}", fix="use the recipe that the adapters were made by")
    return tensor.float()


def _separate(config: Any) -> Any:
    own = {item.name: getattr(config, item.name) for item in fields(config) if item.init and item.name != "wkv"}
    return SeparateQKVLinear.Config(**own, wk=replace(config.wkv), wv=replace(config.wkv))
