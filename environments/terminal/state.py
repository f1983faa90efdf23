"""Final state of a work folder: collected inside the sandbox by the engine's Python interpreter, compared outside.

The agent's processes are stopped when a call ends, the root file system is read-only, and the interpreter runs isolated
(`-I -S`, from `/`), so files of the agent can't affect the result. The expected state never enters the sandbox.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from forge_env.errors import SandboxError
from forge_env.sandbox import WORK, Limits, Sandbox

MOST_FILES = 500
LARGEST_FILE = 16 * 1024
"""Maximum size of a file that is read, in bytes; a larger file differs from every expected one."""
LIMITS = Limits(wall_s=20.0, cpu_s=10.0, output_bytes=32 * 1024 * 1024)
_LOOK = f"""
import os, stat, sys
found = []
for folder, folders, names in os.walk(".", followlinks=False):
    for name in sorted(folders) + sorted(names):
        path = os.path.join(folder, name)[2:]
        entry = os.lstat(path)
        kind = "other"
        data = b""
        if stat.S_ISLNK(entry.st_mode):
            kind, data = "link", os.fsencode(os.readlink(path))
        elif stat.S_ISDIR(entry.st_mode):
            kind = "folder"
        elif stat.S_ISREG(entry.st_mode):
            kind = "unread"
            try:
                os.chmod(path, 0o600)
                with open(path, "rb") as file:
                    data = file.read({LARGEST_FILE} + 1)
                if len(data) <= {LARGEST_FILE}:
                    kind = "file"
            except OSError:
                pass
        executable = bool(entry.st_mode & stat.S_IXUSR)
        found.append((kind, str(int(executable)), os.fsencode(path).hex(), data.hex() if kind != "unread" else ""))
        if len(found) > {MOST_FILES}:
            sys.exit(0)
print(len(found))
sys.stdout.writelines(" ".join(item) + "\\n" for item in found)
"""
"""Script that prints the number of entries, then one line for each. It only imports modules that Python loads anyway,
since start-up takes half of its time."""


@dataclass(frozen=True, slots=True)
class Entry:
    """Entry at a path. `text` is None unless it is a readable file of at most `LARGEST_FILE` bytes."""

    kind: str
    """"file", "folder", "link" or "other"."""
    text: str | None = None
    executable: bool = False
    link: str | None = None


async def look(sandbox: Sandbox) -> dict[str, Entry] | None:
    """All entries of the work folder by path; None: more than `MOST_FILES`. `SandboxError`: the interpreter failed."""
    script = ["/usr/bin/python3", "-I", "-S", "-c", f"import os; os.chdir({WORK!r})\n{_LOOK}"]
    result = await sandbox.exec(script, cwd="/", limits=LIMITS)
    if not result.ok or result.truncated:
        raise SandboxError(f"the work folder could not be read: {result.stderr[-300:] or result}")
    if not result.stdout:
        return None
    entries = [line.split(" ") for line in result.stdout.splitlines()[1:]]
    return {_text(path): _entry(kind, executable == "1", data) for kind, executable, path, data in entries}


def _text(data: str) -> str:
    return bytes.fromhex(data).decode("utf-8", "replace")


def _entry(kind: str, executable: bool, data: str) -> Entry:
    if kind == "link":
        return Entry("link", link=_text(data))
    if kind == "file":
        return Entry("file", text=_text(data), executable=executable)
    return Entry("file", executable=executable) if kind == "unread" else Entry(kind)


def problems(expected: Mapping[str, object], state: Mapping[str, Entry] | None) -> list[str]:
    """Differences from the expected state; empty if there are none.

    A path should have this text (ignoring trailing white space), None (no entry), `{"executable": bool}`,
    `{"link": target}` or `{"folder": True}`.
    """
    if state is None:
        return ["there are too many files"]
    return [f"{path}: {problem}" for path, want in expected.items() if (problem := _differs(want, state.get(path)))]


def _differs(want: object, entry: Entry | None) -> str | None:
    if want is None:
        return None if entry is None else "should not be there"
    if entry is None:
        return "is missing"
    if isinstance(want, str):
        right = entry.kind == "file" and entry.text is not None and _lines(entry.text) == _lines(want)
        return None if right else "has the wrong content"
    if not isinstance(want, dict):
        raise TypeError(f"unknown expectation: {want!r}")
    if "executable" in want:
        return None if entry.kind == "file" and entry.executable == want["executable"] else "has the wrong mode"
    if "link" in want:
        return None if entry.kind == "link" and entry.link in want["link"] else "is not such a link"
    return None if entry.kind == "folder" else "is not a folder"


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]
