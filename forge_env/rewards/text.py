"""Rewards that compare or inspect text: exact match, similarity, format, reasoning tags."""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real

from forge_env.rewards.reasons import explain
from forge_env.rewards.spans import last_between
from forge_env.types import Message
from forge_env.visible import shown

Target = str | int | float | Iterable[str]
"""One text or number, or several accepted texts."""
_ANY_TAG = re.compile(r"</?think>")
NO_TARGET = "the task has no target: give it data['answer'] or gold"
EMPTY_TARGET = "the target is empty"
MAX_COMPARED_CHARS = 4_000
"""Maximum characters compared by fuzzy matching, whose time is proportional to the product of the lengths."""


def _accepted(target: object) -> list[str]:
    if target is None:
        raise ValueError(NO_TARGET)
    texts = [target] if isinstance(target, str | Real) else target
    if isinstance(texts, Mapping):
        raise ValueError(
            f"the target is a mapping of {shown(', '.join(map(str, texts)))}, whose keys are not accepted texts: give "
            "a text or a list of texts, such as columns: {answer: answer.aliases}"
        )
    if isinstance(texts, bytes) or not isinstance(texts, Iterable):
        raise ValueError(f"the target is a {type(texts).__name__}: give a text, a number or a list of them")
    accepted = list(texts)
    for item in accepted:
        if not isinstance(item, str | Real):
            raise ValueError(f"an accepted text of the target is a {type(item).__name__}, not a text or a number")
    return [str(item) for item in accepted]


def _target_problem(target: object, normal: Callable[[str], str]) -> str | None:
    """Why a target can't be compared: it is not one or several texts, or an empty response would equal it."""
    try:
        texts = _accepted(target)
    except ValueError as error:
        return str(error)
    return None if texts and all(map(normal, texts)) else EMPTY_TARGET


@dataclass(eq=False, kw_only=True)
class ExactMatch:
    """1 if the response equals the target, ignoring surrounding white space; else 0.

    Examples:
        >>> import forge_env as fe
        >>> fe.rewards.ExactMatch(ignore_case=True)(" Paris ", "paris")
        1.0
    """

    ignore_case: bool = False
    """Whether to ignore case."""
    ignore_punctuation: bool = False
    """Whether to ignore punctuation and the amount of white space."""

    def __call__(self, response: str, target: Target) -> float:
        """Score one response."""
        accepted = _accepted(target)
        right = self._normal(response) in [self._normal(text) for text in accepted]
        if not right:
            expected = " or ".join(shown(text) for text in accepted[:5])
            reason = "wrong answer" if response.strip() else "no answer"
            explain(reason, [f"expected {expected}, got {shown(response)}"])
        return float(right)

    def check_target(self, target: object) -> str | None:
        """Why `target` can't be compared with answers, or None if it can. Called when tasks are loaded.

        Args:
            target: the true answer of a task.
        """
        return _target_problem(target, self._normal)

    def _normal(self, text: str) -> str:
        if self.ignore_case:
            text = text.casefold()
        if self.ignore_punctuation:
            text = text.translate(str.maketrans("", "", string.punctuation))
        return " ".join(text.split()) if self.ignore_punctuation else text.strip()


@dataclass(eq=False)
class FuzzyMatch:
    """Similarity of response and target in [0, 1], ignoring case; 0 if it is below `threshold`.

    It is 2 L / (n + m), where L is the length of their longest common subsequence and n, m are their lengths.

    Examples:
        >>> import forge_env as fe
        >>> fe.rewards.FuzzyMatch(threshold=0.5)("colour", "color") > 0.9
        True
    """

    threshold: float = 0.0
    """Similarity below which the score is 0."""

    def __call__(self, response: str, target: Target) -> float:
        """Score one response against the most similar accepted text."""
        given = response.strip().casefold()[:MAX_COMPARED_CHARS]
        ratios = [similarity(given, text.strip().casefold()[:MAX_COMPARED_CHARS]) for text in _accepted(target)]
        best = max(ratios, default=0.0)
        return best if best >= self.threshold else 0.0

    def check_target(self, target: object) -> str | None:
        """Why `target` can't be compared with answers, or None if it can. Called when tasks are loaded.

        Args:
            target: the true answer of a task.
        """
        return _target_problem(target, str.strip)


