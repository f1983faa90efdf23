"""Stand-ins for the actors of a run: they start nothing, record every call and answer at once in virtual time."""

from __future__ import annotations

import asyncio
import random
import re
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel
from safetensors.numpy import save_file

from forge_env.run.clock import Reading, read_clock
from forge_env.run.fingerprint import Fingerprint
from trainers.actors.remote import Calls, methods_of
from trainers.buffer.local import LocalReplayBuffer
from trainers.buffer.sequences import Computed
from trainers.buffer.types import Reservation
from trainers.generator.receipt import audit, receipt
from trainers.generator.types import Completion, Hold, SamplingOptions
from trainers.loop.record import AUDIT
from trainers.rollout.local import LocalWorker

Events = list[tuple[float, str, str]]
"""Virtual second, what, details."""


def add_weights(folder: Path) -> None:
    """Make a built folder one with weights."""
    save_file({"weight": np.zeros(4, dtype=np.float32)}, folder / "model.safetensors")


class Trace:
    """What is seen from outside, in order."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.events: Events = []

    def add(self, what: str, *details: Any) -> None:
        try:
            now = round(asyncio.get_running_loop().time(), 6)
        except RuntimeError:
            now = -1.0
        self.events.append((now, what, repr(self._plain(details))))

    def _plain(self, value: Any) -> Any:
        """A value without addresses, file names that a recipe's digest is part of, and folders of this test."""
        if isinstance(value, str | Path):
            return self._text(str(value))
        if isinstance(value, float):
            return round(value, 9)
        if isinstance(value, BaseModel):
            return self._plain(value.model_dump())
        if isinstance(value, Mapping):
            return {self._plain(key): self._plain(item) for key, item in value.items()}
        if isinstance(value, list | tuple | range):
            return [self._plain(item) for item in value]
        if isinstance(value, np.ndarray):
            return value.tolist()
        if value is None or isinstance(value, bool | int | bytes):
            return value
        if isinstance(value, Actor):
            return value.name
        if isinstance(value, Buffer):
            return "buffer"
        names = getattr(value, "__slots__", None) or vars(value)
        return type(value).__name__, {name: self._plain(getattr(value, name)) for name in names}

    def _text(self, text: str) -> str:
        if not text.startswith(str(self.root)):
            return text
        name = re.sub(r"-[0-9a-f]{16}|\.\d+\.partial", "", str(Path(text).relative_to(self.root)))
        files = [Path(text, file) for file in ("config.json", "tokenizer.json")]
        contents = b"".join(file.read_bytes() for file in files if file.is_file())
        return f"{name} {blake2b(contents, digest_size=8).hexdigest()}"


class Actor:
    """Stands for a spawned actor. Every endpoint called is recorded and answered by the method of its name."""

    def __init__(
        self, trace: Trace, name: str, procs: int, arguments: tuple[Any, ...], options: dict[str, Any]
    ) -> None:
        self.trace = trace
        self.name = name
        self.procs = procs
        self.arguments = arguments
        self.options = options
        self._forge_all: Actor = self
        self._forge_pids = self._forge_lost = ()
        self._forge_named = "no process"
        self.version_had = 0

    def __getattr__(self, endpoint: str) -> Endpoint:
        return Endpoint(self, endpoint)

    def slice(self, **dims: int | slice) -> Actor:
        return self

    def end(self) -> None:
        """Its processes are stopped."""

    async def do_ended(self) -> None:
        await asyncio.Event().wait()

    async def do_checksums(self, *published: Any) -> Any:
        """Of a trainer, or, asked with where weights lie, of a generator: as if all weights of a version were that."""
        from trainers.weights.checksum import Served  # imports torch

        held = self.version_had
        return Served(held, {"w": held} if published[0] else None, held, whole=True) if published else {"w": held}

    async def do_fingerprint(self) -> Fingerprint:
        return Fingerprint(0.0, 0.0, 0, {"w": 0}, {"w": self.version_had})

    async def answer(self, endpoint: str, *args: Any, **kwargs: Any) -> Any:
        """What the endpoint returns; most return nothing."""
        answer = getattr(type(self), f"do_{endpoint}", None)
        found = None if answer is None else await answer(self, *args, **kwargs)
        if endpoint in ("begin_push", "update_weights"):
            self.version_had = args[0]
        return found


NAMES_LAST = {"generate": 2, "abort": 0, "withdraw": 0}
"""Endpoints whose arguments from this one on are names of calls, which are random."""


class Endpoint:
    """`actor.ENDPOINT` with Monarch's ways to call it."""

    def __init__(self, actor: Actor, name: str) -> None:
        self._actor = actor
        self._name = name

    def call_one(self, *args: Any, **kwargs: Any) -> asyncio.Future[Any]:
        named = {key: value for key, value in kwargs.items() if key != "call"}
        shown = args[: NAMES_LAST.get(self._name)]
        self._actor.trace.add(f"{self._actor.name}.{self._name}", shown, named)
        return asyncio.ensure_future(self._actor.answer(self._name, *args, **kwargs))

    broadcast = call_one

    def call(self, *args: Any, **kwargs: Any) -> asyncio.Future[Any]:
        work = self.call_one(*args, **kwargs)

        async def by_rank() -> dict[int, Any]:
            value = await work
            return dict.fromkeys(range(self._actor.procs), value)

        return asyncio.ensure_future(by_rank())


