"""Judges' reasons for scores below the maximum; records contain them, and reports group episodes by them.

explain("failed hidden tests", ["test_leap: expected False, got True"])
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from forge_env.tools.schema import shorten
from forge_env.types import clean_unicode

MOST_FAILURES, LONGEST_FAILURE, LONGEST_REASON = 10, 500, 80
"""Maximum failures of an episode, and maximum characters of a failure and of a reason."""


@dataclass(slots=True)
class Explanation:
    """A judge's explanation of an episode's score; the last call of `explain` counts."""

    reason: str = ""
    failures: list[str] = field(default_factory=list)


_CURRENT: ContextVar[Explanation | None] = ContextVar("explanation", default=None)


@contextmanager
def explanation() -> Iterator[Explanation]:
    """Collect the explanation that `explain` sets within this context."""
    token = _CURRENT.set(collected := Explanation())
    try:
        yield collected
    finally:
        _CURRENT.reset(token)


def explain(reason: str, failures: Iterable[str] = ()) -> None:
    """Explain why the episode that is being scored gets less than the full reward. No effect outside an episode.

    Args:
        reason: kind of failure in a few words, the same for many episodes: "wrong answer", "failed hidden tests".
        failures: failures of this episode, such as a test with its expected and actual value. The first ten are
            recorded, shortened to their first and last 250 characters.

    Examples:
        >>> import forge_env as fe
        >>> def correct(answer, target):
        ...     if answer != target:
        ...         fe.rewards.explain("wrong answer", [f"expected {target}, got {answer}"])
        ...     return float(answer == target)
        >>> correct("41", "42")
        0.0
    """
    if (current := _CURRENT.get()) is not None:
        current.reason = clean_unicode(" ".join(reason.split()))[:LONGEST_REASON]
        lines = [line for line, _ in zip(failures, range(MOST_FAILURES), strict=False)]
        current.failures = [clean_unicode(shorten(line, LONGEST_FAILURE)) for line in lines]
