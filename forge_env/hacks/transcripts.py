"""Read recorded episodes and search them for signs: forge-env's trajectories, and transcripts of other agents.

Such transcripts are ATIF documents or conversations in OpenAI's format, one per file or one per line.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from forge_env.errors import UsageError
from forge_env.hacks.catalogue import Hit, as_command, found_in, hits
from forge_env.reading import ANYWHERE, LONGEST_LINE, is_bounded, open_file, whole_lines
from forge_env.run.folder import RunFolder
from forge_env.trajectory import DAMAGE, Trajectory
from forge_env.trajectory_index import is_index


@dataclass(slots=True)
class Played:
    """Summary of a recorded episode.

    Attributes:
        kind: name of its file, without the suffix.
        reward: its reward; None: not recorded.
        place: file, offset and length of its record.
    """

    id: str
    task: str
    kind: str
    group: int | None
    reward: float | None
    metrics: Mapping[str, float]
    hits: list[Hit]
    place: tuple[Path, int, int]


@dataclass(slots=True)
class Transcripts:
    """Episodes read from a folder or file.

    Attributes:
        episodes: the episodes; of repeated records of one, only the last.
        left_out: number of records that were not read, because only a sample was requested.
    """

    episodes: list[Played] = field(default_factory=list)
    left_out: int = 0
    damaged: int = 0


def read(root: Path, most: int | None = None) -> Transcripts:
    """Read the episodes of a run, an evaluation, or a folder or file of transcripts.

    Args:
        most: maximum number of records to read, spread evenly; None: all.

    Raises:
        UsageError: there are no recorded episodes.
        OSError, UnsafeFileError: a file can't be read.
    """
    files = [root] if root.is_file() else _files(root)
    if not files:
        raise UsageError(
            f"{root} contains no recorded episodes",
            fix="give a run, an evaluation, or a folder with trajectories, ATIF documents or conversations as JSON; "
            "a run with logging.trajectories=none records none",
        )
    lines = [_places(path, root) for path in files]
    total = sum(map(len, lines))
    every = 1.0 if most is None or total <= most else total / most
    result = Transcripts(left_out=total - (total if every == 1.0 else math.ceil(total / every)))
    latest: dict[tuple[str, str], Played] = {}
    count, due = 0, 0.0
    for path, places in zip(files, lines, strict=True):
        with open_file(path, root=_root_of(root)) as file:
            for offset, length in places:
                count += 1
                if count <= due:
                    continue
                due += every
                if length > LONGEST_LINE:
                    result.damaged += 1
                    continue
                file.seek(offset)
                for episode in _parsed(file.read(length), path, (path, offset, length), result):
                    latest[episode.kind, episode.id] = episode  # a group that was played again replaces the earlier one
    result.episodes = list(latest.values())
    return result


def _files(root: Path) -> list[Path]:
    folder = RunFolder(root).trajectories
    if folder.is_dir():
        return sorted(path for path in folder.glob("*.jsonl") if not is_index(path))
    names = chain(root.rglob("*.jsonl"), root.rglob("*.json"))
    return sorted(path for path in names if path.is_file() and not is_index(path))


def _root_of(root: Path) -> Path:
    """Folder in which opened files must be: `root` itself if it is a folder; a file given as `root` may be a link."""
    return root if root.is_dir() else ANYWHERE


def _places(path: Path, root: Path) -> list[tuple[int, int]]:
    """Offset and length of every complete line of a .jsonl file, or of the whole document."""
    with open_file(path, root=_root_of(root)) as file:
        if path.suffix != ".jsonl":
            return [(0, os.fstat(file.fileno()).st_size)]
        return [(line.offset, line.length) for line in whole_lines(file)]


def _parsed(text: bytes, path: Path, place: tuple[Path, int, int], found: Transcripts) -> Iterator[Played]:
    """Parse the episode in a line or document; yield nothing if there is none."""
    try:
        data = json.loads(text)
        if isinstance(data, list):
            data = {"messages": data}
        if not isinstance(data, dict):
            return
        if "turns" in data:
            yield _own(data, path, place)
        elif isinstance(data.get("steps"), list) and "agent" in data:
            yield _atif(data, path, place)
        elif isinstance(data.get("messages"), list):
            yield _conversation(data, path, place)
    except DAMAGE:
        found.damaged += 1


def _own(data: dict[str, Any], path: Path, place: tuple[Path, int, int]) -> Played:
    signs = _once(hit for turn in data["turns"] for hit in hits(turn["message"]))
    return Played(
        str(data["id"]),
        str(data.get("task_id", "")),
        path.stem,
        data.get("group"),
        _number(data["reward"]) if data.get("valid", True) else None,
        {name: _number(value) for name, value in (data.get("metrics") or {}).items()},
        signs,
        place,
    )


def _atif(data: dict[str, Any], path: Path, place: tuple[Path, int, int]) -> Played:
    signs: list[Hit] = []
    for step in data["steps"]:
        if step.get("source") != "agent" or step.get("is_copied_context"):
            continue
        message = {"content": step.get("message"), "reasoning_content": step.get("reasoning_content")}
        calls = step.get("tool_calls") or ()
        commands = [text for call in calls for text in as_command(str(call["function_name"]), call.get("arguments"))]
        signs += [*hits(message), *found_in({"command": commands})]
    extra = data.get("extra") or {}
    reward = extra.get("reward", ((data.get("final_metrics") or {}).get("extra") or {}).get("reward"))
    metrics = extra.get("metrics") if isinstance(extra.get("metrics"), dict) else {}
    name = str(data.get("trajectory_id") or data.get("session_id") or path.stem)
    task = str(extra.get("task_id") or path.parent.name)
    return Played(name, task, path.stem, None, _float(reward), _floats(metrics), _once(signs), place)


def _conversation(data: dict[str, Any], path: Path, place: tuple[Path, int, int]) -> Played:
    agent = [item for item in data["messages"] if isinstance(item, dict) and item.get("role") == "assistant"]
    signs = _once(hit for message in agent for hit in hits(message))
    name = str(data.get("id") or data.get("instance_id") or f"{path.stem}:{place[1]}")
    task = str(data.get("task_id") or data.get("instance_id") or path.stem)
    reward = data.get("reward", data.get("score"))
    return Played(name, task, path.stem, None, _float(reward), _floats(data.get("metrics")), signs, place)


def _once(found: Iterator[Hit] | Sequence[Hit]) -> list[Hit]:
    return list({hit.sign: hit for hit in reversed(list(found))}.values())[::-1]


def _number(value: Any) -> float:
    number = float(value)
    if not is_bounded(number):
        raise ValueError(f"the number {number:g} is too large")
    return number


def _float(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and is_bounded(value) else None


def _floats(values: Any) -> dict[str, float]:
    items = values.items() if isinstance(values, dict) else ()
    return {str(name): number for name, value in items if (number := _float(value)) is not None}


def whole(own: Played) -> Trajectory:
    """Load the full trajectory of an episode recorded by forge-env; raises one of `DAMAGE` if its record is damaged.

    Raises:
        UsageError: it was not recorded by forge-env.
    """
    path, offset, length = own.place
    with open_file(path, root=ANYWHERE) as file:  # `read` has checked the path
        file.seek(offset)
        data = json.loads(file.read(length))
    if "turns" not in data:
        raise UsageError(f"the second judge needs trajectories of forge-env, unlike {path}", fix="leave out --judge")
    return Trajectory.from_dict(data)
