"""The skill for coding agents, followed word for word."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from forge_env.trajectory import Trajectory, read_trajectories
from tests.forge_env.cli.test_cli_environments import install

ROOT = Path(__file__).parents[3]
SKILL = ROOT / "skills" / "write-environment" / "SKILL.md"
BLOCK = re.compile(r"^```(sh|python|yaml)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_the_skill_has_a_name_and_a_description() -> None:
    head = SKILL.read_text().split("---")[1]
    assert re.search(rf"^name: {SKILL.parent.name}$", head, re.MULTILINE)
    assert 50 < len(re.findall(r"^description: (.+)$", head, re.MULTILINE)[0]) <= 1_024


@pytest.mark.slow
def test_an_agent_that_follows_the_skill_gets_a_sound_environment(tmp_path: Path) -> None:
    folder, site, printed = tmp_path, tmp_path / "site", ""
    bin_folder = str(Path(sys.executable).parent)
    environment = {**os.environ, "PATH": os.pathsep.join([bin_folder, os.environ["PATH"]]), "COLUMNS": "120"}
    for kind, text in BLOCK.findall(SKILL.read_text()):
        if kind != "sh":  # the first line names the file
            path, _, content = text.removeprefix("# ").partition("\n")
            (folder / path).write_text(content)
            continue
        for command in text.splitlines():
            if command.startswith("cd "):
                folder = folder / command.removeprefix("cd ")
            elif command == "pip install -e .":
                install(folder, site)
                environment["PYTHONPATH"] = os.pathsep.join([str(site), str(folder / "src")])
            else:
                ran = subprocess.run(
                    ["bash", "-c", command], cwd=folder, env=environment, capture_output=True, text=True, check=False
                )
                assert ran.returncode == 0, f"{command}\n{ran.stdout}{ran.stderr}"
                printed += ran.stdout
    assert "stock_room: no check failed; not checked: hidden data" in printed
    assert [{one.reward for one in _episodes(folder / name)} for name in ("gold", "empty")] == [{1.0}, {0.0}]
    assert _episodes(folder / "gold")[0].scores["correct"]["explanation"].startswith("the total is ")


def _episodes(folder: Path) -> list[Trajectory]:
    files = [path for path in folder.rglob("*.jsonl") if "index" not in path.name and "traject" in str(path)]
    return [episode for path in files for episode in read_trajectories(path)]
