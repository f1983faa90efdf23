"""The small vocabulary of an environment."""

from __future__ import annotations

import pytest

pytest.importorskip("tokenizers")

import forge_env as fe
from trainers.model.tokenizer import fixed_phrases


def test_a_tag_around_every_answer_is_no_token() -> None:
    """It would be taken for a control token; the system prompt, which names it, would fall into single letters."""
    told = [fe.Message(role="system", content="Answer in <answer>7</answer>."), fe.Message(role="user", content="?")]
    answers = [[*told, fe.Message(role="assistant", content=f"<answer>{number}</answer>")] for number in range(9)]
    phrases = fixed_phrases(answers, [], "qwen3")
    assert "</answer>" not in phrases
    assert any("Answer in <answer>7</answer>." in phrase for phrase in phrases)
