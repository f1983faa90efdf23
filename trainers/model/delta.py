"""The gated delta rule (Yang et al. 2024, arXiv 2412.06464), in plain PyTorch, for several sequences at once.

Each head has a state S, [K, V], that maps keys to values. A token with decay g, write strength b, key k, value v and
query q changes it and reads it:

    S <- exp(g) S;    S <- S + b k (v - S^T k)^T;    out = S^T q / sqrt(K)

Keys and queries have length 1. The arithmetic is in float32, and on a CPU in float64: the norm that follows removes
the size of what is read, which may be a small difference of large terms.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

CHUNK = 64
"""Tokens whose part of the rule is solved together, as a triangular system."""
_EPS = 1e-6


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.double() if tensor.device.type == "cpu" else tensor.float()


def _unit(vectors: torch.Tensor) -> torch.Tensor:
    wide = _wide(vectors)
    return wide * torch.rsqrt((wide * wide).sum(-1, keepdim=True) + _EPS)


def causal_convolution(rows: torch.Tensor, weight: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Convolve each channel over the W last tokens of its sequence, then apply SiLU; [T, F] -> [T, F].

    The last column of `weight`, [F, W], belongs to the token itself; `positions`, [T], are those in each sequence.
    """
    width, wide, weight = weight.shape[1], _wide(rows), _wide(weight)
    out = wide * weight[:, -1]
    for back in range(1, min(width, len(rows))):
        earlier = nn.functional.pad(wide[:-back], (0, 0, back, 0)) * weight[:, width - 1 - back]
        out = out + torch.where((positions >= back)[:, None], earlier, 0.0)
    return nn.functional.silu(out)


def gated_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    strength: torch.Tensor,
    lengths: Sequence[int],
    states: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Apply the rule to packed sequences, chunk by chunk (section 3.3 of the paper).

    `query` and `key` are [T, H, K], of any length, `value` [T, H, V], `decay` the logarithm of the state's factor, at
    most 0, and `strength` between 0 and 1, [T, H] each. `states`, [S, H, K, V], are zero by default.

    Returns:
        What each token reads, [T, H, V], and the states after the last tokens, [S, H, K, V].
    """
    tokens = _unit(query), _unit(key), _wide(value), _wide(decay), _wide(strength)
    with torch.autocast(query.device.type, enabled=False):
        return _chunked(*tokens, lengths, states)


def _chunked(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    strength: torch.Tensor,
    lengths: Sequence[int],
    states: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    size = min(CHUNK, max(lengths))
    order, take, slots, counts = _chunks(np.array(lengths), size)
    indices = torch.from_numpy(take.ravel()).to(query.device)

    def chunks(tokens: torch.Tensor) -> torch.Tensor:
        """Tokens [T, H, F] in chunks [N, H, C, F]; the padding of the last chunk of a sequence is zero."""
        padded = nn.functional.pad(tokens.flatten(1), (0, 0, 0, 1))
        return padded.index_select(0, indices).view(*take.shape, *tokens.shape[1:]).transpose(1, 2)

    q, k, v, b = chunks(query), chunks(key), chunks(value), chunks(strength[..., None])
    log = chunks(decay[..., None])[..., 0].cumsum(-1)
    upper = torch.ones(size, size, dtype=torch.bool, device=query.device).triu(1)
    between = (log[..., :, None] - log[..., None, :]).masked_fill(upper, -torch.inf).exp()
    grown = log.exp()[..., None]
    system = (k * b) @ k.mT * between
    both = torch.cat([v * b, k * b * grown], -1)
    solved = torch.linalg.solve_triangular(system, both, upper=False, unitriangular=True)
    new, known = solved.split([v.shape[-1], k.shape[-1]], -1)
    inner = q @ k.mT * between
    q = q * grown
    k = k * (log[..., -1:] - log).exp()[..., None]
    whole = log[..., -1].exp()[..., None, None]

    scale = query.shape[-1] ** -0.5
    shape = (len(lengths), *k.shape[1:2], k.shape[-1], v.shape[-1])
    state = query.new_zeros(shape) if states is None else _wide(states).index_select(0, order.to(query.device))
    outs, ended, first = [], [], 0
    for count, following in zip(counts, [*counts[1:], 0], strict=True):  # the next chunk of all sequences that have one
        part = slice(first, first + count)
        written = new[part] - known[part] @ state
        outs.append((q[part] @ state + inner[part] @ written) * scale)
        state = state * whole[part] + k[part].mT @ written
        ended.append(state[following:])
        state = state[:following]
        first += count
    out = torch.cat(outs).transpose(1, 2).flatten(0, 1).index_select(0, torch.from_numpy(slots).to(query.device))
    final = torch.cat(ended[::-1]).index_select(0, torch.argsort(order).to(query.device))
    return out, final


def _chunks(lengths: np.ndarray, size: int) -> tuple[torch.Tensor, np.ndarray, np.ndarray, list[int]]:
    """Divide packed sequences into chunks: the first chunks of all sequences, then the second ones, and so on.

    Returns:
        The sequences, the longest first; the index of the token in each slot, [N, size], T for padding; the slot of
        each token, [T]; and the number of first, second, ... chunks.
    """
    order = np.argsort(-lengths, kind="stable")
    of = -(-lengths[order] // size)
    counts = [int((of > step).sum()) for step in range(of[0])]
    step = np.repeat(np.arange(len(counts)), counts)
    sequence = order[np.concatenate([np.arange(count) for count in counts])]
    position = step[:, None] * size + np.arange(size)
    real = position < lengths[sequence][:, None]
    total = int(lengths.sum())
    take = np.where(real, (lengths.cumsum() - lengths)[sequence][:, None] + position, total)
    slots = np.empty(total, np.int64)
    slots[take[real]] = np.flatnonzero(real)
    return torch.from_numpy(order), take, slots, counts


def delta_step(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    strength: torch.Tensor,
    states: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Apply the rule to one token of each of S sequences, [S, H, ...] and [S, H, K, V], as `gated_delta_rule`."""
    query, key = _unit(query) * query.shape[-1] ** -0.5, _unit(key)
    states = _wide(states) * _wide(decay).exp()[..., None, None]
    missing = (_wide(value) - (states * key[..., None]).sum(-2)) * _wide(strength)[..., None]
    states = states + key[..., None] * missing[..., None, :]
    return (states * query[..., None]).sum(-2), states
