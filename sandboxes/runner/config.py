"""Options of a runner, passed as one JSON argument."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

PRELOAD = [
    "argparse", "bisect", "builtins", "collections", "contextlib", "copy", "dataclasses", "datetime",
    "decimal", "enum", "fractions", "functools", "gettext", "heapq", "inspect", "io", "itertools", "json",
    "linecache", "locale", "math", "operator", "random", "re", "shutil", "signal", "statistics", "string",
    "sys", "textwrap", "time", "traceback", "types", "typing", "unittest",
]  # fmt: skip
"""Common imports of programs, loaded once by the zygote and shared by all children."""
WORK = "/work"
"""Work folder of programs; the judge's is next to it."""
SCRATCH = ("/tmp", "/dev/shm", "/dev/mqueue")
"""Writable folders besides the work folders, if they exist; wiped together with them."""


@dataclass
class RunnerConfig:
    """Options of one runner."""

    isolation: str
    """`uid`: children get a user id of their own (needs CAP_SETUID and CAP_SETGID).
    `ns`: children get pid, mount and ipc namespaces of their own (needs CAP_SYS_ADMIN in a user namespace).
    """
    connect: str = ""
    """Unix socket of the engine to connect to."""
    control_fd: int = -1
    """Descriptor of the channel, if `connect` is empty; -1 for standard input and output."""
    uid: int = 0
    """First user id of children (`uid` isolation)."""
    chown: bool = False
    """The runner must give the work folders to their users."""
    memory_mb: int = 0
    """Memory limit of all programs of the sandbox together, MiB; 0 if an outer cgroup enforces it."""
    pytest: bool = False
    """Zygotes import pytest once they are idle, for the children they fork afterwards."""
    preload: tuple[str, ...] = ()
    """Modules that the zygote of programs imports in the same way."""
    writable: tuple[str, ...] = ()
    """Folders of the image that programs may write to, each a separate file system; see `archives`."""
    proxy_port: int = 0
    """Loopback port of the engine's filtering proxy; 0 without one."""

    def dumps(self) -> str:
        """The command-line argument."""
        return json.dumps(asdict(self))

    @classmethod
    def loads(cls, text: str) -> RunnerConfig:
        """Parse the command-line argument."""
        return cls(**json.loads(text))
