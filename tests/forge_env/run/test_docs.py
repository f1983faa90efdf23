"""The programs in docs/running.md run as printed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from forge_env.cli.train import subscribe
from forge_env.config import RunConfig, load_config
from forge_env.run import RunFolder
from forge_env.run.launch import launch

DOCUMENT = (Path(__file__).parents[3] / "docs" / "running.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", DOCUMENT, re.DOTALL)


def test_the_trainer_runs(config: RunConfig, folder: RunFolder) -> None:
    (program,) = blocks("python")
    scope: dict[str, Any] = {}
    exec(program, scope)
    assert launch(config, folder, lambda: scope["train"], subscribe=subscribe).exit == "success"
    assert folder.reward_curve.exists()


def test_the_recipe_loads(tmp_path: Path) -> None:
    (recipe,) = blocks("yaml")
    path = tmp_path / "recipe.yaml"
    path.write_text(recipe)
    assert load_config(str(path)).grpo.steps == 100
