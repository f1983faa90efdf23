"""Weights with adapters: what the trainer publishes of a LoRA run, and what a generator makes of it.

Megabytes travel: A and B of each layer, under PEFT's names. Whoever computes with them has the base model's files,
takes a layer's weight W from there and adds B A: each time from the files, so that versions add up no rounding.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from safetensors import safe_open

from trainers.model.adapter import DOWN, PREFIX, UP
from trainers.model.folder import weight_files

Named = Iterable[tuple[str, torch.Tensor]]


def scaled(adapters: Mapping[str, torch.Tensor], factor: float) -> dict[str, torch.Tensor]:
    """The adapters with alpha / rank in B, as they are published."""
    return {name: tensor * factor if name.endswith(UP) else tensor for name, tensor in adapters.items()}


def whole_weights(
    published: Named, base: Path, *, everything: bool = False, device: torch.device | None = None
) -> Named:
    """What a model is to load of a version that was published: weights as they are, adapters added to the base's.

    Args:
        published: whole weights, or `scaled` adapters.
        base: checkpoint folder of the base model.
        everything: also the weights that have no adapter.
        device: where to compute; the CPU by default.
    """
    found = dict(published)
    return merged(found, base, everything=everything, device=device) if _are_adapters(found) else found.items()


def _are_adapters(weights: Mapping[str, torch.Tensor]) -> bool:
    return any(name.startswith(PREFIX) for name in weights)


def merged(
    adapters: Mapping[str, torch.Tensor], base: Path, *, everything: bool, device: torch.device | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """The base model's tensors with `scaled` adapters added, in float32, one at a time; see `whole_weights`."""
    for file in weight_files(base):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - it is no mapping
                layer = PREFIX + name.removesuffix(".weight")
                if (down := adapters.get(layer + DOWN)) is not None:
                    weight = opened.get_tensor(name).to(device, torch.float32)
                    up, down = (factor.to(device, torch.float32) for factor in (adapters[layer + UP], down))
                    yield name, torch.addmm(weight, up, down)
                elif everything:
                    yield name, opened.get_tensor(name)
