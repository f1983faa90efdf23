"""Whoever dies of a run, and whenever: no token is trained beyond its bound, no group twice, and none is lost.

The controller's code is the real one: system, stack, checkpoints, publisher, generator pool, rollouts, replay buffer.
The actors are stand-ins in virtual time. What they pass on as weights is the list of all groups that these were trained
on, so that every sampled token knows where it comes from, whatever number a version has.
"""

from __future__ import annotations

import asyncio
import json
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("torch")

from tests.trainers.loop.dry_run import dry_run
from tests.trainers.loop.stand_ins import (
    STAND_INS,
    Actor,
    Actors,
    Buffer,
    Generator,
    ReferenceModel,
    ReplayBuffer,
    RolloutWorker,
    TitanTrainer,
    Trace,
)
from trainers.actors.remote import ActorDiedError, FurtherActorDiedError
from trainers.buffer.local import LocalReplayBuffer
from trainers.generator.types import Completion, SamplingOptions, WeightsDroppedError

pytestmark = pytest.mark.stack
STEPS, GROUPS, MEMBERS = 6, 2, 2
RECIPE = {
    "grpo.steps": STEPS,
    "grpo.groups_per_step": GROUPS,
    "grpo.group_size": MEMBERS,
    "generator.spare": False,
    "checkpoint.minutes": 0.0,
    "checkpoint.keep_best": 0,
}
ALONE = ("trainer", "buffer", "reference")
TWINS = ("generator0", "generator1", "rollouts0", "rollouts1")
LINEAGE = "lineage.json"
FIRST_ID, IDS = 20, 240
"""Token ids that a stand-in samples."""
Lineage = tuple[tuple[int, ...], ...]
"""What weights are made of: the groups of each step, in order."""
Death = tuple[float, str]
"""Seconds after the first rollout began, and who."""


class World:
    """What can be said of a run only by one who sees all of its actors.

    Args:
        deaths: when, and whose.
        bound: most steps between the weights that sampled a token, and those that are trained on it.
        seed: of how long everything takes.
    """

    def __init__(self, deaths: list[Death], bound: int, seed: int) -> None:
        self._deaths, self._bound = deaths, bound
        self.dice = random.Random(seed)
        self.living: dict[str, Mortal] = {}
        self.died: list[str] = []
        self.trained: list[tuple[int, ...]] = []
        """The groups of every step that was begun, those included that are trained again."""
        self._sampled_from: dict[tuple[int, ...], tuple[Lineage, Lineage]] = {}

    def begin(self) -> None:
        deaths, self._deaths = self._deaths, []
        for seconds, name in deaths:
            asyncio.get_running_loop().call_later(seconds, self._kill, name)

    def _kill(self, name: str) -> None:
        if (victim := self.living.get(name)) is not None and not victim.gone.is_set():
            self.died.append(name)
            victim.gone.set()

    def sample(self, most: int) -> list[int]:
        """Tokens that were never sampled before."""
        number, ids = len(self._sampled_from), []
        for _ in range(3):
            number, rest = divmod(number, IDS)
            ids.append(FIRST_ID + rest)
        return (ids + [FIRST_ID] * most)[: self.dice.randint(4, most)]

    def sampled(self, token_ids: list[int], first: Lineage, last: Lineage) -> None:
        """Tokens were sampled from these weights."""
        assert tuple(token_ids) not in self._sampled_from
        self._sampled_from[tuple(token_ids)] = first, last

    def check(self, lineage: Lineage, step: int, groups: list[tuple[int, list[tuple[int, ...]]]]) -> None:
        """Weights are about to be trained on groups: their indices, and the tokens of each of their episodes."""
        assert len(lineage) == step
        before = {index for groups in lineage for index in groups}
        for index, episodes in groups:
            assert index not in before, f"group {index} is trained twice"
            for token_ids in episodes:
                for source in self._sampled_from[token_ids]:
                    assert source == lineage[: len(source)], f"group {index} is of weights that are lost"
                    assert step - len(source) <= self._bound, f"group {index} is too old for step {step}"
        self.trained.append(tuple(index for index, _ in groups))


