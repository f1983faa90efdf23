"""TorchTitan's optimizer and schedule containers, built from a recipe's optimizer section."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from math import sqrt
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer
from torchtitan.components.optimizer.optimizer import ParamGroupConfig

from forge_env.config.recipe import OptimizerSection
from trainers.compat.torchtitan import optimizers_with
from trainers.titan.device import Device

HIDDEN_MATRICES = r"\..*\.(wq|wk|wv|wqkv|wo|w1|w2|w3|w13)\.weight$"
LAYERS = (r"layers\.\d*[02468]", r"layers\.\d*[13579]")
"""Patterns of even and odd layers."""
WITHOUT_DECAY = r"(norm|embeddings)\.weight$|bias$|(A_log|sinks|scale)$"
"""Patterns of norms, embeddings (also as a tied head), biases, sinks, scales, and decays of gated delta layers."""


class Float32Muon(torch.optim.Muon):
    """torch's Muon (Jordan et al. 2024), orthogonalizing in float32 instead of bfloat16.

    A CPU without bfloat16 instructions takes ten times as long to multiply such matrices in bfloat16. Supports only
    Nesterov momentum and the learning rate of `match_rms_adamw`, which `build_optimizer` uses.
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all parameters."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if (gradient := parameter.grad) is None:
                    continue
                state = self.state[parameter]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(gradient)
                average: Tensor = state["momentum_buffer"]
                average.lerp_(gradient, 1 - group["momentum"])
                update = orthogonalize(gradient.lerp(average, group["momentum"]))
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(update, alpha=-0.2 * sqrt(max(parameter.shape)) * group["lr"])


def orthogonalize(matrix: Tensor) -> Tensor:
    """Set all singular values of a matrix [M, N] to about 1, keeping its singular vectors (Newton-Schulz iteration)."""
    tall = matrix.shape[0] > matrix.shape[1]
    wide = matrix.T if tall else matrix
    wide = wide / wide.norm().clamp(min=1e-7)
    for _ in range(5):
        gram = wide @ wide.T
        wide = torch.addmm(wide, torch.addmm(gram, gram, gram, beta=-4.775, alpha=2.0315), wide, beta=3.4445)
    return wide.T if tall else wide


def _muon(groups: list[dict[str, Any]]) -> Optimizer:
    known = {"lr", "weight_decay", "adjust_lr_fn", "params", "param_names"}
    cleaned = [{key: value for key, value in group.items() if key in known} for group in groups]
    for group in cleaned:
        group["params"] = list(zip(group.pop("param_names"), group["params"], strict=True))
    (_, first), *_ = parameters = cleaned[0].pop("params")
    kind = Float32Muon if first.device.type == "cpu" else torch.optim.Muon
    return kind(parameters, **cleaned[0])


class Optimizers(optimizers_with("Muon", _muon)):  # type: ignore[misc]
    """TorchTitan's container, which also supports torch's Muon (Jordan et al. 2024) for hidden matrices.

    Its optimizers run in up to `threads` threads, each on its own parameters.
    """

    threads = 1

    def step(self, closure: None = None) -> None:
        """Update all parameters."""
        if self.threads == 1:
            super().step(closure)
            return
        with ThreadPoolExecutor(self.threads) as pool:
            for _ in pool.map(lambda optimizer: optimizer.step(), self.optimizers):
                pass


def build_optimizer(module: Any, section: OptimizerSection, device: Device, *, threads: int = 1) -> OptimizersContainer:
    """Build AdamW over all parameters, or Muon for hidden matrices and AdamW for the rest.

    `weight_decay` applies to matrices. Norms, biases and embeddings have none, because their scale carries information.
    """
    adamw = {
        "lr": section.lr,
        "betas": (section.beta1, section.beta2),
        "eps": 1e-8,
        "weight_decay": section.weight_decay,
    }
    groups = []
    if section.muon_lr > 0:
        muon = {"lr": section.muon_lr, "weight_decay": section.weight_decay, "adjust_lr_fn": "match_rms_adamw"}
        # Two halves that can run in parallel: for a small model, Muon takes half as long as computing the gradients.
        for number, layers in enumerate(LAYERS if threads > 1 and len(module.layers) > 1 else [r"layers"]):
            groups.append(_group(layers + HIDDEN_MATRICES, f"Muon{number}", muon))
    if section.weight_decay > 0:
        groups.append(_group(WITHOUT_DECAY, "AdamW", adamw | {"weight_decay": 0.0}))
    groups.append(_group(r".*", "AdamW", adamw))
    implementation: Any = "foreach" if device.is_cpu else "fused"
    config = Optimizers.Config(param_groups=_used(groups, module), implementation=implementation)
    optimizers = Optimizers(config, model_parts=[module])
    optimizers.threads = threads
    return optimizers


def _group(pattern: str, name: str, options: dict[str, Any]) -> ParamGroupConfig:
    return ParamGroupConfig(pattern=pattern, optimizer_name=name, optimizer_kwargs=options)


def _used(groups: list[ParamGroupConfig], module: Any) -> list[ParamGroupConfig]:
    """Groups that are the first to match some trained parameter; TorchTitan rejects all others."""
    names = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
    first = {next(at for at, group in enumerate(groups) if re.search(group.pattern, name)) for name in names}
    return [groups[at] for at in sorted(first)]


def build_schedule(optimizer: OptimizersContainer, section: OptimizerSection, steps: int) -> LRSchedulersContainer:
    """Build a schedule: linear warm-up, constant, the section's decay over the last `1 - decay_start` of `steps`."""
    warmup = min(section.warmup_steps, steps)
    decay = min(1 - section.decay_start, (steps - warmup) / max(steps, 1))
    config = LRSchedulersContainer.Config(
        warmup_steps=warmup,
        decay_ratio=0.0 if section.schedule == "constant" else decay,
        decay_type="linear" if section.schedule == "constant" else section.schedule,
        min_lr_factor=section.min_lr_ratio,
    )
    return config.build(optimizers=optimizer, training_steps=steps)
