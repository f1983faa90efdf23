"""Supervised fine-tuning: what is learned and when, what is left out, what an interruption changes: nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import forge_env as fe
from forge_env.config import RunConfig, load_config
from forge_env.config.finding import bundled_recipes
from forge_env.errors import UsageError, root_cause
from forge_env.job.needs import needed_memory
from forge_env.run import Run, RunFolder
from forge_env.run.metrics import open_loggers, read_metrics
from forge_env.tasks.order import TaskOrder
from tests.trainers.buffer import virtual_time
from tests.trainers.loop.dry_run import stand_ins
from tests.trainers.loop.stand_ins import STAND_INS, TitanTrainer, Trace
from trainers.algorithms.sft import Conversations, check_idle, play, train

pytestmark = pytest.mark.stack
ROWS = 11
SMALL = {
    "sft.steps": 6,
    "sft.batch_size": 3,
    "evaluation.every": 2,
    "evaluation.num_tasks": 2,
    "logging.tensorboard": False,
    "model.tiny.vocab_size": 320,
}


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """A recipe on a file of conversations, one of which is long."""
    numbers = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "long " * 400]
    rows = [{"question": f"Say {word}, please.", "answer": f"It is {word}."} for word in numbers]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "held_out.jsonl").write_text(json.dumps({"question": "Say zero.", "answer": "It is zero."}))
    dataset = {
        "path": str(tmp_path / "rows.jsonl"),
        "splits": {"train": "rows.jsonl", "eval": "held_out.jsonl"},
        "columns": {"prompt": "question", "gold": "answer"},
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(json.dumps({"method": "sft", "dataset": dataset}))
    return path


def config_of(recipe: Path, changes: Mapping[str, Any] = {}) -> RunConfig:
    folders = {"model.cache_dir": str(recipe.parent / "cache"), "output_dir": str(recipe.parent / "runs")}
    return load_config(
        str(recipe), [f"{key}={json.dumps(value)}" for key, value in {**SMALL, **folders, **changes}.items()]
    )


class Learner(TitanTrainer):
    """Remembers what it learned, by step; asks the run to stop after some."""

    learned: list[list[list[int]]] = []
    stop_after = 0
    run: Run

    async def do_train(self, sequences: Any) -> dict[str, float]:
        Learner.learned.append([sequence.token_ids.tolist() for sequence in sequences])
        if len(Learner.learned) == Learner.stop_after:
            Learner.run.request_stop()
        return await super().do_train(sequences)


def learn(config: RunConfig, name: str, *, resume: bool = False, stop_after: int = 0) -> tuple[list[Any], Run]:
    """What each step of a session learned."""
    Learner.learned, Learner.stop_after = [], stop_after
    folder = RunFolder(Path(config.output_dir) / name)
    folder.create()
    run = Learner.run = Run(config, folder, resume=resume, loggers=open_loggers(config, folder, lambda: 0.0))
    try:
        with stand_ins(Trace(Path(config.output_dir)), {**STAND_INS, "TitanTrainer": Learner}):
            virtual_time.run(play(run))
    finally:
        run.close()
        folder.release()
    return Learner.learned, run


def test_every_row_is_learned_once_an_epoch_and_those_too_long_are_counted(recipe: Path) -> None:
    config = config_of(recipe)
    train.check(config)
    steps, run = learn(config, "whole")
    rows = [tuple(row) for step in steps for row in step]
    assert len(steps) == 6
    assert len(set(rows[:10])) == 10  # the eleventh is too long
    assert len(set(rows)) == 10
    last = list(read_metrics(run.folder.metrics))
    assert [row["sft/left_out"] for row in last if "sft/left_out" in row][-1] == 2.0
    assert [row["eval/eval/loss"] for row in last if "eval/eval/loss" in row] == [1.0] * 4
    assert (run.folder.root / "model" / "model.safetensors").is_file()
    assert set(needed_memory(config)) == {"controller", "trainer", "left free"}


def test_held_out_conversations_are_read_some_at_a_time(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them were read at once, and kept: a million, or without end."""
    rows = [{"question": f"Say {word}.", "answer": f"It is {word}."} for word in "abcdefg"]
    (recipe.parent / "held_out.jsonl").write_text("\n".join(map(json.dumps, rows)))
    config = config_of(recipe, {"evaluation.num_tasks": 100_000_000, "sft.steps": 2})
    sizes: list[int] = []

    async def logprobs(self: Learner, sequences: Any) -> Any:
        sizes.append(len(sequences))
        return await before(self, sequences)

    before = Learner.do_logprobs
    monkeypatch.setattr(Learner, "do_logprobs", logprobs)
    monkeypatch.setattr("trainers.algorithms.sft.HELD_OUT_WINDOW", 3)
    _, run = learn(config, "windows")
    assert sizes[:3] == [3, 3, 1]
    assert max(sizes) == 3
    scored = [row for row in read_metrics(run.folder.metrics) if "eval/eval/n" in row]
    assert [row["eval/eval/n"] for row in scored] == [7.0] * len(scored)


