"""The real stack: Monarch processes, vLLM, TorchTitan and TorchStore, weights swapped while requests are in flight."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import psutil
import pytest
import pytest_asyncio
from numpy.typing import NDArray

pytest.importorskip("torch")

import forge_env as fe
from forge_env.config import RunConfig
from forge_env.config.recipe import (
    EnvironmentSection,
    GeneratorSection,
    LoRASection,
    ModelSection,
    OptimizerSection,
    WeightsSection,
)
from forge_env.errors import GeneratorError
from forge_env.trajectory import Segment
from tests.leftovers import assert_no_shared_memory, shared_memory
from trainers.actors.processes import end_of
from trainers.actors.remote import result
from trainers.generator.pool import GeneratorPool
from trainers.generator.receipt import receipt
from trainers.generator.types import Completion, SamplingOptions
from trainers.loop.stack import Stack, prepare_controller
from trainers.loop.trainer import TrainerHandle
from trainers.losses.sft import SFTLoss
from trainers.model.tiny import build_tiny_folder

pytestmark = [
    pytest.mark.stack,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.asyncio(loop_scope="module"),
]
ALL_WEIGHTS = pytest.mark.parametrize("started", ["all weights"], indirect=True)
BOTH_TRANSPORTS = pytest.mark.parametrize(
    ("started", "engine"),
    [
        ("all weights", "in_process"),
        pytest.param("all weights", "async_llm", marks=pytest.mark.core),
        ("torchstore", "in_process"),
    ],
    indirect=["started"],
)
ADAPTERS = pytest.mark.parametrize("started", ["adapters"], indirect=True)
UPDATES = 24
MISMATCH = 1e-5


def sequence(completion: Completion) -> Segment:
    sampled = len(completion.token_ids)
    ids = np.array([*completion.prompt_ids, *completion.token_ids])
    return Segment(ids, np.arange(len(ids)) >= len(ids) - sampled)


def children() -> set[int]:
    return {process.pid for process in psutil.Process().children(recursive=True)}


@asynccontextmanager
async def nothing_left() -> AsyncIterator[None]:
    """No process that is started inside outlives it, and no shared memory."""
    before, shm = children(), shared_memory()
    yield
    async with asyncio.timeout(30):  # helpers of vLLM's processes end when those have
        await asyncio.gather(*(end_of(pid) for pid in children() - before))
    await asyncio.to_thread(assert_no_shared_memory, shm)


@dataclass(frozen=True)
class Started:
    """A store and a trainer, for one test after another."""

    config: RunConfig
    trainer: TrainerHandle
    model: Path
    """What the trainer begins with."""
    state: Path
    """As the trainer begins."""

    @asynccontextmanager
    async def generators(self, **section: Any) -> AsyncIterator[GeneratorPool]:
        """Generators beside the trainer, both as at the beginning."""
        await self.trainer.load(str(self.state))
        small = {"num_gpu_blocks_override": 1024}  # each process clears its cache as it starts
        generator = GeneratorSection(**section, spare=False, engine_args=small)
        config = self.config.model_copy(update={"generator": generator})
        async with nothing_left(), Stack(config) as stack:
            generators = await stack.start_generators(self.model)
            yield generators
            await generators.halt()


def create_weights(folder: Path) -> None:
    """Write random weights into a checkpoint folder.

    With a trained model, the rounding of float32 alone exceeds `MISMATCH` at a few tokens.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).save_pretrained(folder)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def started(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Started]:
    prepare_controller()
    out, config = tmp_path_factory.mktemp("stack"), RunConfig(environment=EnvironmentSection(name="coding_rlvr"))
    if request.param == "torchstore":
        config = config.model_copy(update={"weights": WeightsSection(transport="torchstore")})
    model = build_tiny_folder(config.model, fe.make("coding_rlvr"), 0, out / "tiny")
    if request.param == "adapters":
        create_weights(model)
        config = config.model_copy(update={"model": ModelSection(path=str(model)), "lora": LoRASection()})
    async with nothing_left(), Stack(config) as stack:
        trainer = await stack.start_trainer(model)
        if request.param != "adapters":
            model = out / "model"
            await trainer.save_model(str(model))
        await trainer.configure(OptimizerSection(lr=1e-2), loss=SFTLoss(), steps=100, microbatch_tokens=4096)
        await (await trainer.begin_save(str(out / "state")))
        yield Started(config, trainer, model, out / "state")


