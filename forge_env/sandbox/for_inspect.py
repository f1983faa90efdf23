"""Sandbox provider for inspect_ai: `sandbox="forge_env"` in a task, `--sandbox forge_env` on the command line.

inspect_ai loads this module through its entry point. `("forge_env", "local")` selects the engine; a
`ForgeSandboxConfig` sets more options.
"""

from __future__ import annotations

import errno
import os
import posixpath
from base64 import b64decode
from typing import Any, ClassVar, Literal

from inspect_ai.util import (
    ExecResult,
    OutputLimitExceededError,
    SandboxEnvironment,
    SandboxEnvironmentLimits,
    SandboxUserUnsupportedError,
    sandboxenv,
)
from pydantic import BaseModel, ConfigDict

from forge_env.errors import SandboxFileError
from forge_env.sandbox.engines import LazyEngine
from forge_env.sandbox.protocol import Sandbox
from forge_env.sandbox.spec import WORK, Limits, SandboxSpec

LONGEST_S = 24 * 3600.0
"""Limit of a command for which inspect_ai sets none, in seconds."""
TOOLS = Limits(wall_s=120, cpu_s=LONGEST_S, memory_mb=1024, file_size_mb=1024, output_bytes=256 * 2**20)
"""Limits for reading and writing a file outside the work folder."""
_MISSING, _FOLDER, _FORBIDDEN, _TOO_LARGE = 101, 102, 103, 104
_ERRORS = {_MISSING: errno.ENOENT, _FOLDER: errno.EISDIR, _FORBIDDEN: errno.EACCES}
_READ = f"""[ -e "$1" ] || exit {_MISSING}; [ ! -d "$1" ] || exit {_FOLDER}; [ -r "$1" ] || exit {_FORBIDDEN}
[ "$(wc -c < "$1")" -le "$2" ] || exit {_TOO_LARGE}; base64 < "$1" """
_WRITE = f"""[ ! -d "$1" ] || exit {_FOLDER}; mkdir -p -- "$(dirname -- "$1")"
[ ! -e "$1" ] || [ -w "$1" ] || exit {_FORBIDDEN}; cat > "$1" """


