"""Every command of docs/seeds.md exists and reads its recipe; nothing is trained."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from forge_env.cli.main import build_parser
from forge_env.config.finding import read_run
from forge_env.config.reader import build, read_arguments, values
from forge_env.config.recipe import RunConfig

ROOT = Path(__file__).resolve().parent.parent
VARIABLE = re.compile(r"^[A-Z_]+=")


def rows() -> Iterator[tuple[str, str]]:
    """What a row promises, and what shows it."""
    for line in (ROOT / "docs" / "seeds.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []
        if len(cells) == 3 and cells[2] != "shown by" and not cells[2].startswith("---"):
            yield cells[0], cells[2]


COMMANDS = [command for _, shown in rows() for command in re.findall(r"`([^`]+)`", shown)]


def check_forge_env(words: list[str], variables: dict[str, str]) -> None:
    """The command exists, takes these arguments, and reads the recipe with its overrides."""
    parser = build_parser(words[0])
    args, rest = parser.parse_known_args(words)
    if not args.parser.takes_keys:
        assert not rest
        return
    args.parser.read_rest(args, rest)
    if words[0] in ("train", "config", "job", "plan"):
        [file] = args.words or [variables["CONFIG_FILE"]]
        build(RunConfig, read_run(file, values(args.overrides, RunConfig), variables))


def check_module(name: str, words: list[str]) -> None:
    """The test, benchmark or app is there; an app reads its recipe."""
    if name == "pytest":
        file, _, test = words[0].partition("::")
        names = {node.name for node in ast.walk(ast.parse((ROOT / file).read_text())) if hasattr(node, "name")}
        assert not test or test in names, words[0]
    elif name == "benchmarks":
        assert (ROOT / "benchmarks" / f"{words[0]}.py").is_file()
    else:
        assert (ROOT / f"{name.replace('.', '/')}.py").is_file()
        assert words[0] == "--config"
        assert (ROOT / words[1]).is_file()
        _, overrides = read_arguments(words[2:])
        build(RunConfig, read_run(words[1], values(overrides, RunConfig)))


def test_every_row_is_shown_by_a_command() -> None:
    found = list(rows())
    assert len(found) >= 39
    for what, shown in found:
        assert re.findall(r"`([^`]+)`", shown), what


@pytest.mark.stack
@pytest.mark.parametrize("command", dict.fromkeys(COMMANDS))
def test_the_command_is_there(command: str) -> None:
    words = shlex.split(command)
    variables = {}
    while VARIABLE.match(words[0]):
        name, _, value = words.pop(0).partition("=")
        variables[name] = value
    if words[0] == "forge-env":
        check_forge_env(words[1:], variables)
    elif words[:2] == ["python", "-c"]:
        exec(words[2], {})
    elif words[:2] == ["python", "-m"]:
        check_module(words[2], words[3:])
    elif words[0] == "sbatch":
        [script] = [word for word in words[1:] if not word.startswith("-")]
        assert "#SBATCH" in (ROOT / script).read_text()
    else:
        assert words[0] == "make"
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
