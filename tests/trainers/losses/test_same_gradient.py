"""One recorded batch as TRL's and verl's trainers compute it, and as ours does: each stage, to the model's gradient.

Rendering, mask and advantages are those of each trainer's own code; the model is the same, in float64. verl's functions
are cut from its package, and get the log-probs that ours compute.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from forge_env.config.recipe import LossSection, ModelSection
from forge_env.integrations.trl import Rollouts
from forge_env.registry import make
from forge_env.rollout.episode import run_episode
from forge_env.trajectory import Segment
from tests.forge_env.integrations.gold import MODEL, GoldModel
from tests.trainers.losses.test_losses_peers import Config, cut
from trainers.algorithms.parts import AdvantageEstimator, GroupMean, GroupNormalized, token_advantages
from trainers.generator.policy import GeneratorPolicy
from trainers.generator.types import Completion
from trainers.losses.load import make_loss
from trainers.losses.types import TokenBatch
from trainers.model.chat import Chat
from trainers.rollout.types import Group
from trainers.titan.batch import collate

torch = pytest.importorskip("torch")
trl = pytest.importorskip("trl")
transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore")]
CPU = torch.device("cpu")
TASKS, MEMBERS = (0, 2), 4
"""The tasks of the batch, whose gold the scripted model knows, and the episodes of each."""
LIMIT = 1e-6
"""Largest difference of two equal gradients."""
ROUNDING = 1e-5
"""Largest such difference if the log-probs are computed twice: TRL's kernel computes them in float32."""
LOGPROBS = 5e-5
"""Largest difference of two log-probs of the same token."""
DIFFERENT = 1e-3
"""Smallest such difference of two gradients that differ."""


class Scripted(GoldModel):
    """Solves the task, or not."""

    solves = True

    def text(self, conversation: str) -> str:
        return super().text(conversation) if self.solves else "#### -1"


def solves(task: int, member: int) -> bool:
    """One episode of the first group is right, and two of the second."""
    return member <= TASKS.index(task)


class Recorded:
    """The batch: episodes with exact tokens and log-probs, and the model that is trained."""

    def __init__(self) -> None:
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL)
        self.model = transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float64)
        self.model.config.max_position_embeddings = 2048
        self.scripted = Scripted(self.tokenizer)
        self.groups: list[Group] = []
        self.behavior: Any = None
        """Log-probs of the learned tokens when they were sampled, [N]."""

    async def play(self) -> None:
        """Play the episodes with our policy."""
        chat = Chat.of(MODEL, ModelSection(path=str(MODEL)))
        policy = GeneratorPolicy(chat, self._generate, max_length=2000, max_tokens=200)
        for index in TASKS:
            task = make("calculator").task("train", index)
            group = Group([])
            for member in range(MEMBERS):
                self.scripted.solves = solves(index, member)
                group.episodes.append(await run_episode(lambda: make("calculator"), policy, task=task))
            assert group.rewards.tolist() == [float(solves(index, member)) for member in range(MEMBERS)]
            self.groups.append(group)

    async def _generate(self, prompt_ids: Any, options: Any, conversation: object) -> Completion:
        tokens = self.scripted(prompt_ids.tolist())
        count = len(tokens)
        return Completion(prompt_ids, tokens, np.zeros(count), np.zeros(count), "stop", 0)

    def segments(self, estimator: AdvantageEstimator) -> list[Segment]:
        """Our sequences, as if an older policy had sampled them."""
        result = []
        for group in self.groups:
            for episode, weights in zip(group.valid, token_advantages(estimator, group), strict=True):
                [segment] = episode.segments()
                segment.advantages[segment.mask] = weights
                result.append(segment)
        if self.behavior is None:
            with torch.no_grad():
                now = self.logprobs(result)[0]
            self.behavior = now + 0.3 * torch.sin(torch.arange(len(now), dtype=torch.float64))
        counts = [int(segment.mask.sum()) for segment in result]
        for segment, behavior in zip(result, torch.split(self.behavior, counts), strict=True):
            segment.logprobs[segment.mask] = behavior.numpy()
        return result

    def logprobs(self, segments: list[Segment]) -> tuple[Any, Any]:
        """Log-probs of the learned tokens with the model's gradient, [N], and our microbatch."""
        scored = []
        for alone in (collate([segment], CPU) for segment in segments):
            logits = self.model(input_ids=alone.tokens).logits[0, alone.predictors]
            scored.append(logits.log_softmax(-1).gather(1, alone.target_ids[:, None])[:, 0])
        return torch.cat(scored), collate(segments, CPU)

    @contextmanager
    def gradient(self) -> Iterator[list[Any]]:
        """Collects the model's gradient, as one vector, of what is called `backward` inside."""
        self.model.zero_grad()
        result: list[Any] = []
        yield result
        result.append(torch.cat([p.grad.flatten() for p in self.model.parameters() if p.grad is not None]))

    def ours(
        self, segments: list[Segment], name: str, *, logprobs: Callable[[], Any] | None = None, **options: Any
    ) -> Any:
        """The gradient of one of our losses; `logprobs` computes the learned tokens' in place of our trainer, [N]."""
        with self.gradient() as gradient:
            now, batch = self.logprobs(segments) if logprobs is None else (logprobs(), collate(segments, CPU))
            counts = [int(segment.mask.sum()) for segment in segments]
            tokens = TokenBatch(
                logprobs=now,
                entropy=torch.zeros_like(now),
                behavior_logprobs=batch.behavior_logprobs.double(),
                advantages=batch.advantages.double(),
                sequence_ids=torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts)),
                total_tokens=len(now),
                total_sequences=len(counts),
            )
            make_loss(LossSection(name=name, options=options))(tokens).loss.backward()
        return gradient[0]


