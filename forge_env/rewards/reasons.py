"""Why an episode scored less than all, in the words of what judged it; episodes are grouped by it, and records keep it.

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
"""Failures of one episode, and characters of a failure and of a reason, that are kept."""


@dataclass(slots=True)
class Explanation:
    """What a judge has said of an episode; the last word counts."""

    reason: str = ""
    failures: list[str] = field(default_factory=list)


_CURRENT: ContextVar[Explanation | None] = ContextVar("explanation", default=None)


@contextmanager
def explanation() -> Iterator[Explanation]:
    """Keep what is explained in this block."""
    token = _CURRENT.set(kept := Explanation())
    try:
        yield kept
    finally:
        _CURRENT.reset(token)


def explain(reason: str, failures: Iterable[str] = ()) -> None:
    """Say why the episode that is being scored gets less than all. It costs nothing, and outside an episode is ignored.

    Args:
        reason: the kind of failure in a few words, the same for many episodes: "wrong answer", "failed hidden tests".
        failures: what failed in this one, such as a test with what it expected and got; the first ten are kept, of
            each the first and last 250 characters.

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
