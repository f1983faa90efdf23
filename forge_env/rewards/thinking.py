"""Reward for reasoning inside one pair of tags."""

from __future__ import annotations

import re

from forge_env.tagged import last_between

_ANY_TAG = re.compile(r"</?think>")


class ThinkingReward:
    """`full_reward` for exactly one well-formed, non-empty `<think>` block, `partial_reward` for an attempt, else 0."""

    def __init__(self, partial_reward: float = 0.2, full_reward: float = 1.0) -> None:
        self.partial_reward = partial_reward
        self.full_reward = full_reward

    def __call__(self, prompt: str, response: str, target: object = None) -> float:
        """Score one response; prompt and target don't matter."""
        tags = _ANY_TAG.findall(response)
        if not tags:
            return 0.0
        pair = tags == ["<think>", "</think>"]
        well_formed = pair and bool((last_between(response, "<think>", "</think>") or "").strip())
        return self.full_reward if well_formed else self.partial_reward
