"""What `forge-env eval`, `score` and `compare` do."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from forge_env.cli.evaluate import FLAGS
from forge_env.cli.main import report_error
from forge_env.errors import ConfigError, UsageError, did_you_mean
from forge_env.evaluation.config import (
    EvaluationConfig,
    build,
    environment_entries,
    parse_flag,
    parse_value,
    read_yaml,
    short_name,
)
from forge_env.evaluation.display import print_tables
from forge_env.evaluation.evaluation import Evaluation
from forge_env.evaluation.record import EvaluationResult, ResultsFolder
from forge_env.evaluation.tables import counted
from forge_env.interrupts import INTERRUPTED, run_until_interrupted, say


def run_eval(args: argparse.Namespace) -> int:
    """Evaluate; 0 when every sample was played and none was lost."""
    evaluation = Evaluation(read_config(args), resume=args.resume, stream=sys.stderr)
    say(f"{counted(len(evaluation.samples), 'sample')}; results in {evaluation.folder.root}")
    try:
        result = run_until_interrupted(evaluation.run(), finish=lambda: _finish([evaluation]))
    except KeyboardInterrupt:
        return _interrupted(evaluation)
    if args.json:
        print(json.dumps(result.summary.to_dict(), indent=2))
    else:
        _show(result)
    if result.error is not None:
        report_error(result.error)
        return 1
    if evaluation.stopped and result.summary.status != "complete":
        return _interrupted(evaluation)
    if result.summary.status != "complete":
        lost = sum(sum(item.invalid.values()) for item in result.summary.environments.values())
        were = "was" if lost == 1 else "were"
        say(f"forge-env: {counted(lost, 'sample')} {were} lost to infrastructure, see {evaluation.folder.log}")
        say(f"  -> {_resume_hint(evaluation)} plays them again")
        return 1
    return 0


def _finish(evaluations: Sequence[Evaluation]) -> str | None:
    playing = [evaluation for evaluation in evaluations if evaluation.playing]
    for evaluation in playing:
        evaluation.stop()
    return "the samples under way" if playing else None


def _show(result: EvaluationResult) -> None:
    from forge_env.evaluation.tables import footnotes, tables

    print_tables(tables(result.summary), [*footnotes(result.summary), f"results: {result.folder}"], sys.stdout)


def _interrupted(evaluation: Evaluation) -> int:
    say(f"interrupted; every finished sample is kept. Continue: {_resume_hint(evaluation)}")
    return INTERRUPTED


def _resume_hint(evaluation: Evaluation) -> str:
    return f"forge-env eval --out {evaluation.folder.root} --resume"


def read_config(args: argparse.Namespace) -> EvaluationConfig:
    """The evaluation that the command line asks for: file or resumed folder first, flags over it."""
    words = [*args.words, *args.overrides]
    if unknown := [word for word in words if word.startswith("-")]:
        known = [f"--{name.replace('_', '-')}" for flags in FLAGS.values() for name in flags]
        guess = did_you_mean(unknown[0], [*known, "--model", "--out", "--resume"])
        raise UsageError(
            f"unknown argument {unknown[0]!r}", fix=f"did you mean {guess}?" if guess else "see forge-env eval --help"
        )
    names = [word for word in words if "=" not in word]
    data: dict[str, Any] = {}
    if args.resume:
        if args.out is None:
            raise UsageError("--resume needs to know which evaluation", fix="add --out DIR")
        folder = ResultsFolder(args.out)
        if not folder.config.exists():
            raise UsageError(f"{args.out} holds no evaluation to resume")
        data = read_yaml(folder.config)
    files = [name for name in names if name.endswith((".yaml", ".yml"))]
    if len(files) > 1:
        raise UsageError(f"{len(files)} files are given: {', '.join(files)}", fix="evaluate as one of them says")
    if files:
        data |= read_yaml(Path(files[0]))
    if chosen := [name for word in names if word not in files for name in word.split(",") if name.strip()]:
        data["environments"] = chosen
    if "environments" not in data:
        raise UsageError("nothing to evaluate on", fix="name an environment (forge-env list) or a YAML file")
    flags = _flags(args)
    data |= flags
    if data.get("model") is None:
        raise UsageError("no model is given", fix="add --model NAME, vllm:PATH, gold or random")
    _set_options(data, [word for word in words if "=" in word], over={"n", "split"} & flags.keys())
    return build(data)


def _flags(args: argparse.Namespace) -> dict[str, Any]:
    names = [name for flags in FLAGS.values() for name in flags]
    given = {name: parse_flag(name, text) for name in names if (text := getattr(args, name)) is not None}
    given |= {name: text for name in ("model", "out") if (text := getattr(args, name)) is not None}
    if args.n is not None:
        given["n"] = parse_value(args.n)
    return given


def _set_options(data: dict[str, Any], words: list[str], *, over: set[str]) -> None:
    """Put `key=value` (one environment) and `ENV.key=value` (several) into the environments' options.

    What an environment says of the keys in `over` is dropped: a flag holds for all of them.
    """
    try:
        entries: list[dict[str, Any]] = [dict(item) for item in environment_entries(data["environments"])]
    except ValueError as error:
        raise ConfigError(f"environments: {error}", fix="write environments: [NAME, ...]") from error
    entries = [{key: value for key, value in entry.items() if key not in over} for entry in entries]
    by_label = {short_name(str(entry.get("name"))): entry for entry in entries}
    by_label |= {str(entry.get("label") or entry.get("name")): entry for entry in entries}
    for word in words:
        key, _, text = word.partition("=")
        named = [label for label in by_label if key.startswith(f"{label}.")]
        if named:
            entry, key = by_label[named[0]], key.removeprefix(f"{named[0]}.")
        elif len(entries) == 1:
            entry = entries[0]
        else:
            raise ConfigError(f"{word!r} is an option of which environment?", fix=f"write ENV.{word}")
        *sections, last = key.replace("-", "_").split(".")
        options = entry.get("options") or {}
        if not isinstance(options, dict):
            raise ConfigError(f"the options of {entry.get('name')} are {options!r} where a mapping is expected")
        place: dict[str, Any] = dict(options)
        entry["options"] = place
        for section in sections:
            place = place.setdefault(section, {})
        place[last] = parse_value(text)
    data["environments"] = entries


def run_score(args: argparse.Namespace) -> int:
    """Score the transcripts of a folder again."""
    from forge_env.evaluation.rescoring import rescore

    out = args.out or f"{args.folder.rstrip('/')}-rescored"
    running: list[Evaluation] = []
    work = rescore(args.folder, out, stream=sys.stderr, on_start=running.append)
    try:
        rescored = run_until_interrupted(work, finish=lambda: _finish(running))
    except KeyboardInterrupt:
        say("interrupted")
        return INTERRUPTED
    _show(rescored.result)
    print(f"{counted(len(rescored.changed), 'score')} changed; forge-env compare {args.folder} {out}")
    for name, before, now in rescored.changed[:20]:
        print(f"  {name}: {before:g} -> {now:g}")
    if rescored.diverged:
        print(f"in {counted(len(rescored.diverged), 'sample')} the environment answered otherwise than it did")
    if rescored.result.error is not None:
        report_error(rescored.result.error)
    for damage in rescored.damage:
        say(f"forge-env: {damage}")
    if rescored.unscored:
        _report_unscored(rescored.unscored, f"{out}/rescored.json")
    return 0 if rescored.result.summary.status == "complete" and not rescored.unscored else 1


def _report_unscored(unscored: dict[str, str], path: str) -> None:
    say(f"forge-env: {counted(len(unscored), 'sample')} could not be scored again:")
    for name, reason in list(unscored.items())[:5]:
        say(f"  {name}: {reason}")
    say(f"  -> all are in {path}; the figures are of the others")


def run_compare(args: argparse.Namespace) -> int:
    """Compare two folders."""
    from forge_env.evaluation import comparison

    found = comparison.compare_folders(args.a, args.b, score=args.score, confidence=args.confidence)
    for damage in found.damage:
        say(f"forge-env: {damage}")
    if args.json:
        print(json.dumps(found.to_dict(), indent=2))
    else:
        print_tables(comparison.tables(found), comparison.FOOTNOTES, sys.stdout)
    return 0
