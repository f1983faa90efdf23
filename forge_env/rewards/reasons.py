"""Judges' reasons for scores; records contain them, and reports group episodes by those below the maximum.

explain("failed hidden tests", ["test_leap: expected False, got True"])
return fe.Score(0.5, answer="41", explanation="off by one")
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from numbers import Number
from typing import Any

from forge_env.reading import is_bounded
from forge_env.redaction import redact
from forge_env.tools.schema import shorten
from forge_env.types import clean_unicode
from forge_env.visible import shown

MOST_FAILURES, LONGEST_FAILURE, LONGEST_REASON = 10, 500, 80
"""Maximum failures of an episode, and maximum characters of a failure and of a reason."""


LONGEST_PART, MOST_METADATA = 2_000, 20
"""Maximum characters of a text in a recorded score, and maximum entries of its metadata."""


@dataclass(frozen=True, slots=True)
class Score:
    """A reward function's value with its reason, for the record, the pages and `forge-env trajectory`.

    Examples:
        >>> import forge_env as fe
        >>> def correct(completion, target):
        ...     number = completion.split()[-1]
        ...     return fe.Score(float(number == target), answer=number, explanation=f"expected {target}")
        >>> correct("It is 41", "42").value
        0.0
    """

    value: float
    """The reward."""
    answer: str = ""
    """What was read from the completion."""
    explanation: str = ""
    """Why it has this value, for this episode."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Parts of the score and other values by name, such as `{"style": 0.5}`. Values other than numbers are recorded as
    text."""

    def __post_init__(self) -> None:
        if not isinstance(self.metadata, Mapping):
            raise TypeError(f"metadata of a Score must be a mapping, not {type(self.metadata).__name__}")

    def __float__(self) -> float:
        if isinstance(self.value, str | bytes):
            raise TypeError("the value of a Score must be a number")
        return float(self.value)

    def bounded(self) -> dict[str, Any]:
        """The score for the record, JSON-ready: texts of at most 2,000 characters and 20 entries of metadata."""
        texts = {name: _text(getattr(self, name)) for name in ("answer", "explanation")}
        entries = [entry for entry, _ in zip(self.metadata.items(), range(MOST_METADATA), strict=False)]
        metadata = {_text(name): _plain(value) for name, value in entries}
        return {name: value for name, value in {**texts, "metadata": metadata}.items() if value}


def _plain(value: Any) -> Any:
    """A number as Python has it, also numpy's; other values as text."""
    if isinstance(value, bool) or not isinstance(value, Number):
        return value if isinstance(value, bool) else _text(value)
    try:
        number = value if isinstance(value, int) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):  # complex numbers
        return _text(value)
    return number if is_bounded(number) else _text(value)


def _text(value: Any) -> str:
    text = "" if value is None else redact(value) if isinstance(value, str) else shown(value, LONGEST_PART)
    return clean_unicode(shorten(text, LONGEST_PART))


@dataclass(slots=True)
class Explanation:
    """A judge's explanation of an episode's score; the last call of `explain` counts."""

    reason: str = ""
    failures: list[str] = field(default_factory=list)
    scores: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Name of a reward function -> its `Score.bounded`."""


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
        failures: one or several failures of this episode, such as a test with its expected and actual value. The
            first ten are recorded, shortened to their first and last 250 characters.

    Examples:
        >>> import forge_env as fe
        >>> def correct(completion, target):
        ...     if completion != target:
        ...         fe.rewards.explain("wrong answer", [f"expected {target}, got {completion}"])
        ...     return float(completion == target)
        >>> correct("41", "42")
        0.0
    """
    if (current := _CURRENT.get()) is not None:
        current.reason = clean_unicode(" ".join(reason.split()))[:LONGEST_REASON]
        lines = [
            line
            for line, _ in zip(
                [failures] if isinstance(failures, str) else failures, range(MOST_FAILURES), strict=False
            )
        ]
        current.failures = [clean_unicode(shorten(redact(line), LONGEST_FAILURE)) for line in lines]


def keep_scores(scores: Mapping[str, dict[str, Any]]) -> None:
    """Record `Score.bounded` of reward functions by name in the current explanation."""
    if (current := _CURRENT.get()) is not None:
        current.scores.update(scores)


def score_lines(scores: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """One line for each score of `Trajectory.scores`: function, answer, explanation and metadata."""
    lines = []
    for name, score in scores.items():
        answer, explanation = score.get("answer", ""), score.get("explanation", "")
        metadata = score.get("metadata")
        pairs = list(metadata.items())[:MOST_METADATA] if isinstance(metadata, dict) else []
        entries = [f"{_text(key)} {_text(value)}" for key, value in pairs]
        parts = [f"answer {shown(answer)}" if answer else "", _text(explanation), ", ".join(entries)]
        lines.append(f"{name}: " + "; ".join(part for part in parts if part))
    return lines
