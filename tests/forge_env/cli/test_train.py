"""`forge-env train`: runs, and everything that is refused before one starts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from forge_env import machine
from forge_env.cli.main import main
from forge_env.config import RunConfig
from forge_env.job import needs
from forge_env.run import metrics, preflight
from forge_env.sandbox import engines

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def undrawn(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the first run's picture is drawn: that takes longer than all else of these runs."""
    if request.function is not test_a_run_from_start_to_end:
        monkeypatch.setattr("forge_env.view.report.write_reward_curve", lambda folder: True)


def test_a_run_from_start_to_end(recipe: Path, capfd: Capture) -> None:
    assert main(["train", "recipe.yaml", "seed=5", "--grpo.steps", "4", "--name", "first"]) == 0
    out, err = capfd.readouterr()
    assert "sandbox engine local" in out
    assert "seed 5" in out
    assert "held-out 0.400 -> 0.800 in 4 steps" in out
    assert err == ""
    summary = json.loads((recipe.parent / "runs/first/summary.json").read_text())
    assert (summary["exit"], summary["steps"], summary["seed"]) == ("success", 4, 5)


def test_options_may_stand_anywhere(recipe: Path) -> None:
    assert main(["train", "--name", "a", "recipe.yaml", "--environment.options.seed", "-1", "output_dir=out"]) == 0
    assert (recipe.parent / "out/a/config.yaml").exists()


def test_a_saved_recipe_is_a_recipe(recipe: Path, capfd: Capture) -> None:
    assert main(["train", "recipe.yaml", "--name", "first"]) == 0
    saved = "runs/first/config.yaml"
    assert main(["train", saved]) == 2
    assert "exists already" in capfd.readouterr().err
    assert main(["train", saved, "--name", "second"]) == 0
    assert main(["train", saved, "--resume", "grpo.steps=5"]) == 0
    assert "changed on resume: grpo.steps: 3 -> 5" in capfd.readouterr().out


def test_a_failure_is_one_message_and_a_log(recipe: Path, capfd: Capture) -> None:
    arguments = ["train", "recipe.yaml", "method=tests.forge_env.cli.fake_trainer:fail", "--name", "first"]
    assert main(arguments) == 1
    err = capfd.readouterr().err
    assert err.startswith("forge-env: RuntimeError: boom\n")
    assert "run.log" in err
    assert "Traceback" not in err
    assert "Traceback" in (recipe.parent / "runs/first/run.log").read_text()


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["environment.name=coding_rvlr"], 2, ["there is no environment 'coding_rvlr'", "did you mean 'coding_rlvr'?"]),
        (["--environment.options.nonsense", "1"], 2, ["--environment.options.nonsense: unknown key (known here: "]),
        (["method=grop"], 2, ["there is no training method 'grop'", "did you mean 'grpo'?"]),
        (["grpo.loss.name=gppo"], 2, ["there is no loss 'gppo'"]),
        (["grpo.stepz=1"], 2, ["--grpo.stepz: unknown key (did you mean grpo.steps?)"]),
        (["--nmae", "x"], 2, ["--nmae: unknown key (did you mean name?)"]),
        (["--reusme"], 2, ["--reusme needs a value"]),
        (["--name", "x", "--resume"], 2, ["there is no run", "to resume"]),
        (["--resume"], 2, ["--resume needs a run"]),
        (["output_dir=recipe.yaml"], 1, ["recipe.yaml is not a folder", "output_dir"]),
        (["method=tests.cli.no_such_module:train"], 1, ["can't be loaded", "no_such_module"]),
        (["model.cache_dir=recipe.yaml/x"], 1, ["is not a folder", "model.cache_dir"]),
        (["output_dir=~no_such_user/runs"], 2, ["this home folder is not known"]),
        (["--name", "two\nlines"], 2, ["can't be the name of a run"]),
        (["method=tests.forge_env.cli.fake_trainer:RECIPE_KEYS"], 1, ["is not a function"]),
        (["method=tests.forge_env.cli.fake_trainer:careful", "seed=13"], 2, ["seed 13 brings bad luck", "use another"]),
    ],
)
def test_what_is_refused(recipe: Path, capfd: Capture, arguments: list[str], code: int, said: list[str]) -> None:
    assert main(["train", "recipe.yaml", *arguments]) == code
    err = capfd.readouterr().err
    for text in said:
        assert text in err
    assert "Traceback" not in err


def refused(
    change: Callable[[pytest.MonkeyPatch], Any], monkeypatch: pytest.MonkeyPatch, capfd: Capture, *extra: str
) -> str:
    change(monkeypatch)
    assert main(["train", "recipe.yaml", *extra]) == 1
    assert not Path("runs").exists()
    return capfd.readouterr().err


def test_too_little_memory(recipe: Path, monkeypatch: pytest.MonkeyPatch, capfd: Capture) -> None:
    err = refused(lambda patch: patch.setattr(machine, "free_memory_gb", lambda: 1.0), monkeypatch, capfd)
    assert "too little memory: the run takes about 4.8 GiB (controller 1 x 0.5, " in err
    assert "rollout worker 1 x 0.3, left free 1 x 0.5), 1.0 GiB are free" in err
    many = refused(
        lambda patch: patch.setattr(machine, "free_memory_gb", lambda: 8.0), monkeypatch, capfd, "rollouts.workers=48"
    )
    assert "rollout worker 48 x 0.3, left free 1 x 0.5), 8.0 GiB are free" in many
    assert "or lower rollouts.workers" in many


