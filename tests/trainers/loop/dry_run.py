"""A whole GRPO run with nothing of its own but the processes: actors are stand-ins that record every call.

The loop, the buffer, the environment, the run's folder are the real ones. Time is virtual and the generators' tokens
depend on nothing but what they are asked and when, so equal recipes leave equal traces (`test_knobs.py` holds them to
it), and what a recipe changes shows.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import shutil
import socket
import zlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from pydantic import Field

import forge_env as fe
from forge_env import machine
from forge_env.config import RunConfig
from forge_env.config.reader import Source, build
from forge_env.environment.single_turn import SingleTurnConfig
from forge_env.errors import ForgeError, root_cause
from forge_env.run import Run, RunFolder
from forge_env.run.metrics import open_loggers
from forge_env.run.trainer import load_trainer
from forge_env.sandbox import Sandbox, SandboxEngine, SandboxSpec
from forge_env.tasks.order import Order
from forge_env.trajectory_index import is_index
from forge_env.types import Message
from tests.trainers.buffer import virtual_time
from tests.trainers.loop.stand_ins import STAND_INS, Actor, Actors, Buffer, Events, Trace
from trainers.loop.method import Method

TASKS = 12
WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
BASE: dict[str, Any] = {
    "environment": {"name": f"{__name__}:Sums"},
    "model": {"max_length": 160},
    "grpo": {"steps": 5, "groups_per_step": 2, "group_size": 2, "max_tokens_per_turn": 12},
    "evaluation": {"every": 2, "num_tasks": 3},
    "logging": {"tensorboard": False},
}


class SumsConfig(SingleTurnConfig):
    """Options of `Sums`."""

    shades: int = Field(3, ge=2)
    """Different rewards."""
    buggy: bool = False
    """The reward function raises on one task."""


def shade(task: fe.Task, answer: str, env: Any) -> float:
    """A number drawn from the answer; rarely above 0 where the task is difficult."""
    drawn = zlib.crc32(answer.encode())
    if env.config.buggy and task.id == "train-3":
        raise ZeroDivisionError("nobody can score this")
    shades: int = env.config.shades
    return 0.0 if task.difficulty == 3 and drawn % 7 else (drawn % shades) / (shades - 1)


def solved(task: fe.Task, answer: str, env: Any) -> float:
    """Whether that is full marks."""
    return float(shade(task, answer, env) == 1.0)


class Sums(fe.SingleTurnEnvironment):
    """Two numbers to add; the reward is drawn from the answer, since nobody here can add."""

    config_class = SumsConfig
    splits = ("train", "eval", "unseen")

    def num_tasks(self, split: str) -> int:
        return TASKS

    def task(self, split: str, index: int) -> fe.Task:
        prompt = f"{split}: {WORDS[index]} and {WORDS[TASKS - index]}?"
        return fe.Task(id=f"{split}-{index}", prompt=prompt, split=split, difficulty=1 + index % 3)

    def demonstrate(self, task: fe.Task, rng: random.Random) -> list[Message]:
        answer = f"The answer is {rng.choice(WORDS)}{rng.choice(WORDS)}."
        return [*self.prompt(task), Message(role="assistant", content=answer)]

    rubric = fe.Rubric(shade, metrics=[solved])


class Differences(Sums):
    """Another environment."""

    def task(self, split: str, index: int) -> fe.Task:
        task = super().task(split, index)
        return task.model_copy(update={"prompt": task.prompt.replace("and", "less")})


class ShortAnswers:
    """Only short answers are learned."""

    def __init__(self, tokens: int = 6) -> None:
        self._tokens = tokens

    def __call__(self, episode: fe.Trajectory) -> bool:
        return episode.num_sampled_tokens < self._tokens


class Strides(Order):
    """Every so manieth task."""

    def __init__(self, environment: fe.Environment, split: str, *, seed: int, stride: int = 2) -> None:
        self._stride, self._count = stride, environment.num_tasks(split) or 1

    def __getitem__(self, position: int) -> int:
        return position * self._stride % self._count


class Listener:
    """A logger of somebody's own."""

    def __init__(self, folder: RunFolder, config: RunConfig) -> None:
        self._file = (folder.root / "heard.txt").open("w")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._file.write(f"{step} {len(metrics)}\n")

    def close(self) -> None:
        self._file.close()


