"""Reader of task folders in Harbor's format (schema 1.4) and Terminal-Bench's older format.

Harbor: `task.toml`, `instruction.md`, `environment/Dockerfile`, `tests/test.sh`, `solution/solve.sh`, and
`tests/Dockerfile` if the tests have an environment of their own.
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
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, Field, ValidationError

from environments.harbor.artifacts import Artifact
from forge_env.config.reader import read_yaml
from forge_env.errors import UsageError, mistakes
from forge_env.machine import user_path
from forge_env.sandbox.dockerfile import last_workdir
from forge_env.sandbox.spec import is_below
from forge_env.types import Text

TESTS, SOLUTION, LOGS, HOME = "/tests", "/solution", "/logs", "/root"
PUBLISHED = f"{LOGS}/artifacts"
"""Folder in which agents leave files for tests in an environment of their own."""
_HARBOR, _TERMINAL_BENCH = "task.toml", "task.yaml"
_COMPOSE = "docker-compose.yaml"
_AGENT_S, _TESTS_S = 600.0, 600.0
_BENCH_AGENT_S, _BENCH_TESTS_S = 360.0, 60.0
_SIZE = re.compile(r"(\d+(?:\.\d*)?)\s*([KMGT])i?B?", re.IGNORECASE)
_MEBIBYTES = {"K": 2**-10, "M": 1, "G": 2**10, "T": 2**20}
_WITH_DEFAULT = re.compile(r"\$\{\w+:-([^{}]*)\}")
_DOCKERFILE = "Dockerfile"
_PLAIN_BUILD = {"context", "dockerfile"}
_PLAIN_SERVICE = {"build", "command", "container_name", "environment", "image", "volumes", "working_dir"}


@dataclass(frozen=True, slots=True)
class Separate:
    """The tests' own environment: a fresh one, with the artifacts of the agent's."""

    image: str
    """Folder with a Dockerfile, or an image reference."""
    has_tests: bool
    """Whether the image has the tests, in /tests."""
    workdir: str
    artifacts: tuple[Artifact, ...]
    collect: tuple[tuple[str, float], ...] = ()
    """Commands that run in the agent's environment before its artifacts are read, and their limits in seconds."""
    memory_mb: int | None = None
    variables: Mapping[str, str] = field(default_factory=dict)
    hosts: tuple[str, ...] | None = ()

    @property
    def folders(self) -> set[str]:
        """Folders that hold the artifacts."""
        parents = {artifact.path: posixpath.dirname(artifact.path) for artifact in self.artifacts}
        return {path if parent == "/" else parent for path, parent in parents.items() if not is_below(path, LOGS)}


@dataclass(frozen=True, slots=True)
class HarborTask:
    """One task of either format."""

    name: str
    instruction: str
    image: str
    """Folder with a Dockerfile, or an image reference."""
    workdir: str
    tests: Path
    """Folder of the tests."""
    script: Path
    """Script that runs the tests; it is copied into their folder."""
    by_exit_code: bool
    """Whether the script's exit code is the verdict, instead of a file that it writes."""
    solution: Path | None = None
    """Script that solves the task."""
    agent_s: float = _AGENT_S
    tests_s: float = _TESTS_S
    memory_mb: int | None = None
    variables: Mapping[str, str] = field(default_factory=dict)
    test_variables: Mapping[str, str] = field(default_factory=dict)
    solution_variables: Mapping[str, str] = field(default_factory=dict)
    hosts: tuple[str, ...] | None = ()
    """Hosts that the task needs to reach; None: unrestricted network access."""
    tags: tuple[str, ...] = ()
    separate: Separate | None = None
    """The tests' environment; None: a copy of the agent's, with all its files."""


class NotPlayableError(Exception):
    """A task needs something that is not supported here."""


