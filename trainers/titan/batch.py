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
    """A row of tokens, and the loss inputs of their N target tokens as flat tensors.

    The row holds all sequences one after another; the first tokens that neighbours share are there once.

    Attributes:
        tokens: [1, T] int64.
        positions: position of each token in its sequence, [1, T] int64.
        layout: boundaries of the sequences.
        predictors: index of the token before each target, which predicts it, in the row, [N].
        target_ids: token ids of the targets, [N] int64.
        behavior_logprobs: log-probabilities of the targets when they were sampled, [N] float32.
        advantages: [N] float32.
        padding: fraction of the tokens that is padding.
        row: the sequences of the row.
        ref_logprobs: log-probabilities under the reference model, [N] float32; None without one.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    layout: RowLayout | ContextLayout
    predictors: torch.Tensor
    target_ids: torch.Tensor
    behavior_logprobs: torch.Tensor
    advantages: torch.Tensor
    padding: float
    row: Row
    ref_logprobs: torch.Tensor | None = None


def collate(
    segments: Sequence[Segment],
    device: torch.device,
    *,
    multiple: int = 1,
    share_prefixes: bool = False,
    padded: bool = False,
) -> Microbatch:
    """Pack `segments` into one row.

    Args:
        multiple: the row length is a multiple of this; the filler is a sequence without targets.
        share_prefixes: the first tokens that a segment shares with the one before it are in the row once.
        padded: attention uses padded grids on a GPU too.
    """
    lengths = np.array([len(segment.token_ids) for segment in segments])
    position = np.concatenate([np.arange(length) for length in lengths])
    shared = shared_with_previous(segments) if share_prefixes else np.zeros(len(lengths), np.int64)
    used = int((lengths - shared).sum())
    filler = [-used % multiple] if used % multiple else []
    row = Row.of([*lengths, *filler], [*shared, *(0 for _ in filler)])
    width, slot = len(row), np.concatenate(row.paths[: len(segments)])
    positions = np.zeros(width, np.int64)
    positions[used:] = np.arange(width - used)
    positions[slot] = position
    token_ids = np.concatenate([segment.token_ids for segment in segments]).astype(np.int64)
    tokens = np.zeros(width, np.int64)
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
        tokens=on_device(tokens[None]),
        positions=on_device(positions[None]),
        layout=layout_of(row, device, padded=padded),
        predictors=on_device(slot[targets - 1]),
        target_ids=on_device(token_ids[targets]),
        behavior_logprobs=chosen([segment.logprobs for segment in segments]),
        advantages=chosen([segment.advantages for segment in segments]),
        padding=1 - used / width,
        row=row,
        ref_logprobs=chosen(reference) if len(reference) == len(segments) else None,
    )
