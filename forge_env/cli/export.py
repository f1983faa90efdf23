"""`forge-env export`: write models, episodes, runs and environments for other tools and people, or upload them."""

from __future__ import annotations

import argparse
import json
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from forge_env import __version__
from forge_env.cli.command import Parser
from forge_env.cli.trajectory import episodes, trajectory_files
from forge_env.errors import UsageError
from forge_env.files import written_whole
from forge_env.hub import HUB, Kind, repository_of, upload
from forge_env.interrupts import say
from forge_env.plugins import load_plugin
from forge_env.reading import UnsafeFileError, check_files, unsafe
from forge_env.run.folder import RunFolder
from forge_env.trajectory import Trajectory
from forge_env.view.report import write_card

FORMATS: dict[str, Kind] = {
    "huggingface": "model",
    "atif": "dataset",
    "inspect": "dataset",
    "run": "dataset",
    "environment": "space",
}
"""Format -> kind of its repository on the hub."""
RECORD = (
    *("config.yaml", "summary.json", "metrics.jsonl", "contract.jsonl", "trained.jsonl", "rescored.json"),
    *("report.html", "report.md", "reward_curve.png", "trajectories"),
)
"""What is exported of a run or an evaluation: its record, without checkpoints and logs."""
LEFT_OUT = shutil.ignore_patterns(
    *(".*", "__pycache__", "*.pyc", "*.egg-info", "build", "dist", "runs", "evals", "venv", "env", "node_modules"),
    *("*.pem", "*.key", "credentials*", "secrets*"),
)
"""What is not exported of a package."""
SPACE = "sdk: docker\napp_port: 8000\ntags: [openenv, forge-env]\n"
"""The hub's metadata of a package that OpenEnv's clients use."""


def add_arguments(parser: Parser) -> None:
    """Add the command's arguments."""
    parser.description = (
        "Export the model of a checkpoint as a Hugging Face folder, or upload it. LoRA adapters are merged into the "
        "base model; with --adapter they are exported alone, in PEFT's format. --format atif or inspect: the "
        "episodes of a run or an evaluation, as a folder of ATIF documents or as a log of inspect_ai. run: the record "
        "of a run or an evaluation. environment: a package of `forge-env new --openenv`. Models and runs get a card "
        "that is made from the record."
    )
    parser.add_argument(
        "source",
        metavar="FROM",
        help="a checkpoint, or a run for its newest one; for episodes, a run, an evaluation or a file of trajectories; "
        "for run, a run or an evaluation; for environment, the folder of a package",
    )
    parser.add_argument(
        "out",
        metavar="TO",
        help=f"new folder, or {HUB}OWNER/NAME; for --format inspect, a file ending in .eval",
    )
    parser.add_argument("--format", choices=FORMATS, default="huggingface", help="output format")
    parser.add_argument("--public", action="store_true", help="allow a public repository on the hub")
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
    """Export to a file or folder, or upload what would be exported."""
    repository = repository_of(args.out)
    if repository is None:
        if args.public:
            raise UsageError(f"--public is for a target on the hub, not {args.out}", fix=f"{HUB}OWNER/NAME")
        say(f"{_write(args, Path(args.out))} -> {args.out}")
        return 0
    with TemporaryDirectory() as scratch:
        folder = Path(scratch) / "repository"
        written = _write(args, folder / "log.eval" if args.format == "inspect" else folder)
        message = f"Upload {Path(args.source).resolve().name} with forge-env {__version__}"
        address = upload(folder, repository, FORMATS[args.format], message=message, public=args.public)
    say(f"{written} -> {address}")
    return 0


def _write(args: argparse.Namespace, out: Path) -> str:
    """Write the export; return what it is, in words."""
    source = Path(args.source)
    if args.format in ("run", "environment") and out.exists():
        raise UsageError(f"{out} already exists", fix="name a new folder")
    if args.format == "run":
        from forge_env.view.recorded import folder_of_run

        return _run(folder_of_run(args.source), out)
    if args.format == "environment":
        return _environment(source, out)
    if args.format != "huggingface":
        return _episodes(args, out)
    export: Callable[..., Path] = load_plugin("forge_env.exporters", "huggingface")
    taken = export(source, out, adapter_only=args.adapter, dtype=args.dtype, base=args.base, tell=say)
    run = RunFolder(taken.parent.parent)
    record = run.root if run.checkpoints == taken.parent else taken
    if RunFolder(record).exists():
        write_card(out, record, "model")
    return str(taken)


def _run(source: Path, out: Path) -> str:
    check_files(source, source)
    with written_whole(out) as staging:
        staging.mkdir()
        for name in RECORD:
            path = source / name
            if path.is_dir():
                shutil.copytree(path, staging / name)
            elif path.is_file():
                shutil.copyfile(path, staging / name)
        write_card(staging, source, "run")
    return str(source)


def _environment(source: Path, out: Path) -> str:
    if not (source / "openenv.yaml").is_file():
        fix = "forge-env new NAME --openenv writes such a package"
        raise UsageError(f"{source} is no package with openenv.yaml", fix=fix)

    def left_out(folder: str, names: list[str]) -> set[str]:
        ignored = LEFT_OUT(folder, names)
        for path in (Path(folder) / name for name in names if name not in ignored):
            if (path.is_symlink() or not path.is_dir()) and (why := unsafe(path, root=source)):
                raise UnsafeFileError(why, fix="remove it")
        return ignored

    source = source.resolve()
    with written_whole(out) as staging:
        shutil.copytree(source, staging, ignore=left_out)
        readme = staging / "README.md"
        text = readme.read_text(encoding="utf-8") if readme.is_file() else f"# {source.name}\n"
        if not text.startswith("---\n"):
            readme.write_text(f"---\ntitle: {json.dumps(source.name)}\n{SPACE}---\n\n{text}", encoding="utf-8")
    return str(source)


def _episodes(args: argparse.Namespace, out: Path) -> str:
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
    return f"{count} episodes"


def _found(source: Path, *, several: bool) -> Iterator[Trajectory]:
    """Yield the episodes of all files. Ids are unique per file, so with several files the file's name is prepended."""
    for file, trajectory in episodes(source):
        yield replace(trajectory, id=f"{file.stem}/{trajectory.id}") if several else trajectory
