"""The other apps' recipes for CPUs as they are, sizes aside, on the whole stack."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from trainers.model.folder import check_folder

pytestmark = [pytest.mark.stack, pytest.mark.slow, pytest.mark.timeout(600)]
ROOT = Path(__file__).resolve().parents[2]
SMALL = (
    *("warmup.steps=2", "warmup.batch_size=4", "grpo.steps=2", "grpo.groups_per_step=2", "grpo.group_size=2"),
    *("evaluation.num_tasks=4", "evaluation.every=0", "generator.spare=false"),
)


def run(folder: Path, *arguments: str) -> str:
    """What a command says that is run in a folder."""
    done = subprocess.run([sys.executable, "-m", *arguments], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def rows(folder: Path, key: str) -> list[float]:
    """A metric of a run, step by step."""
    found: list[dict[str, Any]] = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row[key] for row in found if key in row]


def test_a_model_is_fine_tuned_and_teaches_another_that_is_itself(tmp_path: Path) -> None:
    cache = f"model.cache_dir={tmp_path / 'cache'}"
    sizes = ("sft.steps=24", "sft.batch_size=8", "evaluation.num_tasks=16", "evaluation.every=12")
    recipe = str(ROOT / "apps" / "sft" / "math_cpu.yaml")
    said = run(tmp_path, "apps.sft.main", "--config", recipe, "--name", "math_teacher", cache, *sizes)
    assert "Reached training limit (24 steps)" in said
    teacher = tmp_path / "runs" / "math_teacher"
    losses = rows(teacher, "eval/eval/loss")
    assert len(losses) == 3
    assert losses[2] < losses[0] - 1.0
    assert "Traceback" not in (teacher / "run.log").read_text()
    check_folder(teacher / "model", 192)
    itself = ("model.path=runs/math_teacher/model", "warmup=null", "sandbox.engine=local", cache)
    recipe = str(ROOT / "apps" / "distill" / "math_cpu.yaml")
    run(tmp_path, "forge_env", "train", recipe, "--name", "student", *itself, *SMALL[2:])
    divergence = rows(tmp_path / "runs" / "student", "reward/teacher_kl")
    assert len(divergence) == 2
    assert abs(divergence[0]) < 1e-5  # what the teacher says of the student's tokens is what the generator said


@pytest.mark.parametrize(
    ("program", "recipe"),
    [
        (("apps.grpo.main", "--config"), "grpo/math_cpu"),
        (("forge_env", "train"), "self_play/nim_cpu"),
    ],
)
def test_a_recipe_trains(program: tuple[str, ...], recipe: str, tmp_path: Path) -> None:
    file, cache = str(ROOT / "apps" / f"{recipe}.yaml"), f"model.cache_dir={tmp_path / 'cache'}"
    said = run(tmp_path, *program, file, "--name", "run", "sandbox.engine=local", cache, *SMALL)
    assert "Reached training limit (2 steps)" in said
    folder = tmp_path / "runs" / "run"
    assert rows(folder, "eval/eval/oldest_version") == [0, 2], "what both steps learned went to the generators"
    assert "Traceback" not in (folder / "run.log").read_text()
