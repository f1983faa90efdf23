"""Environment with one sentence about a person and one answer, a JSON object with the facts of the sentence."""

from __future__ import annotations

import json
from random import Random
from typing import Any

from pydantic import Field

import forge_env as fe
from environments.cards.words import CITIES, FORMS, JOBS, NAMES
from forge_env.environment.single_turn import SingleTurnConfig
from forge_env.tools.json_text import BadJSONError, read_json
from forge_env.types import Task

KEYS = ("name", "age", "city", "job")


class CardsConfig(SingleTurnConfig):
    """Selection of the sentences and partial rewards."""

    levels: list[int] = Field(default_factory=lambda: [1, 2], min_length=1)
    """Kinds of sentences, drawn uniformly: 1, facts in the order of the keys; 2, in another order; 3, with a second
    person of whom nothing is asked."""
    partial_credit: float = Field(0.5, ge=0.0, lt=1.0)
    """Maximum reward for an object that isn't exact. Three quarters of it depend on the share of correct facts, one
    quarter on having exactly the four keys. The exact object earns 1."""


def solved(task: Task, completion: str) -> float:
    """1 for the exact object, with its keys in any order."""
    return float(_object(completion) == task.data["card"])


def parses(completion: str) -> float:
    """1 if the answer is a JSON object with any content, and nothing else."""
    return float(bool(_object(completion)))


def facts(task: Task, completion: str) -> float:
    """Share of the facts that the answer's object has."""
    value = _object(completion)
    return float(sum(value.get(key) == fact for key, fact in task.data["card"].items())) / len(KEYS)


def keys(completion: str) -> float:
    """1 if the answer's object has the four keys and no others."""
    return float(_object(completion).keys() == set(KEYS))


def score(task: Task, completion: str, env: Cards) -> float:
    """1 for the exact object, otherwise `partial_credit * (0.75 * facts + 0.25 * keys)`."""
    part = 0.75 * facts(task, completion) + 0.25 * keys(completion)
    return solved(task, completion) or env.config.partial_credit * part


class Cards(fe.SingleTurnEnvironment):
    """Write the facts of a sentence about a person as a JSON object."""

    api_version = 1
    splits = ("train", "eval", "unseen")
    config_class = CardsConfig
    config: CardsConfig
    rubric = fe.Rubric([score], metrics=[solved, parses, keys, facts])

    def task(self, split: str, index: int) -> Task:
        """Return the sentence generated for `(seed, split, index)`.

        No other split has a person of `eval` (the same name, city and job), or a name, city or job of `unseen`.
        """
        rng = Random(f"cards/{self.config.seed}/{split}/{index}")
        part = "unseen" if split == "unseen" else "seen"
        names, cities, jobs = NAMES[part], CITIES[part], JOBS[part]
        name, another = rng.sample(names, 2)
        job = rng.choice(jobs)
        if part == "seen":
            # For each name and job, one city in five belongs to `eval`.
            first = names.index(name) + jobs.index(job)
            cities = [city for place, city in enumerate(cities, first) if (place % 5 == 0) == (split == "eval")]
        card = {"name": name, "age": rng.randint(20, 79), "city": rng.choice(cities), "job": job}
        level = rng.choice(self.config.levels)
        sentence = rng.choice(FORMS[level]).format(**card, another=another, later=rng.randint(2, 9))
        return Task(
            id=f"{split}-{self.config.seed}-{index}",
            prompt=f"{sentence}\nWrite this as a JSON object with the keys {', '.join(KEYS)}. "
            "Answer with the JSON only, on one line.",
            data={"card": card},
            gold=json.dumps(card),
            difficulty=level,
            split=split,
        )


def _object(answer: str) -> dict[str, Any]:
    """The answer's object; empty if the answer is something else."""
    try:
        value = read_json(answer.strip())
    except BadJSONError:
        return {}
    return value if isinstance(value, dict) else {}
