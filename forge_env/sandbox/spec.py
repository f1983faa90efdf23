"""What a caller asks a sandbox engine for: the kind of sandbox, and the limits of a call."""

from __future__ import annotations

import posixpath
import re
from dataclasses import dataclass

from forge_env.errors import UsageError

PROXY_PORT = 3128
"""Port of the filtering proxy, on a sandbox's own loopback."""
ORIGIN_URL = f"http://127.0.0.1:{PROXY_PORT}"
"""URL at which programs reach `SandboxSpec.origin`."""
WORK = "/work"
"""The work folder, as programs in a sandbox see it."""
_READ_ONLY = (
    "bin", "boot", "dev", "etc", "lib", "lib32", "lib64", "opt/forge_env", "proc", "run", "sbin", "sys",
    "usr/bin", "usr/lib", "usr/lib32", "usr/lib64", "usr/libexec", "usr/local", "usr/sbin",
)  # fmt: skip
"""Folders that are never writable: the runner's own files, and file systems of the kernel."""
_OWN_FOLDERS = (WORK, f"{WORK}-judge", "/tmp")
_MOST = 2**31 - 1
_PORTS = 80, 443
"""Default ports of an allowed host."""
_REQUIREMENT = re.compile(r"[A-Za-z0-9][\w.-]*(\[[\w,. -]*\])?\s*([<>=!~]=?=?\s*[\w.*+!-]+\s*,?\s*)*", re.ASCII)
SANDBOXES_PER_CPU = 4
"""Default number of sandboxes per CPU. An episode holds its sandbox while the model generates, so most are idle."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one call. All of them apply to every call; none can be switched off.

    Examples:
        >>> import forge_env as fe
        >>> fe.Limits(wall_s=2.0).memory_mb
        512
    """

    wall_s: float = 10.0
    """Wall-clock seconds."""
    cpu_s: float = 10.0
    """CPU seconds per process."""
    memory_mb: int = 512
    """Address space per process, MiB."""
    processes: int = 64
    """Processes and threads alive at once."""
    file_size_mb: int = 16
    """Largest single file, MiB."""
    open_files: int = 128
    """Open descriptors per process."""
    output_bytes: int = 64 * 1024
    """Bytes kept of stdout and of stderr each: the head and the tail, with a mark for the missing middle."""

    def __post_init__(self) -> None:
        for name in ("wall_s", "cpu_s"):
            value = getattr(self, name)
            if isinstance(value, bool) or not (isinstance(value, int | float) and 0 < value <= _MOST):  # also NaN
                raise UsageError(f"limit {name}={value!r} is not a time", fix="give a positive number of seconds")
        for name in ("memory_mb", "processes", "file_size_mb", "open_files", "output_bytes"):
            _check_size(name, getattr(self, name))


def _check_size(name: str, value: object) -> None:
    if isinstance(value, bool) or not (isinstance(value, int) and 0 < value <= _MOST):
        raise UsageError(f"limit {name}={value!r} is not a size", fix=f"give an integer from 1 to {_MOST}")


