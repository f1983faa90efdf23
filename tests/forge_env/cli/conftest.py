"""A recipe in a folder of its own, on a machine where everything works."""

from __future__ import annotations

from pathlib import Path

import pytest

from forge_env import machine
from forge_env.sandbox import engines

RECIPE = """\
environment:
  name: coding_rlvr
method: tests.forge_env.cli.fake_trainer:train
grpo:
  steps: 3
"""


@pytest.fixture
def recipe(tmp_path: Path, clean_environ: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    clean_environ.chdir(tmp_path)
    clean_environ.setenv("FORGE_ENV_CACHE", str(tmp_path / "cache"))
    clean_environ.setattr(engines, "available_engines", lambda: {"docker": "no daemon", "local": None})
    clean_environ.setattr("forge_env.sandbox.reap_abandoned", lambda: 0)
    clean_environ.setattr(machine, "free_memory_gb", lambda: 64.0)
    clean_environ.setattr(machine, "free_disk_gb", lambda path: 64.0)
    clean_environ.setattr(machine, "gpus", list)
    return path