class AtOnce:
    """An executor without threads: what they are waited for takes no virtual time."""

    def __init__(self, *_: object) -> None: ...

    def submit(self, work: Callable[..., Any], *args: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(work(*args))
        except Exception as error:  # noqa: BLE001 - whoever waits is told
            future.set_exception(error)
        return future

    def shutdown(self) -> None: ...


class NoEngine(SandboxEngine):
    """A sandbox engine that nothing is run in."""

    name = "none"

    async def acquire(self, spec: SandboxSpec | None = None) -> Sandbox:
        raise AssertionError("no environment here runs code")

    async def release(self, sandbox: Sandbox) -> None:
        raise AssertionError("no environment here runs code")


def make_config(overrides: Mapping[str, Any], root: Path) -> RunConfig:
    """The recipe of the dry run with overrides, by dotted key."""
    defaults = {"model.cache_dir": str(root / "cache"), "output_dir": str(root / "runs")}
    return build(RunConfig, Source("dry_run.yaml", BASE, {}), list({**defaults, **overrides}.items()))


TOKENIZERS: dict[Any, Any] = {}
"""What earlier runs have trained on the tasks of an environment: a tenth of a second each."""


@contextmanager
def stand_ins(trace: Trace, actors: Actors, buffer: type[Buffer] = Buffer) -> Iterator[None]:
    """No process is started inside."""
    from trainers.actors.actor import ForgeActor
    from trainers.model.tokenizer import build_tokenizer

    async def launch(cls: Any, *args: Any, **kwargs: Any) -> Actor:
        name = cls._actor_class().__name__
        actor = actors[name](trace, cls.mesh_name, cls.procs, args, kwargs)
        shown = () if name in ("ReplayBuffer", "RolloutWorker") else (args, kwargs)
        trace.add("launch", cls.mesh_name, cls.procs, cls.with_gpus, *shown)
        return actor

    async def shutdown(actor: Actor, *, dead: bool = False) -> None:
        trace.add("shutdown", actor.name)
        actor.end()

    def prepare_spare(cls: Any) -> None:
        trace.add("prepare spare", cls.mesh_name, cls.spare is not None)

    async def inline(function: Any, *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    def tokenizer(environment: Any, *rest: Any) -> Any:
        key = (type(environment), environment.config.model_dump_json(), *rest)
        if key not in TOKENIZERS:
            TOKENIZERS[key] = build_tokenizer(environment, *rest)
        return TOKENIZERS[key]

    def open_engine(name: str, **options: Any) -> NoEngine:
        trace.add("open engine", name, options)
        return NoEngine()

    async def open_store(processes: Any, count: int) -> None:
        trace.add("open store", count)

    async def close_store() -> None:
        trace.add("close store")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ForgeActor, "launch", classmethod(launch))
        patch.setattr(ForgeActor, "shutdown", staticmethod(shutdown))
        patch.setattr(ForgeActor, "prepare_spare", classmethod(prepare_spare))
        patch.setattr("trainers.model.tiny.build_tokenizer", tokenizer)
        patch.setattr("trainers.weights.store.open_store", open_store)
        patch.setattr("trainers.weights.store.close_store", close_store)
        patch.setattr(machine, "gpus", lambda: [machine.GPU(str(n), f"GPU-{n}", "none", 1.0) for n in range(8)])
        patch.setattr(machine, "claim", lambda gpu: socket.socket())  # of GPUs that aren't there
        patch.setattr("trainers.buffer.actor.RemoteReplayBuffer", partial(buffer, trace))
        patch.setattr("trainers.rollout.local.open_engine", open_engine)
        patch.setattr(asyncio, "to_thread", inline)
        patch.setattr("forge_env.run.trajectories.ThreadPoolExecutor", AtOnce)
        yield


def dry_run(
    overrides: Mapping[str, Any], root: Path, actors: Actors = STAND_INS, buffer: type[Buffer] = Buffer
) -> Events:
    """The trace of a run with these overrides; `root` may hold what earlier ones have built."""
    trace = Trace(root)
    try:
        config = make_config(overrides, root)
        method = load_trainer(config.method)
        method.check(config)
        assert isinstance(method, Method)
    except ForgeError as error:
        return [(-1.0, "refused", error.message)]
    for warm in root.glob("*/models/warm-*"):
        shutil.rmtree(warm)
    _play(config, method, trace, root, actors, buffer)
    return trace.events


def _play(config: RunConfig, method: Method, trace: Trace, root: Path, actors: Actors, buffer: type[Buffer]) -> None:
    folder = RunFolder(root / "runs" / "run")
    shutil.rmtree(folder.root, ignore_errors=True)
    folder.create()
    run = Run(config, folder, loggers=open_loggers(config, folder, lambda: 0.0))
    try:
        with stand_ins(trace, actors, buffer):
            virtual_time.run(method.play(run))
    except* ForgeError as errors:
        trace.add("failed", [str(root_cause(error)) for error in errors.exceptions])
    finally:
        run.close()
        folder.release()
    _look_at(run, trace)


def _look_at(run: Run, trace: Trace) -> None:
    """What the run has left."""
    root = run.folder.root
    trace.add("warnings", [text.split(":")[0] for text in run.state.warnings])
    trace.add(
        "files", sorted(re.sub(r"tfevents.*", "tfevents", str(path.relative_to(root))) for path in root.rglob("*"))
    )
    for line in run.folder.metrics.read_text().splitlines():
        row = {key: value for key, value in json.loads(line).items() if not re.search(r"^time|_s$", key)}
        trace.add("metrics", row)
    for file in sorted(path for path in run.folder.trajectories.iterdir() if not is_index(path)):
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        trace.add("episodes", file.name, [(row["id"], row["task_id"], row["reward"]) for row in rows])
