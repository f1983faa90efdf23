"""`forge-env job`: write or submit the job files that a platform needs to run a recipe on several hosts."""

from __future__ import annotations

import argparse
import os
import re
from dataclasses import replace
from pathlib import Path

from forge_env.cli.command import Parser
from forge_env.config.finding import read_run
from forge_env.config.reader import build, values
from forge_env.config.recipe import RunConfig
from forge_env.errors import UsageError
from forge_env.job.addresses import PLATFORMS
from forge_env.job.files import Request, job_files, job_name, needed_hosts, write_files
from forge_env.job.submit import submit

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def add_arguments(parser: Parser) -> None:
    """Add the command's arguments."""
    parser.usage = "forge-env job FILE [--write [FOLDER]] [--submit] [--job.kind KIND] [--a.b VALUE | a.b=VALUE ...]"
    parser.description = (
        "Print the files that Slurm, Kubernetes and SkyPilot need to run a recipe on several hosts (docs/jobs.md); "
        "job.kind selects one platform. With --write, save them in a folder; with --submit, submit the job and follow "
        "its output."
    )
    parser.word("FILE", "a YAML file, or the name of a bundled recipe (`forge-env config` lists them)")
    parser.keys(RunConfig)
    parser.add_argument("--write", nargs="?", const="", metavar="FOLDER", help="save the files in FOLDER (or job-NAME)")
    parser.add_argument("--submit", action="store_true", help="submit the job and follow it until it ends")
    parser.add_argument("--hosts", type=int, default=2, metavar="N", help="hosts, or pods")
    parser.add_argument("--cpus", type=int, default=4, metavar="N", help="processors of each host")
    parser.add_argument("--memory", type=int, metavar="GIB", help="memory of each host (default: an estimate)")
    parser.add_argument("--accelerator", default=Request.accelerator, help="kind of GPU, for SkyPilot")
    parser.add_argument("--image", default=Request.image, help="image with forge-env")
    parser.add_argument(
        "--secret",
        action="append",
        default=[],
        metavar="NAME",
        help="environment variable to pass as a platform secret",
    )


def run(args: argparse.Namespace) -> int:
    """Print the files, write them, or submit them."""
    source = read_run(args.words[0], values(args.overrides, RunConfig), os.environ)
    config = build(RunConfig, source)
    for option, number in (("hosts", args.hosts), ("cpus", args.cpus), ("memory", args.memory)):
        if number is not None and number < 1:
            raise UsageError(f"--{option} must be at least 1")
    for secret in args.secret:
        if not _VARIABLE.fullmatch(secret):
            raise UsageError(f"--secret {secret!r} is not the name of an environment variable")
    if args.submit and config.job.kind not in PLATFORMS:
        raise UsageError("--submit needs a platform", fix=f"add --job.kind {', '.join(PLATFORMS)}")
    name = job_name(config.name or source.stem)
    kinds = [config.job.kind] if config.job.kind in PLATFORMS else list(PLATFORMS)
    with source.locating():
        hosts = needed_hosts(config, args.hosts, args.cpus)
        hosts = replace(hosts, memory_gb=args.memory or hosts.memory_gb)
        request = Request(name, config, hosts, args.image, args.accelerator, tuple(args.secret))
        folder = Path(args.write or f"job-{name}")
        if args.submit:
            return submit(request, folder)
        files = {file.name: file for kind in kinds for file in job_files(kind, request)}
    if args.write is None:
        for file in files.values():
            print(f"# ---- {file.name}\n{file.text}")
        return 0
    write_files(folder, list(files.values()))
    print(hosts)
    for file in files.values():
        print(f"{folder / file.name}")
    print(f"\nto submit: cd {folder}")
    for file in files.values():
        for line in filter(None, file.submit.split("\n")):
            print(f"  {line}")
    return 0
