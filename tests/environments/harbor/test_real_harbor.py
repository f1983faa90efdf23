"""Against the real Harbor: `harbor run` and `harbor:FOLDER` give the same rewards to the same tasks."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import docker
import pytest

import forge_env as fe
from forge_env.rollout.episode import run_episode
from forge_env.rollout.scripted import GoldPolicy, ReplayPolicy
from forge_env.sandbox import SandboxEngine
from forge_env.sandbox.dockerfile import with_base
from sandboxes.images.build import ensure_image
from tests.sandboxes.conftest import engine_fixture

WHY = "NOT RUN: harbor is not installed (`make conformance` makes an environment for it)"
mappers = pytest.importorskip("harbor.mappers.terminal_bench", reason=WHY)
pytestmark = [pytest.mark.docker, pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.asyncio(loop_scope="module")]
HERE = Path(__file__).parent
NEW, OLD = ("greeting", "repair", "tool_at_home"), "old_sum"


engine = engine_fixture("docker", concurrency=1, warm=0)


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tasks over an image that is here, the older one converted by Harbor itself."""
    top = tmp_path_factory.mktemp("tasks")
    for name in NEW:
        shutil.copytree(HERE / "tasks" / name, top / name)
    old = tmp_path_factory.mktemp("old")
    shutil.copytree(HERE / "tasks" / OLD, old / OLD)
    assert not mappers.TerminalBenchMapper().map(old, top).failed
    with closing(docker.from_env()) as client:
        ensure_image(client)
        base = next(tag for image in client.images.list("forge-env/base") for tag in image.tags)
    for path in top.glob("*/environment/Dockerfile"):
        path.write_text(with_base(path.read_text(), base))
    return top


def harbors_rewards(tasks: Path, agent: str, folder: Path) -> dict[str, float]:
    """What `harbor run` gives each task."""
    for part in ("files", "docker/cli-plugins"):
        (folder / part).mkdir(parents=True)
    plugin = folder / "docker/cli-plugins/docker-compose"
    plugin.write_text(f'#!/bin/sh\nexec {shlex.join([sys.executable, str(HERE / "compose.py")])} "$@"\n')
    plugin.chmod(0o755)
    given = {"DOCKER_CONFIG": str(folder / "docker"), "COMPOSE_FILES": str(folder / "files"), "HOME": str(folder)}
    command = [str(Path(sys.executable).with_name("harbor")), "run", "-p", str(tasks), "-a", agent, "-e", "docker"]
    done = subprocess.run(
        [*command, "--jobs-dir", str(folder / "jobs"), "-n", "1", "-y"],
        env={**os.environ, **given, "LITELLM_LOCAL_MODEL_COST_MAP": "true"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    trials = [path for path in (folder / "jobs").glob("*/*") if path.is_dir()]
    assert len(trials) == len(NEW) + 1, done.stdout
    rewards = {}
    for trial in trials:
        name, _, _ = trial.name.rpartition("__")
        said = (trial / "verifier/reward.txt") if name != "repair" else (trial / "verifier/reward.json")
        rewards[name] = float(said.read_text() if name != "repair" else said.read_text().split(":")[1].split(",")[0])
    return rewards


@pytest.mark.parametrize("agent", ["oracle", "nop"])
async def test_both_give_the_same(agent: str, tasks: Path, engine: SandboxEngine, tmp_path: Path) -> None:
    theirs = harbors_rewards(tasks, agent, tmp_path)

    def make() -> fe.Environment:
        return fe.make(f"harbor:{tasks}", writable=["/data"], sandboxes=engine)

    ours = {}
    for index in range(len(NEW) + 1):
        task = make().task("train", index)
        policy = GoldPolicy() if agent == "oracle" else ReplayPolicy(["Done."])
        episode = await run_episode(make, policy, task=task)
        assert episode.valid, episode.error
        ours[task.id] = episode.reward
    assert ours == theirs
    assert set(ours.values()) == ({1.0} if agent == "oracle" else {0.0})
