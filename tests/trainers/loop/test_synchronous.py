"""Asynchrony is one number: at 0 the loop is bitwise the synchronous algorithm, at S no token is older than S."""

from __future__ import annotations

import ast
import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from safetensors.torch import load_file

from forge_env.config import RunConfig
from forge_env.tasks.curriculum import make_order
from forge_env.trajectory import read_trajectories
from trainers.loop.stack import prepare_controller

prepare_controller()

from forge_env.trajectory import Segment  # noqa: E402
from tests.trainers.loop.dry_run import Sums, dry_run, make_config, shade  # noqa: E402
from tests.trainers.loop.stand_ins import STAND_INS, Actor, Buffer, Events  # noqa: E402
from trainers.buffer.sequences import BatchSizes  # noqa: E402
from trainers.generator.types import Completion, SamplingOptions  # noqa: E402
from trainers.losses.load import make_loss  # noqa: E402
from trainers.losses.types import needs  # noqa: E402
from trainers.model.chat import Chat, FolderTokenizer  # noqa: E402
from trainers.titan.batch import collate  # noqa: E402
from trainers.titan.device import use_device  # noqa: E402
from trainers.titan.engine import TitanEngine  # noqa: E402
from trainers.titan.model import TitanModel  # noqa: E402

pytestmark = pytest.mark.stack
STEPS, GROUPS, MEMBERS = 5, 2, 4
RECIPE: dict[str, Any] = {
    "model.tiny": {"layers": 1, "dim": 64, "heads": 2, "kv_heads": 2, "hidden_dim": 96},
    "trainer.optimizer": {"lr": 1e-2, "warmup_steps": 0},
    "trainer.minibatches": 2,
    "grpo.steps": STEPS,
    "grpo.groups_per_step": GROUPS,
    "grpo.group_size": MEMBERS,
    "grpo.max_tokens_per_turn": 8,
    "evaluation": {"every": 0, "num_tasks": 1},
}


def model(folder: str | Path) -> TitanModel:
    return TitanModel(folder, max_length=160, device=use_device(with_gpus=False).torch)


def engine(trained: TitanModel, config: RunConfig) -> TitanEngine:
    section = config.trainer
    return TitanEngine(
        trained,
        section.optimizer,
        device=use_device(with_gpus=False),
        steps=config.grpo.steps,
        microbatch_tokens=section.microbatch_tokens,
        seed=config.seed,
    )


class Sampler:
    """Samples as a function of the prompt, the weights, and how often that prompt was asked with these weights."""

    def __init__(self, folder: str | Path) -> None:
        self.model = model(folder)
        self.version = 0
        self._asked: Counter[tuple[int, tuple[int, ...]]] = Counter()

    def load(self, weights: dict[str, torch.Tensor], version: int) -> None:
        self.model.load_hf(weights)
        self.version = version

    def dice(self, prompt_ids: Sequence[int]) -> random.Random:
        key = self.version, tuple(prompt_ids)
        self._asked[key] += 1
        return random.Random(f"{prompt_ids} {self._asked[key]}")

    @torch.no_grad()
    def token(self, ids: list[int], dice: random.Random) -> tuple[int, float]:
        """The next token and its log-probability."""
        batch = collate([Segment(np.array([*ids, 0]), np.array([False] * len(ids) + [True]))], torch.device("cpu"))
        vocabulary = torch.arange(self.model.config.vocab_size)
        batch.target_ids, batch.predictors = vocabulary, batch.predictors.expand(len(vocabulary))
        logprobs, _ = self.model.score(batch)
        [token] = dice.choices(range(len(logprobs)), logprobs.exp().tolist())
        return token, float(logprobs[token])


class Trainer(Actor):
    """The real engine; an update takes a second, and so does the way to the generators."""

    async def do_setup(self) -> None:
        self._model = model(self.arguments[0])

    async def do_save_model(self, folder: str, dtype: str = "float32") -> None:
        self._model.save_hf(Path(folder))

    async def do_configure(self, optimizer: Any, *, loss: Any, minibatches: int, **options: Any) -> None:
        self._loss, self._minibatches = loss, minibatches
        self._engine = engine(self._model, make_config(RECIPE, self.trace.root))

    async def do_train_on(self, buffer: Buffer, step: int) -> dict[str, float]:
        await asyncio.sleep(1.0)
        sizes = await buffer.batch_sizes(step, needs(self._loss).computed)
        share = self._engine.share(sizes, self._minibatches)
        return self._engine.train_share(share, await buffer.sequences(step, sizes.numbers.tolist()), self._loss)

    async def do_fingerprint(self) -> dict[str, Any]:
        return self._engine.fingerprint()

    async def do_logprobs(self, sequences: Sequence[Segment]) -> list[Any]:
        return self._engine.logprobs(sequences)

    async def do_begin_push(self, version: int) -> tuple[Any, dict[str, float]]:
        return {name: tensor.clone() for name, tensor in self._model.state_dict_hf().items()}, {}

    async def do_begin_save(self, folder: str) -> dict[str, float]:
        self._model.save_hf(Path(folder, "model"))
        return {}

    async def do_saved(self) -> dict[str, float]:
        return {}


