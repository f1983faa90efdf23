"""`forge-env export`: the model of a run for those who use it elsewhere."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from forge_env.cli.command import Parser
from forge_env.interrupts import say
from forge_env.plugins import load_plugin


def add_arguments(parser: Parser) -> None:
    """Describe the command."""
    parser.description = (
        "Write the model of a checkpoint as a Hugging Face folder. Adapters (lora) are added to their base model's "
        "weights; with --adapter they are written alone, in the format of PEFT."
    )
    parser.add_argument("source", metavar="FROM", help="a checkpoint, or a run's folder, of which the newest is taken")
    parser.add_argument("out", metavar="TO", help="folder to write")
    parser.add_argument("--adapter", action="store_true", help="the adapters alone")
    parser.add_argument("--base", metavar="MODEL", help="folder or hub name of the adapters' base model")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of whole weights")


def run(args: argparse.Namespace) -> int:
    """Export."""
    export: Callable[..., Path] = load_plugin("forge_env.exporters", "huggingface")
    out = Path(args.out)
    taken = export(Path(args.source), out, adapter_only=args.adapter, dtype=args.dtype, base=args.base)
    say(f"{taken} -> {out}")
    return 0