@pytest.fixture(scope="module")
def recorded() -> Recorded:
    made = Recorded()
    asyncio.run(made.play())
    return made


def difference(ours: Any, theirs: Any) -> float:
    """The norm of the difference of two gradients, relative to that of theirs."""
    return float((ours - theirs).norm() / theirs.norm())


# --- TRL


@lru_cache(maxsize=1)
def trainer_of(recorded: Recorded, folder: Path) -> Any:
    """TRL's trainer, whose rollouts are the recorded ones."""

    def replay(prompts: Any, trainer: Any) -> dict[str, Any]:
        segments = recorded.segments(GroupMean())
        starts = [int(segment.mask.argmax()) for segment in segments]
        pairs = list(zip(segments, starts, strict=True))
        return {
            "prompt_ids": [segment.token_ids[:start].tolist() for segment, start in pairs],
            "completion_ids": [segment.token_ids[start:].tolist() for segment, start in pairs],
            "env_mask": [segment.mask[start:].astype(int).tolist() for segment, start in pairs],
            "logprobs": [segment.logprobs[start:].tolist() for segment, start in pairs],
            "earned": [episode.reward for group in recorded.groups for episode in group.valid],
        }

    args = trl.GRPOConfig(
        output_dir=str(folder),
        per_device_train_batch_size=len(TASKS) * MEMBERS,
        num_generations=MEMBERS,
        max_completion_length=400,
        max_steps=1,
        use_cpu=True,
        bf16=False,
        report_to="none",
        epsilon_high=0.28,
    )
    rows = [{"prompt": [{"role": "user", "content": str(index)}]} for index in TASKS for _ in range(MEMBERS)]
    from datasets import Dataset

    trainer = trl.GRPOTrainer(
        recorded.model,
        lambda earned, **_: earned,
        args,
        train_dataset=Dataset.from_list(rows),
        processing_class=recorded.tokenizer,
        rollout_func=replay,
    )
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    trainer.rows = rows
    return trainer


def trl_batch(trainer: Any, scale: str) -> dict[str, Any]:
    """The batch as TRL makes it of the rollouts; the sampling policy's log-probs are the recorded ones."""
    trainer.scale_rewards = scale
    batch: dict[str, Any] = trainer._generate_and_score_completions(trainer.rows)
    return {**batch, "old_per_token_logps": batch["sampling_per_token_logps"].double()}


def trl_logprobs(trainer: Any, batch: dict[str, Any]) -> Any:
    """Log-probs of the learned tokens as TRL computes them, [N]."""
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    width = batch["completion_ids"].shape[1]
    rows = trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, width)[0]
    return rows[(batch["completion_mask"] * batch["tool_mask"]).bool()].double()


def trl_gradient(recorded: Recorded, trainer: Any, loss: str, batch: dict[str, Any]) -> Any:
    trainer.loss_type = loss
    with recorded.gradient() as gradient:
        trainer._compute_loss(trainer.model, batch).backward()
    return gradient[0]


def test_trl_renders_and_masks_the_same_tokens(recorded: Recorded) -> None:
    """Its rollout through our adapter, with the template of the model's folder, against ours."""
    trainer = SimpleNamespace(
        processing_class=recorded.tokenizer,
        _tokenizer=recorded.tokenizer,
        chat_template_kwargs={},
        eos_token_ids=[recorded.tokenizer.eos_token_id],
        max_completion_length=1000,
        use_vllm=False,
    )
    for task, group in zip(TASKS, recorded.groups, strict=True):
        for member, episode in enumerate(group.valid):
            recorded.scripted.solves = solves(task, member)
            trainer._generate_single_turn = lambda ids, *_: ([recorded.scripted(each) for each in ids], None)
            rollout = Rollouts("calculator")([[{"role": "user", "content": f"train/{task}"}]], trainer)
            [segment] = episode.segments()
            assert rollout["prompt_ids"][0] + rollout["completion_ids"][0] == segment.token_ids.tolist()
            assert [0] * len(rollout["prompt_ids"][0]) + rollout["env_mask"][0] == segment.mask.astype(int).tolist()
            assert rollout["episode_reward"] == [episode.reward]


SAME: dict[str, tuple[str, dict[str, Any]]] = {
    "dapo": ("grpo", {}),
    "grpo": ("grpo", {"aggregation": "sequence"}),
    "bnpo": ("grpo", {}),
    "dr_grpo": ("dr_grpo", {"clip_high": 0.28, "horizon": 400.0}),
}
"""TRL's `loss_type` -> our loss with its options."""


