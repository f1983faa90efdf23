"""LoRA adapters in weight transfers: the published adapters, and merging them into the base model's weights.

The trainer publishes only A and B of each layer, a few megabytes, under PEFT's names. A receiver reads each layer's
weight W from the base model's files and adds B A. It reads the files for every version, so that rounding errors do not
accumulate.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, islice
from pathlib import Path

import torch
from safetensors import safe_open

from trainers.model.adapter import DOWN, PREFIX, UP
from trainers.model.folder import weight_files

Named = Iterable[tuple[str, torch.Tensor]]


def scaled(adapters: Mapping[str, torch.Tensor], factor: float) -> dict[str, torch.Tensor]:
    """Multiply B of each adapter by `factor`, alpha / rank, which is the published form."""
    return {name: tensor * factor if name.endswith(UP) else tensor for name, tensor in adapters.items()}


def whole_weights(
    published: Named, base: Path, *, everything: bool = False, device: torch.device | None = None
) -> Named:
    """Tensors for a model to load: published weights unchanged, or published adapters merged into the base weights.

    With adapters, base weights without one are only included with `everything`.
    """
    rest = iter(published)
    first = list(islice(rest, 1))
    if not any(name.startswith(PREFIX) for name, _ in first):
        return chain(first, rest)  # lazily: a tensor may be assembled when it is read
    return merged(dict(chain(first, rest)), base, everything=everything, device=device)


def reloadable(weights: Named, skipped: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield weights that vLLM's `reload_weights` loads, and put those that it silently skips into `skipped`.

    Only gpt-oss has weights that it skips: joint tensors of experts, which are split into single experts here, and
    attention sinks, which the caller passes to `load_weights` afterwards.
    """
    for name, tensor in weights:
        if name.endswith(".sinks"):
            skipped[name] = tensor
            continue
        joint = re.fullmatch(r"(.*\.mlp\.experts)\.(gate_up|down)_proj(_bias)?", name)
        if joint is None:
            yield name, tensor
            continue
        experts, layer, bias = joint.groups()
        for number, expert in enumerate(tensor):
            yield f"{experts}.{number}.{'w13' if layer == 'gate_up' else 'w2'}{bias or '_weight'}", expert


def merged(
    adapters: Mapping[str, torch.Tensor], base: Path, *, everything: bool, device: torch.device | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the base model's tensors with `scaled` adapters added in float32, one at a time; see `whole_weights`."""
    for file in weight_files(base):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - not a mapping
                layer = PREFIX + name.removesuffix(".weight")
                if (down := adapters.get(layer + DOWN)) is not None:
                    tensors = opened.get_tensor(name), adapters[layer + UP], down
                    weight, up, down = (each.to(device).float() for each in tensors)  # converted after the copy
                    yield name, torch.addmm(weight, up, down)
                elif everything:
                    yield name, opened.get_tensor(name)
