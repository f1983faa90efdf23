"""`forge-env report`: write a run's report as a web page, as Markdown or as a picture."""

from __future__ import annotations

import argparse
from pathlib import Path

from forge_env.cli.command import Parser
from forge_env.cli.show import folder_of_run
from forge_env.files import write_whole
from forge_env.machine import cache_dir, user_path


def add_arguments(parser: Parser) -> None:
    """Add the command's arguments."""
    parser.description = (
        "Write the report of a run or an evaluation, finished or not: the four answers, curves, failures and successes "
        "to read, and what was run on what. A page is one file that needs nothing else; Markdown and a picture are for "
        "pull requests."
    )
    parser.add_argument("run_folder", metavar="RUN", help="folder of a run or an evaluation")
    parser.add_argument("--format", choices=("html", "md", "png"), default="html", help="a page, Markdown or a picture")
    parser.add_argument(
        "--out", metavar="FILE", help="where to (default: report.html or report.png in RUN; Markdown is printed)"
    )


def run(args: argparse.Namespace) -> int:
    """Write the report and print its path."""
    from forge_env.view.digest import digest
    from forge_env.view.report import EXAMPLES, html, markdown, write_picture

    root = folder_of_run(args.run_folder)
    facts = digest(root, examples=EXAMPLES, cache=cache_dir())
    out = user_path(args.out) if args.out else Path(root, f"report.{args.format}")
    if args.format == "md":
        if args.out is None:
            print(markdown(facts), end="")
            return 0
        write_whole(out, markdown(facts))
    elif args.format == "png":
        write_picture(facts, out)
    else:
        write_whole(out, html(facts))
    print(out)
    return 0