class Generator(Actor):
    """A token every tenth of a second, from the weights there are at that moment."""

    async def do_setup(self) -> None:
        self._sampler = Sampler(self.arguments[0]["model"])

    async def do_generate(
        self, prompt_ids: Any, options: SamplingOptions, request_id: str, held: bool, at_least: int
    ) -> Completion:
        prompt = prompt_ids.tolist()
        sampler, dice = self._sampler, self._sampler.dice(prompt)
        ids: list[int] = []
        logprobs: list[float] = []
        versions: list[int] = []
        while len(ids) < options.max_tokens and ids[-1:] not in [[token] for token in options.stop_token_ids]:
            token, logprob = sampler.token(prompt + ids, dice)
            ids.append(token)
            logprobs.append(logprob)
            versions.append(sampler.version)
            await asyncio.sleep(0.1)
        return Completion(prompt_ids, ids, logprobs, versions, "length", 0)

    async def do_update_weights(self, version: int, published: dict[str, torch.Tensor]) -> dict[str, float]:
        await asyncio.sleep(1.0)
        self._sampler.load(published, version)
        self.trace.add("arrived", version)
        return {"pull_s": 0.0, "stall_s": 0.0}

    async def do_get_stats(self) -> dict[str, float]:
        return {"tokens": 0.0}


REAL = {**STAND_INS, "TitanTrainer": Trainer, "Generator": Generator}


def synchronous(config: RunConfig, folder: Path) -> dict[str, torch.Tensor]:
    """The algorithm without any loop around it: sample a batch with the current weights, update them, repeat."""
    environment, chat, loss = Sums(), Chat(FolderTokenizer(folder)), make_loss(config.grpo.loss)
    trained, sampler = model(folder), Sampler(folder)
    trainer, order = engine(trained, config), make_order(config.tasks, environment, "train", seed=config.seed)
    for step in range(STEPS):
        batch: list[Segment] = []
        for position in range(step * GROUPS, (step + 1) * GROUPS):
            task = environment.task("train", order[position])
            prompt, group, rewards = chat.render(environment.prompt(task), []), [], []
            for _ in range(MEMBERS):
                ids, logprobs, dice = list(prompt), [0.0] * len(prompt), sampler.dice(prompt)
                while len(ids) < len(prompt) + 8 and ids[-1:] != chat.stop_token_ids[:1]:
                    token, logprob = sampler.token(ids, dice)
                    ids.append(token)
                    logprobs.append(logprob)
                answer = chat.parse(ids[len(prompt) :], [], prompt).content
                rewards.append(shade(task, answer, environment))
                mask = [place >= len(prompt) for place in range(len(ids))]
                group.append(Segment(np.array(ids), np.array(mask), np.array(logprobs, np.float32)))
            for sequence, reward in zip(group, rewards, strict=True):
                sequence.advantages = sequence.mask * np.float32(reward - sum(rewards) / MEMBERS)
            batch += group
        sizes = BatchSizes.of(batch, "segments")
        trainer.train_share(trainer.share(sizes, config.trainer.minibatches), sizes.pick(batch), loss)
        sampler.load(trained.state_dict_hf(), step + 1)
    return trained.state_dict_hf()


def trained_weights(root: Path) -> dict[str, torch.Tensor]:
    return load_file(root / "runs" / "run" / "checkpoints" / f"step-{STEPS:06d}" / "model" / "model.safetensors")


def ages(root: Path, events: Events) -> list[int]:
    """Of every token trained on: policy updates between the one that sampled it and the one that trains on it."""
    sampled = {
        int(episode.id.split("-")[1]): {version for turn in episode.turns for version in turn.reply.versions.tolist()}
        for episode in read_trajectories(root / "runs" / "run" / "trajectories" / "train.jsonl")
    }
    batches = [ast.literal_eval(details)[0] for _, what, details in events if what == "batch"]
    assert len(batches) == STEPS
    return [step - version for step, indices in enumerate(batches) for index in indices for version in sampled[index]]


def begun_meanwhile(events: Events) -> int:
    """Completions begun between the hand-out of a batch and the arrival of the weights trained on it."""
    handed_out, arrived, count = 0, 0, 0
    for _, what, _ in events:
        handed_out += what == "batch"
        arrived += what == "arrived"
        count += what == "generator0.generate" and handed_out > arrived
    return count


def test_0_is_bitwise_the_synchronous_algorithm(tmp_path: Path) -> None:
    recipe = {**RECIPE, "grpo.max_off_policy_steps": 0}
    events = dry_run(recipe, tmp_path, REAL)
    found, [folder] = trained_weights(tmp_path), (tmp_path / "cache" / "models").iterdir()
    expected, start = synchronous(make_config(recipe, tmp_path), folder), model(folder).state_dict_hf()
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
        assert not torch.equal(start[name], tensor), f"{name} was not trained"
    assert set(ages(tmp_path, events)) == {0}
    assert begun_meanwhile(events) == 0


def test_above_0_rollouts_go_on_and_stay_within_the_bound(tmp_path: Path) -> None:
    events = dry_run({**RECIPE, "grpo.max_off_policy_steps": 2}, tmp_path, REAL)
    assert begun_meanwhile(events) > 0
    assert 0 < max(ages(tmp_path, events)) <= 2
    found, [folder] = trained_weights(tmp_path), (tmp_path / "cache" / "models").iterdir()
    expected = synchronous(make_config(RECIPE, tmp_path), folder)
    assert any(not torch.equal(found[name], tensor) for name, tensor in expected.items())
