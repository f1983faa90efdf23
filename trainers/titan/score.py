"""Log-probabilities of given tokens under a model that is not being trained."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from trainers.losses.primitives import token_logprobs_and_entropy
from trainers.titan.batch import TokenSequence, collate
from trainers.titan.model import TitanModel


def target_logprobs(
    model: TitanModel,
    sequences: Sequence[TokenSequence],
    device: torch.device,
    *,
    microbatch_tokens: int,
    temperature: float = 1.0,
    threads: int = 1,
) -> list[list[float]]:
    """Log-probabilities of each sequence's target tokens, in order.

    Args:
        microbatch_tokens: padded tokens in one forward pass.
        temperature: the one that the tokens were sampled at.
        threads: forward passes side by side.
    """

    @torch.no_grad()
    def score(rows: list[int]) -> list[list[float]]:
        batch = collate([sequences[row] for row in rows], device)
        logits = model.logits(batch) / temperature
        logprobs, _ = token_logprobs_and_entropy(logits, batch.target_ids)
        sizes = [len(sequences[row].target_positions) for row in rows]
        return [part.tolist() for part in torch.split(logprobs, sizes)]

    chunks = list(_chunks([len(sequence.token_ids) for sequence in sequences], microbatch_tokens))
    result: list[list[float]] = [[] for _ in sequences]
    with ThreadPoolExecutor(threads) as pool:
        for rows, values in zip(chunks, pool.map(score, chunks), strict=True):
            for row, value in zip(rows, values, strict=True):
                result[row] = value
    return result


@torch.no_grad()
def next_token_logprobs(model: TitanModel, tokens: torch.Tensor, *, temperature: float = 1.0) -> torch.Tensor:
    """Log-probability of every token but the first, [B, T] int64 -> [B, T - 1] float32; padding is on the right."""
    logits = model.all_logits(tokens)[:, :-1] / temperature
    logprobs, _ = token_logprobs_and_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    return logprobs.view(tokens.shape[0], tokens.shape[1] - 1)


def _chunks(lengths: Sequence[int], max_tokens: int) -> Iterator[list[int]]:
    """Rows that go together: at most `max_tokens` with their padding, similar lengths."""
    ordered = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
    start = 0
    while start < len(ordered):
        rows = max(1, max_tokens // lengths[ordered[start]])
        yield ordered[start : start + rows]
        start += rows
