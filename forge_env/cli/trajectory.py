"""`forge-env trajectory`: list recorded episodes, or print one as a conversation."""

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
from forge_env.cli.info import earned
from forge_env.errors import UsageError
from forge_env.figures import duration
from forge_env.interrupts import say
from forge_env.machine import user_path
from forge_env.reading import check_readable
from forge_env.rewards.reasons import score_lines
from forge_env.run.folder import RunFolder
from forge_env.run.trained import read_trained
from forge_env.trajectory import DAMAGE, Trajectory, Turn, read_record, read_trajectories
from forge_env.trajectory_index import IndexReader, IndexRow, is_index
from forge_env.types import Message, ToolCall
from forge_env.visible import one_line, visible

LONGEST = 4_000
"""Maximum characters of a text without --full."""
COLOURS = {"system": "2", "user": "36", "assistant": "32", "tool": "33"}
"""ANSI colour codes of the roles' names."""


def add_arguments(parser: Parser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "path", metavar="PATH", help="folder of a run or an evaluation, a name in runs/, or a file of trajectories"
    )
    parser.add_argument("id", metavar="ID", nargs="?", help="episode to print (default: list all, one per line)")
    parser.add_argument("--kind", metavar="KIND", help="kind of episodes: train, eval-00010, ... (default: all)")
    parser.add_argument("--full", action="store_true", help=f"print texts in full instead of {LONGEST:,} characters")


def run(args: argparse.Namespace) -> int:
    """List the episodes, or print one with its reward last."""
    source = source_of(args.path)
    if args.id is None:
        for file, trajectory in episodes(source):
            if of_kind(file, args.kind):
                print(visible(summary_line(trajectory).replace("\n", " ")))
        return 0
    path, row, others = find(source, args.id, args.kind)
    episode = read_episode(path, row)
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 100
    for line in conversation(episode, colour=sys.stdout.isatty(), width=width, longest=None if args.full else LONGEST):
        print(line)
    print()
    for line in figures(episode, path.parent.parent, path):
        print(visible(line))
    if others:
        print(visible(f"also in {', '.join(others)}; --kind chooses one"))
    print(visible(result(episode)))
    return 0


def source_of(text: str) -> Path:
    """Find a file of trajectories, or a folder with some: the given path, or `runs/NAME`.

    Raises:
        UsageError: there is no such path, or it is a run with an unreadable file.
    """
    for path in (user_path(text), Path("runs") / text):
        if path.exists():
            if path.is_dir():
                check_readable(path.absolute())
            return path.absolute()
    raise UsageError(f"there is no {one_line(text)}", fix="give a run, an evaluation, or a file of trajectories")


def left_out(why: str) -> None:
    """Report a record that can't be shown; the remaining records are still shown."""
    say(f"forge-env: {why}")


def episodes(source: Path) -> Iterator[tuple[Path, Trajectory]]:
    """Yield the episodes of a path with their files; records that can't be shown are reported."""
    root = None if source.is_file() else source
    for file in trajectory_files(source):
        for trajectory in read_trajectories(file, on_damage=left_out, on_newer=left_out, root=root):
            yield file, trajectory


def trajectory_files(path: Path) -> Iterator[Path]:
    """Yield the trajectory files of a path: the file itself, or those in the folder of a run or an evaluation."""
    folder = path / "trajectories"
    candidates = [path] if path.is_file() else sorted((folder if folder.is_dir() else path).glob("*.jsonl"))
    files = [file for file in candidates if not is_index(file)]
    if not files:
        raise UsageError(
            f"{path} contains no trajectories", fix="give a .jsonl file, or the folder of a run or an evaluation"
        )
    yield from files


def of_kind(path: Path, kind: str | None) -> bool:
    """Whether a trajectory file is of a kind; each host of a run writes a file of its own, `KIND-HOST.jsonl`."""
    return kind is None or path.stem == kind or path.stem.startswith(f"{kind}-")


def summary_line(trajectory: Trajectory) -> str:
    """Format an episode in one line: id, task, reward, size and end."""
    end = f"truncated ({trajectory.truncation})" if trajectory.truncated else "ended"
    if trajectory.crashed:
        end = f"agent crashed ({' '.join((trajectory.error or '').split())[:200]})"
    elif not trajectory.valid:
        end = f"lost ({' '.join((trajectory.error or '').split())[:200]})"
    tokens = f", {trajectory.num_sampled_tokens} sampled tokens" if trajectory.num_sampled_tokens else ""
    return (
        f"{trajectory.id}  {trajectory.environment} {trajectory.task_id}  {earned(trajectory)}  "
        f"{len(trajectory.turns)} turns{tokens}  {end}"
    )


def find(source: Path, name: str, kind: str | None) -> tuple[Path, IndexRow, list[str]]:
    """Find an episode: its file, its index row, and the names of other files with an episode of the same id.

    Raises:
        UsageError: there is no such episode.
    """
    rows: dict[Path, IndexRow] = {}
    for path in trajectory_files(source):
        for row in IndexReader(path).news() if of_kind(path, kind) else ():
            if row.id == name and (path not in rows or row.offset > rows[path].offset):
                rows[path] = row
    if not rows:
        where = f"{source.name}, kind {kind}" if kind else source.name
        raise UsageError(
            f"{one_line(where)} has no episode {one_line(name)!r}", fix=f"forge-env trajectory {source} lists them"
        )
    path = max(rows, key=lambda path: (path.stem != "train", path.stem))
    return path, rows[path], sorted(other.stem for other in rows if other != path)


def read_episode(path: Path, row: IndexRow) -> Trajectory:
    """Read the record of an index row. Raises `UsageError` if it is damaged."""
    try:
        return read_record(path, row.offset, row.length)
    except DAMAGE as error:
        raise UsageError(
            f"{path}, byte {row.offset} is not a trajectory: {one_line(str(error))}", fix="delete the damaged line"
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
        took = f"  ({duration(seconds[index], fine=True)})" if index < len(seconds) else ""
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
    parts += [f"model {duration(turn.generate_s, fine=True)}, environment {duration(turn.step_s, fine=True)}"]
    parts += [f"reward {turn.reward:g}"] if turn.reward else []
    parts += ["stopped at max_tokens"] if reply.was_cut else []
    return ", ".join(parts) + (", starts a new conversation" if reply.forked else "")


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
    waited = f" (waited {duration(episode.waited_s)})" if episode.waited_s else ""
    size = f"{len(episode.turns)} turns, {episode.num_sampled_tokens} tokens"
    yield f"{size}, {duration(episode.wall_s)}{waited}{started}{tries}"
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
                yield f"trained on in step {step}: advantage {mean:+.3f}, staleness {group.staleness}"


def result(episode: Trajectory) -> str:
    """Format the end of the episode and its reward."""
    end = "ended"
    if not episode.valid:
        end = f"lost ({one_line(episode.error or 'no reason is recorded')})"
    elif episode.crashed:
        end = f"agent crashed ({one_line(episode.error or '')})"
    elif episode.truncated:
        end = f"truncated ({one_line(str(episode.truncation or 'unknown'))})"
    best: Any = episode.info.get("max_reward")
    of = f" of {best:g}" if isinstance(best, int | float) else ""
    seats = ", ".join(f"{one_line(seat, 40)} {reward:g}" for seat, reward in episode.rewards.items())
    why = f"\n{one_line(episode.reason)}" if episode.reason else ""
    why += "".join(f"\n  {one_line(line, 400)}" for line in [*episode.failures, *score_lines(episode.scores)])
    return f"{end}: reward {episode.reward:g}{of}" + (f" ({seats})" if seats else "") + why