def test_a_full_disk(recipe: Path, monkeypatch: pytest.MonkeyPatch, capfd: Capture) -> None:
    err = refused(lambda patch: patch.setattr(machine, "free_disk_gb", lambda path: 0.01), monkeypatch, capfd)
    assert "is full: 0.01 GiB free" in err
    assert "output_dir=PATH" in err


def test_no_sandbox(recipe: Path, monkeypatch: pytest.MonkeyPatch, capfd: Capture) -> None:
    reasons = {"docker": "no daemon answers", "local": "namespaces are off"}
    err = refused(lambda patch: patch.setattr(engines, "available_engines", lambda: reasons), monkeypatch, capfd)
    assert "no code is run: docker: no daemon answers; local: namespaces are off" in err
    assert "start Docker" in err


def test_too_few_gpus(recipe: Path, monkeypatch: pytest.MonkeyPatch, capfd: Capture) -> None:
    gpu = machine.GPU("0", "GPU-1", "card", 80.0)
    wants = ["--trainer.with_gpus", "true", "--generator.with_gpus=true", "--generator.num_replicas", "2"]
    err = refused(lambda patch: patch.setattr(machine, "gpus", lambda: [gpu]), monkeypatch, capfd, *wants)
    assert "Insufficient GPU resources: this recipe needs 3 (generator 2, trainer 1), this machine has 1" in err
    assert "use job.share_gpus=true, " in err
    assert "--generator.with_gpus false --trainer.with_gpus false" in err
    wants = ["--grpo.reference", "{source: initial, with_gpus: true}"]
    err = refused(lambda patch: patch.setattr(machine, "gpus", list), monkeypatch, capfd, *wants)
    assert "needs 1 (grpo.reference 1), this machine has 0" in err
    assert "--grpo.reference.with_gpus false" in err


@pytest.mark.parametrize(
    ("value", "code", "said"),
    [
        ("2", 1, "Insufficient GPU resources: MIN_GPUS requires 2, this machine has 1"),
        ("two", 2, "MIN_GPUS='two' is not a number"),
        ("1", 0, ""),
        ("", 0, ""),
    ],
)
def test_min_gpus_is_a_bound_below_which_nothing_starts(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, capfd: Capture, value: str, code: int, said: str
) -> None:
    monkeypatch.setenv("MIN_GPUS", value)
    monkeypatch.setattr(machine, "gpus", lambda: [machine.GPU("0", "GPU-1", "card", 80.0)])
    assert main(["train", "recipe.yaml"]) == code
    assert said in capfd.readouterr().err
    assert (recipe.parent / "runs").exists() == (code == 0)


def test_recipe_from_the_environment(recipe: Path, monkeypatch: pytest.MonkeyPatch, capfd: Capture) -> None:
    monkeypatch.delenv("CONFIG_FILE", raising=False)
    assert main(["train", "--name", "none"]) == 2
    assert "FILE is missing" in capfd.readouterr().err
    monkeypatch.setenv("CONFIG_FILE", "recipe.yaml")
    assert main(["train", "--name", "theirs"]) == 0
    assert (recipe.parent / "runs/theirs/summary.json").is_file()
    (recipe.parent / "other.yaml").write_text(recipe.read_text())
    assert main(["train", "other.yaml", "--name", "ours"]) == 0, "the command line has the last word"


def test_training_packages_are_missing(recipe: Path, monkeypatch: pytest.MonkeyPatch, capfd: Capture) -> None:
    monkeypatch.setattr(machine, "missing_training_packages", lambda: ["vLLM"])
    assert main(["train", "recipe.yaml", "method=grpo"]) == 1
    err = capfd.readouterr().err
    assert "packages that aren't installed: vLLM" in err
    assert "make setup STACK=cpu" in err
    monkeypatch.setattr(machine, "missing_training_packages", list)
    monkeypatch.setattr(machine, "missing_libraries", lambda: ["libnuma1"])
    assert main(["train", "recipe.yaml", "method=grpo"]) == 1
    assert "apt-get install libnuma1" in capfd.readouterr().err


def test_a_logger_that_cannot_work(recipe: Path, monkeypatch: pytest.MonkeyPatch, capfd: Capture) -> None:
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(recipe.parent / "netrc"))
    monkeypatch.setattr(metrics, "find_spec", lambda name: object())
    assert main(["train", "recipe.yaml", "logging.wandb=true"]) == 2
    assert "set WANDB_MODE=offline" in capfd.readouterr().err
    monkeypatch.setattr(metrics, "find_spec", lambda name: None)
    assert main(["train", "recipe.yaml"]) == 2
    assert "tensorboard isn't installed" in capfd.readouterr().err
    assert not Path("runs").exists()


def test_an_unwritable_place(recipe: Path, monkeypatch: pytest.MonkeyPatch, capfd: Capture) -> None:
    monkeypatch.setattr(preflight, "_writable", lambda folder: False)
    assert main(["train", "recipe.yaml"]) == 1
    assert "can't write to" in capfd.readouterr().err


def test_the_memory_estimate_grows_with_what_runs() -> None:
    def needed(**sections: Any) -> float:
        return needs.needed_memory_gb(RunConfig.model_validate({"environment": {"name": "x"}, **sections}))

    default = needed()
    assert 4.0 <= default <= 5.0
    assert needed(rollouts={"workers": 3}) == pytest.approx(default + 2 * needs.WORKER_GB)
    assert needed(generator={"num_replicas": 3}) > default
    assert needed(trainer={"procs": 2}) > default
    assert needed(grpo={"reference": {"source": "initial"}}) > default + 0.7
    assert needed(generator={"kv_cache_gb": 4}) == pytest.approx(default + 3)