@BOTH_TRANSPORTS
async def test_weights_swapped_in_flight_leave_generator_and_trainer_in_agreement(
    started: Started, engine: Literal["in_process", "async_llm"]
) -> None:
    rng = random.Random(0)
    prompts = [[rng.randrange(10, 300) for _ in range(40)] for _ in range(16)]
    trainer = started.trainer
    async with started.generators(engine=engine, procs=2) as generators:

        async def sample(tokens: int) -> list[Completion]:
            options = SamplingOptions(max_tokens=tokens)
            return await asyncio.gather(*(generators.generate(prompt, options) for prompt in prompts))

        first = await sample(30)
        assert (await mismatches(trainer, first)).max() <= MISMATCH

        updated = asyncio.Event()

        async def sample_until_updated() -> list[Completion]:
            completions: list[Completion] = []
            while not updated.is_set():
                completions += await sample(150)
            return completions

        in_flight = asyncio.ensure_future(sample_until_updated())
        for version in range(1, UPDATES + 1):
            await trainer.train_step([sequence(completion) for completion in first])
            published, _ = await (await trainer.begin_push(version))
            await generators.update_weights(version, published)
        updated.set()
        long = await in_flight
        assert any(len(np.unique(completion.versions)) > 1 for completion in long), (
            "no request was in flight over an update"
        )
        assert all((np.diff(completion.versions) >= 0).all() for completion in long)

        after = await sample(30)
        assert {version for completion in after for version in completion.versions} == {UPDATES}
        assert (await mismatches(trainer, after)).max() <= MISMATCH
        assert_signed([*after, *long])
        [served] = (await generators.checksums(published)).values()
        assert (served.version, served.taken) == (UPDATES, await trainer.checksums())
        assert (served.whole, served.expected) == (False, None), "each process has a part"
        moved = (await mismatches(trainer, first)).max()
        assert moved > 0.1, "the updates changed nothing, so agreement proves nothing"

        # A caller's bad argument is the caller's error, and the generator goes on.
        with pytest.raises(GeneratorError):
            await generators.generate([1] * 10_000, SamplingOptions(max_tokens=5))
        assert len((await generators.generate(prompts[0], SamplingOptions(max_tokens=5))).token_ids) <= 5


@ALL_WEIGHTS
@pytest.mark.parametrize("engine", ["in_process", "async_llm"])
async def test_recomputation_uses_new_policy(started: Started, engine: Literal["in_process", "async_llm"]) -> None:
    trainer = started.trainer
    async with started.generators(engine=engine, recompute_on_update=True) as generators:
        prompts = [[10 + number] * 40 for number in range(8)]
        options = SamplingOptions(max_tokens=240)
        taught = [sequence(Completion(prompt, [7] * 20, [], [], "stop", 0)) for prompt in prompts]
        await trainer.train_step(taught)
        published = await trainer.push_weights(1)
        in_flight = asyncio.ensure_future(asyncio.gather(*(generators.generate(prompt, options) for prompt in prompts)))
        while not (await generators.stats())["tokens"]:
            assert not in_flight.done()
        await generators.update_weights(1, published)
        completions = await in_flight
        versions = np.concatenate([completion.versions for completion in completions])
        assert set(versions) == {0, 1}, "no request was in flight during the update"
        assert (await mismatches(trainer, completions))[versions == 1].max() <= MISMATCH
        assert all((np.diff(completion.versions) >= 0).all() for completion in completions)
        assert_signed(completions)

        # Requests with seeds of their own are sampled alike, whatever is under way beside them; so many prompts are
        # more than one step takes.
        seeded = [([10 + number] * 60, SamplingOptions(max_tokens=16, seed=number)) for number in range(128)]
        together = await asyncio.gather(*(generators.generate(*request) for request in seeded))
        for size in (8, 3, 1):  # to the last bit
            few = []
            for start in range(0, 24, size):
                few += await asyncio.gather(*(generators.generate(*one) for one in seeded[start : start + size]))
            for one, other in zip(few[:24], together, strict=False):
                assert one.token_ids.tolist() == other.token_ids.tolist()
                assert one.logprobs.tolist() == other.logprobs.tolist()
        assert len({tuple(one.token_ids.tolist()) for one in together}) > 100

        # Log-probabilities are of the distribution that is sampled, which of one token is certain of it.
        narrow = await generators.generate(prompts[0], SamplingOptions(max_tokens=20, shaping={"top_k": 1}))
        assert narrow.logprobs.tolist() == [0.0] * len(narrow.token_ids)

        # Weights that are held stay until they are released.
        await trainer.train_step(taught)
        published = await trainer.push_weights(2)
        async with generators.held() as held:
            update = asyncio.ensure_future(generators.update_weights(2, published))
            scored = await asyncio.gather(
                *(held.generate(prompt, SamplingOptions(max_tokens=20)) for prompt in prompts)
            )
            assert not update.done()
            assert {version for completion in scored for version in completion.versions} == {held.version} == {1}
        await update
        assert set((await generators.generate(prompts[0], SamplingOptions(max_tokens=20))).versions) == {2}

        # A cancelled caller's request ends in the engine too.
        call = asyncio.ensure_future(generators.generate(prompts[0], options))
        while not (stats := await generators.stats())["in_flight"]:
            assert not call.done()
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        tokens = stats["tokens"]
        while (stats := await generators.stats())["in_flight"]:
            assert stats["tokens"] < tokens + options.max_tokens, "the request went on to its end"
        assert {"time/generate", "time/wait for requests", "time/load weights"} <= set(stats)

        # Asleep, nothing is sampled, and new weights wait; afterwards requests go on as if nothing had been.
        async def under_way(version: int) -> asyncio.Future[list[Completion]]:
            before = (await generators.stats())["tokens"]
            asked = asyncio.gather(*(generators.generate(prompt, options) for prompt in prompts))
            while (await generators.stats())["tokens"] <= before + 2 * len(prompts):
                assert not asked.done()
            return asked

        asked = await under_way(2)
        async with generators.asleep():
            resting = (await generators.stats())["tokens"]
            assert not asked.done()
        interrupted = await asked
        assert {version for completion in interrupted for version in completion.versions} == {2}
        assert (await mismatches(trainer, interrupted)).max() <= MISMATCH
        asked = await under_way(2)
        async with generators.asleep():
            resting = (await generators.stats())["tokens"]
            await trainer.train_step(taught)
            published = await trainer.push_weights(3)
            update = asyncio.ensure_future(generators.update_weights(3, published))
            later = asyncio.ensure_future(generators.generate(prompts[0], SamplingOptions(max_tokens=20)))
            await mismatches(trainer, interrupted)
            assert (await generators.stats())["tokens"] == resting
            assert not update.done()
            assert not later.done()
        await update
        interrupted = await asked
        versions = np.concatenate([completion.versions for completion in interrupted])
        assert set(versions) == {2, 3}
        assert (await mismatches(trainer, interrupted))[versions == 3].max() <= MISMATCH
        [served] = (await generators.checksums(published)).values()
        assert (served.version, served.taken) == (3, await trainer.checksums())
        assert served.whole
        assert served.expected == served.held
        await later
        stats = await generators.stats()
        assert stats["time/wait for the trainer"] > 0

        # One that is ended by its name gives back what it has sampled.
        actor = generators.replicas[0].actor
        asked = SamplingOptions(max_tokens=options.max_tokens, seed=3)
        ended = asyncio.ensure_future(result(actor.generate.call_one(prompts[0], asked, "mine")))
        while (await generators.stats())["tokens"] <= stats["tokens"]:
            assert not ended.done()
        await result(actor.abort.call_one("mine"))
        partial = replace(await ended, prompt_ids=np.array(prompts[0]))  # whoever asks has them
        assert partial.stop_reason == "abort"
        assert 0 < len(partial.token_ids) == len(partial.logprobs) == len(partial.versions) < options.max_tokens
        assert (await mismatches(trainer, [partial])).max() <= MISMATCH


