"""What docs/evaluation.md shows runs as printed."""

from __future__ import annotations

import re
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


def test_the_readme_prints_what_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (program,) = re.findall(r"```python\n(.*?)```", (Path(__file__).parents[3] / "README.md").read_text(), re.DOTALL)
    exec(program, {"__name__": "double"})
    assert capsys.readouterr().out.strip() == program.rpartition("# ")[2].strip()


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
