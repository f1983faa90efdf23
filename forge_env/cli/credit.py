"""`forge-env credit`: what each tool call of a recorded episode was worth."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge_env.cli.command import Parser, number
from forge_env.errors import UsageError
from forge_env.figures import duration
from forge_env.machine import user_path
from forge_env.visible import one_line, visible

if TYPE_CHECKING:
    from forge_env.credit.recorded import RecordedEpisode
    from forge_env.credit.results import Call, Credits

BAR = 12
"""Characters of the longest bar."""
WIDTH = 42
"""Characters of a call."""


def add_arguments(parser: Parser) -> None:
    """Add the command's arguments."""
    from forge_env.credit.credit import CONTINUATIONS

    parser.description = (
        "Estimate what each tool call of a recorded episode was worth: play the recorded actions again up to the call, "
        "let the model continue from before and from after it, and compare the mean rewards."
    )
    parser.add_argument("folder", metavar="RUN", help="folder of a run or an evaluation, or a name in runs/")
    parser.add_argument("episode", metavar="EPISODE", help="id of the episode; `forge-env trajectory RUN` lists them")
    parser.add_argument("--kind", metavar="KIND", help="kind of episode: train, eval-00010, ... (default: any)")
    parser.add_argument(
        "-m",
        "--model",
        metavar="MODEL",
        help="model that continues, as in eval: an endpoint's, vllm:PATH, random, module:function "
        "(default: the evaluation's, or the run's newest checkpoint)",
    )
    parser.add_argument("--base-url", metavar="URL", help="address of its endpoint (default: the evaluation's)")
    parser.add_argument(
        "--api-key-env",
        metavar="NAME",
        help="environment variable with its API key (default: the evaluation's; with another --base-url: "
        "OPENAI_API_KEY)",
    )
    parser.add_argument("--temperature", type=number, metavar="T", help="sampling temperature (default: the run's)")
    parser.add_argument(
        "-n",
        "--continuations",
        type=int,
        default=CONTINUATIONS,
        metavar="N",
        help="continuations from before and after each call",
    )
    parser.add_argument(
        "--turn", dest="turns", action="append", type=int, default=[], metavar="T", help="only this turn; repeatable"
    )
    parser.add_argument("--out", metavar="DIR", help="folder of the page and credit.json (default: RUN/credit/EPISODE)")
    parser.add_argument("--json", action="store_true", help="print credit.json instead of a summary")


def run(args: argparse.Namespace) -> int:
    """Print the credits and write them."""
    from forge_env.cli.grade import new_folder
    from forge_env.cli.trajectory import find, read_episode, source_of
    from forge_env.credit.recorded import recorded_episode
    from forge_env.files import plain_name, write_whole
    from forge_env.interrupts import run_until_interrupted
    from forge_env.view.credit import credit_page

    if args.continuations < 2:
        raise UsageError(f"--continuations {args.continuations} is too few", fix="use 2 or more")
    root = source_of(args.folder)
    if not root.is_dir():
        raise UsageError(f"{one_line(args.folder)} is a file", fix="give the folder of its run or evaluation")
    path, row, _ = find(root, args.episode, args.kind)
    changed = {key: getattr(args, key) for key in ("model", "base_url", "api_key_env", "temperature")}
    episode = recorded_episode(
        root,
        read_episode(path, row),
        kind=path.stem,
        changed={key: value for key, value in changed.items() if value is not None},
    )
    if not episode.config.model:
        raise UsageError(
            f"{root.name} has no checkpoint to continue with",
            fix="add --model: an endpoint's model, vllm:PATH, or module:function",
        )
    stem = plain_name(args.episode)
    if find(root, args.episode, None)[2]:  # each evaluation of a run plays the same held-out tasks
        stem = f"{path.stem}-{stem}"
    out = root / "credit" / stem if args.out is None else user_path(args.out)
    with new_folder(out):
        credits = run_until_interrupted(_estimate(episode, args))
    credits.run = root.name
    text = json.dumps(credits.as_json(), indent=1)
    write_whole(out / "credit.json", f"{text}\n")
    write_whole(out / "credit.html", credit_page(credits, episode.trajectory))
    if args.json:
        print(text)
    else:
        print("\n".join(lines(credits)))
        print(f"{out / 'credit.html'}")
    return 0


async def _estimate(episode: RecordedEpisode, args: argparse.Namespace) -> Credits:
    from forge_env.credit.credit import Estimation
    from forge_env.evaluation.evaluation import open_policy, scripted
    from forge_env.interrupts import say
    from forge_env.loop_guard import LoopGuard
    from forge_env.sandbox.engines import LazyEngine

    def show(done: int, total: int) -> None:
        if sys.stderr.isatty():
            end = "\n" if done == total else "\r"
            print(f"\r\033[K   {done:,} of {total:,} continuations", end=end, file=sys.stderr, flush=True)

    config = episode.config
    options: dict[str, Any] = {"docker_host": config.docker_host, **config.sandbox_options}
    async with AsyncExitStack() as stack:
        log = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="forge-env-"))) / "vllm.log"
        policy = scripted(config)
        if policy is None:
            policy, _ = await open_policy(stack, config, log, lambda text: say(f"forge-env: {visible(text)}"))
        engine = await stack.enter_async_context(LazyEngine(config.sandbox, **options))
        with LoopGuard(20.0, 0.0, say, at_once=True):
            return await Estimation(
                episode,
                episode.maker(engine),
                policy,
                args.continuations,
                args.turns,
                on_progress=show,
            ).run()


def lines(credits: Credits) -> Iterator[str]:
    """Format the credits for the terminal, in the order of the calls."""
    from forge_env.view.credit import interval

    calls = f"{len(credits.calls)} call{'s' * (len(credits.calls) != 1)}"
    cost = credits.cost
    yield visible(f"{credits.run} {credits.episode}: {credits.environment}, reward {credits.reward:g}")
    yield visible(
        f"   {calls}; {cost.continuations:,} continuations by {credits.model}: {cost.turns:,} new turns, "
        f"{cost.replayed:,} played again{f', {cost.tokens:,} tokens' * bool(cost.tokens)}; {duration(cost.seconds)}"
    )
    largest = max((abs(call.credit.value) for call in credits.calls if call.credit), default=0.0)
    for call in credits.calls:
        yield _line(call, largest)
    if (first := next((call.before for call in credits.calls), None)) is not None:
        yield f"   before turn {credits.calls[0].turn}, the model earns {interval(first, signed=False)}"
    yield from (f"!! {visible(text)}" for text in credits.notes())


def _line(call: Call, largest: float) -> str:
    from forge_env.view.credit import interval

    text = one_line(f"{call.name} {call.arguments}".strip(), WIDTH)
    credit = call.credit
    if credit is None:
        return f"{call.turn:>4}  {text:<{WIDTH}}  unknown"
    bar = ("\u2588" if call.is_clear else "\u2591") * round(BAR * abs(credit.value) / (largest or 1.0))
    return f"{call.turn:>4}  {text:<{WIDTH}}  {interval(credit)} {bar}".rstrip()
