"""The tutorial, word for word: what its page prints is a sound environment, and the curve rises."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.stack, pytest.mark.slow, pytest.mark.timeout(600)]
PAGE = (Path(__file__).resolve().parents[2] / "docs" / "tutorial.md").read_text()
(ENVIRONMENT,) = re.findall(r"<!-- tutorial: environment -->\n```python\n(.*?)```", PAGE, re.DOTALL)
(RECIPE,) = re.findall(r"<!-- tutorial: recipe -->\n```yaml\n(.*?)```", PAGE, re.DOTALL)


def forge_env(folder: Path, *words: str) -> str:
    done = subprocess.run([sys.executable, "-m", "forge_env", *words], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_from_a_new_package_to_a_rising_curve(tmp_path: Path, clean_environ: pytest.MonkeyPatch) -> None:
    clean_environ.setenv("FORGE_ENV_CACHE", str(tmp_path / "cache"))
    forge_env(tmp_path, "new", "scale")
    source = tmp_path / "scale" / "src"
    (source / "scale" / "environment.py").write_text(ENVIRONMENT)
    checked = forge_env(source, "validate", "scale:Scale", "--num-tasks", "3")
    assert "scale:Scale: no check failed; not checked: the agent is shown no hidden data" in checked
    (source / "train.yaml").write_text(RECIPE)
    forge_env(source, "train", "train.yaml")
    (run,) = (source / "runs").iterdir()
    summary = json.loads((run / "summary.json").read_text())
    assert summary["heldout_end"] > summary["heldout_start"] + 0.05
    assert summary["episodes_bugs"] == 0
