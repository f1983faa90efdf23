"""`forge-env trajectory`: show one episode as a readable conversation."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from forge_env.cli.command import Parser
from forge_env.cli.show import folder_of_run
from forge_env.errors import UsageError
from forge_env.evaluation.tables import counted
from forge_env.reading import LONGEST_LINE, open_file
from forge_env.run.folder import RunFolder
from forge_env.run.trained import read_trained
from forge_env.trajectory import DAMAGE, Trajectory, Turn
from forge_env.trajectory_index import IndexReader, IndexRow, is_index
from forge_env.types import Message, ToolCall
from forge_env.visible import one_line, visible

LONGEST = 4_000
"""Maximum characters of a text without --full."""
COLOURS = {"system": "2", "user": "36", "assistant": "32", "tool": "33"}
"""ANSI colour codes of the roles' names."""


def add_arguments(parser: Parser) -> None:
    """Add the command's arguments."""
    parser.add_argument("run_folder", metavar="RUN", help="folder of a run or an evaluation")
    parser.add_argument("id", metavar="ID", help="of the episode (`forge-env trajectories RUN` lists them)")
    parser.add_argument("--kind", metavar="KIND", help="file to look in: train, eval-00010, ... (default: the newest)")
    parser.add_argument("--full", action="store_true", help=f"show all of every text, not {LONGEST} characters")


def run(args: argparse.Namespace) -> int:
    """Print the episode, with its reward last."""
    root = folder_of_run(args.run_folder)
    path, row, others = find(root, args.id, args.kind)
    episode = _read(path, row)
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 100
    for line in conversation(episode, colour=sys.stdout.isatty(), width=width, longest=None if args.full else LONGEST):
        print(line)
    print()
    for line in figures(episode, root, path):
        print(visible(line))
    if others:
        print(visible(f"also in {', '.join(others)}: choose with --kind"))
    print(visible(result(episode)))
    return 0


def find(root: Path, name: str, kind: str | None) -> tuple[Path, IndexRow, list[str]]:
    """Find an episode: its file, its index row, and the names of other files with an episode of the same id.

    Raises:
        UsageError: there is no such episode.
    """
    rows: dict[Path, IndexRow] = {}
    for path in sorted((root / "trajectories").glob("*.jsonl")):
        if not is_index(path) and (kind is None or path.stem == kind or path.stem.startswith(f"{kind}-")):
            for row in IndexReader(path).news():
                if row.id == name and (path not in rows or row.offset > rows[path].offset):
                    rows[path] = row
    if not rows:
        where = f"{root.name}, kind {kind}" if kind else root.name
        raise UsageError(
            f"{one_line(where)} holds no episode {one_line(name)!r}", fix=f"forge-env trajectories {root} lists all"
        )
    path = max(rows, key=lambda path: (path.stem != "train", path.stem))
    return path, rows[path], sorted(other.stem for other in rows if other != path)


def _read(path: Path, row: IndexRow) -> Trajectory:
    with open_file(path) as file:
        file.seek(row.offset)
        line = file.read(min(row.length, LONGEST_LINE))
    try:
        return Trajectory.from_dict(json.loads(line))
    except DAMAGE as error:
        raise UsageError(
            f"{path}, byte {row.offset} is not a trajectory: {one_line(str(error))}", fix="its line is damaged"
        ) from error


def conversation(episode: Trajectory, *, colour: bool, width: int, longest: int | None) -> Iterator[str]:
    """Format the messages as the agent saw them, with the metrics of each turn."""
    seat = None
    for number, turn in enumerate(episode.turns, start=1):
        if turn.seat != (seat or ""):
            yield _rule(f"seat {one_line(turn.seat, 40)}", width, colour)
        seat = turn.seat
        for message in turn.observation:
            yield from _message(message, colour, longest)
        yield from _message(turn.message, colour, longest, turn)
        yield _soft(f"  turn {number}: {_turn_figures(turn)}", colour)
    for message in episode.final_observation:
        yield from _message(message, colour, longest)


def _message(message: Message, colour: bool, longest: int | None, turn: Turn | None = None) -> Iterator[str]:
    name = message.role + (f" {one_line(message.name, 60)}" if message.name else "")
    yield ""
    yield f"\x1b[1;{COLOURS.get(message.role, '0')}m{name}\x1b[0m" if colour else name
    if message.reasoning_content:
        for line in _text(message.reasoning_content, longest):
            yield _soft(f"  ~ {line}", colour)
    yield from (f"  {line}" for line in _text(message.content, longest)) if message.content else ()
    if message.images:
        yield f"  [{len(message.images)} images]"
    seconds = turn.calls_s if turn is not None else []
    for index, call in enumerate(message.tool_calls):
        took = f"  ({seconds[index]:.2f} s)" if index < len(seconds) else ""
        yield from _call(call, took, colour, longest)


