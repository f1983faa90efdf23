"""Supervised warm-up: fine-tune a model on the environment's demonstrations once and cache the result."""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from forge_env.config.recipe import RunConfig
from forge_env.environment.base import Environment
from forge_env.environment.optional import demonstrate
from forge_env.errors import UsageError
from forge_env.run import Run
from forge_env.trajectory import Segment
from forge_env.types import Message, Task
from trainers.model.chat import Chat
from trainers.model.folder import file_digests
from trainers.model.tiny import FORMAT
from trainers.model.tokenizer import training_task

MICROBATCH_TOKENS = 8192
"""Maximum tokens of a microbatch, if `trainer.microbatch_tokens` allows as many."""
PREPARED_BATCHES = 16


def cache_key(config: RunConfig, environment: Environment, *, warm: bool, found: Path | None = None) -> str:
    """Hash everything a checkpoint depends on: model, environment, its demonstrations, seed and warm-up.

    Args:
        found: the checkpoint folder that it is made from; None if the run builds the model.
    """
    rng = random.Random(0)
    probe = [training_task(environment, index) for index in range(8)]
    demonstrations = [message.to_openai() for task in probe for message in demonstration(environment, task, rng)]
    parts: dict[str, Any] = {
        "format": FORMAT,
        "model": config.model.model_dump(exclude={"cache_dir"}),
        "environment": config.environment.model_dump(),
        "tools": [tool.model_dump() for tool in environment.tools],
        "demonstrations": demonstrations,
        "seed": config.seed,
    }
    if found is not None:
        parts["found"] = file_digests(found)
    if warm:
        assert config.warmup is not None
        parts["warmup"] = config.warmup.model_dump()
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def demonstration(environment: Environment, task: Task, rng: random.Random) -> list[Message]:
    """Return the environment's demonstration for a task, as messages."""
    messages = demonstrate(environment, task, rng)
    if messages is None:
        raise UsageError(
            f"{type(environment).__name__} gives no demonstrations to warm up on",
            fix="define `demonstrate(task, rng)`, or use a trained model: model.path=Qwen/Qwen3-0.6B warmup=null",
        )
    return messages


class Demonstrations:
    """Endless stream of batches of demonstrations on training tasks, deterministic for a seed."""

    def __init__(self, environment: Environment, chat: Chat, *, batch_size: int, max_length: int, seed: int) -> None:
        self._environment, self._chat = environment, chat
        self._batch_size, self._max_length = batch_size, max_length
        self._rng = random.Random(seed)
        self._next = 0

    def batch(self) -> list[Segment]:
        """Return the segments of the next `batch_size` demonstrations."""
        return [segment for _ in range(self._batch_size) for segment in self._one()]

    def _one(self) -> list[Segment]:
        for _ in range(1000):
            task = training_task(self._environment, self._next)
            self._next += 1
            messages = demonstration(self._environment, task, self._rng)
            sequences = self._chat.render_training(messages, self._environment.tools)
            learned = [(ids, mask) for ids, mask in sequences if any(mask[1:])]
            if learned and all(len(ids) <= self._max_length for ids, _ in learned):
                return [Segment(np.array(ids), np.array(mask)) for ids, mask in learned]
        raise UsageError(
            f"no demonstration fits into model.max_length = {self._max_length} tokens", fix="raise model.max_length"
        )


async def warm_up(
    run: Run,
    environment: Environment,
    trainer: Any,
    folder: Path,
    *,
    dtype: str = "float32",
    log: Callable[[int, Mapping[str, float]], None] | None = None,
) -> None:
    """Train `trainer` on demonstrations and save the model to `folder`.

    The trainer never waits: a thread makes the next demonstrations during a step, and each batch is sent before the
    previous one is trained.
    """
    from trainers.losses.sft import SFTLoss  # takes seconds: torch

    config = run.config
    section = config.warmup
    assert section is not None
    chat = Chat.of(trainer.folder, config.model)
    demonstrations = Demonstrations(
        environment, chat, batch_size=section.batch_size, max_length=config.model.max_length, seed=config.seed
    )
    await trainer.configure(
        section.optimizer,
        loss=SFTLoss(),
        steps=section.steps,
        microbatch_tokens=min(MICROBATCH_TOKENS, config.trainer.microbatch_tokens),
        share_prefixes=config.trainer.share_prefixes,
        threads=section.threads,
    )
    batches: asyncio.Queue[list[Segment]] = asyncio.Queue(PREPARED_BATCHES)

    async def demonstrate() -> None:
        for _ in range(section.steps):
            await batches.put(await asyncio.to_thread(demonstrations.batch))

    async with asyncio.TaskGroup() as group:
        group.create_task(demonstrate())
        next_step = group.create_task(trainer.train_step(await batches.get()))
        for step in range(1, section.steps + 1):
            current = next_step
            if step < section.steps:
                next_step = group.create_task(trainer.train_step(await batches.get()))
            metrics = await current
            shown = {name: metrics[name] for name in ("loss", "tokens_per_s") if name in metrics}
            run.progress(step, section.steps, **shown)
            if log is not None:
                log(step, {f"warmup/{name}": value for name, value in metrics.items()})
    await trainer.save_model(str(folder), dtype)