@dataclass(frozen=True, slots=True)
class SandboxSpec:
    """The kind of sandbox to acquire.

    Examples:
        >>> import forge_env as fe
        >>> fe.SandboxSpec(packages=("numpy>=2",), allow=("api.example.com",)).network
        False
    """

    image: str = "python"
    """Name of a bundled image, or an image reference of the engine."""
    network: bool = False
    """Allow network access. Off unless a task needs it."""
    allow: tuple[str, ...] = ()
    """Hosts (`NAME`, `NAME:PORT`, `*.NAME`) that programs may reach over HTTP and HTTPS, through a filtering proxy set
    in the usual environment variables. All other hosts are unreachable.
    """
    origin: str = ""
    """`HOST:PORT` of a server that programs reach at `ORIGIN_URL`, as if it ran in the sandbox. This works without
    proxy variables, which not every client reads.
    """
    base: str = ""
    """If `image` is a folder: the image, `python` for the bundled one, that replaces those named by `FROM` in its
    Dockerfile. This makes it possible to build without a registry.
    """
    writable: tuple[str, ...] = ()
    """Folders of the image, such as `/app`, that programs may write to as well, by absolute path. Each user of the
    sandbox finds them with the image's content.
    """
    disk_mb: int = 64
    """Size of the work folder, and of each of `writable`, MiB."""
    memory_mb: int = 1024
    """Memory of the whole sandbox, MiB."""
    packages: tuple[str, ...] = ()
    """Python packages as pip takes them (`pytest`, `numpy>=2`). They are installed before the sandbox starts, from the
    index configured on this machine, since the sandbox itself has no network.
    """
    preload: tuple[str, ...] = ()
    """Modules that each sandbox imports once, ahead of use. `run_python`, and `spawn(["python", "FILE.py", ...])`, then
    run in a copy of the process that has imported them. That process starts your programs, so list only modules that
    you trust. If a module can't be imported, programs meet the error themselves.
    """

    def __post_init__(self) -> None:
        for name, kind in {"image": str, "network": bool, "origin": str, "base": str}.items():
            if not isinstance(value := getattr(self, name), kind):
                expected = "a string" if kind is str else "True or False"
                raise UsageError(f"{name}={value!r} is not {expected}", fix=f"give {expected}")
        named = {"allow": "hosts", "packages": "packages", "preload": "modules", "writable": "folders"}
        for name, what in named.items():
            if isinstance(value := getattr(self, name), str):
                raise UsageError(f"{name}={value!r} is a single string", fix=f"pass a tuple of {what}")
            object.__setattr__(self, name, tuple(value))
        for package in self.packages:
            if not (isinstance(package, str) and _REQUIREMENT.fullmatch(package)):
                fix = "name packages of the index, with versions if needed: 'numpy>=2'"
                raise UsageError(f"{package!r} is not a package", fix=fix)
        for module in self.preload:
            if not (isinstance(module, str) and all(part.isidentifier() for part in module.split("."))):
                raise UsageError(f"{module!r} is not a module", fix="name modules as in an import: 'openai'")
        _check_folders(self.writable)
        _check_size("disk_mb", self.disk_mb)  # 0 means unlimited to the kernel
        _check_size("memory_mb", self.memory_mb)
        for host in (*self.allow, *([self.origin] if self.origin else [])):
            parse_host(host)
        if self.network and self.proxied:
            raise UsageError("network=True reaches every host, allow and origin only some", fix="choose one of them")

    @property
    def proxied(self) -> bool:
        """Whether programs reach hosts through the filtering proxy."""
        return bool(self.allow or self.origin)


def _check_folders(folders: tuple[str, ...]) -> None:
    """Raise `UsageError` if one of the folders can't be writable."""
    for folder in folders:
        if not isinstance(folder, str) or posixpath.normpath(folder) != folder or not folder.strip("/"):
            raise UsageError(f"writable: {folder!r} is not a folder", fix="give absolute paths such as '/app'")
        if not folder.startswith("/") or folder.startswith("//") or not folder.isprintable() or "," in folder:
            raise UsageError(f"writable: {folder!r} is not an absolute path", fix="give absolute paths such as '/app'")
        if any(is_below(folder, f"/{fixed}") or is_below(f"/{fixed}", folder) for fixed in _READ_ONLY):
            raise UsageError(f"writable: {folder!r} is never writable: the sandbox itself uses it", fix="leave it out")
        others = [*_OWN_FOLDERS, *(other for other in folders if other is not folder)]
        if inside := [other for other in others if is_below(folder, other)]:
            raise UsageError(f"writable: {folder!r} is in {inside[0]!r}", fix="leave it out")


def parse_host(entry: str) -> tuple[str, tuple[int, ...]]:
    """Split a host of `allow` or `origin` into name and ports; raises `UsageError` if it is malformed."""
    if not isinstance(entry, str):
        raise UsageError(f"{entry!r} in allow or origin is not a host", fix="write NAME, NAME:PORT or *.NAME")
    ports: tuple[int, ...]
    name, colon, port = entry.lower().rpartition(":") if not entry.endswith("]") else (entry, "", "")
    if not colon:
        name, ports = entry.lower(), _PORTS
    elif re.fullmatch(r"[0-9]{1,5}", port) and 0 < int(port) < 1 << 16:
        ports = (int(port),)
    else:
        name = ""
    if ":" in name and not (name.startswith("[") and name.endswith("]")):
        name = ""
    name = name.strip("[]").rstrip(".")
    if not name or "/" in name or "*" in name.removeprefix("*.") or name == "*.":
        raise UsageError(f"{entry!r} in allow or origin is not a host", fix="write NAME, NAME:PORT or *.NAME")
    return name, ports


def is_below(path: str, folder: str) -> bool:
    """Whether an absolute path is `folder` itself or inside it."""
    return path == folder or path.startswith(f"{folder}/")