@ADAPTERS
@pytest.mark.parametrize("engine", ["in_process", "async_llm"])
async def test_only_adapters_travel_to_generators(started: Started, engine: Literal["in_process", "async_llm"]) -> None:
    trainer, folder = started.trainer, started.model
    async with started.generators(engine=engine) as generators:
        rng = random.Random(0)
        prompts = [[rng.randrange(10, 300) for _ in range(40)] for _ in range(8)]

        async def sample() -> list[Completion]:
            options = SamplingOptions(max_tokens=60)
            return await asyncio.gather(*(generators.generate(prompt, options) for prompt in prompts))

        first = await sample()
        [before] = (await generators.checksums()).values()
        updated = asyncio.Event()

        async def sample_until_updated() -> list[Completion]:
            completions: list[Completion] = []
            while not updated.is_set():
                completions += await sample()
            return completions

        in_flight = asyncio.ensure_future(sample_until_updated())
        for version in range(1, 6):
            await trainer.train_step([sequence(completion) for completion in first])
            published, pushed = await (await trainer.begin_push(version))
            await generators.update_weights(version, published)
        updated.set()
        assert any(len(np.unique(completion.versions)) > 1 for completion in await in_flight), (
            "no request was in flight over an update"
        )
        after = await sample()
        [served] = (await generators.checksums(published)).values()
        assert served.taken == await trainer.checksums()
        assert not served.whole, "the engine adds adapters to weights of its own"
        assert served.held != before.held
        assert pushed["bytes"] * 5 < (folder / "model.safetensors").stat().st_size
        assert (await mismatches(trainer, after)).max() <= MISMATCH

        # After one more step the generators are one version behind, and the log-probs of almost all tokens differ.
        await trainer.train_step([sequence(completion) for completion in first])
        assert np.median(await mismatches(trainer, after)) > 1000 * MISMATCH


def assert_signed(completions: list[Completion]) -> None:
    """The generator has signed for what it sampled."""
    for completion in completions:
        assert completion.receipt == receipt(completion.prompt_ids, completion.token_ids, completion.logprobs)


async def mismatches(trainer: TrainerHandle, completions: list[Completion]) -> NDArray[np.float32]:
    """Differences between the trainer's and the generators' log-probs of all sampled tokens."""
    theirs = await trainer.logprobs([sequence(completion) for completion in completions])
    return abs(np.concatenate(theirs) - np.concatenate([completion.logprobs for completion in completions]))