def _mebibytes(size: Any) -> Any:
    """Convert a size of schema 1.0, such as `8G`, to MiB; numbers alone are MiB."""
    match = _SIZE.fullmatch(size.strip()) if isinstance(size, str) else None
    return float(match[1]) * _MEBIBYTES[match[2].upper()] if match else size


Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class _Settings(BaseModel):
    """The used fields of a section of `task.toml`. Numbers may be strings, as in Harbor."""

    env: dict[str, Text] = {}


class _Machine(_Settings):
    os: str = "linux"
    docker_image: str | None = None
    workdir: str | None = None
    memory_mb: Annotated[int, Field(gt=0)] | None = None
    memory: Annotated[float, BeforeValidator(_mebibytes), Field(gt=0)] | None = None
    """In MiB; field of schemas before 1.1."""
    gpus: int | None = None
    tpu: Any = None
    mcp_servers: Any = None
    healthcheck: Any = None
    network_mode: Literal["public", "no-network", "allowlist"] = "public"
    allow_internet: bool = True
    allowed_hosts: list[str] = []


class _Agent(BaseModel):
    timeout_sec: Seconds | None = None
    user: str | int | None = None


class _Collected(BaseModel):
    source: str
    exclude: list[str] = []
    service: str | None = None


class _Collect(BaseModel):
    command: str
    service: str = "main"
    timeout_sec: Seconds = 60.0


class _Verifier(_Agent, _Settings):
    environment: _Machine | None = None
    environment_mode: str | None = None
    collect: list[_Collect] = []


class _About(BaseModel):
    keywords: list[Text] = []


class _Harbor(BaseModel):
    """Content of `task.toml`."""

    steps: Any = None
    artifacts: list[str | _Collected] = []
    environment: _Machine = _Machine()
    agent: _Agent = _Agent()
    verifier: _Verifier = _Verifier()
    solution: _Settings = _Settings()
    task: _About = _About()


class _TerminalBench(BaseModel):
    """Content of `task.yaml`."""

    instruction: str
    max_agent_timeout_sec: Seconds = _BENCH_AGENT_S
    max_test_timeout_sec: Seconds = _BENCH_TESTS_S
    tags: list[Text] | None = None


@lru_cache(maxsize=16)
def read_folder(folder: str) -> tuple[list[HarborTask], dict[str, str]]:
    """Tasks in order of their names, and why others can't be used, by name. `UsageError`: there is no task."""
    top = user_path(folder)
    if not top.is_dir():
        raise UsageError(f"{folder} is not a folder", fix="name the folder of a task, or one with tasks in it")
    tasks, refused = [], {}
    for path in [top] if _is_task(top) else sorted(path for path in top.iterdir() if _is_task(path)):
        try:
            tasks.append(_harbor(path) if (path / _HARBOR).is_file() else _terminal_bench(path))
        except NotPlayableError as error:
            refused[path.name] = str(error)
        except ValidationError as error:
            refused[path.name] = f"it can't be read: {mistakes(error)}"
        except (OSError, ValueError, TypeError, AttributeError, yaml.YAMLError) as error:
            refused[path.name] = f"it can't be read: {type(error).__name__}: {error}"
    if not tasks and not refused:
        raise UsageError(f"no task in {folder}", fix=f"a task is a folder with {_HARBOR} or {_TERMINAL_BENCH}")
    return tasks, refused


def _is_task(path: Path) -> bool:
    return (path / _HARBOR).is_file() or (path / _TERMINAL_BENCH).is_file()


