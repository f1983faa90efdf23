"""TorchTitan's decoders, whose forward pass returns log-probabilities and entropies of given targets."""

from __future__ import annotations

from typing import Any

import torch
from torchtitan.models.llama3.model import Llama3Model
from torchtitan.models.qwen3.model import Qwen3Model

from trainers.compat.torchtitan import same_config
from trainers.titan.attention import spread
from trainers.titan.layout import ContextLayout, RowLayout
from trainers.titan.parallel import local


class Scoring:
    """Decoder mix-in whose forward pass returns log-probabilities and entropies of given targets.

    The head is part of the model's single forward call, so that FSDP sees whole passes.
    """

    tok_embeddings: Any
    layers: Any
    norm: Any
    lm_head: Any

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        attention_masks: RowLayout | ContextLayout,
        predictors: torch.Tensor,
        targets: torch.Tensor,
        temperature: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probability and entropy of `targets` at `predictors`, [N] indices into the row, [1, T]."""
        hidden = self.norm(self.apply_blocks(tokens, attention_masks, positions))
        hidden = local(hidden)  # tensor parallel: replicated on all its ranks
        chosen = spread(hidden.flatten(0, 1), predictors)  # one token may predict the first of many replies
        scored: tuple[torch.Tensor, torch.Tensor] = self.lm_head(chosen, targets, temperature)
        return scored

    def apply_blocks(
        self, tokens: torch.Tensor, attention_masks: RowLayout | ContextLayout, positions: torch.Tensor
    ) -> torch.Tensor:
        """Embed tokens and apply all blocks, [1, T] -> [1, T, D]."""
        hidden: torch.Tensor = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            hidden = layer(hidden, attention_masks, positions)
        return hidden


class ScoringLlama(Scoring, Llama3Model):  # type: ignore[misc]
    """TorchTitan's Llama 3 with `Scoring`."""

    Config = same_config(Llama3Model)


class ScoringQwen(Scoring, Qwen3Model):  # type: ignore[misc]
    """TorchTitan's Qwen 3 with `Scoring`; without query and key norms it is SmolLM 3, with biases too Qwen 2."""

    Config = same_config(Qwen3Model)
