"""The final state of a work folder: taken inside the sandbox by the engine's own interpreter, compared outside.

The agent's processes are gone when a call ends, the root file system can't be written, and the interpreter runs
isolated (`-I -S`, from `/`), so nothing that the agent left behind takes part. What is expected never goes in.
"""

from __future__ import annotations

import base64
import json
import stat
from collections.abc import Mapping
from dataclasses import dataclass

from forge_env.errors import SandboxError
from forge_env.sandbox import Limits, Sandbox

WORK = "/work"
MOST_FILES = 500
LARGEST_FILE = 16 * 1024
"""A file longer than this differs from every expected one, bytes."""
LIMITS = Limits(wall_s=20.0, cpu_s=10.0, output_bytes=16 * 1024 * 1024)
_LOOK = f"""
import base64, json, os, stat, sys
found = []
for folder, folders, names in os.walk(".", followlinks=False):
    for name in sorted(folders) + sorted(names):
        path = os.path.join(folder, name)[2:]
        entry = os.lstat(path)
        item = {{"path": path.encode("utf-8", "surrogateescape").decode("utf-8", "replace"), "mode": entry.st_mode}}
        if stat.S_ISLNK(entry.st_mode):
            item["link"] = os.fsencode(os.readlink(path)).decode("utf-8", "replace")
        elif stat.S_ISREG(entry.st_mode) and entry.st_size <= {LARGEST_FILE}:
            try:
                os.chmod(path, 0o600)
                with open(path, "rb") as file:
                    item["data"] = base64.b64encode(file.read({LARGEST_FILE} + 1)).decode()
            except OSError:
                pass
        found.append(item)
        if len(found) > {MOST_FILES}:
            sys.exit(0)
sys.stdout.write(json.dumps(found))
"""


@dataclass(frozen=True, slots=True)
class Entry:
    """What is at a path. `text` is None for what is not a readable file of sensible length."""

    kind: str
    """"file", "folder", "link" or "other"."""
    text: str | None = None
    executable: bool = False
    link: str | None = None


async def look(sandbox: Sandbox) -> dict[str, Entry] | None:
    """Everything in the work folder by path; None when there is too much of it to be the answer to any task.

    Raises:
        SandboxError: the engine's interpreter could not look.
    """
    script = ["/usr/bin/python3", "-I", "-S", "-c", f"import os; os.chdir({WORK!r})\n{_LOOK}"]
    result = await sandbox.exec(script, cwd="/", limits=LIMITS)
    if not result.ok or result.truncated:
        raise SandboxError(f"the work folder could not be read: {result.stderr[-300:] or result}")
    return None if not result.stdout else {item["path"]: _entry(item) for item in json.loads(result.stdout)}


def _entry(item: Mapping[str, object]) -> Entry:
    mode = int(str(item["mode"]))
    if stat.S_ISLNK(mode):
        return Entry("link", link=str(item.get("link")))
    if stat.S_ISDIR(mode):
        return Entry("folder")
    if not stat.S_ISREG(mode):
        return Entry("other")
    data = item.get("data")
    text = None if data is None else base64.b64decode(str(data)).decode("utf-8", "replace")
    return Entry("file", text=text, executable=bool(mode & stat.S_IXUSR))


def problems(expected: Mapping[str, object], state: Mapping[str, Entry] | None) -> list[str]:
    """What is not as expected, for logs; empty when everything is.

    Args:
        expected: path -> text of a file (trailing white space aside), None (nothing is there), or
            `{"executable": bool}`, `{"link": target}`, `{"folder": True}`.
        state: from `look`.
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
        raise TypeError(f"no expectation: {want!r}")
    if "executable" in want:
        return None if entry.kind == "file" and entry.executable == want["executable"] else "has the wrong mode"
    if "link" in want:
        return None if entry.kind == "link" and entry.link in want["link"] else "is not such a link"
    return None if entry.kind == "folder" else "is not a folder"


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]
