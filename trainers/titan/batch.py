"""Microbatches: token sequences as tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from forge_env.trajectory import Segment
from trainers.titan.layout import ContextLayout, RowLayout, layout_of


@dataclass(slots=True)
class Microbatch:
    """Rows of tokens, and the loss inputs of their N target tokens as flat tensors.

    Each row holds one sequence, padded on the right; or, if packed, a single row holds all sequences one after another.

    Attributes:
        tokens: [B, T] int64.
        positions: position of each token in its sequence, [B, T] int64.
        layout: boundaries of the sequences in a packed row; None for one sequence per row.
        predictors: index of the token before each target, which predicts it, in the flattened rows, [N].
        target_ids: token ids of the targets, [N] int64.
        behavior_logprobs: log-probabilities of the targets when they were sampled, [N] float32.
        advantages: [N] float32.
        padding: fraction of the tokens that is padding.
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
    ref_logprobs: torch.Tensor | None = None


def collate(
    segments: Sequence[Segment], device: torch.device, *, packed: bool = False, multiple: int = 1
) -> Microbatch:
    """Build one microbatch of `segments`: one row each, padded to the longest, or all packed into one row.

    Args:
        multiple: the row length is a multiple of this (packed only); the filler is a sequence without targets.
    """
    lengths = np.array([len(segment.token_ids) for segment in segments])
    used = int(lengths.sum())
    begins = lengths.cumsum() - lengths
    sequence = np.repeat(np.arange(len(segments)), lengths)
    position = np.arange(used) - begins[sequence]
    layout: RowLayout | None = None
    if packed:
        filler = -used % multiple
        rows, width, slot = 1, used + filler, np.arange(used)
        positions = np.concatenate([position, np.arange(filler)])[None]
        layout = layout_of([*lengths.tolist(), *([filler] if filler else [])], device)
    else:
        rows, width = len(segments), int(lengths.max())
        slot = sequence * width + position
        positions = np.tile(np.arange(width), (rows, 1))
    token_ids = np.concatenate([segment.token_ids for segment in segments]).astype(np.int64)
    tokens = np.zeros(rows * width, np.int64)
    tokens[slot] = token_ids
    learned = np.concatenate([segment.mask for segment in segments])
    learned[begins] = False  # nothing predicts the first token of a sequence
    (targets,) = learned.nonzero()
    reference = [segment.ref_logprobs for segment in segments if segment.ref_logprobs is not None]

    def chosen(arrays: Sequence[np.ndarray]) -> torch.Tensor:
        return torch.from_numpy(np.concatenate(arrays)[targets].astype(np.float32, copy=False)).to(device)

    def on_device(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(device)

    return Microbatch(
        tokens=on_device(tokens.reshape(rows, width)),
        positions=on_device(positions),
        layout=layout,
        predictors=on_device(slot[targets] - 1),
        target_ids=on_device(token_ids[targets]),
        behavior_logprobs=chosen([segment.logprobs for segment in segments]),
        advantages=chosen([segment.advantages for segment in segments]),
        padding=1 - used / (rows * width),
        ref_logprobs=chosen(reference) if len(reference) == len(segments) else None,
    )