def _harbor(path: Path) -> HarborTask:
    settings = _Harbor.model_validate(tomllib.loads(_text(path / _HARBOR)))
    environment, verifier = settings.environment, settings.verifier
    _refuse_features(path, settings)
    image, workdir = _image(path / "environment", environment.docker_image)
    test, solution = path / "tests" / "test.sh", path / "solution" / "solve.sh"
    _require(test)
    _check_scripts(test, solution)
    memory_mb = environment.memory_mb or environment.memory
    return HarborTask(
        name=path.name,
        instruction=_instruction(_text(path / "instruction.md")),
        image=image,
        workdir=_workdir(environment.workdir or workdir),
        tests=path / "tests",
        script=test,
        by_exit_code=False,
        solution=solution if solution.is_file() else None,
        agent_s=settings.agent.timeout_sec or _AGENT_S,
        tests_s=verifier.timeout_sec or _TESTS_S,
        memory_mb=None if memory_mb is None else max(1, round(memory_mb)),
        variables=_variables(environment.env),
        test_variables=_variables(verifier.env),
        solution_variables=_variables(settings.solution.env),
        hosts=_hosts(environment),
        tags=tuple(settings.task.keywords),
        separate=_separate(path, settings, image, _workdir(environment.workdir or workdir)),
    )


def _refuse_features(path: Path, settings: _Harbor) -> None:
    machines = [settings.environment, *filter(None, [settings.verifier.environment])]
    services = {
        entry.service or "main"
        for entry in [*settings.artifacts, *settings.verifier.collect]
        if not isinstance(entry, str)
    }
    composed = [path / folder / _COMPOSE for folder in ("environment", "tests")]
    wanted = {
        "steps": settings.steps,
        "another operating system": any(machine.os.lower() != "linux" for machine in machines),
        "GPUs": any(machine.gpus for machine in machines),
        "TPUs": any(machine.tpu for machine in machines),
        "a user other than root": {str(role.user or 0) for role in (settings.agent, settings.verifier)} - {"0", "root"},
        "MCP servers": settings.environment.mcp_servers,
        "a health check": any(machine.healthcheck for machine in machines),
        "additional services": services - {"main"} or any(file.is_file() for file in composed),
    }
    _refuse(wanted)


def _separate(path: Path, settings: _Harbor, image: str, workdir: str) -> Separate | None:
    """Read the tests' own environment; see `resolve_verifier_environment_definition` in Harbor."""
    verifier = settings.verifier
    if (verifier.environment_mode or ("separate" if verifier.environment else "shared")) != "separate":
        return None
    machine, tests = verifier.environment or settings.environment, path / "tests"
    has_tests = True
    if verifier.environment is not None and verifier.environment.docker_image:
        image, of_image = verifier.environment.docker_image, None
    elif (tests / "Dockerfile").is_file():
        image, of_image = _image(tests, None)
    else:
        has_tests, of_image = False, workdir
    entries = [_Collected(source=entry) if isinstance(entry, str) else entry for entry in settings.artifacts]
    artifacts = [
        Artifact(posixpath.normpath(posixpath.join(workdir, entry.source)), tuple(entry.exclude)) for entry in entries
    ]
    if all(artifact.path != PUBLISHED for artifact in artifacts):
        artifacts.insert(0, Artifact(PUBLISHED))
    memory_mb = machine.memory_mb or machine.memory
    return Separate(
        image=image,
        has_tests=has_tests,
        workdir=_workdir(machine.workdir or of_image or "/"),
        artifacts=tuple(artifacts),
        collect=tuple((entry.command, entry.timeout_sec) for entry in verifier.collect),
        memory_mb=None if memory_mb is None else max(1, round(memory_mb)),
        variables=_variables(machine.env),
        hosts=_hosts(machine),
    )


