"""`forge-env config`: a recipe as resolved, with its documentation."""

from __future__ import annotations

import argparse

from forge_env.config.loader import build_config, bundled_recipes, parse_overrides, read_source
from forge_env.config.render import render


def run_config(args: argparse.Namespace) -> int:
    """Print the recipe, or the names of the bundled ones."""
    if args.file is None:
        for name in bundled_recipes():
            print(name)
        return 0
    source = read_source(args.file)
    print(render(build_config(source, parse_overrides(args.overrides))), end="")
    return 0
