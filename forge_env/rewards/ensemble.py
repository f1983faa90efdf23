"""Combination of several weak verifiers into one reward.

Votes are combined by naive Bayes: a verifier that is right with probability a counts log(a / (1 - a)).
Unknown accuracies are estimated from votes alone, by expectation maximisation on the one-coin model of Dawid and
Skene (1979), as Weaver (Saad-Falcon et al., 2025) does for language-model verifiers.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from forge_env.concurrency import gather_or_cancel, settled
from forge_env.errors import UsageError
from forge_env.rewards.rubric import as_sequence, inputs_of, name_of

INPUTS = ("prompt", "response", "target")
"""Names of a verifier's parameters."""
_EDGE = 1e-3
"""Minimum distance of accuracies from 0 and 1, so that no single verifier decides alone."""


class Ensemble:
    """Probability in [0, 1] that an answer is right, according to several verifiers.

    Args:
        verifiers: callables `(prompt, response, target) -> float`, sync or async; 0.5 and above is a vote for.
        accuracies: probability in (0, 1) that each verifier is right, for example from `estimate_accuracies`; None
            assumes equal ones.
        prior: fraction of answers that are right.

    Examples:
        >>> import asyncio
        >>> import forge_env as fe
        >>> verifiers = [fe.rewards.ExactMatch(), fe.rewards.FuzzyMatch(threshold=0.5)]
        >>> ensemble = fe.rewards.Ensemble(verifiers, accuracies=[0.9, 0.6])
        >>> round(asyncio.run(ensemble("", "42", "42")), 3)
        0.931
    """

    def __init__(
        self,
        verifiers: Callable[..., Any] | Sequence[Callable[..., Any]],
        accuracies: Sequence[float] | None = None,
        *,
        prior: float = 0.5,
    ) -> None:
        verifiers = as_sequence(verifiers)
        accuracies = [0.75] * len(verifiers) if accuracies is None else list(accuracies)
        if len(accuracies) != len(verifiers):
            raise UsageError(f"an ensemble has {len(verifiers)} verifiers but {len(accuracies)} accuracies")
        if not all(0.0 < value < 1.0 for value in [*accuracies, prior]):
            raise UsageError("accuracies and prior of an ensemble must be between 0 and 1")
        self.verifiers = list(verifiers)
        self._inputs = [inputs_of("verifier", name_of(verifier), verifier, INPUTS) for verifier in verifiers]
        self.accuracies = accuracies
        self.prior = prior

    async def __call__(self, prompt: str, response: str, target: Any = None) -> float:
        """Combine the verifiers' votes on one response."""
        given = {"prompt": prompt, "response": response, "target": target}
        inputs = [{name: given[name] for name in names} for names in self._inputs]
        values = await gather_or_cancel([*map(_value, self.verifiers, inputs)])
        return combine([value >= 0.5 for value in values], self.accuracies, self.prior)


def combine(votes: Sequence[bool], accuracies: Sequence[float], prior: float = 0.5) -> float:
    """P(right | votes) for verifiers that err independently of each other."""
    log_odds = math.log(prior / (1.0 - prior))
    for vote, accuracy in zip(votes, accuracies, strict=True):
        accuracy = _inside(accuracy)
        log_odds += (1.0 if vote else -1.0) * math.log(accuracy / (1.0 - accuracy))
    return 1.0 / (1.0 + math.exp(-log_odds)) if log_odds > -700 else 0.0


def estimate_accuracies(
    votes: Sequence[Sequence[bool]], labels: Sequence[bool] | None = None, *, iterations: int = 100
) -> tuple[list[float], float]:
    """Estimate `(accuracy of each verifier, prior)` from the votes of K verifiers on N answers, labelled or not.

    Without labels at least three verifiers are needed, and most must be better than chance.

    Args:
        votes: votes of each verifier on each answer, [N, K].
        labels: whether each answer is right, [N]; None if unknown.
        iterations: maximum number of iterations of expectation maximisation.

    Raises:
        UsageError: there are no votes, too few verifiers, or a different number of labels than answers.

    Examples:
        >>> import forge_env as fe
        >>> votes = [[True, True, False], [False, False, False], [True, True, True], [False, True, False]]
        >>> accuracies, prior = fe.rewards.estimate_accuracies(votes, labels=[True, False, True, False])
        >>> [round(accuracy, 2) for accuracy in accuracies], prior
        ([1.0, 0.75, 0.75], 0.5)
    """
    if not votes or not votes[0]:
        raise UsageError("there are no votes to estimate accuracies from")
    if len({len(row) for row in votes}) > 1:
        raise UsageError("votes [N answers][K verifiers] need one vote of every verifier on each answer")
    if labels is not None and len(labels) != len(votes):
        raise UsageError(f"there are votes on {len(votes)} answers but {len(labels)} labels")
    if labels is not None:
        return _maximise(votes, [float(label) for label in labels], [1] * len(votes))
    if len(votes[0]) < 3:
        raise UsageError("accuracies of fewer than three verifiers can't be estimated without labels")
    alike = Counter(tuple(map(bool, row)) for row in votes)  # answers with equal votes have equal beliefs
    rows, counts = list(alike), list(alike.values())
    beliefs = [sum(row) / len(row) for row in rows]  # start from the fraction of votes for
    for _ in range(iterations):
        accuracies, prior = _maximise(rows, beliefs, counts)
        updated = [combine(row, accuracies, prior) for row in rows]
        moved = max(abs(new - old) for new, old in zip(updated, beliefs, strict=True))
        beliefs = updated
        if moved < 1e-9:
            break
    return _maximise(rows, beliefs, counts)


def _maximise(
    rows: Sequence[Sequence[bool]], beliefs: Sequence[float], counts: Sequence[int]
) -> tuple[list[float], float]:
    """Accuracies and prior, given distinct rows of votes with their beliefs and numbers of answers."""
    total = sum(counts)
    accuracies = [
        sum(
            number * (belief if row[k] else 1.0 - belief)
            for row, belief, number in zip(rows, beliefs, counts, strict=True)
        )
        / total
        for k in range(len(rows[0]))
    ]
    prior = sum(number * belief for belief, number in zip(beliefs, counts, strict=True)) / total
    return [_inside(value) for value in accuracies], _inside(prior)


def _inside(probability: float) -> float:
    return min(max(probability, _EDGE), 1.0 - _EDGE)


async def _value(verifier: Callable[..., Any], inputs: dict[str, Any]) -> float:
    return float(await settled(verifier(**inputs)))
