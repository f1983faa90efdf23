"""Tasks in Harbor's format (schema 1.4), and in Terminal-Bench's older one, as they lie in a folder.

Harbor: `task.toml`, `instruction.md`, `environment/Dockerfile`, `tests/test.sh`, `solution/solve.sh`.
Terminal-Bench: `task.yaml`, `Dockerfile` or `docker-compose.yaml`, `run-tests.sh`, `tests/`, `solution.sh`.
"""

from __future__ import annotations

import os
import posixpath
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from forge_env.errors import UsageError

TESTS, SOLUTION, LOGS, HOME = "/tests", "/solution", "/logs", "/root"
_HARBOR, _TERMINAL_BENCH = "task.toml", "task.yaml"
_COMPOSE = "docker-compose.yaml"
_AGENT_S, _TESTS_S = 600.0, 600.0
_BENCH_AGENT_S, _BENCH_TESTS_S = 360.0, 60.0
_STAGE = re.compile(
    r"^\s*(?:FROM\s+(?:--\S+\s+)*(?P<base>\S+)(?:\s+AS\s+(?P<name>\S+))?|WORKDIR\s+(?P<folder>\S+))\s*$",
    re.IGNORECASE | re.MULTILINE,
)
_PLAIN_SERVICE = {"build", "command", "container_name", "environment", "image", "volumes", "working_dir"}


@dataclass(frozen=True, slots=True)
class HarborTask:
    """One task, whichever format it has."""

    name: str
    instruction: str
    image: str
    """A folder with a Dockerfile, or the reference of an image."""
    workdir: str
    tests: Path
    """Folder of what judges it."""
    script: Path
    """The program that runs them, which is put beside them."""
    by_exit_code: bool
    """Whether that one's exit code is the verdict, instead of a file that it writes."""
    solution: Path | None = None
    """The program that solves it."""
    agent_s: float = _AGENT_S
    tests_s: float = _TESTS_S
    memory_mb: int | None = None
    variables: Mapping[str, str] = field(default_factory=dict)
    test_variables: Mapping[str, str] = field(default_factory=dict)
    solution_variables: Mapping[str, str] = field(default_factory=dict)
    hosts: tuple[str, ...] | None = ()
    """What it asks to reach: hosts, or None for every one."""
    tags: tuple[str, ...] = ()


class NotPlayableError(Exception):
    """A task asks for something that there is not here."""


@lru_cache(maxsize=16)
def read_folder(folder: str) -> tuple[list[HarborTask], dict[str, str]]:
    """The tasks of a folder, which may be one itself, in order of their names; and why others are none, by name.

    Raises:
        UsageError: there is no such folder, or no task in it.
    """
    top = Path(folder).expanduser()
    if not top.is_dir():
        raise UsageError(f"{folder} is not a folder", fix="name the folder of a task, or one with tasks in it")
    tasks, refused = [], {}
    for path in [top] if _is_task(top) else sorted(path for path in top.iterdir() if _is_task(path)):
        try:
            tasks.append(_harbor(path) if (path / _HARBOR).is_file() else _terminal_bench(path))
        except NotPlayableError as error:
            refused[path.name] = str(error)
        except (OSError, ValueError, TypeError, AttributeError, yaml.YAMLError) as error:
            refused[path.name] = f"it can't be read: {type(error).__name__}: {error}"
    if not tasks and not refused:
        raise UsageError(f"no task in {folder}", fix=f"a task is a folder with {_HARBOR} or {_TERMINAL_BENCH}")
    return tasks, refused


def _is_task(path: Path) -> bool:
    return (path / _HARBOR).is_file() or (path / _TERMINAL_BENCH).is_file()


def _harbor(path: Path) -> HarborTask:
    settings = tomllib.loads((path / _HARBOR).read_text())
    place, agent, verifier = (settings.get(name, {}) for name in ("environment", "agent", "verifier"))
    wanted = {
        "steps": settings.get("steps"),
        "another operating system": place.get("os", "linux").lower() != "linux",
        "GPUs": place.get("gpus"),
        "TPUs": place.get("tpu"),
        "MCP servers": place.get("mcp_servers"),
        "a health check": place.get("healthcheck"),
        "an environment of its own for the tests": verifier.get("environment")
        or verifier.get("environment_mode", "shared") != "shared",
        "services beside it": (path / "environment" / _COMPOSE).is_file(),
    }
    _refuse(wanted)
    image, workdir = _image(path / "environment", place.get("docker_image"))
    solution = path / "solution" / "solve.sh"
    _require(path / "tests" / "test.sh")
    return HarborTask(
        name=path.name,
        instruction=(path / "instruction.md").read_text().strip(),
        image=image,
        workdir=_workdir(place.get("workdir") or workdir),
        tests=path / "tests",
        script=path / "tests" / "test.sh",
        by_exit_code=False,
        solution=solution if solution.is_file() else None,
        agent_s=float(agent.get("timeout_sec") or _AGENT_S),
        tests_s=float(verifier.get("timeout_sec") or _TESTS_S),
        memory_mb=place.get("memory_mb"),
        variables=_variables(place.get("env", {})),
        test_variables=_variables(verifier.get("env", {})),
        solution_variables=_variables(settings.get("solution", {}).get("env", {})),
        hosts=_hosts(place),
        tags=tuple(map(str, settings.get("task", {}).get("keywords", []))),
    )


