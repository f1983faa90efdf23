"""`forge-env eval`: run an evaluation, configured by a resumed folder, a file and the command line, in this order."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from forge_env.cli.command import Parser, report_error
from forge_env.config import hints
from forge_env.config.evaluation import EvaluationConfig, environment_entries, short_name
from forge_env.config.reader import (
    KeyPath,
    Override,
    Problem,
    Source,
    build,
    read_file,
    replaced,
    unknown,
    values,
)
from forge_env.errors import ConfigError, UsageError
from forge_env.interrupts import INTERRUPTED, TERM_GRACE_S, run_until_interrupted, say
from forge_env.registry import environment_class
from forge_env.visible import one_line, visible

if TYPE_CHECKING:
    from forge_env.evaluation.evaluation import Evaluation
    from forge_env.evaluation.record import EvaluationResult

EPILOG = """\
examples:
  forge-env eval coding_rlvr --model gold                            check the reference solutions
  forge-env eval coding_rlvr --model qwen3-8b --base-url http://localhost:8000/v1 -n 100 --epochs 4
  forge-env eval coding_rlvr --model vllm:runs/first/checkpoints/step-000100/model
                                                                     also start vLLM
  forge-env eval evaluation.yaml --temperature 0.7                   keys in a file; flags override them
  forge-env eval --out runs/first --resume                           run missing and lost samples
  forge-env eval --rescore runs/first                                score the transcripts again
Ctrl-C once finishes the running samples; twice stops immediately. Finished samples are kept in both cases.
"""


def add_arguments(parser: Parser) -> None:
    """Add the command's arguments."""
    parser.usage = "forge-env eval ENV[,ENV...]|FILE [key=value ...] --model M [-n N] [--out DIR] [--resume] [...]"
    parser.description = (
        "Evaluate a model or policy on environments. Every key below can be set in a YAML file, or as --key VALUE, "
        "--key=VALUE or key=VALUE. Any other key is an option of the environment; for several environments, use "
        "ENV.key=VALUE."
    )
    parser.epilog = EPILOG
    parser.word(
        "ENV", "environments (`forge-env info`, or module:Class), or a YAML file", required=False, any_number=True
    )
    parser.keys(EvaluationConfig, short={"m": "model", "n": "num_tasks", "o": "out"})
    parser.add_argument("--resume", action="store_true", help="continue the evaluation in --out")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")
    parser.add_argument(
        "--rescore",
        metavar="DIR",
        help="score the transcripts of the evaluation in DIR with the current version of its environments, without "
        "the model; results go to --out (default: DIR-rescored)",
    )


def run(args: argparse.Namespace) -> int:
    """Evaluate; return 0 if all samples completed and the agent's code didn't crash on every one of an environment."""
    from forge_env.evaluation.evaluation import Evaluation
    from forge_env.evaluation.tables import counted

    if args.rescore is not None:
        return _rescore(args)
    source = requested(args)
    config = build(EvaluationConfig, source)
    with source.locating():
        evaluation = Evaluation(config, resume=args.resume, stream=sys.stderr)
    say(f"{counted(len(evaluation.samples), 'sample')}; results in {evaluation.folder.root}")
    for label, env in evaluation.planned.items():
        if env.asked > env.samples:
            say(f"forge-env: {env.asked} samples of {label} ({env.split}) were requested, {env.samples} are available")
    try:
        result = run_until_interrupted(evaluation.run(), finish=lambda: finish([evaluation]), grace_s=TERM_GRACE_S)
    except KeyboardInterrupt:
        return _interrupted(evaluation)
    if args.json:
        print(json.dumps(result.summary.to_dict(), indent=2))
    else:
        show(result)
    if result.error is not None:
        report_error(result.error)
        return 1
    if evaluation.stopped and result.summary.status != "complete":
        return _interrupted(evaluation)
    if result.summary.status != "complete":
        items = result.summary.environments.values()
        if lost := sum(sum(item.invalid.values()) for item in items):
            were = "was" if lost == 1 else "were"
            say(f"forge-env: {counted(lost, 'sample')} {were} lost to infrastructure, see {evaluation.folder.log}")
            errors = (sample.error for sample in result.samples if sample.error and not (sample.valid or sample.is_bug))
            say(f"  the first: {one_line(next(errors, ''), 300)}")
        if bugs := sum(item.bugs for item in items):
            hint = f"see {evaluation.folder.log}"
            say(f"forge-env: the environment's own code failed on {counted(bugs, 'sample')}, {hint}")
            say(f"  -> when it is fixed, score without the model: forge-env eval --rescore {evaluation.folder.root}")
        say(f"  -> run them again with {_resume_hint(evaluation)}")
        return 1
    crashed = [label for label, item in result.summary.environments.items() if item.crashed == item.samples > 0]
    if crashed:
        say(f"forge-env: the agent's own code crashed on every sample of {', '.join(crashed)}: no score was measured")
        say(f"  -> see {evaluation.folder.log}; when it is fixed, evaluate with another --out")
        return 1
    return 0