class ForgeSandboxConfig(BaseModel):
    """Engine and kind of sandbox. All fields but `engine` are those of `SandboxSpec`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    engine: str = "auto"
    """docker, local or auto: the best that this machine allows."""
    image: str = "python"
    network: bool = False
    allow: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    disk_mb: int = 512
    memory_mb: int = 2048

    @property
    def spec(self) -> SandboxSpec:
        """The specification for the engine."""
        return SandboxSpec(**self.model_dump(exclude={"engine"}))


@sandboxenv(name="forge_env")
class ForgeSandboxEnvironment(SandboxEnvironment):  # type: ignore[misc]  # it is not imported by the type checker
    """One sandbox of an engine, for one sample."""

    engines: ClassVar[dict[str, LazyEngine]] = {}
    """Engines in use, by name."""
    _users: ClassVar[dict[str, int]] = {}
    """Number of tasks that use each engine."""

    def __init__(self, box: Sandbox, config: ForgeSandboxConfig) -> None:
        super().__init__()
        self.box = box
        self.config = config

    # --- life cycle

    @classmethod
    def config_deserialize(cls, config: dict[str, Any]) -> BaseModel:
        """Read a config as stored in inspect_ai's logs."""
        return ForgeSandboxConfig.model_validate(config)

    @classmethod
    async def task_init(cls, task_name: str, config: Any) -> None:
        """Register a task. Its engine starts with the first sample."""
        name = _config(config).engine
        cls.engines.setdefault(name, LazyEngine(name))
        cls._users[name] = cls._users.get(name, 0) + 1

    @classmethod
    async def sample_init(cls, task_name: str, config: Any, metadata: dict[str, str]) -> dict[str, SandboxEnvironment]:
        """Acquire a clean sandbox, waiting while none is available."""
        chosen = _config(config)
        return {"default": cls(await cls.engines[chosen.engine].acquire(chosen.spec), chosen)}

    @classmethod
    async def sample_cleanup(
        cls, task_name: str, config: Any, environments: dict[str, SandboxEnvironment], interrupted: bool
    ) -> None:
        """Release the sample's sandbox."""
        for environment in environments.values():
            sandbox = environment.as_type(cls)
            await cls.engines[sandbox.config.engine].release(sandbox.box)

    @classmethod
    async def task_cleanup(cls, task_name: str, config: Any, cleanup: bool) -> None:
        """Unregister a task, and close its engine unless another task uses it."""
        name = _config(config).engine
        cls._users[name] -= 1
        if not cls._users[name]:
            await cls.engines.pop(name).close()

    # --- operations of a sample

    async def exec(
        self,
        cmd: list[str],
        input: str | bytes | None = None,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        user: str | None = None,
        timeout: int | None = None,
        timeout_retry: bool = True,
        concurrency: bool = True,
    ) -> ExecResult[str]:
        """Run a command.

        Raises:
            TimeoutError: it took longer than `timeout` seconds.
            PermissionError: the file is not executable.
            OutputLimitExceededError: its output exceeds inspect_ai's limit.
            SandboxUserUnsupportedError: `user` is given; a sandbox has one user, who is not root.
        """
        if user is not None:
            raise SandboxUserUnsupportedError(f"can't run as {user!r}: a sandbox has one user, who is not root")
        most = SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE
        limits = Limits(
            wall_s=timeout or LONGEST_S,
            cpu_s=LONGEST_S,  # `timeout` is wall-clock time, and several threads may use more CPU time than that
            memory_mb=self.config.memory_mb,
            processes=256,
            file_size_mb=self.config.disk_mb,
            open_files=1024,
            output_bytes=most,
        )
        done = await self.box.exec(cmd, stdin=input or "", env=env, cwd=cwd, limits=limits)
        if done.timed_out:
            raise TimeoutError(f"{cmd[0]} took longer than {limits.wall_s:g} s")
        if done.truncated:
            limit = SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE_STR
            raise OutputLimitExceededError(limit_str=limit, truncated_output=done.stdout)
        if done.exit_code == 126 and "ermission denied" in done.stderr:
            raise PermissionError(errno.EACCES, done.stderr.strip())
        code = 128 + (done.signal or 0) if done.exit_code is None else done.exit_code
        return ExecResult(code == 0, code, done.stdout, done.stderr)

    async def write_file(self, file: str, contents: str | bytes) -> None:
        """Write a file, creating its parent folders.

        `PermissionError`: it can't be written. `IsADirectoryError`: it is a folder.
        """
        data = contents.encode() if isinstance(contents, str) else contents
        path = posixpath.normpath(posixpath.join(WORK, file))
        if path.startswith(f"{WORK}/"):
            try:
                await self.box.write_file(path.removeprefix(f"{WORK}/"), data)
            except SandboxFileError as error:
                raise OSError(error.errno, error.strerror, file) from error
        else:
            done = await self.box.exec(["sh", "-c", _WRITE, "sh", path], stdin=data, limits=TOOLS)
            if not done.ok:
                raise _failed(done.exit_code, done.stderr, file)

    async def read_file(self, file: str, text: bool | Literal[True] = True) -> Any:
        """Read a file as text or bytes.

        Raises:
            FileNotFoundError: it does not exist.
            PermissionError: it can't be read.
            IsADirectoryError: it is a folder.
            UnicodeDecodeError: it is not UTF-8.
            OutputLimitExceededError: it exceeds inspect_ai's limit.
        """
        data = await self._read(file, SandboxEnvironmentLimits.MAX_READ_FILE_SIZE)
        return data.decode() if text else data

    async def _read(self, file: str, most: int) -> bytes:
        path = posixpath.normpath(posixpath.join(WORK, file))
        if path.startswith(f"{WORK}/"):
            try:
                data = await self.box.read_file(path.removeprefix(f"{WORK}/"))
            except SandboxFileError as error:
                raise OSError(error.errno, error.strerror, file) from error
            if len(data) <= most:
                return data
        else:
            done = await self.box.exec(["sh", "-c", _READ, "sh", path, str(most)], limits=TOOLS)
            if done.ok:
                return b64decode(done.stdout)
            if done.exit_code != _TOO_LARGE:
                raise _failed(done.exit_code, done.stderr, file)
        limit = SandboxEnvironmentLimits.MAX_READ_FILE_SIZE_STR
        raise OutputLimitExceededError(limit_str=limit, truncated_output=None)


def _config(config: Any) -> ForgeSandboxConfig:
    if config is None or isinstance(config, str):  # inspect_ai turns the name into a path
        return ForgeSandboxConfig(engine=posixpath.basename(config or "auto"))
    return ForgeSandboxConfig.model_validate(config)


def _failed(code: int | None, said: str, file: str) -> OSError:
    number = _ERRORS.get(code or 0, errno.EIO)
    return OSError(number, os.strerror(number) if number != errno.EIO else said.strip() or "can't be reached", file)