def _terminal_bench(path: Path) -> HarborTask:
    settings = yaml.safe_load((path / _TERMINAL_BENCH).read_text())
    context, workdir = path, None
    variables: dict[str, str] = {}
    if (path / _COMPOSE).is_file():
        services = yaml.safe_load((path / _COMPOSE).read_text()).get("services", {})
        service: dict[str, Any] = next(iter(services.values()), {})
        further = sorted(set(service) - _PLAIN_SERVICE)
        mounted = [str(volume) for volume in service.get("volumes", ()) if "${T_BENCH_" not in str(volume)]
        _refuse({"services beside it": len(services) > 1, ", ".join(further): further, "volumes": mounted})
        build = service.get("build", ".")
        context = path / (build if isinstance(build, str) else build.get("context", "."))
        workdir = service.get("working_dir")
        given = service.get("environment", {})
        given = dict(item.partition("=")[::2] for item in given) if isinstance(given, list) else given
        variables = {name: str(value) for name, value in given.items() if "${" not in str(value)}
    image, of_image = _image(context, None)
    _require(path / "run-tests.sh")
    solution = path / "solution.sh"
    return HarborTask(
        name=path.name,
        instruction=str(settings["instruction"]).strip(),
        image=image,
        workdir=_workdir(workdir or of_image),
        tests=path / "tests",
        script=path / "run-tests.sh",
        by_exit_code=True,
        solution=solution if solution.is_file() else None,
        agent_s=float(settings.get("max_agent_timeout_sec", _BENCH_AGENT_S)),
        tests_s=float(settings.get("max_test_timeout_sec", _BENCH_TESTS_S)),
        variables=variables,
        test_variables={"TEST_DIR": TESTS},
        hosts=None,
        tags=tuple(map(str, settings.get("tags", []))),
    )


def _refuse(wanted: Mapping[str, object]) -> None:
    if asked := [name for name, value in wanted.items() if value]:
        raise NotPlayableError(f"it asks for {' and '.join(asked)}")


def _require(path: Path) -> None:
    if not path.is_file():
        raise NotPlayableError(f"it has no {path.name}")


def _image(context: Path, prebuilt: str | None) -> tuple[str, str | None]:
    """The image, and the folder that its programs begin in, where its Dockerfile says."""
    if not (context / "Dockerfile").is_file():
        if prebuilt is None:
            raise NotPlayableError("it has neither a Dockerfile nor an image")
        return prebuilt, None
    return os.path.abspath(context), _last_workdir((context / "Dockerfile").read_text())


def _last_workdir(dockerfile: str) -> str | None:
    """The folder of the last stage, which begins in that of the stage it is FROM; None: in another image's."""
    folder: str | None = None
    stages: dict[str, str | None] = {}
    stage = ""
    for found in _STAGE.finditer(dockerfile):
        if found["folder"]:
            folder = posixpath.join(folder or "/", found["folder"].strip("\"'"))
        else:
            folder, stage = stages.get(found["base"].lower()), (found["name"] or "").lower()
        stages[stage] = folder
    return folder


def _workdir(path: str | None) -> str:
    if path is None:
        raise NotPlayableError("it names no working folder: no WORKDIR in a Dockerfile, no workdir in its settings")
    if "$" in path:
        raise NotPlayableError(f"its folder {path} depends on variables")
    return posixpath.normpath(path)


def _variables(given: Mapping[str, Any]) -> dict[str, str]:
    if asked := [str(value) for value in given.values() if "${" in str(value)]:
        raise NotPlayableError(f"it asks for variables of this machine: {', '.join(asked)}")
    return {name: str(value) for name, value in given.items()}


def _hosts(place: Mapping[str, Any]) -> tuple[str, ...] | None:
    mode = place.get("network_mode", "public")
    if place.get("allow_internet") is False or mode == "no-network":
        return ()
    return tuple(place.get("allowed_hosts", ())) if mode == "allowlist" else None
