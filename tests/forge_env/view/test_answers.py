"""What limited the speed: who is busy while the others wait, and keys to turn that exist."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from forge_env.config import RunConfig
from forge_env.config.evaluation import EvaluationConfig
from forge_env.policy import Reply
from forge_env.trajectory import Trajectory, TrajectoryWriter, Turn
from forge_env.types import Message
from forge_env.view.answers import limit, sample_limit
from forge_env.view.runs import RunView

WAITS = {"time/trainer/wait for episodes": 6.0, "time/trainer/train": 4.0}
BUSY = {"time/generator/generate": 8.0, "time/generator/wait for requests": 2.0}
IDLE = {"time/generator/generate": 3.0, "time/generator/wait for requests": 7.0}


@pytest.mark.parametrize(
    ("times", "said", "key"),
    [
        (WAITS | BUSY, "Bottleneck: sampling", "generator.num_replicas"),
        (
            WAITS | BUSY | {"time/episodes/environment": 8.3, "time/episodes/generate": 1.7},
            "Bottleneck: tools and sandboxes",
            "sandbox.concurrency",
        ),
        (
            WAITS | IDLE | {"time/episodes/environment": 6.0, "time/episodes/generate": 4.0},
            "Bottleneck: tools and sandboxes",
            "sandbox.concurrency",
        ),
        (
            WAITS | IDLE | {"time/reference/score": 8.0, "time/reference/wait for calls": 2.0},
            "Bottleneck: reference model",
            "grpo.reference.procs",
        ),
        (
            WAITS | IDLE | {"time/episodes/environment": 1.0, "time/episodes/generate": 9.0},
            "too few concurrent episodes",
            "grpo.max_off_policy_steps",
        ),
        (
            WAITS | BUSY | {"time/rollouts0/busy": 9.0, "time/rollouts0/wait": 1.0},
            "Bottleneck: rollout workers",
            "rollouts.workers",
        ),
        ({"time/trainer/train": 9.0, "time/trainer/wait for episodes": 1.0} | BUSY, "80 %", "trainer.procs"),
        (
            {"time/trainer/wait for generators": 9.0, "time/trainer/train": 1.0},
            "Bottleneck: weight transfer",
            "model.dtype",
        ),
        ({"time/trainer/wait for the reference": 9.0} | BUSY, "The reference model", "grpo.reference.procs"),
    ],
)
def test_who_limited_the_speed_is_named_with_keys_to_turn(
    times: dict[str, float], said: str, key: str, tmp_path: Path
) -> None:
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"schema": 1, "step": 1, **times}) + "\n")
    found = limit(RunView(tmp_path))
    assert said in f"{found.words} {found.detail}"
    assert found.advice[0][0] == key
    for name, _ in found.advice:
        model: Any = RunConfig
        for part in name.split("."):
            model = model.model_fields[part].annotation


@pytest.mark.parametrize(
    ("seconds", "waited", "keys"),
    [
        ({"reset_s": 8.0}, 7.0, ["sandbox_options", "max_samples"]),
        ({"step_s": 8.0}, 7.0, ["sandbox_options", "max_samples"]),
        ({"step_s": 8.0}, 1.0, ["max_samples"]),
        ({"generate_s": 8.0}, 7.0, ["concurrency"]),
    ],
)
def test_samples_that_wait_are_not_advised_more_load(
    seconds: dict[str, float], waited: float, keys: list[str], tmp_path: Path
) -> None:
    reset_s = seconds.pop("reset_s", 0.0)
    turn = Turn([], Reply(Message(role="assistant", content="4")), **seconds)
    episode = Trajectory(
        id="0", environment="e", task_id="t", answer="4", turns=[turn], wall_s=9.0, reset_s=reset_s, waited_s=waited
    )
    with TrajectoryWriter(tmp_path / "trajectories" / "eval.jsonl") as writer:
        writer.write(episode)
    run = RunView(tmp_path)
    run.index.update()
    found = sample_limit(run.queries)
    assert [key for key, _ in found.advice] == keys
    assert not any(effect.startswith("more concurrent") for _, effect in found.advice) or waited < 4
    assert "8.0s (89 %)" in found.words
    assert set(keys) <= set(EvaluationConfig.model_fields)
