"""Recipes: what loads, and what is said about mistakes."""

from __future__ import annotations

import contextlib
import math
import string
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, BeforeValidator, Field

from forge_env.config import RunConfig, bundled_recipes, load_config
from forge_env.config.finding import read_recipe
from forge_env.config.reader import (
    LARGEST_INTEGER,
    build,
    dump,
    keys,
    parse,
    parse_overrides,
    read_file,
    read_yaml,
    render,
)
from forge_env.errors import ConfigError, UsageError
from forge_env.reading import LARGEST_NUMBER

MINIMAL = "environment:\n  name: coding_rlvr\n"
ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


def mistakes(text: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        build(RunConfig, parse(text, "r.yaml"), parse_overrides(overrides, RunConfig))
    return str(caught.value)


def load(text: str, *overrides: str) -> RunConfig:
    return build(RunConfig, parse(text, "r.yaml"), parse_overrides(overrides, RunConfig))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (MINIMAL + "grpo:\n  stepz: 3\n", "r.yaml:4: grpo.stepz: unknown key (did you mean grpo.steps?)"),
        (
            MINIMAL + "trainer:\n  optimizer:\n    learning: 3\n    beta_1: 0.9\n",
            "r.yaml:6: trainer.optimizer.beta_1: unknown key (did you mean trainer.optimizer.beta1?)",
        ),
        (MINIMAL + "group_size: 4\n", "r.yaml:3: group_size: unknown key (did you mean grpo.group_size?)"),
        (MINIMAL + "warmup:\n  stepps: 4\n", "r.yaml:4: warmup.stepps: unknown key (did you mean warmup.steps?)"),
        ("seed: 1\n", "r.yaml: environment: missing (add it, for example `environment: {name: coding_rlvr}`)"),
        ("environment: {}\n", "r.yaml:1: environment.name: missing"),
        (MINIMAL + "grpo: {group_size: 0}\n", "grpo.group_size: should be greater than 0, not 0"),
        (MINIMAL + "grpo: {steps: many}\n", "grpo.steps: should be a valid integer"),
        (MINIMAL + "model: {tiny: {heads: 3}}\n", "model.tiny: heads must be a multiple of kv_heads"),
        (MINIMAL + "model: {dtype: float16}\n", "should be 'float32' or 'bfloat16', not 'float16'"),
        (MINIMAL + "grpo: {temperature: 3}\n", "grpo.temperature: should be less than or equal to 2, not 3"),
        (MINIMAL + "tasks: {explore: 0.3}\n", "tasks: explore needs a curriculum: set order to curriculum"),
        (MINIMAL + "watchdog: {end_s: 10}\n", "watchdog: end_s is below warn_s"),
        (MINIMAL + "sandbox: {engine: local, base_image: debian}\n", "base_image needs Docker: set engine to docker"),
        (MINIMAL + "grpo: 3\n", "r.yaml:3: grpo: should be a mapping of keys to values, not 3"),
        (
            "environment: cards\n",
            "environment: should be a mapping of keys to values, not 'cards' (write `environment: {na",
        ),
        (MINIMAL + "grpo: {loss: gspo}\n", "(write `loss: {name: gspo}`)"),
        (
            MINIMAL + "grpo.loss.name: gspo\n",
            "r.yaml:3: grpo.loss.name: unknown key (write `grpo: {loss: {name: VALUE}}`)",
        ),
        (MINIMAL + "grpo: {steps: true}\n", "r.yaml:3: grpo.steps: should be a number, not True"),
        (MINIMAL + "grpo: {steps: false}\n", "r.yaml:3: grpo.steps: should be greater than 0, not False"),
        (MINIMAL + "trainer: {optimizer: {lr: on}}\n", "r.yaml:3: trainer.optimizer.lr: should be a number, not True"),
        (MINIMAL + "trainer: {optimizer: {lr: .inf}}\n", "trainer.optimizer.lr: should be a finite number, not inf"),
        (MINIMAL + "generator: {max_num_seqs: true}\n", "generator.max_num_seqs: should be a number, not True"),
        (MINIMAL + "1: 2\n", "r.yaml:3: 1: unknown key"),
        (MINIMAL + "null: 2\n", "r.yaml:3: null: unknown key"),
        (MINIMAL + "SEED: 2\n", "r.yaml:3: SEED: unknown key (did you mean seed?)"),
        (MINIMAL + "Grpo: {Steps: 2}\n", "r.yaml:3: Grpo.Steps: unknown key (did you mean grpo.steps?"),
    ],
)
def test_a_mistake_is_named_with_file_line_key_and_fix(text: str, expected: str) -> None:
    assert expected in mistakes(text)