def _rescore(args: argparse.Namespace) -> int:
    """Score the transcripts of a folder again; return 0 if all could be read and scored."""
    from forge_env.evaluation.rescoring import rescore
    from forge_env.evaluation.tables import counted

    if args.words or any(item.key != "out" for item in args.overrides) or args.resume:
        raise UsageError("--rescore uses the settings of DIR", fix="give no other keys than --out")
    out = args.overrides[-1].text if args.overrides else f"{args.rescore.rstrip('/')}-rescored"
    running: list[Evaluation] = []
    work = rescore(args.rescore, out, stream=sys.stderr, on_start=running.append)
    try:
        rescored = run_until_interrupted(work, finish=lambda: finish(running), grace_s=TERM_GRACE_S)
    except KeyboardInterrupt:
        say("interrupted")
        return INTERRUPTED
    if args.json:
        print(json.dumps(rescored.result.summary.to_dict(), indent=2))
    else:
        show(rescored.result)
        print(f"{counted(len(rescored.changed), 'score')} changed; forge-env compare {args.rescore} {out}")
        for name, before, now in rescored.changed[:20]:
            print(f"  {visible(name)}: {before:g} -> {now:g}")
    if rescored.diverged:
        samples = counted(len(rescored.diverged), "sample")
        say(f"forge-env: in {samples} the environment answered differently than recorded")
    if rescored.result.error is not None:
        report_error(rescored.result.error)
    for damage in rescored.damage[:5]:
        say(f"forge-env: {damage}")
    if rescored.damage:
        say(f"forge-env: {counted(len(rescored.damage), 'line')} of {args.rescore} could not be read")
    if rescored.unscored:
        say(f"forge-env: {counted(len(rescored.unscored), 'sample')} could not be scored again:")
        for name, reason in list(rescored.unscored.items())[:5]:
            say(f"  {name}: {reason}")
        say(f"  -> {out}/rescored.json lists all of them; they are not in the figures above")
    complete = rescored.result.summary.status == "complete" and not (rescored.unscored or rescored.damage)
    if not complete:
        say(f"  -> play what is missing (forge-env eval --out {args.rescore} --resume), then score again")
    return 0 if complete else 1


def finish(evaluations: Sequence[Evaluation]) -> str | None:
    """Stop starting samples; return a description of the running work, or None if nothing has started."""
    playing = [evaluation for evaluation in evaluations if evaluation.playing]
    for evaluation in playing:
        evaluation.stop()
    return "the running samples" if playing else None


def show(result: EvaluationResult) -> None:
    """Print the results."""
    from forge_env.evaluation.tables import footnotes, headlines, print_tables, tables

    for line in headlines(result.summary):
        print(visible(line))
    print(f"results: {result.folder}")
    print_tables(tables(result.summary), footnotes(result.summary), sys.stdout)


def _interrupted(evaluation: Evaluation) -> int:
    say(f"interrupted; finished samples are kept. Continue: {_resume_hint(evaluation)}")
    return INTERRUPTED


def _resume_hint(evaluation: Evaluation) -> str:
    return f"forge-env eval --out {evaluation.folder.root} --resume"