class Mortal(Actor):
    """Ends when the world says so; calls under way fail then, and go on otherwise, whoever stops waiting for them."""

    world: World

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.gone = asyncio.Event()
        self._work: set[asyncio.Future[Any]] = set()
        self.world.living[self.name] = self

    async def answer(self, endpoint: str, *args: Any, **kwargs: Any) -> Any:
        return await self.while_alive(super().answer(endpoint, *args, **kwargs))

    async def while_alive(self, work: Any) -> Any:
        """What it answers to a call."""
        working, dying = asyncio.ensure_future(work), asyncio.ensure_future(self.gone.wait())
        self._work.add(working)
        working.add_done_callback(self._done)
        try:
            await asyncio.wait([working, dying], return_when=asyncio.FIRST_COMPLETED)
        finally:
            dying.cancel()
        if self.gone.is_set():
            working.cancel()
            raise ActorDiedError("killed")
        try:
            return working.result()
        except ActorDiedError as error:
            raise FurtherActorDiedError(error.message) from error

    def _done(self, working: asyncio.Future[Any]) -> None:
        self._work.discard(working)
        if not working.cancelled():
            working.exception()  # seen

    def end(self) -> None:
        self.gone.set()
        for working in self._work:
            working.cancel()


class Trainer(Mortal, TitanTrainer):
    """Its weights are the groups that it has trained on."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.lineage: Lineage = ()

    async def do_train_on(self, buffer: LocalReplayBuffer[Any], step: int) -> dict[str, float]:
        batch = await buffer.fetch(step)
        await asyncio.sleep(self.world.dice.uniform(0.1, 3.0))
        own = batch.reservation.indices
        groups = [
            (index, [tuple(segment.token_ids[segment.mask].tolist()) for segment in group.segments()])
            for index, group in zip(own, batch.groups, strict=True)
        ]
        self.world.check(self.lineage, step, groups)
        self.lineage = (*self.lineage, tuple(own))
        return {"loss": 0.0, "entropy": 1.0, "tokens_per_s": 100.0}

    async def do_begin_push(self, version: int) -> tuple[Any, dict[str, float]]:
        assert version == len(self.lineage)
        return (self, self.lineage), {"snapshot_s": 0.0, "push_s": 0.0, "bytes": 8.0}

    async def do_uploaded(self) -> dict[str, float]:
        await asyncio.sleep(self.world.dice.uniform(0.0, 1.0))
        return {"push_s": 0.3}

    async def do_begin_save(self, folder: str) -> dict[str, float]:
        self._note_in(Path(folder, LINEAGE))
        return await super().do_begin_save(folder)

    async def do_load(self, folder: str) -> None:
        self._read(Path(folder, LINEAGE))

    def _note_in(self, file: Path) -> None:
        file.write_text(json.dumps(self.lineage))

    def _read(self, file: Path) -> None:
        self.lineage = tuple(map(tuple, json.loads(file.read_text())))


class Sampler(Mortal, Generator):
    """Samples tokens that tell from which weights they are."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._lineage: Lineage = ()

    async def _sample(self, prompt_ids: Any, options: SamplingOptions) -> Completion:
        first, version = self._lineage, self._version
        await asyncio.sleep(self.world.dice.choice([0.1, 0.5, 4.0]))
        ids = self.world.sample(options.max_tokens)
        self.world.sampled(ids, first, self._lineage)
        half = len(ids) // 2
        versions = [version] * half + [self._version] * (len(ids) - half)
        return Completion(prompt_ids, ids, [-1.0] * len(ids), versions, "stop", self._version)

    async def do_update_weights(self, version: int, published: tuple[Trainer, Lineage]) -> dict[str, float]:
        await asyncio.sleep(self.world.dice.uniform(0.0, 0.5))
        trainer, lineage = published
        if trainer.gone.is_set():
            raise WeightsDroppedError(f"version {version} went with its trainer")
        self._version, self._lineage = version, lineage
        return {"pull_s": 0.1, "stall_s": 0.0, "total_s": 0.1}


class Reference(Mortal, ReferenceModel): ...


class Worker(Mortal, RolloutWorker): ...


class BufferProcess(Mortal, ReplayBuffer): ...


class MortalBuffer(Buffer):
    """A buffer whose groups go with its actor; another begins with none."""

    def __init__(self, trace: Trace, actor: BufferProcess) -> None:
        self._trace, self.actor = trace, actor

    @property
    def actor(self) -> BufferProcess:
        """In which it lives now."""
        return self._process

    @actor.setter
    def actor(self, process: BufferProcess) -> None:
        self._process = process
        self.inner: LocalReplayBuffer[Any] = LocalReplayBuffer(*process.arguments)


