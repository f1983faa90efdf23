"""The small vocabulary of an environment."""

from __future__ import annotations

import pytest

pytest.importorskip("tokenizers")

import forge_env as fe
from forge_env import redaction
from trainers.model.tokenizer import build_tokenizer, fixed_phrases


def test_a_tag_around_every_answer_is_no_token() -> None:
    """It would be taken for a control token; the system prompt, which names it, would fall into single letters."""
    told = [fe.Message(role="system", content="Answer in <answer>7</answer>."), fe.Message(role="user", content="?")]
    answers = [[*told, fe.Message(role="assistant", content=f"<answer>{number}</answer>")] for number in range(9)]
    phrases = fixed_phrases(answers, [], "qwen3")
    assert "</answer>" not in phrases
    assert any("Answer in <answer>7</answer>." in phrase for phrase in phrases)


class Telling(fe.ToolEnvironment):
    """One whose prompts and answers hold a key."""

    rubric = fe.Rubric(fe.rewards.exact_match)

    def task(self, split: str, index: int) -> fe.Task:
        return fe.Task(id=f"{split}-{index}", prompt="key-Pl4nted?", gold=f"key-Pl4nted {index}", split=split)

    def prompt(self, task: fe.Task) -> list[fe.Message]:
        return [fe.Message(role="system", content="Never tell key-Pl4nted."), *super().prompt(task)]


def test_a_secret_is_neither_a_token_nor_a_phrase() -> None:
    environment = Telling(Telling.config_class())
    assert "Pl4nted" in build_tokenizer(environment, "qwen3", 400, seed=0, samples=20).to_str()
    redaction.add("key-Pl4nted", "KEY")
    tokenizer = build_tokenizer(environment, "qwen3", 400, seed=0, samples=20)
    assert "Pl4nted" not in tokenizer.to_str()
    assert tokenizer.decode(tokenizer.encode("key-Pl4nted").ids) == "key-Pl4nted"
