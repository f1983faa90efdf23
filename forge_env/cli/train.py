"""`forge-env train`: read the recipe, check the machine, run."""

from __future__ import annotations

import argparse
import shlex

from forge_env.cli.main import report_error
from forge_env.config.loader import build_config, parse_overrides, read_source
from forge_env.plugins import load_plugin
from forge_env.run.folder import choose_folder


def run_train(args: argparse.Namespace) -> int:
    """Train; the exit code of the run."""
    source = read_source(args.file)
    config = build_config(source, parse_overrides(args.overrides))
    folder = choose_folder(config.output_dir, args.name or config.name, source.stem, resume=args.resume)

    from forge_env.run import preflight

    engine = preflight.check(config, folder)
    print(f"recipe {source.name}, environment {config.environment.name}, sandbox engine {engine}", flush=True)
    print(f"run folder {folder.root}", flush=True)
    if args.resume:
        for change in preflight.changed_keys(config, folder.config):
            print(f"changed on resume: {change}", flush=True)

    from forge_env.cli.tidy import tidy
    from forge_env.run.launch import launch

    tidy()

    outcome = launch(
        config,
        folder,
        lambda: load_plugin("forge_env.trainers", config.method),
        resume=args.resume,
        debug=args.debug,
    )
    if outcome.error is not None:
        report_error(outcome.error, hint=f"the traceback is at the end of {folder.log}")
    elif outcome.exit == "interrupted":
        print(f"interrupted; continue with: forge-env train {shlex.quote(str(folder.config))} --resume", flush=True)
    return outcome.code