def _terminal_bench(path: Path) -> HarborTask:
    settings = _TerminalBench.model_validate(read_yaml(_text(path / _TERMINAL_BENCH))[0])
    context, workdir, prebuilt = path, None, None
    variables: dict[str, str] = {}
    if (path / _COMPOSE).is_file():
        compose = yaml.load(_text(path / _COMPOSE), yaml.BaseLoader) or {}
        services = compose.get("services") or {}
        service: dict[str, Any] = next(iter(services.values()), {}) or {}
        unsupported = sorted(set(service) - _PLAIN_SERVICE)
        mounted = [str(volume) for volume in service.get("volumes", ()) if "${T_BENCH_" not in str(volume)]
        _refuse({"additional services": len(services) > 1, ", ".join(unsupported): unsupported, "volumes": mounted})
        build = service.get("build") or {}
        build = {"context": build} if isinstance(build, str) else build
        _refuse({f"the build option {name}": value and name not in _PLAIN_BUILD for name, value in build.items()})
        dockerfile = posixpath.normpath(build.get("dockerfile") or _DOCKERFILE)
        _refuse({f"the Dockerfile {dockerfile}": dockerfile != _DOCKERFILE})
        context = path / (build.get("context") or ".")
        workdir = service.get("working_dir")
        prebuilt = service.get("image") if not build else None
        given = service.get("environment") or {}
        if isinstance(given, list):  # NAME=VALUE, or the NAME of a variable of this machine
            given = dict(item.split("=", 1) for item in given if "=" in item)
        variables = {name: value for name, value in given.items() if "${" not in value}
    image, of_image = _image(context, prebuilt)
    test, solution = path / "run-tests.sh", path / "solution.sh"
    _require(test)
    _check_scripts(test, solution)
    return HarborTask(
        name=path.name,
        instruction=_instruction(settings.instruction),
        image=image,
        workdir=_workdir(workdir or of_image),
        tests=path / "tests",
        script=test,
        by_exit_code=True,
        solution=solution if solution.is_file() else None,
        agent_s=settings.max_agent_timeout_sec,
        tests_s=settings.max_test_timeout_sec,
        variables=variables,
        test_variables={"TEST_DIR": TESTS},
        hosts=None,
        tags=tuple(settings.tags or ()),
    )


def _refuse(wanted: Mapping[str, object]) -> None:
    if asked := [name for name, value in wanted.items() if value]:
        raise NotPlayableError(f"it needs {' and '.join(asked)}")


def _require(path: Path) -> None:
    if not path.is_file():
        raise NotPlayableError(f"it has no {path.name}")


def _text(path: Path) -> str:
    """Text of a file, with line feeds as line ends and without a byte order mark."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise NotPlayableError(f"{path.name} is not UTF-8: {error.reason}") from error


def _instruction(text: str) -> str:
    if not text.strip():
        raise NotPlayableError("its instruction is empty")
    return text.strip()


def _check_scripts(*scripts: Path) -> None:
    """Reject scripts in Windows format, which the sandbox's shell can't run."""
    for script in scripts:
        content = script.read_bytes() if script.is_file() else b""
        if b"\r\n" in content or content.startswith(b"\xef\xbb\xbf"):
            what = "CRLF line ends" if b"\r\n" in content else "a byte order mark"
            raise NotPlayableError(f"{script.name} has {what}: convert it with dos2unix")


def _image(context: Path, prebuilt: str | None) -> tuple[str, str | None]:
    """Image of a task, and the working folder set by its Dockerfile, or None."""
    if not (context / "Dockerfile").is_file():
        if prebuilt is None:
            raise NotPlayableError("it has neither a Dockerfile nor an image")
        return prebuilt, None
    return os.path.abspath(context), last_workdir(_text(context / "Dockerfile"))


def _workdir(path: str | None) -> str:
    if path is None:
        raise NotPlayableError("it has no working folder: no WORKDIR in a Dockerfile, no workdir in its settings")
    if "$" in path:
        raise NotPlayableError(f"its folder {path} depends on variables")
    if not path.startswith("/"):
        raise NotPlayableError(f"its folder {path} is not absolute")
    return posixpath.normpath(path)


def _variables(given: Mapping[str, str]) -> Mapping[str, str]:
    given = {name: _WITH_DEFAULT.sub(r"\1", value) for name, value in given.items()}
    if asked := [value for value in given.values() if "${" in value]:
        raise NotPlayableError(f"it needs variables of this machine: {', '.join(asked)}")
    return given


def _hosts(machine: _Machine) -> tuple[str, ...] | None:
    if not machine.allow_internet or machine.network_mode == "no-network":
        return ()
    return tuple(machine.allowed_hosts) if machine.network_mode == "allowlist" else None
