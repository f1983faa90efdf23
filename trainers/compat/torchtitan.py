"""TorchTitan: its device, optimizers beyond its own, and the factor of its LoRA layers.

This module imports TorchTitan only in functions, because `import_uncompiled` has to come first.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch.optim import Optimizer

from trainers.compat import Package

PACKAGE = Package("torchtitan", ("0.3.0",))
UNCOMPILED = "TORCHDYNAMO_DISABLE"
"""Environment variable of torch that makes `torch.compile` return its argument unchanged."""
ON_CPU = {
    "torchtitan.tools.utils:device_type": "cpu",
    "torchtitan.tools.utils:device_module": torch.cpu,
    "torchtitan.distributed.utils:device_type": "cpu",
    "torchtitan.distributed.utils:device_module": torch.cpu,
    "torchtitan.distributed.parallel_dims:device_type": "cpu",
}
"""TorchTitan's device, which it determines at import, in each module that uses it here."""


def import_uncompiled() -> None:
    """Import TorchTitan's attention without the compilation that it does on import.

    It would compile an attention that is not used here, and importing torch's compiler for that takes 1.5 s. Later code
    can still use the compiler.
    """
    before = os.environ.get(UNCOMPILED)
    os.environ[UNCOMPILED] = "1"
    try:
        import torchtitan.models.common.attention  # noqa: F401
    finally:
        os.environ.pop(UNCOMPILED)
        if before is not None:
            os.environ[UNCOMPILED] = before


def use_cpu() -> None:
    """Make the CPU TorchTitan's device in this process; by default it assumes an accelerator."""
    for path, value in ON_CPU.items():
        PACKAGE.replace(path, value)


def optimizers_with(prefix: str, factory: Callable[..., Optimizer]) -> Any:
    """Make a subclass of TorchTitan's `OptimizersContainer` that has `factory` make optimizers whose names begin so.

    The factory gets parameter groups.
    """
    container = "torchtitan.components.optimizer:OptimizersContainer"
    resolve = PACKAGE.function(f"{container}._resolve_optimizer_factory", "name")

    class Container(PACKAGE.get(container)):  # type: ignore[misc]
        @staticmethod
        def _resolve_optimizer_factory(name: str) -> Callable[..., Optimizer]:
            resolved: Callable[..., Optimizer] = factory if name.startswith(prefix) else resolve(name)
            return resolved

    return Container


def same_config(base: Any) -> Any:
    """Config of a subclass of a TorchTitan component, which must not share that of `base`, with the same fields."""
    return dataclass(kw_only=True, slots=True)(type("Config", (base.Config,), {}))


def arguments(config: Any) -> dict[str, Any]:
    """Constructor arguments of a TorchTitan config, to build an equal or a subclass config; values aren't copied."""
    return {item.name: getattr(config, item.name) for item in fields(config) if item.init}


def set_lora_scaling(layer: Any, factor: float) -> None:
    """Set the factor of B A in a linear layer with an adapter."""
    scales = isinstance(getattr(layer, "_lora_scaling", None), float)
    PACKAGE.require(scales, "a linear layer with an adapter has the factor `_lora_scaling`")
    layer._lora_scaling = factor
