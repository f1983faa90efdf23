"""`forge-env train`: read a recipe, check the machine, and start the run."""

from __future__ import annotations

import argparse
import os
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from forge_env.cli.command import Parser, number, report_error, tidy
from forge_env.config.finding import read_run
from forge_env.config.reader import Source, build, values
from forge_env.config.recipe import RunConfig
from forge_env.errors import UsageError

if TYPE_CHECKING:
    from forge_env.run.run import Run


def add_arguments(parser: Parser) -> None:
    """Add the command's arguments."""
    parser.usage = "forge-env train FILE [--a.b VALUE | a.b=VALUE ...] [--name NAME] [--resume] [--plan] [--debug]"
    parser.description = (
        "Train on a recipe. Every key of it can be set: --grpo.steps 20, or grpo.steps=20. With job.kind slurm, "
        "kubernetes or skypilot outside of a job, submit a job and follow it (docs/jobs.md)."
    )
    parser.epilog = "Ctrl-C once stops after the current step and saves a checkpoint; twice stops immediately."
    help_text = "a YAML file, or the name of a bundled recipe (`forge-env config` lists them); by default $CONFIG_FILE"
    parser.word("FILE", help_text, required=False)
    parser.keys(RunConfig)
    parser.add_argument("--config", metavar="FILE", help="the same as FILE")
    parser.add_argument("--resume", action="store_true", help="continue the run NAME from its last checkpoint")
    parser.add_argument(
        "--plan",
        action="store_true",
        help="start nothing; estimate the placement, memory, step time and cost of the run (docs/plan.md)",
    )
    parser.add_argument("--gpus", metavar="NxKIND", help="for --plan: GPUs (default: as many H100 as needed)")
    parser.add_argument("--prompt", type=int, metavar="N", help="for --plan: prompt and tool tokens of an episode")
    parser.add_argument("--reply", type=int, metavar="N", help="for --plan: sampled tokens of an episode")
    parser.add_argument("--price", type=number, metavar="X", help="for --plan: price of one GPU-hour")


def run(args: argparse.Namespace) -> int:
    """Train, or submit a job that does, or print a plan; return the exit code of the run."""
    from forge_env.files import claim
    from forge_env.job.files import Request, job_name, needed_hosts
    from forge_env.job.submit import submit, to_be_submitted
    from forge_env.run import preflight
    from forge_env.run.folder import RunFolder, choose_folder
    from forge_env.run.launch import launch
    from forge_env.run.trainer import load_trainer

    source = read_run(_file(args), values(args.overrides, RunConfig), os.environ)
    config = build(RunConfig, source)
    if args.plan:
        return _plan(args, source, config)
    if only := [name for name in ("gpus", "prompt", "reply", "price") if getattr(args, name) is not None]:
        raise UsageError(f"--{only[0]} needs --plan", fix=f"add --plan, or leave --{only[0]} out")
    if to_be_submitted(config.job):
        if args.resume:
            raise UsageError("a run can't be resumed from outside its job", fix="see docs/jobs.md for each platform")
        with source.locating():
            request = Request(job_name(config.name or source.stem), config, needed_hosts(config))
            return submit(request, Path(f"job-{request.name}"))
    folder = choose_folder(config.output_dir, config.name, source.stem, resume=args.resume)
    with source.locating():
        engine, plan = preflight.check(config, folder)
    print(f"recipe {source.name}, environment {config.environment.name}, sandbox engine {engine}", flush=True)
    if config.model.path == os.environ.get("MODEL"):
        print(f"model {config.model.path} (from $MODEL)", flush=True)
    if plan:
        print(plan, flush=True)
    if config.name is None:
        folder = RunFolder(claim(folder.root))
    print(f"run folder {folder.root}", flush=True)
    if args.resume:
        for change in preflight.changed_keys(config, folder.config):
            print(f"changed on resume: {change}", flush=True)
    tidy()
    outcome = launch(
        config,
        folder,
        lambda: load_trainer(config.method),
        subscribe=partial(subscribe, live=not args.debug),
        resume=args.resume,
        debug=args.debug,
    )
    if outcome.error is not None:
        report_error(outcome.error, hint=f"the traceback is at the end of {folder.log}")
    with suppress(OSError):  # the terminal was closed
        print(outcome.ending, flush=True)
    return outcome.code


def subscribe(run: Run, terminal: TextIO, *, live: bool = True) -> None:
    """Show a run's progress on the terminal, and write its report when it has ended."""
    from forge_env.display.training import TrainingView
    from forge_env.terminal import open_display
    from forge_env.view.report import ReportWriter

    run.events.subscribe(open_display(TrainingView(run.state), terminal, live=live))
    run.events.subscribe(ReportWriter(run))


def _plan(args: argparse.Namespace, source: Source, config: RunConfig) -> int:
    """Print the estimated resources of the run."""
    from forge_env.run.trainer import Question, load_trainer

    if args.price is not None and args.price < 0:
        raise UsageError(f"--price {args.price:g} must not be negative")
    with source.locating():
        question = Question(args.gpus, args.prompt, args.reply, args.price)
        for line in load_trainer(config.method).plan(config, question):
            print(line)
    return 0


def _file(args: argparse.Namespace) -> str:
    given = [*args.words, *filter(None, [args.config])] or list(filter(None, [os.environ.get("CONFIG_FILE")]))
    if not given:
        args.parser.error("FILE is missing")
    if len(given) > 1:
        args.parser.error(f"two recipes are given: {', '.join(given)}")
    return str(given[0])
