"""The same mistake is said in the same words wherever it is made, and help is made of the models' own words."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import pytest
import yaml
from pydantic import BaseModel, ConfigDict, Field
from pydantic.dataclasses import dataclass

import forge_env as fe
from forge_env.cli.main import COMMANDS, main
from forge_env.config import RunConfig
from forge_env.config.evaluation import EvaluationConfig
from forge_env.config.reader import (
    build,
    changed_yaml,
    keys,
    make_plugin,
    parse,
    read_as,
    read_file,
    render,
    section_of,
)
from forge_env.config.serving import ServeConfig
from forge_env.environment.single_turn import SingleTurnConfig
from forge_env.errors import ConfigError, UsageError
from forge_env.evaluation.metering import read_price
from forge_env.registry import make_config


@dataclass(config=ConfigDict(extra="forbid"))
class Loss:
    """As losses are: a class whose arguments are its options."""

    steps: Annotated[int, Field(gt=0)]
    clip: float = 0.2

    def __call__(self) -> None: ...


class Counting(SingleTurnConfig):
    """Options of an environment."""

    steps: Annotated[int, Field(gt=0)]
    clip: float = 0.2


class Counts(fe.SingleTurnEnvironment):
    config_class = Counting


def recipe(lines: list[str], file: Path) -> Any:
    file.write_text("\n  ".join(["environment: {name: x}\ngrpo:", *lines]))
    return read_as(RunConfig, file)


def evaluation(lines: list[str], file: Path) -> Any:
    file.write_text("\n".join(["model: gold", "environments: blackjack", *lines]))
    return read_as(EvaluationConfig, file)


def environment(lines: list[str], file: Path) -> Any:
    file.write_text("\n".join(lines))
    return make_config("counts", Counts, read_file(file).data)


def plugin(lines: list[str], file: Path) -> Any:
    file.write_text("\n".join(lines))
    options, place = read_file(file).data, "grpo.loss"
    return make_plugin(
        "forge_env.losses", f"{__name__}:Loss", options, name_at=f"{place}.name", options_at=f"{place}.options"
    )


def price(lines: list[str], file: Path) -> Any:
    file.write_text("\n  ".join(["m:", *lines]))
    return read_price(file, "m")


# Each with a key that holds a number: the key, and how it is misspelt.
places = pytest.mark.parametrize(
    ("read", "key", "misspelt"),
    [
        (recipe, "steps", "stepz"),
        (evaluation, "epochs", "epochz"),
        (environment, "steps", "stepz"),
        (plugin, "steps", "stepz"),
        (price, "input", "inputt"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
Read = Callable[[list[str], Path], Any]


def said(read: Read, lines: list[str], file: Path, key: str) -> str:
    """What is said of the key, without the place where it stands."""
    with pytest.raises(ConfigError) as caught:
        read(lines, file)
    return next(line.partition(f"{key}: ")[2] for line in str(caught.value).splitlines() if f"{key}: " in line)


@places
def test_an_unknown_key(read: Read, key: str, misspelt: str, tmp_path: Path) -> None:
    sentence = said(read, [f"{misspelt}: 1"], tmp_path / "f.yaml", misspelt)
    assert re.fullmatch(rf"unknown key \(did you mean ([\w.]+\.)?{key}\?\)", sentence)


@places
def test_a_wrong_value(read: Read, key: str, misspelt: str, tmp_path: Path) -> None:
    kind = "number" if read is price else "integer"
    assert said(read, [f"{key}: many"], tmp_path / "f.yaml", key) == f"should be a valid {kind}, not 'many'"


@places
def test_a_value_out_of_bounds(read: Read, key: str, misspelt: str, tmp_path: Path) -> None:
    sentence = said(read, [f"{key}: -5"], tmp_path / "f.yaml", key)
    assert re.fullmatch(r"should be greater than( or equal to)? \d, not -5", sentence)


@pytest.mark.parametrize("read", [environment, plugin, price], ids=lambda value: value.__name__)
def test_a_key_that_is_missing(read: Read, tmp_path: Path) -> None:
    key = "input" if read is price else "steps"
    other = "output: 1" if read is price else "clip: 1"
    assert said(read, [other], tmp_path / "f.yaml", key) == f"missing (add it, for example `{key}: VALUE`)"


@places
def test_a_key_that_is_given_twice(read: Read, key: str, misspelt: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"f\.yaml:\d+: not valid YAML: the key '{key}' is given twice"):
        read([f"{key}: 1", f"{key}: 1"], tmp_path / "f.yaml")


@pytest.mark.parametrize("number", ["1e-3", ".5e3", "+1.E+2", "5E-1"])
def test_a_number_is_a_number_everywhere(number: str, tmp_path: Path) -> None:
    file, value = tmp_path / "f.yaml", float(number)
    assert recipe([f"group_timeout_s: {number}"], file).grpo.group_timeout_s == value
    assert evaluation([f"timeout_s: {number}"], file).timeout_s == value
    assert environment(["steps: 1", f"clip: {number}"], file).clip == value
    assert plugin(["steps: 1", f"clip: {number}"], file).clip == value
    assert price([f"input: {number}", "output: 1"], file).input == value


@pytest.mark.parametrize("read", [recipe, evaluation, environment, plugin, price], ids=lambda value: value.__name__)
def test_a_file_of_a_newer_version_is_refused(read: Read, tmp_path: Path) -> None:
    file = tmp_path / "f.yaml"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "write_text", lambda path, text: path.write_bytes(b"schema: 2\n" + text.encode()))
        with pytest.raises(UsageError, match=r"f\.yaml has version 2, this forge-env reads up to version 1"):
            read([], file)


def test_what_is_written_has_a_version() -> None:
    recipe = RunConfig.model_validate({"environment": {"name": "x"}})
    evaluated = EvaluationConfig(model="gold", environments="x", seed=3)
    for text in (render(recipe), changed_yaml(evaluated)):
        assert yaml.safe_load(text)["schema"] == 1
    assert build(EvaluationConfig, parse(changed_yaml(evaluated), "config.yaml")) == evaluated


SPELLINGS = [["--KEY", "3"], ["--KEY=3"], ["KEY=3"]]


@pytest.mark.parametrize("spelling", SPELLINGS, ids=" ".join)
@pytest.mark.parametrize(
    ("command", "key", "said"),
    [
        (["train", "coding_rlvr"], "grpo.stepz", "--grpo.stepz: unknown key (did you mean grpo.steps?)"),
        (["config", "coding_rlvr"], "grpo.stepz", "--grpo.stepz: unknown key (did you mean grpo.steps?)"),
        (["eval", "blackjack", "--model", "gold"], "epochz", "--epochz: unknown key (did you mean epochs?)"),
        (["eval", "gsm8k", "--model", "gold"], "dataset.pth", "dataset.pth: unknown key (did you mean dataset.path?)"),
        (["info", "gsm8k"], "dataset.pth", "--dataset.pth: unknown key (did you mean dataset.path?)"),
        (["validate", "gsm8k"], "max_turnz", "--max_turnz: unknown key (did you mean max_turns?)"),
        (["play", "gsm8k"], "max_turnz", "--max_turnz: unknown key (did you mean max_turns?)"),
        (["serve", "gsm8k"], "max_turnz", "--max_turnz: unknown key (did you mean max_turns?)"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_keys_are_set_in_one_way_on_every_command(
    command: list[str], key: str, said: str, spelling: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, *(word.replace("KEY", key) for word in spelling)]) == 2
    assert said in capsys.readouterr().err


def test_options_in_a_file_are_named_with_their_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "r.yaml").write_text("environment:\n  name: gsm8k\n  options:\n    max_turnz: 1\n")
    assert main(["train", str(tmp_path / "r.yaml")]) == 2
    assert "r.yaml:4: environment.options.max_turnz: unknown key" in capsys.readouterr().err
    (tmp_path / "e.yaml").write_text(
        "model: gold\nenvironments:\n- blackjack\n- name: gsm8k\n  options:\n    max_turnz: 1\n"
    )
    assert main(["eval", str(tmp_path / "e.yaml")]) == 2
    assert "e.yaml:6: environments.1.options.max_turnz: unknown key" in capsys.readouterr().err


def test_ambiguous_key_of_evaluation_and_environment(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "blackjack", "--model", "gold", "seed=3"]) == 2
    assert "write --seed VALUE for the one, blackjack.seed=VALUE for the other" in capsys.readouterr().err


# Help.


def test_the_recipes_help_explains_every_key_in_the_words_of_its_field(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    shown = capsys.readouterr().out
    leaves = [key for key in keys(RunConfig) if not any(other.startswith(f"{key}.") for other in keys(RunConfig))]
    assert len(leaves) > 100
    for key in leaves:
        flag = key if "." in key else key.replace("_", "-")
        assert f"  --{flag} " in shown, key
    assert "Peak learning rate of AdamW. (default: 0.003)" in " ".join(shown.split())  # of the warm-up's own section


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    assert f"usage: forge-env {command}" in capsys.readouterr().out


def docstrings(model: type[BaseModel]) -> Iterator[str]:
    for field in model.model_fields.values():
        yield field.description or ""
        if inner := section_of(field.annotation):
            yield from docstrings(inner)


def in_the_cli() -> Iterator[tuple[str, ast.AST]]:
    for path in Path(fe.__file__).parent.joinpath("cli").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            yield f"{path.name}:{getattr(node, 'lineno', 0)}", node


def test_no_help_says_again_what_a_field_says() -> None:
    models = RunConfig, EvaluationConfig, ServeConfig
    said = {text.rstrip(".").lower() for model in models for text in docstrings(model)} - {""}
    for place, node in in_the_cli():
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            assert node.value.rstrip(".").lower() not in said, place


def test_no_help_says_the_default_that_stands_beside_it(capsys: pytest.CaptureFixture[str]) -> None:
    for place, node in in_the_cli():
        if isinstance(node, ast.Call):
            given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            assert "default" not in given or "default" not in given.get("help", ""), place
    with pytest.raises(SystemExit):
        main(["job", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "hosts, or pods (default: 2)" in shown
    assert "keeps (default" not in shown, "a list that is empty"
