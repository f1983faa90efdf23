"""What docs/evaluation.md shows runs as printed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from forge_env.cli.eval import requested
from forge_env.cli.main import build_parser, main
from forge_env.config.evaluation import EvaluationConfig
from forge_env.config.reader import build
from forge_env.endpoint import errors as endpoint_errors

FLAG = r"(?<![\w-])--[a-z][a-z-]+"
DOCUMENT = (Path(__file__).parents[3] / "docs" / "evaluation.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", DOCUMENT, re.DOTALL)


def test_the_commands_are_understood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (recipe,) = blocks("yaml")
    Path("evaluation.yaml").write_text(recipe)
    (tmp_path / "runs" / "first").mkdir(parents=True)
    Path("runs/first/config.yaml").write_text(recipe)
    commands = [line.split("#")[0].split() for line in blocks("")[0].splitlines()]
    assert {words[1] for words in commands} == {"eval", "compare", "trajectory", "export"}
    for words in commands:
        args, rest = build_parser(words[1]).parse_known_args(words[1:])
        if words[1] == "eval":
            args.parser.read_rest(args, rest)
            if args.rescore is None:
                build(EvaluationConfig, requested(args))
        else:
            assert not rest


def test_the_file_says_what_is_said_about_it() -> None:
    config = EvaluationConfig.model_validate(yaml.safe_load(blocks("yaml")[0]))
    assert [choice.label for choice in config.environments] == ["coding_rlvr", "gsm8k-hard"]


@pytest.mark.slow
def test_the_program_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pandas")
    monkeypatch.chdir(tmp_path)
    scope: dict[str, Any] = {}
    exec(blocks("python")[0], scope)
    assert scope["score"].value == 1.0
    assert len(scope["frame"]) == 20


def test_readme_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    (program,) = re.findall(r"```python\n(.*?)```", (Path(__file__).parents[3] / "README.md").read_text(), re.DOTALL)
    exec(program, {"__name__": "__main__"})
    assert capsys.readouterr().out.strip() == program.rpartition("# ")[2].strip()


@pytest.mark.slow
def test_the_first_screen_of_the_readme_works_as_printed(tmp_path: Path) -> None:
    """Beside the commands that fetch and install, and a model's endpoint."""
    readme = (Path(__file__).parents[3] / "README.md").read_text()
    program, commands = re.findall(r"```(?:python)?\n(.*?)```", readme, re.DOTALL)[:2]
    assert readme.index("```python") < 1000, "an environment is on the first screen"
    assert "one H200" in readme[:4000]
    assert "not yet on a GPU" in readme[:4000]
    (tmp_path / "double.py").write_text(program)
    lines = [line.split("#")[0].strip() for line in commands.splitlines()]
    assert lines[1:3] == ["make setup", ". .venv/bin/activate"]
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    shown = {}
    for line in lines[3:6]:
        done = subprocess.run(
            line, shell=True, cwd=tmp_path, env=environment, input="", capture_output=True, text=True, timeout=120
        )
        shown[line] = (done.returncode, done.stdout + done.stderr)
    (first, text), validated, played = shown.values()
    assert (first, text.strip()) == (0, program.rpartition("# ")[2].strip())
    assert validated[0] == 0, validated[1]
    assert "Double " in played[1], played[1]


def test_every_kind_of_error_is_explained() -> None:
    kinds = {
        name for name, value in vars(endpoint_errors).items() if isinstance(value, type) and name.endswith("Error")
    }
    assert kinds - {"EndpointError", "GeneratorError"} == set(re.findall(r"`(\w+Error)`", DOCUMENT))


def test_every_flag_that_is_mentioned_exists(capsys: pytest.CaptureFixture[str]) -> None:
    known: set[str] = set()
    for name in ("eval", "compare", "export"):
        with pytest.raises(SystemExit):
            main([name, "--help"])
        known |= set(re.findall(FLAG, capsys.readouterr().out))
    assert set(re.findall(FLAG, DOCUMENT)) <= known
