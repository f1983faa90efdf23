"""Answers between tags, as several environments ask for them."""

from __future__ import annotations

from forge_env.rewards.spans import last_between


def final_answer(text: str) -> str | None:
    """Content of the last answer tag, or None."""
    answer = last_between(text, "<answer>", "</answer>")
    return None if answer is None else answer.strip()


def answered(completion: str) -> float:
    """1 if the message has an answer tag; otherwise 0."""
    return float(final_answer(completion) is not None)
