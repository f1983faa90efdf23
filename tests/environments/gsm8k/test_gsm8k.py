"""Generated problems are right and divided; rows of the dataset score as published."""

from __future__ import annotations

import json
import re
from pathlib import Path
from random import Random

import pytest

import forge_env as fe
from environments.gsm8k import GSM8K, GSM8KConfig
from environments.gsm8k.problems import LEVELS, make_problem
from forge_env.environment.optional import demonstrate
from forge_env.errors import ConfigError
from forge_env.rollout.episode import run_episode
from forge_env.rollout.scripted import GoldPolicy
from forge_env.validation.checks import Validator

ROW = {
    "question": "Natalia sold clips to 48 friends in April and half as many in May. How many in total?",
    "answer": "In May <<48/2=24>>24.\nTogether <<48+24=72>>72.\n#### 72",
}


def test_the_worked_solution_leads_to_the_answer() -> None:
    rng = Random(0)
    for _ in range(300):
        problem = make_problem(rng, rng.choice(LEVELS))
        *workings, last = problem.solution.splitlines()
        assert last == f"#### {problem.answer}"
        assert len(workings) == problem.level
        for before, after in zip(workings, [*workings[1:], None], strict=True):
            left, right = before.split(" = ")
            assert re.fullmatch(r"[\d+\-*/() ]+", left)
            assert eval(left) == int(right)
            assert after is None or re.search(rf"\b{right}\b", after)
        for number in re.findall(r"\d+", problem.question):
            assert number in problem.solution or "percent" in problem.question


def test_no_problem_is_in_both_splits() -> None:
    env = fe.make("gsm8k")
    train, held_out = ({env.task(split, index).prompt for index in range(300)} for split in ("train", "eval"))
    assert not train & held_out
    assert len(train) == len(held_out) == 300
    assert fe.make("gsm8k", seed=1).task("train", 0) != env.task("train", 0)


@pytest.mark.parametrize("levels", [[1], [6], [2, 3]])
def test_levels_are_the_number_of_steps(levels: list[int]) -> None:
    env = fe.make("gsm8k", levels=levels)
    assert {env.task("train", index).difficulty for index in range(40)} == set(levels)


async def test_rows_of_a_file_in_the_datasets_format(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(ROW), encoding="utf-8")

    def make() -> fe.Environment:
        return fe.make("gsm8k", dataset={"path": str(path), "splits": {"train": "rows.jsonl", "eval": "rows.jsonl"}})

    checks = [check async for check in Validator(make).run()]
    assert "failed" not in [check.status for check in checks], checks
    assert make().num_tasks("train") == 1
    trajectory = await run_episode(make, GoldPolicy(), seed=0)
    assert (trajectory.reward, trajectory.metrics["answered"]) == (1.0, 1.0)


def test_the_hubs_name_is_enough() -> None:
    config = GSM8KConfig.model_validate({"dataset": "openai/gsm8k"})
    assert (config.dataset.name, config.dataset.splits) == ("main", {"train": "train", "eval": "test"})
    assert config.dataset.columns["prompt"] == "question"
    streamed = GSM8KConfig.model_validate({"dataset": {"path": "openai/gsm8k", "streaming": True}})
    assert (streamed.dataset.streaming, streamed.dataset.name) == (True, "main")
    assert GSM8KConfig.model_validate({"dataset": "generated"}).dataset is None


def test_a_split_of_the_hubs_dataset() -> None:
    def splits(split: str) -> tuple[str | None, dict[str, str]]:
        found = GSM8KConfig.model_validate({"dataset": {"path": "openai/gsm8k", "split": split}}).dataset
        return found.split, found.splits

    assert splits("train") == (None, {"train": "train", "eval": "test"})  # its own `test` is held out
    assert splits("test") == ("test", {})


async def test_what_is_rewarded() -> None:
    env = GSM8K(GSM8KConfig(partial_credit=0.2))
    task = env.task("train", 0)
    answer = task.data["answer"]
    for text, reward in [(f"#### {answer}", 1.0), (f"It is {answer}.", 0.2), ("#### -1", 0.0), ("", 0.0)]:
        await env.reset(options={"task": task})
        assert (await env.step(text))[1] == reward
    with pytest.raises(ConfigError, match="level"):
        fe.make("gsm8k", levels=[9])


@pytest.mark.parametrize("name", ["gsm8k", "calculator"])
def test_demonstrations_slip_as_often_as_they_are_told_but_never_on_held_out_tasks(name: str) -> None:
    def right(slip: float, split: str) -> int:
        env = fe.make(name, demo_slip=slip)
        tasks = [env.task(split, index) for index in range(100)]
        answers = [(demonstrate(env, task, Random(index)) or [])[-1].content for index, task in enumerate(tasks)]
        return sum(answer.endswith(f"#### {task.data['answer']}") for answer, task in zip(answers, tasks, strict=True))

    assert right(0.0, "train") == right(1.0, "eval") == 100
    assert right(1.0, "train") < 10
    assert 20 < right(0.5, "train") < 80