def _call(call: ToolCall, took: str, colour: bool, longest: int | None) -> Iterator[str]:
    """Format a call, with string arguments in separate lines; arguments that are no JSON object are shown unchanged."""
    name = one_line(call.function.name, 60)
    yield (f"  \x1b[1m→ {name}\x1b[0m" if colour else f"  → {name}") + _soft(took, colour)
    try:
        arguments = json.loads(call.function.arguments)
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        yield from (f"      {line}" for line in _text(call.function.arguments, longest))
        return
    for key, value in arguments.items():
        lines = _text(value if isinstance(value, str) else json.dumps(value), longest)
        if len(lines) == 1:
            yield f"    {one_line(key, 60)}: {lines[0]}"
        else:
            yield f"    {one_line(key, 60)}:"
            yield from (f"      {line}" for line in lines)


def _text(text: str, longest: int | None) -> list[str]:
    cut = [] if longest is None or len(text) <= longest else [f"[... {len(text) - longest:,} more; --full shows them]"]
    return [*visible(text if longest is None else text[:longest]).strip("\n").split("\n"), *cut]


def _turn_figures(turn: Turn) -> str:
    reply = turn.reply
    parts = [f"{len(reply.token_ids)} tokens"] if len(reply.token_ids) else []
    versions = sorted({int(version) for version in reply.versions}) if len(reply.token_ids) else []
    parts += [f"version {'-'.join(map(str, versions))}"] if versions else []
    parts += [f"model {turn.generate_s:.2f} s, environment {turn.step_s:.2f} s"]
    parts += [f"reward {turn.reward:g}"] if turn.reward else []
    parts += ["cut at the limit of tokens"] if reply.stop_reason == "length" else []
    return ", ".join(parts) + (", begins the conversation anew" if reply.forked else "")


def _rule(text: str, width: int, colour: bool) -> str:
    return _soft(f"-- {text} ".ljust(min(width, 80), "-"), colour)


def _soft(text: str, colour: bool) -> str:
    return f"\x1b[2m{text}\x1b[0m" if colour and text else text


def figures(episode: Trajectory, root: Path, path: Path) -> Iterator[str]:
    """Format the metadata of an episode: environment, task, timing, training, metrics."""
    yield f"{episode.id} in {path}"
    yield f"environment {episode.environment}, task {one_line(episode.task_id)}, difficulty {episode.difficulty}" + (
        f", {one_line(', '.join(episode.tags))}" if episode.tags else ""
    )
    started = ""
    if episode.started:
        began = datetime.fromtimestamp(episode.started, UTC)
        started = f", started {began.isoformat(sep=' ', timespec='seconds')}"
    tries = f", tried {episode.retries + 1} times" if episode.retries else ""
    waited = f" (waited {episode.waited_s:.1f} s)" if episode.waited_s else ""
    size = f"{len(episode.turns)} turns, {episode.num_sampled_tokens} tokens"
    yield f"{size}, {episode.wall_s:.1f} s{waited}{started}{tries}"
    if path.stem == "train" or path.stem.startswith("train-"):
        yield from _trained(episode, root)
    if episode.metrics:
        yield ", ".join(f"{one_line(name, 60)} {value:g}" for name, value in episode.metrics.items())


def _trained(episode: Trajectory, root: Path) -> Iterator[str]:
    """Format the training steps that used the episode, or the reason why none did."""
    if episode.group is None:
        return
    trained = read_trained(RunFolder(root).trained)
    if fate := trained.fates.get(episode.group):
        yield f"not trained on: group {episode.group} was {one_line(fate)}"
    for step, groups in trained.steps.items():
        for group in groups:
            samples = [one for one in group.episodes if one.member.partition("/")[0] == str(episode.member)]
            if group.group == episode.group and samples:
                mean = sum(one.advantage for one in samples) / len(samples)
                yield f"trained on in step {step}: advantage {mean:+.3f}, {counted(group.staleness, 'version')} old"


def result(episode: Trajectory) -> str:
    """Format the end of the episode and its reward."""
    end = "ended"
    if not episode.valid:
        end = f"lost ({one_line(episode.error or 'no reason is recorded')})"
    elif episode.crashed:
        end = f"agent crashed ({one_line(episode.error or '')})"
    elif episode.truncated:
        end = f"ended by the limit of {one_line(str(episode.truncation or 'unknown'))}"
    best: Any = episode.info.get("max_reward")
    of = f" of {best:g}" if isinstance(best, int | float) else ""
    seats = ", ".join(f"{one_line(seat, 40)} {reward:g}" for seat, reward in episode.rewards.items())
    why = f"\n{one_line(episode.reason)}" if episode.reason else ""
    why += "".join(f"\n  {one_line(failure, 400)}" for failure in episode.failures)
    return f"{end}: reward {episode.reward:g}{of}" + (f" ({seats})" if seats else "") + why
