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
    """

    token_ids: list[int]
    mask: list[bool]
    logprobs: list[float] = field(default_factory=list)
    advantage: float = 0.0

    @classmethod
    def from_segment(cls, segment: Segment, advantage: float) -> TokenSequence:
        """A segment of a trajectory with its episode's advantage."""
        return cls(segment.token_ids, segment.mask, segment.logprobs, advantage)

    @property
    def num_targets(self) -> int:
        """Tokens to be learned."""
        return sum(self.mask)


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
    """

    tokens: torch.Tensor
    target_mask: torch.Tensor
    target_ids: torch.Tensor
    behavior_logprobs: torch.Tensor
    advantages: torch.Tensor
    sequence_ids: torch.Tensor
    padding: float


def collate(sequences: Sequence[TokenSequence], device: torch.device) -> Microbatch:
    """Pad `sequences` on the right into one microbatch."""
    rows, width = len(sequences), max(len(sequence.token_ids) for sequence in sequences)
    tokens = torch.zeros(rows, width, dtype=torch.long)
    mask = torch.zeros(rows, width, dtype=torch.bool)
    logprobs = torch.zeros(rows, width)
    advantages = torch.zeros(rows, width)
    for row, sequence in enumerate(sequences):
        length = len(sequence.token_ids)
        tokens[row, :length] = torch.tensor(sequence.token_ids)
        mask[row, :length] = torch.tensor(sequence.mask)
        if sequence.logprobs:
            logprobs[row, :length] = torch.tensor(sequence.logprobs)
        advantages[row, :length] = sequence.advantage
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