def test_a_resumed_run_reads_on_where_it_was(recipe: Path) -> None:
    config = config_of(recipe)
    whole, _ = learn(config, "whole")
    first, _ = learn(config, "parts", stop_after=3)
    second, run = learn(config, "parts", resume=True)
    assert [*first, *second] == whole
    assert (len(first), run.state.step) == (3, 6)


def test_no_bundled_recipe_has_keys_that_sft_does_not_use() -> None:
    recipes = [config for config in map(load_config, bundled_recipes()) if config.method == "sft"]
    assert len(recipes) > 2
    for config in recipes:
        check_idle(config)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"grpo.steps": 3}, "grpo is not used by method=sft"),
        ({"evaluation.temperature": 0.5}, "evaluation.temperature is not used"),
        ({"tasks.order": "curriculum"}, "tasks.order=curriculum is not used"),
        ({"lora": {}}, "random weights, which adapters would not train"),
        (
            {"dataset.columns": {"prompt": "query"}},
            "has no column 'query'",
        ),
        ({"environment.options.dataset.columns": {"prompt": "question"}}, "there is no answer to learn"),
    ],
)
def test_what_is_refused(recipe: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError) as caught:
        train.check(config_of(recipe, changes))
    assert said in f"{caught.value.message} -> {caught.value.fix}"


def test_an_environment_without_demonstrations() -> None:
    environment = {"name": "gymnasium", "options": {"env_id": "FrozenLake-v1"}}  # nobody knows its gold actions
    config = RunConfig.model_validate({"method": "sft", "environment": environment})
    with pytest.raises(UsageError, match="gives no demonstrations"):
        train.check(config)


def test_nothing_fits(recipe: Path) -> None:
    with pytest.raises(BaseExceptionGroup) as caught:
        learn(config_of(recipe, {"model.max_length": 12}), "short")
    assert "no conversation of split 'eval' fits into model.max_length=12" in str(root_cause(caught.value))


class Written:
    """A chat format that gives prepared sequences."""

    def __init__(self, sequences: list[tuple[list[int], list[bool]]]) -> None:
        self.sequences = sequences

    def render_training(self, messages: Any, tools: Any) -> list[tuple[list[int], list[bool]]]:
        return self.sequences


def written(sequences: list[tuple[list[int], list[bool]]]) -> Conversations:
    environment = fe.make("cards")
    return Conversations(environment, Written(sequences), "train", TaskOrder(None), 4, 0)


def test_a_batch_counts_conversations_of_which_a_template_makes_several_sequences() -> None:
    short, other, long = ([1, 2], [False, True]), ([1, 2, 3], [False, True, False]), ([1] * 5, [True] * 5)
    batch = written([short, other, long]).batch(0, 3)
    assert [segment.token_ids.tolist() for segment in batch.segments] == [[1, 2], [1, 2, 3]] * 3
    assert (batch.end, batch.left_out) == (3, 0)


@pytest.mark.parametrize(
    ("sequence", "text", "fix"),
    [
        (([1] * 5, [True] * 5), "longer than model.max_length=4", "raise model.max_length"),
        (([1, 2], [False, False]), "no turn of the assistant", "model.renderer"),
    ],
)
def test_reason_for_no_conversations_is_named(sequence: tuple[list[int], list[bool]], text: str, fix: str) -> None:
    with pytest.raises(UsageError, match=text) as refused:
        written([sequence]).batch(0, 1)
    assert fix in (refused.value.fix or "")
