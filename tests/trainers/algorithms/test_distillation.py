"""On-policy distillation: the student comes closer to its teacher, on real models, by what it samples itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from forge_env.config import load_config
from forge_env.config.recipe import ModelSection, OptimizerSection, TinyModel
from forge_env.policy import Reply
from forge_env.trajectory import Segment, Trajectory, Turn
from forge_env.types import Message
from trainers.algorithms.distillation import Preferring
from trainers.losses.grpo import GRPOLoss
from trainers.losses.sft import SFTLoss
from trainers.model.tiny import hf_config
from trainers.rollout.types import Group, ScoreFunction
from trainers.titan.device import use_device
from trainers.titan.engine import TitanEngine
from trainers.titan.model import TitanModel

pytestmark = pytest.mark.stack
PROMPT, ANSWERS, VOCABULARY = [1, 2], np.arange(10, 14), 320


def says(token: int) -> Segment:
    return Segment(np.array([*PROMPT, token]), np.array([False, False, True]))


def engine(folder: Path, shares: list[float], rng: np.random.Generator) -> TitanEngine:
    """A model that has learned to answer with these tokens as often."""
    device = use_device(with_gpus=False)
    model = TitanModel(folder, max_length=16, device=device.torch)
    section = OptimizerSection(lr=3e-3, warmup_steps=0, decay_start=1.0)
    made = TitanEngine(model, section, device=device, steps=200, microbatch_tokens=2048)
    for _ in range(60):
        made.train([says(token) for token in rng.choice(ANSWERS, 64, p=shares)], SFTLoss())
    return made


def logprobs(of: TitanEngine) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Of each answer, [4]."""
    return np.concatenate(of.logprobs([says(token) for token in ANSWERS])).astype(np.float64)


def divergence(student: TitanEngine, teacher: TitanEngine) -> float:
    """KL(student | teacher) over the answers, exactly."""
    own, theirs = logprobs(student), logprobs(teacher)
    return float((np.exp(own) * (own - theirs)).sum())


def preferring(score: ScoreFunction) -> Preferring:
    """The algorithm's part in the workers, with a teacher that scores so."""
    return Preferring(load_config("coding_rlvr"), score)


class Rollouts:
    """Groups of answers that the student samples."""

    def __init__(self, student: TitanEngine, rng: np.random.Generator) -> None:
        self._student, self._rng = student, rng

    def group(self) -> Group:
        known = logprobs(self._student)
        drawn = self._rng.choice(4, 16, p=np.exp(known) / np.exp(known).sum())
        return Group([self._episode(int(ANSWERS[place]), float(known[place])) for place in drawn])

    def _episode(self, token: int, logprob: float) -> Trajectory:
        reply = Reply(Message(role="assistant", content="x"), PROMPT, [token], [logprob], [0])
        return Trajectory("e", "t", "t", turns=[Turn([], reply)])


async def test_a_student_comes_closer_to_its_teacher(tmp_path: Path) -> None:
    shape = TinyModel(layers=1, dim=32, heads=2, kv_heads=1, hidden_dim=48, vocab_size=VOCABULARY)
    (tmp_path / "config.json").write_text(json.dumps(hf_config(ModelSection(tiny=shape), VOCABULARY, 2)))
    rng = np.random.default_rng(0)
    student = engine(tmp_path, [0.25, 0.25, 0.25, 0.25], rng)
    teacher = engine(tmp_path, [0.7, 0.1, 0.1, 0.1], rng)

    async def score(segments: list[Segment]) -> Any:
        return teacher.logprobs(segments)

    prefer, rollouts = preferring(score), Rollouts(student, rng)
    before = divergence(student, teacher)
    for _ in range(40):
        groups = [await prefer(rollouts.group()) for _ in range(4)]
        student.train([segment for group in groups if group for segment in group.segments()], GRPOLoss())
    assert before > 0.3
    assert divergence(student, teacher) < 0.2 * before


async def test_the_teacher_is_asked_about_every_sampled_token_and_its_divergence_is_recorded() -> None:
    async def score(segments: list[Segment]) -> Any:
        return [np.array([-1.0] * int(segment.mask.sum()), np.float32) for segment in segments]

    turns = [
        Turn([], Reply(Message(role="assistant"), [1, 2], [3, 4], [-2.0, -4.0], [0, 0])),
        Turn([], Reply(Message(role="assistant"), [5], [6], [-0.5], [1], continues=4)),
    ]
    episode = Trajectory("e", "t", "t", turns=turns, metrics={"solved": 1.0})
    packed = await preferring(score)(Group([episode]))
    [segment] = packed.segments()
    mean = (1.0 + 3.0 - 0.5) / 3
    assert segment.advantages.tolist() == pytest.approx([0, 0, 1.0 - mean, 3.0 - mean, 0, -0.5 - mean], abs=1e-6)
    assert packed.record.metrics["teacher_kl"].tolist() == pytest.approx([-mean])
    assert episode.metrics == {"solved": 1.0}  # it is being written meanwhile