class TitanTrainer(Actor):
    """Trains in a second, publishes in a third of one."""

    async def do_train(self, sequences: Sequence[Any]) -> dict[str, float]:
        await asyncio.sleep(1.0)
        return {"loss": sum(int(sequence.token_ids.sum()) for sequence in sequences), "tokens_per_s": 100.0}

    async def do_train_on(self, buffer: Buffer, step: int) -> dict[str, float]:
        sizes = await buffer.batch_sizes(step, "segments")
        await asyncio.sleep(1.0)
        sequences = await buffer.sequences(step, sizes.numbers.tolist())
        total = sum(float(sequence.advantages.sum()) * int(sequence.token_ids.sum()) for sequence in sequences)
        reference = sum(
            float(sequence.ref_logprobs.sum()) for sequence in sequences if sequence.ref_logprobs is not None
        )
        audited = {f"{AUDIT}{name}": float(value) for name, value in asdict(audit(sequences)).items()}
        return {"loss": total / 1000 + reference, "entropy": 1.0, "tokens_per_s": 100.0, **audited}

    async def do_logprobs(self, sequences: Sequence[Any]) -> list[Any]:
        return [np.full(int(sequence.mask[1:].sum()), -1.0, np.float32) for sequence in sequences]

    async def do_begin_push(self, version: int) -> tuple[Any, dict[str, float]]:
        return f"location of version {version}", {"snapshot_s": 0.0, "push_s": 0.0, "bytes": 8.0}

    async def do_uploaded(self) -> dict[str, float]:
        await asyncio.sleep(0.3)
        return {"push_s": 0.3}

    async def do_begin_save(self, folder: str) -> dict[str, float]:
        await self.do_save_model(str(Path(folder) / "model"))
        return {"snapshot_s": 0.0}

    async def do_saved(self) -> dict[str, float]:
        await asyncio.sleep(0.2)
        return {"write_s": 0.2}

    async def do_save_model(self, folder: str, dtype: str = "float32") -> None:
        shutil.copytree(self.arguments[0], folder)
        add_weights(Path(folder))


class Generator(Actor):
    """Samples whatever comes to its mind, the same for the same requests; every ninth takes a minute."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._version = 0
        self._tokens = 0
        self._places = asyncio.Semaphore(self.arguments[0]["max_num_seqs"])
        self._asked: Counter[tuple[int, ...]] = Counter()
        self._hold = Hold()

    async def do_hold(self) -> None:
        self._hold.held = True

    async def do_release(self) -> None:
        self._hold.held = False

    async def do_generate(
        self, prompt_ids: Any, options: SamplingOptions, request_id: str, held: bool, at_least: int
    ) -> Completion:
        self._hold.check(self._version, held=held, at_least=at_least)
        async with self._places:
            return await self._sample(prompt_ids, options)

    async def _sample(self, prompt_ids: Any, options: SamplingOptions) -> Completion:
        prompt = tuple(prompt_ids.tolist())
        self._asked[prompt] += 1
        rng = random.Random(f"{prompt} {self._version} {self._asked[prompt]}")
        count = min(options.max_tokens, rng.randrange(4, 16))
        ids = [rng.randrange(20, 260) for _ in range(count)]
        first = self._version
        place = sum(self._asked.values()) % 9
        await asyncio.sleep({6: 60.0, 2: 3.0, 7: 3.0}.get(place, 0.05 * count))
        self._tokens += count
        versions = sorted([first] * (count // 2) + [self._version] * (count - count // 2))
        completion = Completion(prompt_ids, ids, [-1.0] * count, versions, "stop", self._version)
        completion.receipt = receipt(completion.prompt_ids, completion.token_ids, completion.logprobs)
        return completion

    async def do_update_weights(self, version: int, published: Any) -> dict[str, float]:
        await asyncio.sleep(0.1)
        self._version = version
        return {"pull_s": 0.1, "stall_s": 0.0}

    async def do_get_stats(self) -> dict[str, float]:
        return {"tokens": float(self._tokens), "in_flight": 0.0}


class ReferenceModel(Actor):
    """Finds everything equally likely."""

    async def do_score(self, buffer: Buffer, step: int, computed: Computed) -> None:
        sizes = await buffer.batch_sizes(step, computed)
        found = zip(sizes.numbers.tolist(), sizes.targets.tolist(), strict=True)
        await buffer.set_reference(step, {number: np.full(count, -1, np.float32) for number, count in found})

    async def do_get_account(self) -> tuple[dict[str, float], list[tuple[str, float, float]], Reading]:
        return {"wait for calls": asyncio.get_running_loop().time()}, [], read_clock()


class RolloutWorker(Actor):
    """The real one, in this process. How it was made is not part of the trace."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._worker, self._calls = LocalWorker(*self.arguments), Calls()

    async def answer(self, endpoint: str, *args: Any, call: str = "", **kwargs: Any) -> Any:
        if endpoint == "withdraw":
            return self._calls.withdraw(*args)
        if endpoint in methods_of(LocalWorker):
            return await self._calls.until_withdrawn(call, getattr(self._worker, endpoint)(*args, **kwargs))
        return await super().answer(endpoint, *args, **kwargs)


class ReplayBuffer(Actor):
    """Never asked: `Buffer` plays its part. How it was made is not part of the trace."""


class Buffer(LocalReplayBuffer[Any]):
    """The real buffer, in this process; what it hands out is recorded."""

    def __init__(self, trace: Trace, actor: Actor) -> None:
        super().__init__(*actor.arguments)
        self._trace = trace

    async def reserve(self, curr_policy_version: int) -> Reservation:
        reserved = await super().reserve(curr_policy_version)
        self._trace.add("batch", reserved.indices, reserved.versions)
        return reserved


Actors = Mapping[str, type[Actor]]
STAND_INS: Actors = {
    stand_in.__name__: stand_in for stand_in in (TitanTrainer, Generator, ReferenceModel, RolloutWorker, ReplayBuffer)
}
