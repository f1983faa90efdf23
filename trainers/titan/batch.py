"""What is trained on: token sequences, and how they are packed into padded microbatches."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from forge_env.trajectory import Segment


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

    @classmethod
    def from_segment(cls, segment: Segment, advantage: float) -> TokenSequence:
        """A segment of a trajectory with its episode's advantage."""
        return cls(segment.token_ids, segment.mask, segment.logprobs, advantage)

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
    """Right-padded rows and, flat over their N target tokens, what the loss needs.

    Attributes:
        tokens: [B, T] int64.
        target_mask: positions whose *next* token is a target, [B, T - 1] bool.
        target_ids: the target tokens, [N] int64.
        behavior_logprobs: their log-probabilities when sampled, [N] float32.
        advantages: [N] float32.
        sequence_ids: which row each target belongs to, [N] int64.
        padding: share of padded tokens.
        ref_logprobs: log-probabilities under the reference model, [N] float32; None without one.
    """

    tokens: torch.Tensor
    target_mask: torch.Tensor
    target_ids: torch.Tensor
    behavior_logprobs: torch.Tensor
    advantages: torch.Tensor
    sequence_ids: torch.Tensor
    padding: float
    ref_logprobs: torch.Tensor | None = None


def collate(sequences: Sequence[TokenSequence], device: torch.device) -> Microbatch:
    """Pad `sequences` on the right into one microbatch."""
    rows, width = len(sequences), max(len(sequence.token_ids) for sequence in sequences)
    tokens = torch.zeros(rows, width, dtype=torch.long)
    mask = torch.zeros(rows, width, dtype=torch.bool)
    logprobs = torch.zeros(rows, width)
    advantages = torch.zeros(rows, width)
    reference = torch.zeros(rows, width) if sequences[0].ref_logprobs is not None else None
    for row, sequence in enumerate(sequences):
        length = len(sequence.token_ids)
        tokens[row, :length] = torch.tensor(sequence.token_ids)
        mask[row, :length] = torch.tensor(sequence.mask)
        if sequence.logprobs:
            logprobs[row, :length] = torch.tensor(sequence.logprobs)
        advantages[row, :length] = sequence.advantage
        if reference is not None:
            reference[row, :length] = torch.tensor(sequence.ref_logprobs)
    mask[:, 0] = False  # the first token has no prediction
    target = mask[:, 1:]
    used = sum(len(sequence.token_ids) for sequence in sequences)
    return Microbatch(
        tokens=tokens.to(device),
        target_mask=target.to(device),
        target_ids=tokens[:, 1:][target].to(device),
        behavior_logprobs=logprobs[:, 1:][target].to(device),
        advantages=advantages[:, 1:][target].to(device),
        sequence_ids=target.nonzero()[:, 0].to(device),
        padding=1 - used / (rows * width),
        ref_logprobs=None if reference is None else reference[:, 1:][target].to(device),
    )


def microbatches(sequences: Sequence[TokenSequence], max_tokens: int, device: torch.device) -> Iterator[Microbatch]:
    """Split into microbatches of at most `max_tokens` padded tokens, similar lengths together."""
    ordered = sorted(sequences, key=lambda sequence: len(sequence.token_ids), reverse=True)
    start = 0
    while start < len(ordered):
        rows = max(1, max_tokens // len(ordered[start].token_ids))
        yield collate(ordered[start : start + rows], device)
        start += rows


def split(sequences: Sequence[TokenSequence], parts: int, rng: random.Random) -> list[list[TokenSequence]]:
    """A random partition into `parts` minibatches of nearly equal size, none empty."""
    shuffled = list(sequences)
    rng.shuffle(shuffled)
    parts = min(parts, len(shuffled))
    return [shuffled[part::parts] for part in range(parts)]