def requested(args: argparse.Namespace) -> Source:
    """Merge the requested configuration: a resumed folder's, overridden by a file, overridden by the command line."""
    source = Source("", {})
    overrides: list[Override] = args.overrides
    if args.resume:
        source = _recorded(next((item.text for item in reversed(overrides) if item.key == "out"), None))
    files = [word for word in args.words if word.endswith((".yaml", ".yml", ".json", ".toml"))]
    if len(files) > 1:
        raise UsageError(f"{len(files)} files are given: {', '.join(files)}", fix="give one of them")
    if files:
        file = read_file(files[0])
        source = replace(file, data=source.data | file.data)
    if chosen := [name for word in args.words if word not in files for name in word.split(",") if name.strip()]:
        source = source.with_overrides([("environments", chosen)])
    source = source.with_overrides(values((item for item in overrides if item.key == "environments"), EvaluationConfig))
    if "environments" not in source.data:
        if unknown_keys := unknown(source.data, EvaluationConfig.model_fields, ()):
            missing = Problem(("environments",), "missing (add it, for example `environments: [calculator]`)")
            raise source.refuse([missing, *unknown_keys])
        raise UsageError("nothing to evaluate on", fix="name an environment (forge-env info) or a YAML file")
    try:
        entries: list[dict[str, Any]] = [dict(entry) for entry in environment_entries(source.data["environments"])]
    except ValueError as error:
        raise source.refuse([Problem(("environments",), str(error))], error) from error
    evaluation_keys: list[Override] = []
    written: dict[KeyPath, str] = {}
    for item in overrides:
        if (option := _option(item, entries)) is None:
            evaluation_keys.append(item)
            continue
        index, path = option
        entries[index] = replaced(entries[index], ("options", *path), item.value(), item.written)
        written["environments", str(index), "options", *path] = item.written
    for entry in entries:  # flags apply to all environments
        for key in {"num_tasks", "split"} & {item.key for item in evaluation_keys}:
            entry.pop(key, None)
    source = source.with_overrides(values(evaluation_keys, EvaluationConfig))
    if source.data.get("model") in (None, ""):
        raise UsageError("no model is given", fix="add --model NAME, vllm:PATH, gold or random")
    return replace(source, data={**source.data, "environments": entries}, written={**source.written, **written})


def _recorded(out: str | None) -> Source:
    from forge_env.evaluation.record import ResultsFolder
    from forge_env.reading import check_readable

    if out is None:
        raise UsageError("--resume needs an evaluation", fix="add --out DIR")
    folder = ResultsFolder(out)
    if not folder.config.exists():
        raise UsageError(f"{out} contains no evaluation to resume")
    check_readable(folder.root)
    return read_file(folder.config)


def _option(item: Override, entries: list[dict[str, Any]]) -> tuple[int, KeyPath] | None:
    """Find the environment (index) and option path that a key sets; None if it is a key of the evaluation.

    Raises:
        ConfigError: it could be either, or an option of several environments.
    """
    names = [str(entry.get("name")) for entry in entries]
    labels = {short_name(name): index for index, name in enumerate(names)}
    labels |= {str(entry.get("label") or names[index]): index for index, entry in enumerate(entries)}
    for label, index in labels.items():
        if item.written.startswith(f"{label}."):
            return index, tuple(item.written.removeprefix(f"{label}.").replace("-", "_").split("."))
    path = tuple(item.key.split("."))
    fields = EvaluationConfig.model_fields
    if path[0] in fields and item.flag:
        return None
    options = {key for name in names for key in environment_class(name).config_class.model_fields}
    if path[0] in fields and path[0] in options:
        raise ConfigError(
            f"{item.written!r} is a key of the evaluation and an option of the environment",
            fix=f"write --{item.written} VALUE for the one, {next(iter(labels))}.{item.written}=VALUE for the other",
        )
    if path[0] in fields or (hints.meant(path, fields, fields) and path[0] not in options):
        return None
    if len(entries) > 1:
        fix = f"write ENV.{item.written}=VALUE"
        raise ConfigError(f"{item.written!r} is ambiguous: there are several environments", fix=fix)
    return 0, path
