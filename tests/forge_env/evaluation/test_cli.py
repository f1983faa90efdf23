"""The commands: flags, files, exit codes, what is imported."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

import forge_env as fe
from forge_env.cli.eval import requested
from forge_env.cli.main import build_parser, main
from forge_env.config.evaluation import EvaluationConfig
from forge_env.config.reader import build
from tests.forge_env.evaluation.toys import Sums

TOY = "tests.forge_env.evaluation.toys:Sums"
OTHER = "tests.forge_env.evaluation.toys:Broken"


@pytest.fixture
def out(tmp_path: Path, clean_environ: pytest.MonkeyPatch) -> str:
    return str(tmp_path / "results")


def config_of(*words: str) -> EvaluationConfig:
    args, rest = build_parser("eval").parse_known_args(["eval", *words])
    args.parser.read_rest(args, rest)
    return build(EvaluationConfig, requested(args))


def test_help_explains_every_key_in_the_words_of_its_field(capsys: Any) -> None:
    with pytest.raises(SystemExit):
        main(["eval", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    for name, field in EvaluationConfig.model_fields.items():
        flag = f"--{name.replace('_', '-')} "
        assert flag in shown
        assert (field.description or "").replace("`", "") in shown


def test_a_file_says_the_same_as_flags(tmp_path: Path) -> None:
    data = {
        "environments": [{"name": TOY, "options": {"max_turns": 3}}],
        "model": "m",
        "base_url": "http://localhost:1/v1",
        "num_tasks": 5,
        "epochs": 2,
        "temperature": 0.5,
        "extra": {"top_k": 4},
        "turn_limit": 7,
    }
    path = tmp_path / "evaluation.yaml"
    path.write_text(yaml.safe_dump(data))
    flags = ["--model", "m", "--base-url", data["base_url"], "-n", "5", "--epochs", "2"]
    flags += ["--temperature", "0.5", "--turn-limit", "7"]
    assert config_of(str(path)) == config_of(TOY, "max_turns=3", *flags, "--extra", "{top_k: 4}")
    assert config_of(str(path), "--epochs", "9").epochs == 9


@pytest.mark.parametrize("named", [OTHER, "Broken"])
def test_options_of_several_environments(named: str, out: str) -> None:
    config = config_of(f"{TOY},{OTHER}", "--model", "gold", f"{named}.max_turns=4")
    assert [choice.options for choice in config.environments] == [{}, {"max_turns": 4}]


def test_classes_of_one_name_are_told_apart(out: str) -> None:
    config = config_of(f"{TOY},{OTHER},other.module:Sums", "--model", "gold")
    assert [choice.label for choice in config.environments] == [TOY, "Broken", "other.module:Sums"]


def test_a_class_has_one_label_however_it_is_given(out: str, capsys: Any) -> None:
    fe.evaluate(Sums, "gold", out=out, num_tasks=2)
    main(["eval", TOY, "--model", "gold", "--out", f"{out}-2", "-n", "2"])
    assert main(["compare", out, f"{out}-2"]) == 0
    main(["eval", OTHER, "--model", "gold", "--out", f"{out}-3", "-n", "2"])
    capsys.readouterr()
    assert main(["compare", out, f"{out}-3"]) == 2
    shown = capsys.readouterr().err
    assert "no environment in common: Sums against Broken" in shown
    assert "with the same label" in shown


def test_a_flag_holds_for_every_environment_of_a_file(tmp_path: Path, out: str) -> None:
    path = tmp_path / "evaluation.yaml"
    path.write_text(
        yaml.safe_dump({"environments": [{"name": TOY, "num_tasks": 5, "split": "a"}, OTHER], "model": "gold"})
    )
    config = config_of(str(path))
    assert [(choice.num_tasks, choice.split) for choice in config.environments] == [(5, "a"), (None, None)]
    config = config_of(str(path), "-n", "2", "--split", "b")
    assert [(choice.num_tasks, choice.split) for choice in config.environments] == [(None, None), (None, None)]
    assert (config.num_tasks, config.split) == (2, "b")


def test_one_file_is_read_and_a_second_refused(tmp_path: Path, capsys: Any) -> None:
    for name in "ab":
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump({"environments": TOY, "model": "gold"}))
    assert main(["eval", f"{tmp_path}/b.yaml", f"{tmp_path}/a.yaml"]) == 2
    assert "2 files are given" in capsys.readouterr().err


def test_the_home_folder_is_expanded_and_text_stays_text(tmp_path: Path, clean_environ: pytest.MonkeyPatch) -> None:
    clean_environ.setenv("HOME", str(tmp_path))
    path = tmp_path / "evaluation.yaml"
    lines = [f"environments: [{{name: '{TOY}', split: 2023}}]", "model: gold", "out: ~/x", "prices: ~/p.yaml"]
    path.write_text("\n".join([*lines, "split: 2024"]))
    config = config_of(str(path))
    assert (config.out, config.prices) == (tmp_path / "x", tmp_path / "p.yaml")
    assert (config.environments[0].split, config.split) == ("2023", "2024")
    config = config_of(TOY, "--model", "gold", "--split", "2025", "--score", "1e3")
    assert (config.split, config.score) == ("2025", "1e3")
    assert config_of(TOY, "--model", "gold", "--vllm-args", "[--dtype, float32]").vllm_args == ["--dtype", "float32"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["coding_rlv", "--model", "gold"], "did you mean 'coding_rlvr'?"),
        ([TOY, "--model", "gold", "--temprature", "1"], "--temprature: unknown key (did you mean temperature?)"),
        ([TOY, "--model", "gold", "max_turn=1"], "--max_turn: unknown key (did you mean max_turns?)"),
        ([f"{TOY},{OTHER}", "--model", "gold", "max_turns=1"], "write ENV.max_turns=VALUE"),
        ([TOY], "add --model"),
        (["--model", "gold"], "name an environment"),
        ([TOY, "--model", "gold", "--resume"], "add --out DIR"),
        ([TOY, "--model", "gold", "-n", "0"], "greater than or equal to 1"),
        (["missing.yaml"], "there is no file 'missing.yaml'"),
        ([TOY, "--model", "m", "--base-url", "localhost:8000"], "did you mean http://localhost:8000/v1?"),
        ([TOY, "--model", "m", "--base-url", "http://"], "is not the address of an endpoint"),
        (
            [TOY, "--model", "m", "--base-url", "http://me:pw@host/v1"],
            "the address of host contains a name",
        ),
        ([TOY, "--model", "nosuch.module:policy"], "there is no module 'nosuch.module'"),
        ([TOY, "--model", "tests.forge_env.evaluation.toys:nosuch"], "can't be imported"),
        ([TOY, "--model", "m", "--budget", "1"], "forge-env: `budget` needs `prices`"),
        ([TOY, "--model", ""], "add --model"),
        ([TOY, "--model", "m", "--sandbox", "dokcer"], "there is no sandbox engine 'dokcer'"),
        ([TOY, "--model", "m", "--temperature", ".inf"], "--temperature: should be a finite number, not inf"),
        ([TOY, "--model", "m", "-n", "true"], "--num_tasks: should be a number, not True"),
        ([TOY, "--model", "m", "--max_turns", "true"], "--max_turns: should be a number, not True"),
        ([TOY, "--model", "m", "--base-url", "http://host:99999/v1"], "the address of host has port 99999"),
        ([TOY, "--model", "m", "max_turns=" + "9" * 500], "--max_turns: '9999"),
        (["missing.toml"], "there is no file 'missing.toml'"),
        ([TOY, "--model", "m", "--budget", "1", "--prices", "missing.yaml"], "there is no file 'missing.yaml'"),
        ([TOY, "--model", "m", "--split", "exam"], "use one of"),
    ],
)
def test_wrong_usage_is_exit_code_2_with_the_fix(words: list[str], message: str, capsys: Any, tmp_path: Path) -> None:
    assert main(["eval", *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("environment: calculator", "evaluation.yaml:1: environment: unknown key (did you mean environments?)"),
        ("model: gold\neval: [calculator]", "evaluation.yaml: environments: missing"),
        ("environments: calculator\nmodel: m\nprices: {m: 1}", "prices: should be a path"),
    ],
)
def test_mistakes_in_an_evaluation_file_are_named_with_their_keys(
    text: str, message: str, capsys: Any, tmp_path: Path
) -> None:
    (tmp_path / "evaluation.yaml").write_text(text)
    assert main(["eval", f"{tmp_path}/evaluation.yaml"]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("environments", "message"),
    [
        (5, "should be a list of environments, not 5"),
        ([5], "5 is not an environment: give a name"),
        ([[TOY]], "is not an environment: give a name"),
        (None, "should be a list of environments, not None"),
        ([], "name at least one environment"),
        (" , ", "name at least one environment"),
        ([{"label": "x"}], "evaluation.yaml:2: environments.0.name: missing"),
        ([{"name": TOY, "options": 5}], "--max_turns: 'options' is a value, not a section"),
    ],
)
def test_environments_of_a_wrong_shape_are_named(
    environments: Any, message: str, tmp_path: Path, capsys: Any, clean_environ: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "evaluation.yaml"
    path.write_text(yaml.safe_dump({"environments": environments, "model": "gold"}))
    assert main(["eval", str(path), *(["max_turns=3"] if "max_turns" in message else [])]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("environments", [f"{TOY}, {OTHER}", [f"{TOY} ", OTHER], [f"{TOY},{OTHER}"]])
def test_blanks_around_names_do_not_matter(environments: Any, tmp_path: Path) -> None:
    path = tmp_path / "evaluation.yaml"
    path.write_text(yaml.safe_dump({"environments": environments, "model": "gold"}))
    assert [choice.name for choice in config_of(str(path)).environments] == [TOY, OTHER]
    assert [choice.name for choice in config_of(f"{TOY}, {OTHER}", "--model", "gold").environments] == [TOY, OTHER]


def test_one_sample_is_no_samples(out: str, capsys: Any) -> None:
    main(["eval", TOY, "--model", "gold", "--out", out, "-n", "1"])
    assert capsys.readouterr().err.startswith("1 sample; results in")


def test_what_can_no_longer_be_scored_is_exit_code_1(out: str, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    main(["eval", TOY, "--model", "gold", "--out", out])
    monkeypatch.setattr("tests.forge_env.evaluation.toys.Sums.num_tasks", lambda self, split: 11)
    assert main(["eval", "--rescore", out]) == 1
    captured = capsys.readouterr()
    assert "1 sample could not be scored again" in captured.err
    assert "Sums/eval/11/0: the environment no longer has this task" in captured.err
    assert main(["eval", "--out", f"{out}-rescored", "--resume"]) == 2


def test_scoring_keeps_to_the_plan_and_names_what_was_lost(out: str, capsys: Any) -> None:
    unlucky = "tests.forge_env.evaluation.toys:Unlucky"
    main(["eval", unlucky, "--model", "gold", "--out", out, "--sample-retries", "0"])
    path = Path(out) / "trajectories" / "eval.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    valid = next(number for number, line in enumerate(lines) if b'"valid":true' in line)
    hit = json.loads(lines[valid])["id"]
    path.write_bytes(b"".join([*lines[:valid], b"\x00garbage\n", *lines[valid + 1 :]]))
    capsys.readouterr()
    assert main(["eval", "--rescore", out]) == 1
    shown = capsys.readouterr().err
    assert f"line {valid + 1} is not a trajectory" in shown
    assert f"1 line of {out} could not be read" in shown
    assert f"play what is missing (forge-env eval --out {out} --resume)" in shown
    assert "7 samples could not be scored again" in shown
    unscored = json.loads((Path(f"{out}-rescored") / "rescored.json").read_text())["unscored"]
    assert "no readable record" in unscored[hit]
    assert unscored["Unlucky/eval/1/0"].startswith("it was lost: SandboxError")
    summary = json.loads((Path(f"{out}-rescored") / "summary.json").read_text())
    (item,) = summary["environments"].values()
    assert (summary["status"], item["planned"], item["samples"], item["missing"]) == ("incomplete", 12, 5, 7)


def test_scoring_what_gold_played_misses_no_task_without_gold(out: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "tests.forge_env.evaluation.toys.Sums.gold_actions",
        lambda self, task: [task.gold] if task.difficulty == 1 else None,
        raising=False,
    )
    assert main(["eval", TOY, "--model", "gold", "--out", out]) == 0
    assert main(["eval", "--rescore", out]) == 0
    summary = json.loads((Path(f"{out}-rescored") / "summary.json").read_text())
    assert (summary["status"], *(item["planned"] for item in summary["environments"].values())) == ("complete", 6)


def test_wrong_comparisons_are_named(out: str, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    main(["eval", TOY, "--model", "gold", "--out", out, "-n", "2"])
    assert main(["compare", out, out, "--confidence", "2"]) == 2
    assert "between 0 and 1" in capsys.readouterr().err
    monkeypatch.setattr(
        "tests.forge_env.evaluation.toys.Sums.task",
        lambda self, split, index: fe.Task(id=f"new-{index}", prompt="1 + 1 = ?", data={"answer": "2"}, gold="2"),
    )
    main(["eval", TOY, "--model", "gold", "--out", f"{out}-2", "-n", "2"])
    assert main(["compare", out, f"{out}-2"]) == 2
    assert "have no task in common" in capsys.readouterr().err


def test_eval_score_and_compare(out: str, capsys: Any) -> None:
    assert (
        main(["eval", TOY, "--model", "tests.forge_env.evaluation.toys:answer_even", "--out", out, "--epochs", "2"])
        == 0
    )
    shown = capsys.readouterr().out
    assert "0.500 ± " in shown
    assert "pass@k" in shown
    assert main(["eval", "--rescore", out]) == 0
    assert "0 scores changed" in capsys.readouterr().out
    assert main(["compare", out, f"{out}-rescored", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["environments"]["Sums"]["difference"]["value"] == 0.0
    assert main(["compare", out, "nowhere"]) == 2
    assert "contains no evaluation" in capsys.readouterr().err


def test_json_and_resume_from_the_folder_alone(out: str, capsys: Any) -> None:
    assert main(["eval", TOY, "--model", "gold", "--out", out, "-n", "2"]) == 0
    capsys.readouterr()
    assert main(["eval", "--out", out, "--resume", "-n", "3", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["environments"]["Sums"]["samples"] == 3


@pytest.mark.parametrize(("agent", "code"), [("crash", 1), ("crash_on_odd", 0)])
def test_an_agent_that_always_crashes_is_exit_code_1(agent: str, code: int, out: str, capsys: Any) -> None:
    command = ["eval", TOY, "--model", f"tests.forge_env.evaluation.toys:{agent}", "--out", out, "-n", "4"]
    assert main(command) == code
    said = "forge-env: the agent's own code crashed on every sample of Sums: no score was measured\n"
    assert (said in capsys.readouterr().err) == bool(code)
    assert main(["eval", "--out", out, "--resume"]) == code, "also if it had all been played before"


def test_tasks_that_share_an_id_are_refused(out: str, capsys: Any) -> None:
    command = ["eval", "tests.forge_env.evaluation.toys:Twins", "--model", "m", "--out", out]
    assert main(command) == 2
    err = capsys.readouterr().err
    assert "Twins: several tasks have one id: 'same' (tasks 0, 3, 6, 9)\n" in err
    assert "-> give each task a unique id; --epochs plays tasks several times" in err
    assert not Path(out).exists()


def test_lost_samples_are_exit_code_1(out: str, capsys: Any) -> None:
    unlucky = "tests.forge_env.evaluation.toys:Unlucky"
    assert main(["eval", unlucky, "--model", "gold", "--out", out, "--sample-retries", "0"]) == 1
    captured = capsys.readouterr()
    assert "6 SandboxError" in captured.out
    assert re.search(
        r"6 samples were lost to infrastructure, .*\n  the first: SandboxError: the box was lost", captured.err
    )
    assert f"run them again with forge-env eval --out {out} --resume" in captured.err


def test_empty_run_leaves_no_folder(tmp_path: Path, capsys: Any, clean_environ: pytest.MonkeyPatch) -> None:
    clean_environ.chdir(tmp_path)
    assert main(["eval", TOY, "--model", "m", "--base-url", "http://127.0.0.1:9/v1"]) == 1
    assert "start the server, or check --base-url" in capsys.readouterr().err
    assert list(tmp_path.glob("runs/*")) == []


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/forge-env")):
        assert main(["eval", TOY, "--model", "gold", "--out", str(place)]) == 1
        assert "choose another --out" in capsys.readouterr().err


@pytest.mark.parametrize(
    "line",
    [
        b"\x00\xff",
        b'{"id": 3',
        b"[]",
        b'{"id": "x", "environment": "e", "task_id": "t", "turns": 3}',
        b'{"id":3,"environment":"e","task_id":"t","turns":[],"info":{"max_reward":1,"index":0,"epoch":0}}',
        b'{"id": "x", "environment": "e", "task_id": "t", "turns": [], "info": [1]}',
    ],
)
def test_a_damaged_line_costs_only_its_own_sample(line: bytes, out: str, capsys: Any) -> None:
    assert main(["eval", TOY, "--model", "gold", "--out", out, "-n", "4"]) == 0
    path = Path(out) / "trajectories" / "eval.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([lines[0], line + b"\n", *lines[2:]]))
    assert main(["compare", out, out]) == 0
    capsys.readouterr()
    assert main(["eval", "--out", out, "--resume", "--json"]) == 0
    captured = capsys.readouterr()
    assert "line 2 is not a trajectory" in captured.err
    assert "its sample will be played again" in captured.err
    assert json.loads(captured.out)["environments"]["Sums"]["samples"] == 4
    assert len(path.read_bytes().splitlines()) == 5


def test_scoring_twice_needs_another_folder(out: str, capsys: Any) -> None:
    assert main(["eval", TOY, "--model", "gold", "--out", out, "-n", "2"]) == 0
    assert main(["eval", "--rescore", out]) == 0
    assert main(["eval", "--rescore", out]) == 2
    assert "choose another --out, or remove it" in capsys.readouterr().err


@pytest.mark.skipif(find_spec("vllm") is None, reason="NOT RUN: vLLM is not installed")
def test_vllm_needs_a_checkpoint(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "run" / "last").mkdir(parents=True)
    (tmp_path / "run" / "last" / "config.json").write_text("{}")
    for model, message in [
        (f"vllm:{tmp_path}/nosuch", "there is no checkpoint folder"),
        ("vllm:checkpoints/first/last", "there is no checkpoint folder"),
        (f"vllm:{tmp_path}/run", f"use vllm:{tmp_path}/run/last"),
        ("vllm:", "does not name a checkpoint"),
    ]:
        assert main(["eval", TOY, "--model", model]) == 2
        assert message in capsys.readouterr().err


def test_evaluating_an_endpoint_loads_nothing_heavy() -> None:
    code = f"""
import sys
from forge_env.cli.main import main
main(["eval", "{TOY}", "--model", "m", "--base-url", "http://127.0.0.1:9/v1", "--out", "/dev/null/x"])
import forge_env.evaluation.evaluation
heavy = {{"torch", "vllm", "docker", "gymnasium", "matplotlib", "pandas", "numpy", "transformers"}} & set(sys.modules)
sys.exit(f"loaded {{heavy}}" if heavy else 0)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