def test_every_mistake_is_listed_in_the_order_of_the_file() -> None:
    text = mistakes(MINIMAL + "grpo: {stepz: 1}\nseeds: 3\n", "--trainer.procs", "0")
    lines = text.splitlines()
    assert lines[0] == "3 mistakes in r.yaml:"
    assert [line.split(":")[-2].strip() for line in lines[1:]] == ["grpo.stepz", "seeds", "--trainer.procs"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: 1\na: 2\n", "r.yaml:2: not valid YAML: the key 'a' is given twice"),
        ("a: [1\n", "not valid YAML"),
        ("- 1\n", "r.yaml: should be a mapping of keys to values, not a list"),
        ("", "r.yaml is empty"),
        ("a: \x00\n", "not valid YAML"),
        ("? [a, b]\n: 1\n", "r.yaml:1: not valid YAML: a key is a name"),
        ("a: !!timestamp 2020-13-45\n", "not valid YAML: month must be in 1..12"),
        (f"a: 1\nb: {2**64}", "r.yaml:2: not valid YAML: the number 18446744073709551616 is too large"),
        ("a: " + "1" * 401, "the number 11111111111111111111... (401 characters) is too large; a text goes in quotes"),
        ("a: 0x" + "f" * 4000, "is too large"),
        ("a: 0b" + "1" * 20_000, "is too large"),
        ("a: 1e400", "the number 1e400 is too large"),
        ("a: -1" + "0" * 101 + ".0", "is too large"),
        ("a: " + "[" * 3000, "not valid YAML: it is nested too deeply"),
        ("a: " + "[" * 101 + "]" * 101, "not valid YAML: it is nested too deeply"),
        ("- " * 3000, "not valid YAML: it is nested too deeply"),
        ("a: &a {b: *a}\n", "its aliases expand to an endless"),
        ("a: &a [*a]\n", "its aliases expand to an endless"),
        (
            "a0: &a0 {x: 1, y: 2}\n" + "".join(f"a{n}: &a{n} {{x: *a{n - 1}, y: *a{n - 1}}}\n" for n in range(1, 40)),
            "its aliases expand to an endless or huge document",
        ),
        ("a: 1\n---\nb: 2\n", "r.yaml:2: not valid YAML: a second document begins (keep one of them)"),
        ("a:\n\tb: 1\n", "r.yaml:2: not valid YAML: found character '\\t' that cannot start any token (indent with sp"),
        ("steps = 3\nlr = 1e-6\n", "not a str (it looks like TOML; in YAML, `key = value` is `key: value`"),
        ("# for prime-rl\n[model]\nname = 'x'\n", "it looks like TOML"),
        ("[[env]]\nid = 'x'\n", "it looks like TOML"),
    ],
)
def test_what_is_no_recipe_is_refused(text: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(text, "r.yaml")
    assert expected in str(caught.value)


def test_brackets_may_be_nested_as_deeply_as_anyone_writes() -> None:
    assert str(parse("a: " + "[" * 100 + "]" * 100, "r.yaml").data["a"]) == "[" * 100 + "]" * 100


def test_numbers_in_scientific_notation_are_numbers() -> None:
    config = load(MINIMAL + "environment:\n  name: a\n  options: {x: 1e-3}\n".replace("environment:\n  name: a\n", ""))
    assert config.environment.options == {"x": 0.001}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *[(text, text) for text in ("12:30", "1:30.5", "007", "-010", "00", "2024-01-01", "2024-01-01 10:00:00", "=")],
        *[("0o17", 15), ("0x1F", 31), ("0b11", 3), ("1_000", 1000), ("-0", 0), ("+7", 7), ("10", 10)],
        *[("1e3", 1e3), (".5", 0.5), ("1.10", 1.1), ("08.5", 8.5), ("-.inf", float("-inf")), ("12E03", 12e3)],
        *[("no", False), ("ON", True), ("true", True), ("~", None), ("y", "y"), ("'no'", "no"), ("'5'", "5")],
    ],
)
def test_a_value_is_what_stands_there(text: str, value: object) -> None:
    read = read_yaml(f"key: {text}")[0]["key"]
    assert (read, type(read)) == (value, type(value))
    assert read_yaml(dump({"key": text}))[0] == {"key": text}
    assert read_yaml(dump({"key": value}))[0] == {"key": value}


def test_keys_are_text() -> None:
    assert read_yaml("{on: 1, no: 2, Yes: 3}")[0] == {"on": 1, "no": 2, "Yes": 3}
    assert read_yaml("{1: 1, 1.5: 2, null: 3, ~: 4}")[0] == {"1": 1, "1.5": 2, "null": 3, "~": 4}


