"""`forge-env export`: write the model or the episodes of a run in the formats of other tools."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from forge_env.cli.command import Parser
from forge_env.cli.trajectory import episodes, trajectory_files
from forge_env.errors import UsageError
from forge_env.interrupts import say
from forge_env.plugins import load_plugin
from forge_env.trajectory import Trajectory

FORMATS = ("huggingface", "atif", "inspect")


def add_arguments(parser: Parser) -> None:
    """Add the command's arguments."""
    parser.description = (
        "Export the model of a checkpoint as a Hugging Face folder. LoRA adapters are merged into the base model; with "
        "--adapter they are exported alone, in PEFT's format. With --format atif or inspect, export the episodes of a "
        "run or an evaluation as a folder of ATIF documents or as a log of inspect_ai."
    )
    parser.add_argument(
        "source",
        metavar="FROM",
        help="a checkpoint, or a run for its newest one; for episodes, a run, an evaluation or a file of trajectories",
    )
    parser.add_argument("out", metavar="TO", help="output folder; for --format inspect, a file ending in .eval")
    parser.add_argument("--format", choices=FORMATS, default=FORMATS[0], help="output format")
    parser.add_argument("--model-name", metavar="NAME", default="", help="model name recorded in exported episodes")
    parser.add_argument("--adapter", action="store_true", help="export only the adapters")
    parser.add_argument("--base", metavar="MODEL", help="base model, if not the run's: a folder or hub name")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="precision of full weights; bfloat16 may lose training",
    )


def run(args: argparse.Namespace) -> int:
    """Export the model or the episodes."""
    out = Path(args.out)
    if args.format != "huggingface":
        return _episodes(args, out)
    export: Callable[..., Path] = load_plugin("forge_env.exporters", "huggingface")
    taken = export(Path(args.source), out, adapter_only=args.adapter, dtype=args.dtype, base=args.base, tell=say)
    say(f"{taken} -> {out}")
    return 0


def _episodes(args: argparse.Namespace, out: Path) -> int:
    from forge_env.interchange import atif, write_inspect

    source = Path(args.source)
    files = list(trajectory_files(source))
    trajectories = _found(source, several=len(files) > 1)
    if args.format == "inspect":
        if out.suffix != ".eval":
            raise UsageError(f"{out} is not a name for an inspect_ai log", fix="end it with .eval")
        out.parent.mkdir(parents=True, exist_ok=True)
        count = write_inspect(trajectories, out, model=args.model_name, created=files[0].stat().st_mtime)
    else:
        out.mkdir(parents=True, exist_ok=True)
        count = 0
        for count, trajectory in enumerate(trajectories, start=1):
            name = re.sub(r"[^\w.-]+", "_", trajectory.id) or str(count)
            document = json.dumps(atif(trajectory, args.model_name), ensure_ascii=False)
            # unpaired surrogates, which UTF-8 can't encode, become JSON escapes
            (out / f"{name}.json").write_bytes(document.encode("utf-8", "backslashreplace"))
    say(f"{count} episodes -> {out}")
    return 0


def _found(source: Path, *, several: bool) -> Iterator[Trajectory]:
    """Yield the episodes of all files. Ids are unique per file, so with several files the file's name is prepended."""
    for file, trajectory in episodes(source):
        yield replace(trajectory, id=f"{file.stem}/{trajectory.id}") if several else trajectory
