"""Models with the chat templates of other families are trained from end to end."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from forge_env.config.finding import bundled_models
from forge_env.trajectory import read_trajectories
from forge_env.types import Message
from tests.trainers.loop.training import Training
from tests.trainers.model.families import TEMPLATES
from tests.trainers.model.test_template import Transformers

pytestmark = [pytest.mark.stack, pytest.mark.slow, pytest.mark.timeout(600)]
RECIPE: dict[str, Any] = {
    "environment": {"name": "tests.trainers.loop.test_resume:Chatter"},
    "sandbox": {"engine": "local"},
    "model": {"path": "", "max_length": 384},
    "warmup": None,
    "trainer": {"minibatches": 1, "threads": 2},
    "grpo": {"steps": 1, "groups_per_step": 2, "group_size": 4, "max_tokens_per_turn": 16, "max_off_policy_steps": 0},
    "evaluation": {"every": 0, "num_tasks": 4},
    "checkpoint": {"every": 0, "minutes": 0},
    "generator": {"spare": False},
    "logging": {"tensorboard": False},
}
MISTRAL = {"<|endoftext|>": "<s>", "<|im_start|>": "[INST]", "<|im_end|>": "</s>", "<think>": "[/INST]"}


def small_agent(folder: Path, name: str, renamed: dict[str, str]) -> Path:
    """The bundled model with another family's template, and with its control tokens renamed."""
    shutil.copytree(bundled_models()["coding_rlvr_base"], folder)
    shutil.copy(TEMPLATES / f"{name}.jinja", folder / "chat_template.jinja")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        text = (folder / file).read_text()
        for old, new in renamed.items():
            text = text.replace(old, new)
        if "<s>" in text and file == "tokenizer_config.json":
            text = text.replace('"pad_token"', '"bos_token"')
        (folder / file).write_text(text)
    return folder


@pytest.mark.parametrize(("name", "renamed"), [("smollm2", {}), ("qwen2_5", {}), ("mistral_v3", MISTRAL)])
def test_a_model_is_trained_with_the_template_of_its_folder(name: str, renamed: dict[str, str], tmp_path: Path) -> None:
    folder = small_agent(tmp_path / "model", name, renamed)
    training = Training(tmp_path, {**RECIPE, "model": {**RECIPE["model"], "path": str(folder)}})
    assert training.process.wait() == 0, training.said
    assert training.steps == [1]
    theirs = Transformers(folder)
    turns = 0
    played = list(read_trajectories(training.folder / "trajectories" / "train.jsonl"))
    for trajectory in played:
        messages: list[Message] = []
        for turn in trajectory.turns:
            messages += turn.observation
            assert not turn.reply.forked
            if not turn.reply.continues:
                assert turn.reply.prompt_ids.tolist() == theirs.render(messages, [], add_generation_prompt=True)
            messages.append(turn.reply.message)
            turns += 1
    assert turns > len(played) >= 8, "conversations have several turns"
