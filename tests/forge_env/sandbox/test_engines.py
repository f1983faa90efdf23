"""Finding engines: names, import paths, options, and those of third parties."""

from __future__ import annotations

import math
from typing import Any

import pytest

import forge_env as fe
from forge_env.errors import PluginError, SandboxUnavailableError, UsageError
from forge_env.plugins import installed
from forge_env.rollout.episode import run_episode
from forge_env.rollout.scripted import ReplayPolicy
from forge_env.sandbox import TENANT, Limits, Sandbox, SandboxEngine, SandboxSpec, open_engine
from forge_env.sandbox.engines import GROUP, load_engine
from sandboxes.docker import DockerEngine
from sandboxes.docker.daemon import why_unreachable


class Foreign(SandboxEngine):
    """As a third party may write one: no pool, one option of its own."""

    name = "foreign"

    def __init__(self, region: str = "here") -> None:
        self.region = region

    async def acquire(self, spec: SandboxSpec | None = None) -> Sandbox:
        raise NotImplementedError

    async def release(self, sandbox: Sandbox) -> None: ...


class Demanding(Foreign):
    def __init__(self, key: str) -> None:
        super().__init__(key)


FOREIGN, DEMANDING = f"{__name__}:Foreign", f"{__name__}:Demanding"


async def test_an_episodes_sandboxes_count_for_its_environment() -> None:
    class Asker(fe.SingleTurnEnvironment):
        def task(self, split: str, index: int) -> fe.Task:
            return fe.Task(id=f"{split}-{index}", split=split, prompt=TENANT.get(), data={})

        def reward(self, task: fe.Task, answer: str) -> float:
            return float(answer == TENANT.get())

    policy = ReplayPolicy(["asked/for"])
    trajectory = await run_episode(Asker, policy, seed=0, environment_name="asked/for")
    assert trajectory.reward == 1.0
    assert TENANT.get() == ""


def test_a_third_partys_engine_takes_what_it_knows() -> None:
    engine = open_engine(FOREIGN, concurrency=3, warm=1, region="there")
    assert isinstance(engine, Foreign)
    assert engine.region == "there"
    with pytest.raises(UsageError, match="base_image: unknown key"):
        open_engine(FOREIGN, base_image="x")
    with pytest.raises(UsageError, match="Demanding': key: missing"):
        open_engine(DEMANDING)
    with pytest.raises(UsageError, match="base_image: unknown key"):
        open_engine("local", base_image="x")


@pytest.mark.parametrize("name", ["json:loads", "json:JSONDecoder", "os:sep"])
def test_what_is_no_engine_is_said(name: str) -> None:
    with pytest.raises(PluginError, match="SandboxEngine"):
        load_engine(name)


def test_every_installed_engine_loads() -> None:
    assert {load_engine(name).name for name in installed(GROUP)} >= {"docker", "local"}


def test_a_daemon_that_may_not_be_used_says_who_may(monkeypatch: pytest.MonkeyPatch) -> None:
    import docker

    def refuse(**options: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(docker, "from_env", refuse)
    assert "add yourself to the group docker" in (DockerEngine.unavailable_reason() or "")
    assert DockerEngine.version() == ""


@pytest.mark.parametrize(
    ("host", "reason"),
    [("unix:///nonexistent.sock", "No such file"), ("tcp://127.0.0.1:1", "refused")],
)
def test_a_daemon_that_does_not_answer_is_one_line(monkeypatch: pytest.MonkeyPatch, host: str, reason: str) -> None:
    monkeypatch.setenv("DOCKER_HOST", host)
    said = DockerEngine.unavailable_reason() or ""
    assert said.startswith(f"Docker can't be reached at {host}: ")
    assert reason in said
    assert "DOCKER_HOST" in said
    assert "urllib3" not in said
    assert "\n" not in said
    assert len(said) < 160
    with pytest.raises(SandboxUnavailableError, match="Docker can't be reached"):
        open_engine("docker")
    assert DockerEngine.reap_abandoned() == 0


def test_the_innermost_reason_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DOCKER_HOST", raising=False)
    outer = RuntimeError("HTTPConnectionPool(host='x'): Max retries exceeded")
    outer.__cause__ = ConnectionRefusedError(111, "Connection refused")
    assert why_unreachable(outer) == "at unix:///var/run/docker.sock: Connection refused"
    outer.__cause__ = TimeoutError()
    assert why_unreachable(outer).endswith("timed out")


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        *((Limits, name, value) for name in ("wall_s", "cpu_s") for value in (0, -1.0, math.nan, math.inf, "1", True)),
        *(
            (Limits, name, value)
            for name in ("memory_mb", "output_bytes")
            for value in (0, -1, 1.5, 10**20, None, True)
        ),
        *((SandboxSpec, name, value) for name in ("memory_mb", "disk_mb") for value in (0, -1, 1.5, 10**20, True)),
        *((SandboxSpec, "network", value) for value in ("false", "yes", 1, None)),
        *((SandboxSpec, name, value) for name in ("image", "origin", "base") for value in (3, None)),
    ],
)
def test_a_value_of_a_wrong_type_or_size_is_refused(
    kind: type[Limits] | type[SandboxSpec], name: str, value: Any
) -> None:
    with pytest.raises(UsageError, match=name):
        kind(**{name: value})
