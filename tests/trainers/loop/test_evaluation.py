"""A generator that dies while a held-out split is scored: it costs no run, and no part of a score is a score."""

from __future__ import annotations

import ast
import asyncio
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("monarch")

from trainers.loop.stack import prepare_controller

prepare_controller()

from tests.trainers.loop.dry_run import dry_run  # noqa: E402
from tests.trainers.loop.stand_ins import STAND_INS, Actors, Events, Generator  # noqa: E402
from trainers.actors.remote import ActorDiedError  # noqa: E402
from trainers.generator.types import Completion, SamplingOptions  # noqa: E402

pytestmark = pytest.mark.stack
HELD_OUT = 0.5
"""Temperature by which a held-out request is known."""


def mortal(version: int, deaths: int = 1, after: int = 0, endpoint: str = "generate") -> Actors:
    """Generators of which so many die of `endpoint` at this version, held-out requests after the first `after`."""
    died: list[Generator] = []

    class Mortal(Generator):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self._gone = asyncio.Event()
            self._answered = 0

        async def do_ended(self) -> None:
            await self._gone.wait()
            raise ActorDiedError("killed")

        async def _die(self) -> None:
            if len(died) < deaths and self not in died and self._version == version:
                died.append(self)
                await asyncio.sleep(70.0 if after else 0.5)  # meanwhile others answer
                self._gone.set()
            if self in died:
                await asyncio.Event().wait()

        async def do_hold(self) -> None:
            if endpoint == "hold":
                await self._die()
            await super().do_hold()

        async def _sample(self, prompt_ids: Any, options: SamplingOptions) -> Completion:
            if endpoint == "generate" and options.temperature == HELD_OUT and self._version == version:
                self._answered += 1
                if self._answered > after:
                    await self._die()
            return await super()._sample(prompt_ids, options)

    return {**STAND_INS, "Generator": Mortal}


def play(root: Path, replicas: int, actors: Actors, workers: int = 1) -> Events:
    recipe = {"evaluation.temperature": HELD_OUT, "generator.num_replicas": replicas, "generator.spare": False}
    return dry_run({**recipe, "rollouts.workers": workers}, root, actors)


def details(events: Events, wanted: str) -> list[str]:
    return [details for _, what, details in events if what == wanted]


def scores(events: Events) -> dict[int, float]:
    """How many episodes each one is of, by version."""
    rows = [ast.literal_eval(row)[0] for row in details(events, "metrics")]
    return {row["step"]: row["eval/eval/n"] for row in rows if "eval/eval/score" in row}


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(
    ("replicas", "death", "due"),
    [
        (1, {}, 0),
        (2, {}, 2),
        (2, {}, 5),
        (1, {"after": 2}, 5),
        (2, {"endpoint": "hold"}, 0),
    ],
    ids=["before training", "beside training", "after training", "halfway", "when it is to be held"],
)
def test_evaluation_begins_again(tmp_path: Path, replicas: int, death: dict[str, Any], due: int, workers: int) -> None:
    events = play(tmp_path, replicas, mortal(due, **death), workers)
    assert details(events, "failed") == []
    assert "generator 0 died" in details(events, "warnings")[0]
    found = scores(events)
    assert found[due] == found[5] == 3.0, "every episode counts"
    for recorded in details(events, "episodes"):
        file, episodes = ast.literal_eval(recorded)
        assert file == "train.jsonl" or len(episodes) == 3, "none is recorded twice"


def test_a_score_is_left_out_when_generator_after_generator_dies_of_it(tmp_path: Path) -> None:
    events = play(tmp_path, 1, mortal(0, deaths=3))
    assert details(events, "failed") == []
    assert "the score on eval is missing" in details(events, "warnings")[0]
    assert sorted(scores(events)) == [2, 4, 5]
