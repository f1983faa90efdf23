"""`forge-env trajectories`: list the episodes of a run or an evaluation, or show one in full."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from forge_env.cli.command import Parser
from forge_env.cli.info import earned, shown
from forge_env.errors import UsageError
from forge_env.interrupts import say
from forge_env.trajectory import Trajectory, read_trajectories
from forge_env.trajectory_index import is_index
from forge_env.visible import visible


def add_arguments(parser: Parser) -> None:
    """Add the command's arguments."""
    parser.add_argument("path", metavar="PATH", help="a file of trajectories, or the folder of a run or an evaluation")
    parser.add_argument(
        "id", metavar="ID", nargs="?", help="show this episode in full (default: list all, one per line)"
    )


def run(args: argparse.Namespace) -> int:
    """List all episodes, or show those with the given id."""
    shown_any = False
    for file, trajectory in episodes(Path(args.path)):
        if args.id is None:
            print(visible(_line(trajectory).replace("\n", " ")))
        elif trajectory.id == args.id:
            print("\n".join([f"{file}:", *shown(trajectory, limit=None)]))
            print(visible(f"  {_line(trajectory)}  {trajectory.metrics}"))
        shown_any |= args.id in (None, trajectory.id)
    if not shown_any:
        what = "no trajectory yet" if args.id is None else f"no trajectory {args.id!r}"
        raise UsageError(f"{args.path} holds {what}", fix=f"forge-env trajectories {args.path} lists those there are")
    return 0


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
            f"{path} holds no trajectories", fix="give a .jsonl file, or the folder of a run or an evaluation"
        )
    yield from files


def _line(trajectory: Trajectory) -> str:
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
