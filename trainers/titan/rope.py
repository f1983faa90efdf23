"""Rotary positions with scalings, applied to all, a part or none of each head."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torchtitan.models.common import CosSinRoPE, RoPE

from trainers.model.folder import heads, rope_parameters, rotates


class ScaledRoPE(CosSinRoPE):  # type: ignore[misc]
    """Rotary positions in the first `dim` elements of each head; `dim` may be 0."""

    @dataclass(kw_only=True, slots=True)
    class Config(CosSinRoPE.Config):  # type: ignore[misc]
        """TorchTitan's fields, divisors of frequencies (one, or one for each), and a factor of cosines and sines."""

        divisors: tuple[float, ...] = (1.0,)
        magnitude: float = 1.0

    def _precompute_cache(self) -> torch.Tensor:
        config = self.config
        exponents = torch.arange(0, config.dim, 2).float() / max(config.dim, 1)
        frequencies = 1.0 / (torch.tensor(config.divisors) * config.theta**exponents)
        angles = torch.outer(torch.arange(config.max_seq_len).float(), frequencies).repeat(1, 2)
        cache: torch.Tensor = torch.cat([angles.cos(), angles.sin()], -1) * config.magnitude
        return cache

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotate queries and keys, [B, T, heads, head dim] each."""
        size = self.config.dim
        if size == 0:
            return query, key
        rotated = super().forward(query[..., :size], key[..., :size], positions)
        first, second = (
            torch.cat([part, whole[..., size:]], -1) for part, whole in zip(rotated, (query, key), strict=True)
        )
        return first, second


def rope_config(kind: type[RoPE], hf: Mapping[str, Any], layer: int, max_length: int) -> RoPE.Config:
    """Build the config of a layer's rotary positions: of `kind` if that can compute them, else of `ScaledRoPE`."""
    rope, (size, _) = rope_parameters(hf, layer), heads(hf, layer)
    rotated = int(size * rope["partial_rotary_factor"]) if rotates(hf, layer) else 0
    options: dict[str, Any] = {"dim": rotated, "max_seq_len": max_length, "theta": rope["rope_theta"]}
    scaling = rope["rope_type"]
    if scaling == "proportional":  # pairs of elements that aren't rotated have the frequency 0
        options |= {"dim": size, "divisors": (1.0,) * (rotated // 2) + (math.inf,) * (size // 2 - rotated // 2)}
    if scaling == "llama3":
        names = ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        options |= {"scaling": "llama", "scaling_factor": rope["factor"], **{name: rope[name] for name in names}}
    elif scaling == "yarn":
        options |= {
            "scaling": "yarn",
            "rope_factor": rope["factor"],
            "beta_fast": rope["beta_fast"],
            "beta_slow": rope["beta_slow"],
            "truncate": rope["truncate"],
            "original_seq_len": rope["original_max_position_embeddings"],
        }
    elif scaling == "linear":
        options["divisors"] = (rope["factor"],)
    elif scaling == "longrope":
        # Ding et al. 2024, arXiv 2402.13753; the same factors for sequences of any length, as in vLLM
        original = rope["original_max_position_embeddings"]
        options["divisors"] = tuple(rope["long_factor" if max_length > original else "short_factor"])
        growth = max(hf.get("max_position_embeddings", original) / original, 1.0)
        options["magnitude"] = math.sqrt(1 + math.log(growth) / math.log(original))
    plain = options["dim"] == size and "divisors" not in options
    return (kind if plain else ScaledRoPE).Config(**options)
