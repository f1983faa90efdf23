"""Sentences and their cards: what earns how much, and what the splits share."""

from __future__ import annotations

import json
import re

import pytest

import forge_env as fe
from environments.cards.words import CITIES, FORMS, JOBS, NAMES

CARD = {"name": "Elsa", "age": 41, "city": "Oslo", "job": "nurse"}


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        (json.dumps(CARD), 1.0),
        (json.dumps(dict(reversed(CARD.items())), indent=2) + "\n", 1.0),
        (json.dumps({**CARD, "age": "41"}), 0.40625),
        (json.dumps({**CARD, "country": "Norway"}), 0.375),
        (json.dumps({"job": "nurse"}), 0.09375),
        (f"```json\n{json.dumps(CARD)}\n```", 0.0),
        ("Elsa is 41.", 0.0),
        ("[]", 0.0),
        ("", 0.0),
    ],
)
async def test_what_an_answer_earns(answer: str, reward: float) -> None:
    env = fe.make("cards")
    task = fe.Task(id="1", prompt="?", split="eval", data={"card": CARD})
    await env.reset(options={"task": task})
    assert (await env.step(answer))[1] == pytest.approx(reward)


def test_a_sentence_has_the_facts_of_its_card() -> None:
    env = fe.make("cards", levels=[1, 2, 3])
    for task in (env.task(split, index) for split in ("train", "eval") for index in range(100)):
        assert {re.search(rf"\b{fact}\b", task.prompt) is not None for fact in task.data["card"].values()} == {True}


def test_eval_has_people_of_its_own_and_unseen_has_words_of_its_own() -> None:
    env = fe.make("cards")
    cards = {
        split: [env.task(split, index).data["card"] for index in range(500)] for split in ("train", "eval", "unseen")
    }
    people = {split: {(card["name"], card["city"], card["job"]) for card in cards[split]} for split in cards}
    assert not people["train"] & people["eval"]
    words = {split: {word for person in people[split] for word in person} for split in cards}
    assert not words["unseen"] & (words["train"] | words["eval"])
    assert len(words["eval"] & words["train"]) > 0.9 * len(words["eval"])


def test_words_are_unique_and_in_no_sentence() -> None:
    every = [word for words in (NAMES, CITIES, JOBS) for part in words.values() for word in part]
    assert len(every) == len(set(every))
    assert not any(word in form for forms in FORMS.values() for form in forms for word in every)


def test_levels_are_the_kinds_of_sentences() -> None:
    env = fe.make("cards", levels=[3])
    assert {env.task("train", index).difficulty for index in range(20)} == {3}
