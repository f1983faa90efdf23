"""Microbatches: token sequences as tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from forge_env.trajectory import Segment
from trainers.buffer.sequences import shared_with_previous
from trainers.titan.layout import ContextLayout, Row, RowLayout, layout_of


@dataclass(slots=True)
class Microbatch:
    """Rows of tokens, and the loss inputs of their N target tokens as flat tensors.

    Each row holds one sequence, padded on the right; or, if packed, a single row holds all sequences one after another,
    the first tokens that neighbours share once (`trainers.titan.layout`).

    Attributes:
        tokens: [B, T] int64.
        positions: position of each token in its sequence, [B, T] int64.
        layout: boundaries of the sequences in a packed row; None for one sequence per row.
        predictors: index of the token before each target, which predicts it, in the flattened rows, [N].
        target_ids: token ids of the targets, [N] int64.
        behavior_logprobs: log-probabilities of the targets when they were sampled, [N] float32.
        advantages: [N] float32.
        padding: fraction of the tokens that is padding.
        row: the sequences of a packed row; None for one sequence per row.
        ref_logprobs: log-probabilities under the reference model, [N] float32; None without one.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    layout: RowLayout | ContextLayout | None
    predictors: torch.Tensor
    target_ids: torch.Tensor
    behavior_logprobs: torch.Tensor
    advantages: torch.Tensor
    padding: float
    row: Row | None = None
    ref_logprobs: torch.Tensor | None = None


def collate(
    segments: Sequence[Segment],
    device: torch.device,
    *,
    packed: bool = False,
    multiple: int = 1,
    share_prefixes: bool = False,
) -> Microbatch:
    """Build one microbatch of `segments`: one row each, padded to the longest, or all packed into one row.

    Args:
        multiple: the row length is a multiple of this (packed only); the filler is a sequence without targets.
        share_prefixes: the first tokens that a segment shares with the one before it are in the row once (packed only).
    """
    lengths = np.array([len(segment.token_ids) for segment in segments])
    position = np.concatenate([np.arange(length) for length in lengths])
    layout: RowLayout | None = None
    row: Row | None = None
    if packed:
        shared = shared_with_previous(segments) if share_prefixes else np.zeros(len(lengths), np.int64)
        used = int((lengths - shared).sum())
        filler = [-used % multiple] if used % multiple else []
        row = Row.of([*lengths, *filler], [*shared, *(0 for _ in filler)])
        count, width, slot = 1, len(row), np.concatenate(row.paths[: len(segments)])
        positions = np.zeros((1, width), np.int64)
        positions[0, used:] = np.arange(width - used)
        layout = layout_of(row, device)
    else:
        used, count, width = int(lengths.sum()), len(segments), int(lengths.max())
        slot = np.repeat(np.arange(count), lengths) * width + position
        positions = np.tile(np.arange(width), (count, 1))
    positions.flat[slot] = position
    token_ids = np.concatenate([segment.token_ids for segment in segments]).astype(np.int64)
    tokens = np.zeros(count * width, np.int64)
    tokens[slot] = token_ids
    learned = np.concatenate([segment.mask for segment in segments])
    learned[lengths.cumsum() - lengths] = False  # nothing predicts the first token of a sequence
    (targets,) = learned.nonzero()
    reference = [segment.ref_logprobs for segment in segments if segment.ref_logprobs is not None]

    def chosen(arrays: Sequence[np.ndarray]) -> torch.Tensor:
        return torch.from_numpy(np.concatenate(arrays)[targets].astype(np.float32, copy=False)).to(device)

    def on_device(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(device)

    return Microbatch(
        tokens=on_device(tokens.reshape(count, width)),
        positions=on_device(positions),
        layout=layout,
        predictors=on_device(slot[targets - 1]),
        target_ids=on_device(token_ids[targets]),
        behavior_logprobs=chosen([segment.logprobs for segment in segments]),
        advantages=chosen([segment.advantages for segment in segments]),
        padding=1 - used / (count * width),
        row=row,
        ref_logprobs=chosen(reference) if len(reference) == len(segments) else None,
    )
