"""Every loss once more, in numpy and float64, token by token from its formula; nothing of `trainers` is used.

`now` is the variable, `frozen` its value without gradient: a finite difference over `now` alone is the gradient that
a formula with a stop-gradient means.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[np.float64]]


@dataclass
class Case:
    """Flat tokens: log-probs now, when sampled, at the step's start (None: now), under the reference; and the rest."""

    now: Array
    sampled: Array
    advantages: Array
    sequences: list[int]
    proximal: Array | None = None
    reference: Array | None = None
    entropy: Array = field(default_factory=lambda: np.zeros(0))

    @property
    def num_tokens(self) -> int:
        return len(self.now)


def random_case(seed: int, lengths: tuple[int, ...] = (4, 1, 5, 2), spread: float = 0.4, moved: bool = True) -> Case:
    rng = np.random.default_rng(seed)
    count = sum(lengths)
    now = -3 * rng.random(count) - 0.05
    per_sequence = rng.normal(size=len(lengths))
    sequences = [row for row, length in enumerate(lengths) for _ in range(length)]
    return Case(
        now=now,
        sampled=now + spread * rng.normal(size=count),
        advantages=np.array([per_sequence[row] for row in sequences]),
        sequences=sequences,
        proximal=now + 0.5 * spread * rng.normal(size=count) if moved else None,
        reference=now + 0.7 * rng.normal(size=count),
        entropy=rng.random(count),
    )


def clipped(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)


def mean_over_sequence(values: list[float], case: Case, token: int) -> float:
    mine = [value for value, row in zip(values, case.sequences, strict=True) if row == case.sequences[token]]
    return sum(mine) / len(mine)


def surrogate(name: str, o: dict[str, Any], case: Case, now: Array, frozen: Array, t: int) -> tuple[float, float]:
    """The loss of token t before anything else is applied, and its ratio."""
    anchor = anchors(o, case, frozen)
    advantage = float(case.advantages[t])
    ratio = math.exp(now[t] - anchor[t])
    fixed_ratio = math.exp(frozen[t] - anchor[t])
    if name in ("grpo", "dapo", "dr_grpo"):
        low, high = o.get("clip_low", 0.2), o.get("clip_high", 0.2 if name == "dr_grpo" else 0.28)
        return -min(ratio * advantage, clipped(ratio, 1 - low, 1 + high) * advantage), ratio
    if name == "simple_grpo":
        return -math.exp(now[t] - frozen[t]) * advantage, ratio
    if name == "gspo":
        low, high = o.get("clip_low", 3e-4), o.get("clip_high", 4e-4)
        whole = math.exp(mean_over_sequence(list(frozen - anchor), case, t))
        own = whole * math.exp(now[t] - frozen[t])
        return -min(own * advantage, clipped(own, 1 - low, 1 + high) * advantage), own
    if name == "reinforce":
        bound = o.get("clip_ratio", 0.2)
        return -clipped(fixed_ratio, max(0, 1 - bound), 1 + bound) * advantage * now[t], ratio
    if name == "cispo":
        low, high = 1 - o.get("clip_low", 1.0), 1 + o.get("clip_high", 4.0)
        return -clipped(fixed_ratio, low, high) * advantage * now[t], ratio
    if name == "sapo":
        tau = o.get("tau_pos", 1.0) if advantage > 0 else o.get("tau_neg", 1.05)
        return -4 / tau / (1 + math.exp(-tau * (ratio - 1))) * advantage, ratio
    raise KeyError(name)


def anchors(o: dict[str, Any], case: Case, frozen: Array) -> Array:
    if o.get("correction") is None:
        return case.sampled
    return frozen if case.proximal is None else case.proximal


def weight(o: dict[str, Any], case: Case, frozen: Array, t: int) -> float:
    """The off-policy correction's weight of token t."""
    chosen = o.get("correction")
    if chosen is None:
        return 1.0
    chosen = {"name": chosen} if isinstance(chosen, str) else chosen
    logs = list(anchors(o, case, frozen) - case.sampled)
    level = chosen.get("level", "token")
    if level == "token":
        log = logs[t]
    else:
        mean = mean_over_sequence(logs, case, t)
        log = mean if level == "geometric" else mean * case.sequences.count(case.sequences[t])
    k = math.exp(log)
    if chosen["name"] == "tis":
        return min(k, chosen.get("cap", 2.0))
    if chosen["name"] == "icepop":
        return k if chosen.get("low", 0.5) <= k <= chosen.get("high", 5.0) else 0.0
    cap = chosen.get("cap", 5.0)
    return k if cap is None or k <= cap else 0.0


def divergence(kind: str, log_policy: float, log_reference: float, frozen: float) -> float:
    d = log_reference - log_policy
    if kind == "k1":  # the value of k1 with the gradient of k2
        return -(log_reference - frozen) + d**2 / 2 - (log_reference - frozen) ** 2 / 2
    return d**2 / 2 if kind == "k2" else math.exp(d) - 1 - d


def loss(name: str, o: dict[str, Any], case: Case, now: Array, frozen: Array) -> float:
    """The loss of a batch that is the whole minibatch."""
    beta = o.get("beta", 0.1 if name == "simple_grpo" else 0.0)
    dual = o.get("dual_clip", 3.0 if name == "dapo" else None)
    values = []
    for t in range(case.num_tokens):
        value, ratio = surrogate(name, o, case, now, frozen, t)
        if dual is not None and case.advantages[t] < 0 and ratio > dual:
            value = -dual * float(case.advantages[t])
        value *= weight(o, case, frozen, t)
        if beta:
            value += beta * divergence(o.get("kl", "k3"), now[t], float(case.reference[t]), frozen[t])
        value -= o.get("entropy_coef", 0.0) * float(case.entropy[t])
        values.append(value)
    return aggregated(name, o, case, values)


def aggregated(name: str, o: dict[str, Any], case: Case, values: list[float]) -> float:
    default = {"gspo": "sequence", "dr_grpo": "fixed_horizon"}.get(name, "token")
    how = o.get("aggregation", default)
    rows = set(case.sequences)
    if how == "token":
        return sum(values) / len(values)
    totals = dict.fromkeys(rows, 0.0)
    for value, row in zip(values, case.sequences, strict=True):
        totals[row] += value / (case.sequences.count(row) if how == "sequence" else o.get("horizon", 512))
    return sum(totals.values()) / len(rows)


def gradient(name: str, o: dict[str, Any], case: Case, step: float = 1e-6) -> list[float]:
    """Central differences of `loss` in each token's log-prob."""
    slopes = []
    for t in range(case.num_tokens):
        up, down = case.now.copy(), case.now.copy()
        up[t] += step
        down[t] -= step
        slopes.append((loss(name, o, case, up, case.now) - loss(name, o, case, down, case.now)) / (2 * step))
    return slopes
