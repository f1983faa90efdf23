"""A recipe and a folder to run in."""

from __future__ import annotations

from pathlib import Path

import pytest

from forge_env.config import RunConfig
from forge_env.run.folder import RunFolder


@pytest.fixture
def config() -> RunConfig:
    return RunConfig.model_validate({"environment": {"name": "coding_rlvr"}})


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path / "runs" / "first")