def similarity(one: str, two: str) -> float:
    """Similarity 2 L / (n + m) of two texts (see `FuzzyMatch`); 1 for two empty ones."""
    if not one and not two:
        return 1.0
    return 2.0 * _common(one, two) / (len(one) + len(two))


def _common(one: str, two: str) -> int:
    """Length of the longest common subsequence, with one column of the table in an integer (Hyyro, 2004)."""
    masks: dict[str, int] = {}
    for position, character in enumerate(one):
        masks[character] = masks.get(character, 0) | 1 << position
    everything = (1 << len(one)) - 1
    row = everything
    for character in two:
        matched = row & masks.get(character, 0)
        row = ((row + matched) | (row - matched)) & everything
    return len(one) - row.bit_count()


class FormatReward:
    """1 if the whole response matches a regular expression (`re.DOTALL`); else 0.

    Args:
        pattern: pattern that the response, stripped of surrounding white space, has to match from start to end.

    Examples:
        >>> import forge_env as fe
        >>> fe.rewards.FormatReward(r"<answer>.*</answer>")("<answer>42</answer>")
        1.0
    """

    def __init__(self, pattern: str) -> None:
        self.pattern = re.compile(pattern, re.DOTALL)

    def __call__(self, response: str) -> float:
        """Score one response."""
        return float(self.pattern.fullmatch(response.strip()) is not None)


def exact_match(response: str, target: Target) -> float:
    """Apply `ExactMatch()`.

    Args:
        response: the agent's message.
        target: a text or number, or several accepted ones.

    Examples:
        >>> import forge_env as fe
        >>> fe.rewards.exact_match("42", ["42", "forty-two"])
        1.0
    """
    return ExactMatch()(response, target)


def fuzzy_match(response: str, target: Target) -> float:
    """Apply `FuzzyMatch()`.

    Args:
        response: the agent's message.
        target: a text or number, or several accepted ones.

    Examples:
        >>> import forge_env as fe
        >>> fe.rewards.fuzzy_match("abc", "abd")
        0.6666666666666666
    """
    return FuzzyMatch()(response, target)


exact_match.check_target = ExactMatch().check_target  # type: ignore[attr-defined]
fuzzy_match.check_target = FuzzyMatch().check_target  # type: ignore[attr-defined]


@dataclass(eq=False)
class ThinkingReward:
    """`full_reward` for exactly one well-formed, non-empty `<think>` block, `partial_reward` for an attempt, else 0.

    Examples:
        >>> import forge_env as fe
        >>> reward = fe.rewards.ThinkingReward(partial_reward=0.1)
        >>> reward("", "<think>6 * 7</think>42"), reward("", "<think>6 * 7"), reward("", "42")
        (1.0, 0.1, 0.0)
    """

    partial_reward: float = 0.2
    """Score of tags that don't form exactly one block, or of an empty block."""
    full_reward: float = 1.0
    """Score of exactly one non-empty block."""

    def __call__(self, prompt: str, response: str, target: object = None, messages: Sequence[Message] = ()) -> float:
        """Score one response; prompt and target are ignored.

        Args:
            prompt: prompt of the task.
            response: the agent's message.
            target: target of the task.
            messages: messages of the episode. Separately returned reasoning in its last turn counts as a block.
        """
        last = next((message for message in reversed(messages) if message.role == "assistant"), None)
        if last is not None and last.reasoning_content:
            response = f"<think>{last.reasoning_content}{'</think>' if response.strip() else ''}{response}"
        tags = _ANY_TAG.findall(response)
        if not tags:
            return 0.0
        pair = tags == ["<think>", "</think>"]
        well_formed = pair and bool((last_between(response, "<think>", "</think>") or "").strip())
        return self.full_reward if well_formed else self.partial_reward
