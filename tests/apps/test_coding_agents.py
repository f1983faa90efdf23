"""Coding agents are trained in one short run, as npm and PyPI ship them.

A small model answers their prompts of up to 22,000 tokens. Each agent's loop runs unchanged in the sandbox. This is a
conformance kit.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from benchmarks.conformance import VENVS
from forge_env.config.recipe import ModelSection, TinyModel
from forge_env.run.metrics import read_metrics
from forge_env.run.trained import read_trained
from forge_env.trajectory import read_trajectories
from tests.forge_env.environment.test_docs_agents import PAGE, code
from tests.forge_env.gateway import test_coding_agents as evaluated
from tests.forge_env.gateway.test_coding_agents import SHELLS
from trainers.model.tiny import hf_config
from trainers.model.tokenizer import save_tokenizer, train_tokenizer

pytestmark = [pytest.mark.docker, pytest.mark.stack, pytest.mark.slow, pytest.mark.timeout(1800)]
NAMES = [*evaluated.NAMES, "mini-swe-agent"]
STEPS = (len(NAMES) + 1) // 2
PACKAGES = (*re.findall(r"mini-swe-agent==\S+", VENVS["programs"].packages), "mcp")
built, engine, agents = evaluated.built, evaluated.engine, evaluated.agents
DOCS = [file.read_text() for file in sorted(PAGE.parents[1].rglob("*.md"))]
VOCABULARY = 8192
MODEL = ModelSection(max_length=32768, tiny=TinyModel(layers=2, dim=64, heads=2, kv_heads=1, hidden_dim=128))
TRAINED = """\
import json
from dataclasses import replace
from pathlib import Path

import forge_env as fe
from coding_agents import Agents

DOCS = Path(__file__).with_name("docs.txt").read_text()
SHELLS = json.loads({shells!r})
NAMES = {names!r}


def written(env):
    replies = [message for message in env.messages if message.role == "assistant"]
    calls = [call.function for message in replies for call in message.tool_calls]
    return sum(len(message.content) for message in replies) + sum(len(call.name + call.arguments) for call in calls)


class Trained(Agents):
    rubric = fe.Rubric(written, [0.001])
    sandbox_spec = replace(Agents.sandbox_spec, image={image!r}, base="python", packages={packages!r})

    def task(self, split, index):
        agent = NAMES[index % len(NAMES)]
        return super().task(split, index).model_copy(update={{"tags": [agent]}})

    def argv(self, task):
        self.config = self.config.model_copy(update={{"agent": task.tags[0]}})
        return super().argv(task)

    def demonstrate(self, task, rng):
        shell, start = rng.choice(sorted(SHELLS)), rng.randrange(len(DOCS) - 1000)
        call = fe.call_tool(shell, **SHELLS[shell])
        prompt = fe.Message(role="user", content=DOCS[start : start + rng.randrange(1000)])
        return [prompt, call if rng.random() < 0.9 else fe.Message(role="assistant", content="Done.")]
"""
"""The page's environment: a task for each agent, a reward for length, calls of the agents' shells to imitate."""
RECIPE: dict[str, Any] = {
    "environment": {"name": "trained:Trained", "options": {"max_turns": 4}},
    "model": {"path": "model", "max_length": MODEL.max_length, "renderer": "qwen3", "cache_dir": "cache"},
    "warmup": {"steps": 150, "batch_size": 16, "optimizer": {"lr": 0.01, "muon_lr": 0.01}},
    "tasks": {"order": "sequential"},
    "sandbox": {"engine": "docker", "concurrency": 2},
    "generator": {"spare": False, "max_num_seqs": 4},
    "trainer": {"microbatch_tokens": MODEL.max_length},
    "grpo": {
        "steps": STEPS,
        "groups_per_step": 2,
        "group_size": 2,
        "max_off_policy_steps": 0,
        "max_tokens_per_turn": 64,
        "group_timeout_s": 900.0,
    },
    "evaluation": {"every": 0, "num_tasks": 1},
    "checkpoint": {"minutes": 0},
}


def write_model(folder: Path) -> None:
    """Write an untrained model whose vocabulary is learned from the documentation; a call of a shell is one token."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    calls = [json.dumps({"name": name, "arguments": arguments}) for name, arguments in SHELLS.items()]
    tokenizer = train_tokenizer(DOCS, [f"\n{call}\n" for call in calls], VOCABULARY)
    config = hf_config(MODEL, VOCABULARY, tokenizer.token_to_id("<|im_end|>"))
    Qwen3ForCausalLM(Qwen3Config(**config)).save_pretrained(folder)
    save_tokenizer(tokenizer, folder)


@pytest.fixture(scope="module")
def run(agents: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the finished run."""
    folder = tmp_path_factory.mktemp("trained")
    write_model(folder / "model")
    image = agents.Agents.sandbox_spec.image
    (folder / "coding_agents.py").write_text(code("agents"))
    (folder / "docs.txt").write_text("\n".join(DOCS))
    source = TRAINED.format(shells=json.dumps(SHELLS), names=NAMES, image=image, packages=PACKAGES)
    (folder / "trained.py").write_text(source)
    (folder / "train.yaml").write_text(yaml.safe_dump(RECIPE))
    command = [sys.executable, "-m", "forge_env", "train", "train.yaml", "--name", "run"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "runs/run"


@pytest.mark.parametrize("name", NAMES)
def test_an_agent_is_trained(name: str, run: Path) -> None:
    """Its group is trained on, with exactly the tokens that were sampled after the agent's whole prompts."""
    trained = {group.group for groups in read_trained(run / "trained.jsonl").steps.values() for group in groups}
    episodes = [each for each in read_trajectories(run / "trajectories/train.jsonl") if each.tags == [name]]
    assert len(episodes) >= 2
    assert {episode.group for episode in episodes} & trained
    for episode in episodes:
        assert episode.valid, episode.error
        assert max(turn.reply.prompt_length for turn in episode.turns) > (8_000 if name in evaluated.NAMES else 800)
        assert all(len(turn.reply.token_ids) == len(turn.reply.logprobs) > 0 for turn in episode.turns)
        assert sum(int(segment.mask.sum()) for segment in episode.segments()) == episode.num_sampled_tokens
        for seat in {turn.seat for turn in episode.turns}:
            first, *later = (turn.reply for turn in episode.turns if turn.seat == seat)
            assert (first.continues, all(reply.continues for reply in later)) == (0, True)


def test_no_episode_is_lost_and_each_step_changes_the_weights(run: Path) -> None:
    steps = [row for row in read_metrics(run / "metrics.jsonl") if "staleness/max" in row]
    assert [row["step"] for row in steps] == [*range(1, STEPS + 1)]
    for row in steps:
        assert (row["episode/invalid"], row["episode/bugs"], row["episode/late"]) == (0, 0, 0)
        assert row["groups/with_signal"] > 0
    clauses = [json.loads(line) for line in (run / "contract.jsonl").read_text().splitlines()]
    verdicts = {each["clause"]: each["verdict"] for each in clauses}
    assert (verdicts["tokens"], verdicts["log-probs"], verdicts["weights"]) == ("holds", "holds", "holds"), clauses
    episodes = read_trajectories(run / "trajectories/train.jsonl")
    assert any(turn.reply.continues for episode in episodes for turn in episode.turns), "an agent goes on"
