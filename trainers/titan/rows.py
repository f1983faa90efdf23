"""Conversion of batches of padded rows into sequences.

A batch is `inputs=[{"tokens"}]` and `targets=[{"response", "padding_mask", ...}]`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from forge_env.errors import UsageError
from forge_env.trajectory import Segment

REQUIRED = ("response", "advantages", "padding_mask")
KNOWN = (*REQUIRED, "ref_logprobs", "logprobs")


def from_rows(
    inputs: Sequence[Mapping[str, torch.Tensor]], targets: Sequence[Mapping[str, torch.Tensor]]
) -> list[Segment]:
    """Convert each row into one sequence, without its padding.

    Args:
        inputs: `tokens` [B, P + R], prompts and responses side by side; optionally `attention_mask` [B, P + R], 0 for
            the padding of a prompt.
        targets: `response` [B, R], `padding_mask` [B, R] (1 for a token, 0 for padding), `advantages` [B] or [B, 1];
            optionally `ref_logprobs` [B, R] and `logprobs` [B, R], those that the responses were sampled with.

    Raises:
        UsageError: a key is missing or unknown, or a shape is wrong.
    """
    if len(inputs) != len(targets):
        raise UsageError(f"{len(inputs)} inputs but {len(targets)} targets", fix="give one target for each input")
    return [sequence for item, target in zip(inputs, targets, strict=True) for sequence in _rows(item, target)]


def _rows(inputs: Mapping[str, torch.Tensor], targets: Mapping[str, torch.Tensor]) -> list[Segment]:
    _check(inputs, targets)
    response = targets["response"]
    start = inputs["tokens"].shape[1] - response.shape[1]
    real = inputs.get("attention_mask", torch.ones_like(inputs["tokens"])).bool()
    real = torch.cat([real[:, :start], targets["padding_mask"].bool()], 1)
    ids = torch.cat([inputs["tokens"][:, :start], response], 1)

    def rows(values: torch.Tensor) -> list[Any]:
        """Split values of the responses, [B, R], into one array per row, without padding and with 0 for the prompt."""
        whole = torch.nn.functional.pad(values.float(), (start, 0))
        return [row[present].numpy() for row, present in zip(whole, real, strict=True)]

    learned = rows(torch.ones_like(response))
    advantages = rows(targets["advantages"].reshape(-1, 1).expand(response.shape))
    segments = [
        Segment(row[present].numpy(), mask, advantages=advantage)
        for row, present, mask, advantage in zip(ids, real, learned, advantages, strict=True)
    ]
    for name in ("logprobs", "ref_logprobs"):
        if name in targets:
            for segment, values in zip(segments, rows(targets[name]), strict=True):
                setattr(segment, name, values)
    return segments


def _check(inputs: Mapping[str, torch.Tensor], targets: Mapping[str, torch.Tensor]) -> None:
    missing = [f"inputs.{key}" for key in ("tokens",) if key not in inputs]
    missing += [f"targets.{key}" for key in REQUIRED if key not in targets]
    if missing:
        raise UsageError(f"the batch lacks {', '.join(missing)}", fix=f"targets are {', '.join(KNOWN)}")
    if unknown := [key for key in targets if key not in KNOWN]:
        raise UsageError(f"the batch has unknown targets {', '.join(unknown)}", fix=f"targets are {', '.join(KNOWN)}")
    tokens, response = inputs["tokens"], targets["response"]
    if tokens.shape[0] != response.shape[0] or tokens.shape[1] < response.shape[1]:
        raise UsageError(
            f"tokens {tuple(tokens.shape)} must be prompts and responses {tuple(response.shape)} side by side",
            fix="concatenate them along the last dimension",
        )
    for name in ("padding_mask", "ref_logprobs", "logprobs"):
        if name in targets and targets[name].shape != response.shape:
            shapes = f"{tuple(targets[name].shape)}, response {tuple(response.shape)}"
            raise UsageError(f"{name} has the shape {shapes}", fix="give one value for each token of the responses")
    if targets["advantages"].numel() != len(tokens):
        raise UsageError(
            f"{targets['advantages'].numel()} advantages for {len(tokens)} rows", fix="give one advantage a row"
        )
