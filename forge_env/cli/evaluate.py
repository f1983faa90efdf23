"""`forge-env eval`, `score` and `compare` at the command line: parsers only, the work is imported when they run."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from importlib import import_module
from typing import Any

FLAGS = {
    "asking the model": {
        "base_url": "address up to and including /v1 (else OPENAI_BASE_URL, else port 8000 of this machine)",
        "uds": "Unix socket to connect to",
        "api_key_env": "environment variable that holds the key (OPENAI_API_KEY)",
        "tools": "native, or text: described in the system message, parsed from the reply",
        "stream": "true asks for server-sent events",
        "exact_tokens": "true, false; asked for by default where the endpoint says it is vLLM",
        "temperature": "sampling temperature",
        "top_p": "nucleus sampling",
        "max_tokens": "tokens of one reply",
        "send_seed": "true sends every sample's own seed",
        "extra": "more fields of the request, as {name: value}",
        "timeout_s": "seconds until an answer must be complete (600)",
        "retries": "times a request is asked again after a passing failure (6)",
        "first_delay_s": "delay before the first of them (0.5)",
        "longest_delay_s": "longest such delay (60)",
        "concurrency": "most requests in flight (256); how many there are follows the endpoint",
        "start_concurrency": "requests in flight at the start (16)",
        "vllm_args": "more arguments of `vllm serve`, as [A, B]",
    },
    "samples": {
        "epochs": "samples of each task (1)",
        "split": "split to take tasks from (eval, or the first)",
        "seed": "every sample's own seed follows from it (0)",
        "sandbox": "auto (default), docker, local",
        "max_samples": "most samples under way at once (twice the concurrency)",
        "sample_retries": "times a sample is played again after an infrastructure failure (1)",
        "max_failures": "samples lost one after another until the run gives up (20)",
    },
    "limits": {
        "turn_limit": "assistant messages of a sample",
        "token_limit": "tokens a model may write in a sample",
        "time_limit": "wall seconds of a sample",
        "working_limit": "seconds of a sample without waiting for rate limits and sandboxes",
        "tool_call_limit": "tool calls of a sample",
        "cost_limit": "cost of a sample",
        "budget": "cost of the whole run",
        "prices": "YAML file: model -> {input, output, cached_input} for a million tokens",
    },
    "figures": {
        "score": "what is reported: reward, or a metric's name",
        "success": "score from which a sample has solved its task (a perfect episode's)",
        "confidence": "of the intervals (0.95)",
    },
}
"""Every key of `EvaluationConfig` besides those with a flag of its own below."""

EPILOG = """\
examples:
  forge-env eval coding_rlvr --model gold                            the reference solutions: is all well?
  forge-env eval coding_rlvr --model qwen3-8b --base-url http://localhost:8000/v1 -n 100 --epochs 4
  forge-env eval coding_rlvr --model vllm:runs/first/checkpoints/step-000100/model
                                                                     starts vLLM itself
  forge-env eval evaluation.yaml --temperature 0.7                   the same keys in a file, overridden
  forge-env eval --out runs/first --resume                           what is missing, and what infrastructure lost
Ctrl-C once finishes the samples under way, twice stops now; neither loses a finished sample.
"""


def add_parsers(commands: Any) -> None:
    """Add the commands to an argparse subparsers object."""
    run = commands.add_parser(
        "eval",
        help="evaluate a model or policy on environments",
        description="Evaluate on environments (names, with options as key=value) or as a YAML file says.",
        usage="forge-env eval ENV[,ENV...]|FILE [key=value ...] --model M [-n N] [--out DIR] [--resume] [...]",
        epilog=EPILOG,
    )
    run.add_argument("words", metavar="ENV", nargs="*", help="environments or a YAML file; key=value sets an option")
    run.add_argument(
        "-m", "--model", help="an endpoint's model, vllm:PATH, or a policy: gold, random, empty, module:function"
    )
    run.add_argument("-n", help="number of tasks of each environment (all; 100 where they never end)")
    run.add_argument("-o", "--out", metavar="DIR", help="folder of the results (a new one under runs/)")
    run.add_argument("--resume", action="store_true", help="continue what --out holds")
    run.add_argument("--json", action="store_true", help="print the summary as JSON")
    for title, flags in FLAGS.items():
        group = run.add_argument_group(title)
        for name, help_text in flags.items():
            group.add_argument(f"--{name.replace('_', '-')}", metavar="VALUE", help=help_text)
    run.set_defaults(run=_lazy("run_eval"), takes_overrides=True)

    score = commands.add_parser(
        "score",
        help="score stored transcripts again, without the model",
        description="Play the recorded messages into the environment as it is now, and score what results.",
    )
    score.add_argument("folder", metavar="DIR", help="folder of an evaluation")
    score.add_argument("-o", "--out", metavar="DIR", help="folder of the new scores (DIR-rescored)")
    score.set_defaults(run=_lazy("run_score"))

    compare = commands.add_parser(
        "compare",
        help="compare two evaluations, paired by task",
        description="Is B better than A? Paired by task: difference, interval, permutation test.",
    )
    compare.add_argument("a", metavar="A", help="folder of the baseline")
    compare.add_argument("b", metavar="B", help="folder of the other evaluation")
    compare.add_argument("--score", help="reward, or a metric's name (what A reported)")
    compare.add_argument("--confidence", type=float, default=0.95, help="of the intervals (0.95)")
    compare.add_argument("--json", action="store_true", help="machine-readable")
    compare.set_defaults(run=_lazy("run_compare"))


def _lazy(function: str) -> Callable[[argparse.Namespace], int]:
    def run(args: argparse.Namespace) -> int:
        result: int = getattr(import_module("forge_env.cli.run_evaluation"), function)(args)
        return result

    return run