def test_booleans_are_refused_as_numbers_at_any_depth() -> None:
    class Inner(BaseModel):
        size: int | None = None
        either: bool | int = 0

    class Outer(BaseModel):
        levels: list[int] = []
        inner: list[Inner] = []

    assert build(Outer, parse("inner: [{either: true}]", "")).inner[0].either is True
    with pytest.raises(ConfigError) as caught:
        build(Outer, parse("levels: [1, true]\ninner: [{size: false}]\n", "r.yaml"))
    assert "r.yaml:1: levels.1: should be a number, not True" in str(caught.value)
    assert "r.yaml:2: inner.0.size: should be a number, not False" in str(caught.value)


def test_booleans_are_accepted_wherever_a_type_allows_them() -> None:
    class Switch(BaseModel):
        kind: Literal["switch"]
        value: bool

    class Dial(BaseModel):
        kind: Literal["dial"]
        value: float

    class Machine(BaseModel):
        part: Switch | Dial = Field(default=Dial(kind="dial", value=1.0), discriminator="kind")
        limit: Literal[False] | int = 0
        pair: tuple[int, bool] = (1, False)
        anything: float | Any = 0.0
        counted: Annotated[int, BeforeValidator(int)] = 0

    text = "{part: {kind: switch, value: true}, limit: false, pair: [1, true], anything: true, counted: true}"
    machine = build(Machine, parse(text, ""))
    assert isinstance(machine.part, Switch)
    assert machine.part.value is True
    assert (machine.limit, machine.pair, machine.anything, machine.counted) == (False, (1, True), True, 1)
    with pytest.raises(ConfigError, match=r"pair\.0: should be a number, not True"):
        build(Machine, parse("pair: [true, true]", ""))


@pytest.mark.parametrize("name", ["a\0b.yaml", "a" * 300, "é" * 200 + "/b.yaml"])
def test_an_impossible_file_name_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match=r"can't be a path \(a file name has at most 255 bytes"):
        read_file(name)


