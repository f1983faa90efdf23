"""`forge-env job`: what a platform needs to run a recipe on several hosts."""

from __future__ import annotations

import argparse
import os
from dataclasses import replace
from pathlib import Path

from forge_env.cli.command import Parser
from forge_env.config.reader import build, values
from forge_env.config.recipe import RunConfig, read_run
from forge_env.errors import UsageError
from forge_env.job.files import KINDS, Request, job_files, job_name, needed_hosts, write_files


def add_arguments(parser: Parser) -> None:
    """Describe the command."""
    parser.usage = "forge-env job FILE [--write [FOLDER]] [--job.kind KIND] [--a.b VALUE | a.b=VALUE ...]"
    parser.description = (
        "Print what Slurm, Kubernetes and SkyPilot need to run a recipe on several hosts (docs/jobs.md), or one of "
        "them with job.kind; with --write, put it into a folder and say how to submit it."
    )
    parser.word("FILE", "a YAML file, or the name of a bundled recipe (`forge-env config` lists them)")
    parser.keys(RunConfig)
    parser.add_argument("--write", nargs="?", const="", metavar="FOLDER", help="write into FOLDER (job-NAME)")
    parser.add_argument("--hosts", type=int, default=2, metavar="N", help="hosts, or pods (default: 2)")
    parser.add_argument("--cpus", type=int, default=4, metavar="N", help="processors of each host (default: 4)")
    parser.add_argument("--memory", type=int, metavar="GIB", help="memory of each host (default: an estimate)")
    parser.add_argument("--accelerator", default="H100", help="kind of GPU, for SkyPilot (default: H100)")
    parser.add_argument("--image", default="forge-env:latest", help="image with forge-env (default: forge-env:latest)")
    parser.add_argument(
        "--secret", action="append", default=[], metavar="NAME", help="an environment variable that the platform keeps"
    )


def run(args: argparse.Namespace) -> int:
    """Print the files, or write them."""
    source = read_run(args.words[0], values(args.overrides, RunConfig), os.environ)
    config = build(RunConfig, source)
    for option in ("hosts", "cpus"):
        if getattr(args, option) < 1:
            raise UsageError(f"--{option} must be at least 1")
    name = job_name(config.name or source.stem)
    kinds = [config.job.kind] if config.job.kind in KINDS else KINDS
    with source.locating():
        hosts = needed_hosts(config, args.hosts, args.cpus)
        hosts = replace(hosts, memory_gb=args.memory or hosts.memory_gb)
        request = Request(name, config, hosts, args.image, args.accelerator, tuple(args.secret))
        files = {file.name: file for kind in kinds for file in job_files(kind, request)}
    if args.write is None:
        for file in files.values():
            print(f"# ---- {file.name}\n{file.text}")
        return 0
    folder = Path(args.write or f"job-{name}")
    write_files(folder, list(files.values()))
    gpus = f", {hosts.gpus} GPUs" if hosts.gpus else ""
    print(f"{hosts.count} hosts, each with {hosts.cpus} CPUs, {hosts.memory_gb} GiB{gpus}")
    for file in files.values():
        print(f"{folder / file.name}")
    print(f"\nto submit: cd {folder}")
    for file in files.values():
        for line in filter(None, file.submit.split("\n")):
            print(f"  {line}")
    return 0
