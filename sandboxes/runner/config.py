"""How a runner is started: one JSON argument."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

PRELOAD = [
    "argparse", "bisect", "builtins", "collections", "contextlib", "copy", "dataclasses", "datetime",
    "decimal", "enum", "fractions", "functools", "gettext", "heapq", "inspect", "io", "itertools", "json",
    "linecache", "locale", "math", "operator", "random", "re", "shutil", "signal", "statistics", "string",
    "sys", "textwrap", "time", "traceback", "types", "typing", "unittest",
]  # fmt: skip
"""What nearly every program imports: loaded once by the zygote, shared by every child."""
WORK = "/work"
"""Work folder of programs; that of their judge is beside it."""
SCRATCH = ("/tmp", "/dev/shm", "/dev/mqueue")
"""Writable folders besides the work folders, where there are such; wiped with them."""


@dataclass
class RunnerConfig:
    """Options of one runner."""

    isolation: str
    """`uid`: children get a user id of their own (needs CAP_SETUID and CAP_SETGID).
    `ns`: children get pid, mount and ipc namespaces of their own (needs CAP_SYS_ADMIN in a user namespace)."""
    connect: str = ""
    """Unix socket of the engine to connect to."""
    control_fd: int = -1
    """Without `connect`: descriptor of the channel, or -1: it is standard input and output."""
    uid: int = 0
    """First of the user ids of children (`uid` isolation)."""
    chown: bool = False
    """The work folders are not their users' yet."""
    memory_mb: int = 0
    """Memory of all programs of the sandbox together, MiB; 0: a cgroup outside sees to it."""
    pytest: bool = False
    """The zygotes load pytest once they have nothing to do: the children that they fork then have it."""
    preload: tuple[str, ...] = ()
    """Modules that the solution's zygote loads likewise."""
    writable: tuple[str, ...] = ()
    """Folders of the image that programs may write to, each a file system of its own; see `archives`."""
    proxy_port: int = 0
    """Port of the sandbox's loopback that leads to the engine's filtering proxy; 0: no way out at all."""

    def dumps(self) -> str:
        """The command-line argument."""
        return json.dumps(asdict(self))

    @classmethod
    def loads(cls, text: str) -> RunnerConfig:
        """Parse the command-line argument."""
        return cls(**json.loads(text))