@pytest.mark.parametrize("loss", SAME)
def test_trls_gradient_is_ours(recorded: Recorded, loss: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    trainer = trainer_of(recorded, tmp_path_factory.getbasetemp())
    batch = trl_batch(trainer, "none")
    segments = recorded.segments(GroupMean())
    theirs = trl_gradient(recorded, trainer, loss, batch)
    assert batch["advantages"].tolist() == pytest.approx([s.advantages[s.mask][0] for s in segments], abs=1e-7)
    name, options = SAME[loss]
    same_logprobs = recorded.ours(segments, name, logprobs=lambda: trl_logprobs(trainer, batch), **options)
    assert difference(same_logprobs, theirs) < LIMIT
    assert difference(recorded.ours(segments, name, **options), theirs) < ROUNDING


def test_trls_logprobs_are_ours(recorded: Recorded, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Their prompts are padded on the left, ours are not padded."""
    trainer = trainer_of(recorded, tmp_path_factory.getbasetemp())
    theirs = trl_logprobs(trainer, trl_batch(trainer, "none"))
    assert (recorded.logprobs(recorded.segments(GroupMean()))[0] - theirs).abs().max() < LOGPROBS


def test_trl_normalises_by_another_deviation(recorded: Recorded, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Stage advantage: TRL's standard deviation divides by G - 1, ours by G."""
    trainer = trainer_of(recorded, tmp_path_factory.getbasetemp())
    batch = trl_batch(trainer, "group")
    segments = recorded.segments(GroupNormalized())
    theirs = trl_gradient(recorded, trainer, "dapo", batch)
    assert difference(recorded.ours(segments, "grpo"), theirs) > DIFFERENT
    for segment, advantage in zip(segments, batch["advantages"].tolist(), strict=True):
        segment.advantages[segment.mask] = advantage
    with_theirs = recorded.ours(segments, "grpo", logprobs=lambda: trl_logprobs(trainer, batch))
    assert difference(with_theirs, theirs) < LIMIT


# --- verl


def verl_gradient(recorded: Recorded, segments: list[Segment], mode: str, *, by_deviation: bool) -> tuple[Any, Any]:
    """verl's gradient, and its advantages by row."""
    masked = cut("verl", "utils/torch_functional.py", "masked_sum", "masked_mean")
    known = {"verl_F": masked, "AlgoConfig": (), "ActorConfig": Config, "np": np, "defaultdict": defaultdict}
    names = ("agg_loss", "compute_policy_loss_vanilla", "compute_grpo_outcome_advantage")
    verl = cut("verl", "trainer/ppo/core_algos.py", *names, **known)
    counts = [int(segment.mask.sum()) for segment in segments]
    width = max(counts)

    def rows(flat: Any) -> Any:
        parts = torch.split(flat, counts)
        return torch.stack([torch.nn.functional.pad(part, (0, width - len(part))) for part in parts])

    with recorded.gradient() as gradient:
        now, batch = recorded.logprobs(segments)
        mask = rows(torch.ones_like(now))
        rewards = torch.zeros_like(mask)
        rewards[:, 0] = torch.tensor([episode.reward for group in recorded.groups for episode in group.valid])
        index = np.repeat(np.arange(len(TASKS)), MEMBERS)
        advantages, _ = verl.compute_grpo_outcome_advantage(rewards, mask, index, norm_adv_by_std_in_grpo=by_deviation)
        config = Config(
            clip_ratio=0.2, clip_ratio_low=0.2, clip_ratio_high=0.28, clip_ratio_c=3.0, global_batch_info={}
        )
        loss, _ = verl.compute_policy_loss_vanilla(
            rows(batch.behavior_logprobs.double()), rows(now), advantages, mask, loss_agg_mode=mode, config=config
        )
        loss.backward()
    return gradient[0], advantages[:, 0]


VERL: dict[str, tuple[str, dict[str, Any]]] = {
    "token-mean": ("dapo", {}),
    "seq-mean-token-mean": ("dapo", {"aggregation": "sequence"}),
}
"""verl's `loss_agg_mode` -> our loss with its options."""


@pytest.mark.parametrize("mode", VERL)
def test_verls_gradient_is_ours(recorded: Recorded, mode: str) -> None:
    segments = recorded.segments(GroupMean())
    theirs, advantages = verl_gradient(recorded, segments, mode, by_deviation=False)
    assert advantages.tolist() == pytest.approx([s.advantages[s.mask][0] for s in segments], abs=1e-7)
    name, options = VERL[mode]
    assert difference(recorded.ours(segments, name, **options), theirs) < LIMIT


def test_verl_normalises_by_another_deviation(recorded: Recorded) -> None:
    """Stage advantage, as TRL."""
    segments = recorded.segments(GroupNormalized())
    theirs, advantages = verl_gradient(recorded, segments, "token-mean", by_deviation=True)
    assert difference(recorded.ours(segments, "dapo"), theirs) > DIFFERENT
    for segment, advantage in zip(segments, advantages.tolist(), strict=True):
        segment.advantages[segment.mask] = advantage
    assert difference(recorded.ours(segments, "dapo"), theirs) < LIMIT