class Shop(BaseModel):
    opens: str = ""
    days: list[str] = []
    mode: Literal["on", "off"] = "on"
    number: int = 0
    share: float = 0.0
    busy: bool = False


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("opens: 12:30", {"opens": "12:30"}),
        ("opens: 007", {"opens": "007"}),
        ("days: [2024-01-01]", {"days": ["2024-01-01"]}),
        ("number: 010", {"number": 10}),
        ("number: 1_000", {"number": 1000}),
        ("share: 010", {"share": 10.0}),
        ("busy: off", {"busy": False}),
        ("busy: y", {"busy": True}),
    ],
)
def test_a_field_reads_what_stands_there(text: str, values: dict[str, object]) -> None:
    assert build(Shop, parse(text, "shop.yaml")).model_dump(exclude_unset=True) == values


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("opens: NO", "opens: should be a valid string, not False: quote it"),
        ("opens: 1.10", "opens: should be a valid string, not 1.1: quote it"),
        ("days: [5]", "days.0: should be a valid string, not 5: quote it"),
        ("mode: off", "mode: should be 'on' or 'off', not False: quote it"),
        ("number: 1:30", "number: should be a valid integer, not '1:30'"),
    ],
)
def test_a_value_that_yaml_reads_otherwise_is_to_be_quoted(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build(Shop, parse(text, "shop.yaml"))
    assert str(caught.value).startswith(f"shop.yaml:1: {said}")


def test_overrides_in_every_spelling() -> None:
    config = load(
        MINIMAL, "--grpo.steps", "7", "--seed=3", "grpo.loss.options.clip_low=1e-1", "--generator.with-gpus", "true"
    )
    assert (config.grpo.steps, config.seed, config.generator.with_gpus) == (7, 3, True)
    assert config.grpo.loss.options == {"clip_low": 0.1}


def test_the_last_override_wins_and_values_are_yaml() -> None:
    config = load(MINIMAL, "seed=1", "seed=2", "evaluation.extra_splits=[a, b]", "sandbox.base_image=null")
    assert config.seed == 2
    assert config.evaluation.extra_splits == ["a", "b"]
    assert config.sandbox.base_image is None


@pytest.mark.parametrize("arguments", [["--seed"], ["--seed", "--grpo.steps", "3"], ["seed"], ["=3"], ["seed=[1"]])
def test_what_is_no_override_is_refused(arguments: list[str]) -> None:
    with pytest.raises(UsageError):
        parse_overrides(arguments)


def test_an_override_is_named_as_it_was_written() -> None:
    assert "--grpo.stepz: unknown key (did you mean grpo.steps?)" in mistakes(MINIMAL, "grpo.stepz=3")
    assert "'seed' is a value, not a section" in mistakes(MINIMAL + "seed: 1\n", "seed.x=3")


def test_giving_one_key_of_a_section_keeps_that_sections_own_defaults() -> None:
    config = load(MINIMAL + "warmup: {}\n", "--warmup.optimizer.lr", "0.5")
    assert config.warmup.optimizer.lr == 0.5
    assert config.warmup.optimizer.muon_lr == load(MINIMAL + "warmup: {}\n").warmup.optimizer.muon_lr != 0.0


def test_files_are_found_by_path_and_by_bundled_name(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(MINIMAL)
    assert load_config(str(tmp_path / "mine.yaml")).environment.name == "coding_rlvr"
    assert "coding_rlvr" in bundled_recipes()
    assert read_recipe("coding_rlvr").data == read_recipe("coding_rlvr.yaml").data
    assert read_recipe("coding_rlvr").stem == "coding_rlvr"


@pytest.mark.parametrize("name", list(bundled_recipes()))
def test_every_bundled_recipe_is_valid(name: str) -> None:
    config = load_config(name)
    assert build(RunConfig, parse(render(config), "again.yaml")) == config


def test_a_missing_file_suggests_what_was_meant(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(MINIMAL)
    for file, guess in ((str(tmp_path / "recipee.yaml"), "recipe.yaml"), ("coding_rvlr", "coding_rlvr")):
        with pytest.raises(ConfigError, match=f"did you mean '{guess}'"):
            read_recipe(file)
    with pytest.raises(ConfigError, match="is a folder"):
        read_recipe(str(tmp_path))
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not a text file"):
        read_recipe(str(tmp_path / "binary.yaml"))


def test_the_rendered_recipe_explains_every_key() -> None:
    text = render(load(MINIMAL + "warmup: {}\nlora: {}\n"))
    lines = text.splitlines()
    for key in keys(RunConfig):
        name = key.rpartition(".")[2]
        places = [index for index, line in enumerate(lines) if line.strip().startswith(f"{name}:")]
        assert any(lines[index - 1].strip().startswith("#") for index in places), key


@pytest.mark.slow
@settings(max_examples=20)  # each reads and writes a whole recipe
@given(
    st.dictionaries(
        st.text(string.ascii_lowercase, min_size=1),
        st.integers(-LARGEST_INTEGER, LARGEST_INTEGER)
        | st.floats(-LARGEST_NUMBER, LARGEST_NUMBER)
        | st.sampled_from([math.inf, -math.inf])
        | st.text(),
    ),
    st.integers(min_value=0, max_value=2**32 - 1),
    st.integers(min_value=1, max_value=10**6),
)
def test_rendering_and_reading_back_changes_nothing(options: dict[str, Any], seed: int, steps: int) -> None:
    data = {"environment": {"name": "x", "options": options}, "seed": seed, "grpo": {"steps": steps}}
    config = RunConfig.model_validate(data)
    assert build(RunConfig, parse(render(config), "again.yaml")) == config


@given(ANY)
def test_any_yaml_either_loads_or_is_refused_in_words(data: Any) -> None:
    with contextlib.suppress(ConfigError):
        build(RunConfig, parse(yaml.safe_dump(data), "r.yaml"))


@given(st.sampled_from(sorted(set(keys(RunConfig)))), st.text(string.ascii_lowercase, min_size=1, max_size=3))
def test_any_unknown_key_is_named(key: str, extra: str) -> None:
    wrong = f"{key}_{extra}zz"
    with pytest.raises(ConfigError) as caught:
        build(RunConfig, parse(MINIMAL, "r.yaml"), [(wrong, 1)])
    assert wrong.split(".")[-1] in str(caught.value) or "is a value" in str(caught.value)


@pytest.mark.parametrize("value", ["!!timestamp 2020-13-45", "1" * 5000, "[" * 3000, "{a: 1", "&a [*a]"])
def test_an_override_that_is_no_value_is_refused(value: str) -> None:
    with pytest.raises(UsageError, match="is not a YAML value"):
        parse_overrides([f"seed={value}"])


def test_sections_may_share_a_value() -> None:
    config = load(MINIMAL + "trainer: {optimizer: &adam {lr: 0.5}}\nwarmup: {optimizer: *adam}\n")
    assert (config.trainer.optimizer.lr, config.warmup.optimizer.lr) == (0.5, 0.5)