def _passed_on(name: str) -> Callable[..., Any]:
    async def call(self: MortalBuffer, *args: Any) -> Any:
        if name == "admit":
            self.actor.world.begin()
        calling = asyncio.ensure_future(getattr(self.inner, name)(*args))
        try:
            return await self.actor.while_alive(calling)
        finally:
            calling.cancel()  # as the real one's are withdrawn

    return call


for _name, _method in vars(LocalReplayBuffer).items():
    if not _name.startswith("_") and callable(_method):
        setattr(MortalBuffer, _name, _passed_on(_name))


def mortals(world: World) -> Actors:
    kinds = {
        "TitanTrainer": Trainer,
        "Generator": Sampler,
        "ReferenceModel": Reference,
        "RolloutWorker": Worker,
        "ReplayBuffer": BufferProcess,
    }
    assert kinds.keys() == STAND_INS.keys()
    return {name: type(kind.__name__, (kind,), {"world": world}) for name, kind in kinds.items()}


def play(
    deaths: list[Death],
    *,
    bound: int,
    every: int,
    replicas: int,
    workers: int,
    seed: int,
    transport: str = "shared",
) -> World:
    world = World(deaths, bound, seed)
    recipe: dict[str, Any] = {
        **RECIPE,
        "grpo.max_off_policy_steps": bound,
        "grpo.reference.source": "initial",
        "grpo.loss.options": {"beta": 0.01},
        "checkpoint.every": every,
        "generator.num_replicas": replicas,
        "rollouts.workers": workers,
        "weights.transport": transport,
    }
    with tempfile.TemporaryDirectory() as root:
        events = dry_run(recipe, Path(root), mortals(world), MortalBuffer)
    assert not [details for _, what, details in events if what in ("failed", "refused")]
    (warnings,) = [details for _, what, details in events if what == "warnings"]
    assert "stale" not in warnings
    trainer = world.living["trainer"]
    assert isinstance(trainer, Trainer)
    assert len(trainer.lineage) == STEPS
    trained = sorted(index for groups in trainer.lineage for index in groups)
    assert trained == list(range(STEPS * GROUPS)), "each once, and none is lost"
    return world


DEATHS = st.tuples(
    st.lists(st.tuples(st.floats(0.0, 40.0), st.sampled_from(ALONE)), min_size=1, max_size=3),
    st.lists(st.tuples(st.floats(0.0, 40.0), st.sampled_from(TWINS)), max_size=3),
)
"""A fourth death of those without a twin may be one too many, where no step is trained in between."""


@given(
    deaths=DEATHS,
    bound=st.integers(0, 2),
    every=st.sampled_from([0, 1, 3]),
    replicas=st.integers(1, 2),
    workers=st.integers(1, 2),
    seed=st.integers(0, 1000),
    transport=st.sampled_from(["shared", "torchstore"]),
)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@pytest.mark.slow
@pytest.mark.timeout(590)
def test_whoever_dies_and_whenever_each_group_is_trained_once_and_within_the_bound(
    deaths: tuple[list[Death], list[Death]],
    bound: int,
    every: int,
    replicas: int,
    workers: int,
    seed: int,
    transport: str,
) -> None:
    both = [*deaths[0], *deaths[1]]
    play(both, bound=bound, every=every, replicas=replicas, workers=workers, seed=seed, transport=transport)


@pytest.mark.parametrize(
    ("deaths", "bound", "every", "transport"),
    [
        ([(7.0, "trainer")], 1, 0, "shared"),
        ([(7.0, "trainer"), (9.0, "generator0")], 1, 0, "torchstore"),
        ([(7.0, "buffer"), (7.0, "trainer"), (7.2, "generator0")], 2, 0, "shared"),
        ([(1.0, "reference"), (4.0, "rollouts0"), (9.0, "reference")], 0, 0, "shared"),
    ],
    ids=["trainer", "trainer with TorchStore", "all at once", "what has no state"],
)
def test_a_run_that_is_set_back(deaths: list[Death], bound: int, every: int, transport: str) -> None:
    world = play(deaths, bound=bound, every=every, replicas=2, workers=2, seed=7, transport=transport)
    assert sorted(world.died) == sorted(name for _, name in deaths)
    if "trainer" in world.died:
        assert len(world.trained) > STEPS, "steps were trained again"


def test_whoever_dies_while_the_end_is_scored_is_started_again() -> None:
    deaths = [(0.0, "trainer"), (36.15, "trainer"), (36.15, "generator0")]
    world = play(deaths, bound=0, every=3, replicas=1, workers=1, seed=0)
    assert sorted(world.died) == sorted(name for _, name in deaths)
