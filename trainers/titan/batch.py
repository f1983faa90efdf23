"""What is trained on: token sequences, and microbatches of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch

from trainers.titan.layout import ContextLayout, PackedLayout


@dataclass(slots=True)
class TokenSequence:
    """One token sequence with what its loss needs, all lists of one length T.

    Attributes:
        token_ids: tokens, [T].
        mask: True where the token is to be learned, [T].
        logprobs: log-probability when it was sampled, 0 elsewhere, [T].
        advantage: of the episode it belongs to.
        ref_logprobs: log-probability under the reference model, 0 elsewhere, [T]; None without one.
    """

    token_ids: list[int]
    mask: list[bool]
    logprobs: list[float] = field(default_factory=list)
    advantage: float = 0.0
    ref_logprobs: list[float] | None = None

    @property
    def num_targets(self) -> int:
        """Tokens to be learned."""
        return sum(self.mask)

    @property
    def target_positions(self) -> list[int]:
        """Where they are; the first token has no prediction and is none of them."""
        return [position for position, learned in enumerate(self.mask) if learned and position]

    def set_reference(self, logprobs: Sequence[float]) -> None:
        """Take the reference model's log-probabilities of the target tokens, in order."""
        self.ref_logprobs = [0.0] * len(self.token_ids)
        for position, value in zip(self.target_positions, logprobs, strict=True):
            self.ref_logprobs[position] = value


@dataclass(slots=True)
class Microbatch:
    """Rows of tokens and, flat over their N target tokens, what the loss needs.

    Either one sequence a row, padded on the right, or packed: one row with all sequences, one after another.

    Attributes:
        tokens: [B, T] int64.
        positions: of each token in its sequence, [B, T] int64.
        layout: where the sequences of a packed row begin and end; None for one sequence a row.
        predictors: for each target the index of the token before it, which predicts it, in the flattened rows, [N].
        target_ids: the target tokens, [N] int64.
        behavior_logprobs: their log-probabilities when sampled, [N] float32.
        advantages: [N] float32.
        sequence_ids: which sequence each target belongs to, [N] int64.
        padding: share of the tokens that is padding.
        ref_logprobs: log-probabilities under the reference model, [N] float32; None without one.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    layout: PackedLayout | ContextLayout | None
    predictors: torch.Tensor
    target_ids: torch.Tensor
    behavior_logprobs: torch.Tensor
    advantages: torch.Tensor
    sequence_ids: torch.Tensor
    padding: float
    ref_logprobs: torch.Tensor | None = None


def collate(
    sequences: Sequence[TokenSequence], device: torch.device, *, packed: bool = False, multiple: int = 1
) -> Microbatch:
    """One microbatch of `sequences`: a row each, padded to the longest, or packed into one row.

    Args:
        multiple: the row length is a multiple of this (packed only); the filler is a sequence without targets.
    """
    lengths = [len(sequence.token_ids) for sequence in sequences]
    used = sum(lengths)
    if packed:
        filler = -used % multiple
        sizes = [*lengths, *([filler] if filler else [])]
        starts = [0, *accumulate(lengths[:-1])]
        tokens = torch.zeros(1, used + filler, dtype=torch.long)
        positions = torch.cat([torch.arange(size) for size in sizes])[None]
        layout: PackedLayout | None = PackedLayout.of(sizes, device)
    else:
        width = max(lengths)
        starts = [row * width for row in range(len(lengths))]
        tokens = torch.zeros(len(lengths), width, dtype=torch.long)
        positions = torch.arange(width).expand(tokens.shape)
        layout = None
    flat = tokens.view(-1)
    mask = torch.zeros(flat.shape, dtype=torch.bool)
    values = torch.zeros(
        4, len(flat)
    )  # log-probability, advantage, number of the sequence, reference's log-probability
    for number, (sequence, start) in enumerate(zip(sequences, starts, strict=True)):
        end = start + lengths[number]
        flat[start:end] = torch.tensor(sequence.token_ids)
        mask[start:end] = torch.tensor(sequence.mask)
        mask[start] = False  # the first token has no prediction
        if sequence.logprobs:
            values[0, start:end] = torch.tensor(sequence.logprobs)
        values[1, start:end] = sequence.advantage
        values[2, start:end] = number
        if sequence.ref_logprobs is not None:
            values[3, start:end] = torch.tensor(sequence.ref_logprobs)
    targets = mask.nonzero()[:, 0]
    return Microbatch(
        tokens=tokens.to(device),
        positions=positions.to(device),
        layout=layout,
        predictors=(targets - 1).to(device),
        target_ids=flat[targets].to(device),
        behavior_logprobs=values[0, targets].to(device),
        advantages=values[1, targets].to(device),
        sequence_ids=values[2, targets].long().to(device),
        padding=1 - used / len(flat),
        ref_logprobs=None if sequences[0].ref_logprobs is None else values[3, targets].to(device),
    )
