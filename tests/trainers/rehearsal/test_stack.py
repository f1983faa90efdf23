"""Rehearsals on the real stack: small models that split as large ones do, changes of the recipe, and named mistakes."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import numpy as np

from forge_env import machine, registry
from forge_env.cli.main import main
from forge_env.config import load_config
from forge_env.config.recipe import ModelSection
from forge_env.errors import UsageError
from forge_env.run.rehearsal import Conditions
from tests.trainers.model.checkpoints import CHECKPOINTS, SHAPE
from trainers.loop.checks import check_checkpoint
from trainers.model.folder import FAMILIES, check_generator_heads, check_heads, read_hf_config
from trainers.plan.shape import Shape, hub_config, published
from trainers.rehearsal import on_cpu
from trainers.rehearsal.acceptance import Training
from trainers.rehearsal.on_cpu import Edits, Signal, number_of_hosts
from trainers.rehearsal.real import Play, check_script, fewer
from trainers.rehearsal.shrinking import ARCHITECTURES, alike, degrees, shrunk, write_shrunk

pytestmark = [pytest.mark.stack, pytest.mark.timeout(900)]

GPU_RECIPES = ("grpo/qwen3_8b", "grpo/qwen3_32b", "grpo/qwen3_30b_a3b", "grpo/llama3_8b", "coding_rlvr/qwen3_0_6b")
LARGE = {family: next(name for name in published() if hub_config(name)["model_type"] == family) for family in FAMILIES}
"""A model of each family."""
GEMMA4 = ("google/gemma-4-E2B", "google/gemma-4-26B-A4B")
"""Models with layers that `LARGE` lacks."""
DEGREES = range(1, 17)


def refused(check: Any, *args: Any) -> bool:
    try:
        check(*args)
    except UsageError:
        return True
    return False


# --- small models


def test_every_family_can_be_shrunk() -> None:
    assert set(ARCHITECTURES) == set(FAMILIES)


@pytest.mark.parametrize("name", [*LARGE.values(), *GEMMA4])
@pytest.mark.parametrize("divided_by", [1, 2, 6, 16])
def test_a_shrunk_model_splits_as_the_large_one(name: str, divided_by: int) -> None:
    large = hub_config(name)
    small = shrunk(large, divided_by)
    kept = ("model_type", "num_attention_heads", "num_key_value_heads", "num_experts", "num_experts_per_tok")
    assert {key: small.get(key) for key in kept} == {key: large.get(key) for key in kept}
    widths = ("intermediate_size", "moe_intermediate_size", *(["hidden_size"] * (large["model_type"] != "qwen2")))
    for degree in DEGREES:
        assert refused(check_heads, small, degree) == refused(check_heads, large, degree)
        assert refused(check_heads, small, 1, degree) == refused(check_heads, large, 1, degree)
        assert refused(check_generator_heads, small, degree) == refused(check_generator_heads, large, degree)
        for width in widths:
            if divided_by % degree == 0 and width in large:
                assert (small[width] % degree == 0) == (large[width] % degree == 0)
    one, other = Shape.of(small, ""), Shape.of(large, "")
    assert one.blocks < 30e6
    assert (one.mixtures > 0, one.linear > 0, one.windowed > 0) == (
        other.mixtures > 0,
        other.linear > 0,
        other.windowed > 0,
    )


@pytest.mark.parametrize("name", sorted(published()))
def test_transformers_accepts_a_shrunk_config(name: str, tmp_path: Path) -> None:
    """vLLM reads the file through it."""
    from transformers import AutoConfig

    (tmp_path / "config.json").write_text(json.dumps(shrunk(hub_config(name), 8) | {"pad_token_id": 0}))
    config = AutoConfig.from_pretrained(tmp_path)
    assert config.to_dict()["head_dim"] == 32


def test_lists_of_layers_and_dense_layers_are_cut_with_the_layers() -> None:
    large = {
        **SHAPE,
        **CHECKPOINTS["Qwen 3 MoE"],
        "rms_norm_eps": 1e-6,
        "num_hidden_layers": 24,
        "mlp_only_layers": [3],
    }
    small = shrunk(large)
    assert (small["num_hidden_layers"], small["mlp_only_layers"]) == (4, [3])
    kinds = [*["sliding_attention"] * 5, "full_attention"]
    gemma = {**SHAPE, **CHECKPOINTS["Gemma 3"], "rms_norm_eps": 1e-6, "num_hidden_layers": 12, "layer_types": kinds * 2}
    assert shrunk(gemma)["layer_types"] == kinds
    sharing = shrunk(hub_config("google/gemma-4-E2B"))
    assert sharing["layer_types"] == [kinds[0], kinds[-1]] * 2
    assert sharing["num_kv_shared_layers"] == 2


@pytest.mark.parametrize(("number", "least", "by"), [(151936, 700, 64), (5120, 64, 96), (50257, 300, 12), (40, 64, 8)])
def test_a_shrunk_number_has_the_same_divisors(number: int, least: int, by: int) -> None:
    small = alike(number, least, by)
    assert small == number or (least <= small < least + by and small % by == number % by)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["Qwen/Qwen3-8B", *(LARGE[family] for family in ("gemma3_text", "gemma4_text", "qwen3_5_text", "phi3")), *GEMMA4],
)
def test_a_shrunk_folder_is_a_complete_checkpoint(name: str, tmp_path: Path) -> None:
    section, folder = ModelSection(path=name, max_length=256), tmp_path / "model"
    environment = registry.make("coding_rlvr")
    write_shrunk(hub_config(name), {}, folder, model=section, environment=environment, divided_by=8)
    check_checkpoint(folder, section)
    config = read_hf_config(folder)
    assert config["vocab_size"] < 2048
    assert config["vocab_size"] % 64 == hub_config(name)["vocab_size"] % 64
    assert sum(file.stat().st_size for file in folder.iterdir()) < 60e6


def test_a_family_that_cannot_be_shrunk_is_one_message() -> None:
    with pytest.raises(UsageError, match="'mamba' model"):
        shrunk({"model_type": "mamba"})


# --- the recipe on this machine


@pytest.mark.parametrize("recipe", GPU_RECIPES)
def test_a_gpu_recipe_is_mapped_to_processors(recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "usable_cpus", lambda: 2)
    monkeypatch.setattr(machine, "free_memory_gb", lambda: 20.0)
    config = load_config(recipe)
    edits = Edits(config)
    on_cpu.on_cpu(edits, tmp_path, [])
    small, text = edits.config(), "\n".join(edits.lines())
    assert (small.generator.with_gpus, small.trainer.with_gpus, small.model.dtype) == (False, False, "float32")
    assert small.generator.engine == "async_llm"
    processes = small.trainer.procs + small.generator.num_replicas * small.generator.procs
    assert processes <= 2 * on_cpu.PROCESSES_PER_CPU
    assert config.trainer.procs % small.trainer.procs == 0
    assert small.grpo.loss == config.grpo.loss
    assert small.trainer.activation_checkpoint == config.trainer.activation_checkpoint
    assert "trainer.with_gpus: true -> false" in text
    if small.trainer.procs < config.trainer.procs:
        assert f"trainer.procs: {config.trainer.procs} -> {small.trainer.procs}" in text


def test_the_recipe_itself_is_not_changed(tmp_path: Path) -> None:
    config = load_config("coding_rlvr")
    before = config.model_dump()
    on_cpu.on_cpu(Edits(config), tmp_path, [])
    assert config.model_dump() == before


def test_groups_without_a_signal_change_the_weights() -> None:
    def group(*rewards: float) -> Any:
        return SimpleNamespace(valid=[None] * len(rewards), rewards=np.array(rewards), mean_reward=0.0)

    signal = Signal("group_mean", {})
    assert list(signal(group(1.0, 0.0))) == [0.5, -0.5]
    assert list(signal(group(0.0, 0.0, 0.0))) == [1.0, -1.0, 1.0]


def test_hosts_are_those_that_the_recipe_names() -> None:
    workers = ["job.kind=hosts", 'job.workers=["tcp://10.0.0.1:1", "tcp://10.0.0.2:1", "tcp://10.0.0.3:1"]']
    assert number_of_hosts(load_config("coding_rlvr"), 1) == 1
    assert number_of_hosts(load_config("coding_rlvr", workers), 1) == 3
    assert number_of_hosts(load_config("coding_rlvr", ["job.kind=slurm"]), 1) == 2
    spread = load_config("grpo/qwen3_32b", ["job.kind=slurm", "trainer.hosts=4"])
    assert number_of_hosts(spread, 1) == 4
    assert degrees(spread) == 8


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ([], {}),
        (["trainer.procs=4"], {"trainer.procs": 2}),
        (["trainer.procs=4", "trainer.parallelism.tensor_parallel_degree=4"], {}),
        (["trainer.procs=8", "trainer.parallelism.tensor_parallel_degree=2"], {"trainer.procs": 4}),
    ],
)
def test_a_resume_has_fewer_processes_if_it_can(keys: list[str], expected: dict[str, int]) -> None:
    found = fewer(load_config("coding_rlvr", keys), 1)
    assert {key: value for key, value in found.items() if key == "trainer.procs"} == expected


# --- mistakes


def rehearsed(capsys: pytest.CaptureFixture[str], tmp_path: Path, *words: str) -> tuple[int, dict[str, Any]]:
    code = main(["rehearse", *words, "--stack", "--json", f"output_dir={tmp_path}"])
    return code, json.loads(capsys.readouterr().out)


def test_unshardable_layout_is_named_early(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    layout = ["trainer.procs=16", "trainer.parallelism.tensor_parallel_degree=16"]
    code, result = rehearsed(capsys, tmp_path, "coding_rlvr/qwen3_0_6b", *layout)
    assert code == 1
    [finding] = result["findings"]
    assert finding["key"] == "trainer.parallelism.tensor_parallel_degree"
    assert [stage["stage"] for stage in result["stages"]] == ["recipe", "layout", "environment", "job"]
    assert [bool(stage["errors"]) for stage in result["stages"]] == [False, True, False, False]


def test_an_unknown_model_leaves_the_other_stages(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    family = tmp_path / "mamba"
    family.mkdir()
    (family / "config.json").write_text('{"model_type": "mamba"}')
    code, result = rehearsed(capsys, tmp_path, "coding_rlvr", f"model.path={family}", "job.kind=slurm")
    assert code == 1
    assert [stage["stage"] for stage in result["stages"] if not stage["errors"]] == ["environment", "job"]
    [message] = {finding["text"] for finding in result["findings"]}
    assert "is a 'mamba' model" in message
    assert (tmp_path / "rehearsal-coding-rlvr" / "job" / "job.sbatch").is_file()
    assert (tmp_path / "rehearsal-coding-rlvr" / "results.json").is_file()


def test_options_of_the_simulation_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rehearse", "coding_rlvr", "--stack", "--reply", "900"]) == 2
    assert "--reply is for simulations" in capsys.readouterr().err


def test_a_script_with_a_wrong_quote_is_refused() -> None:
    check_script("echo 'right'", "job.sbatch")
    with pytest.raises(UsageError, match=r"job\.sbatch can't be parsed"):
        check_script("echo 'wrong", "job.sbatch")


def test_a_resume_that_fails_is_named_with_its_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The resumed command refuses its recipe, as with a placement on a host that is gone."""
    (tmp_path / "run" / "checkpoints" / "step-000004").mkdir(parents=True)
    (tmp_path / "run" / "checkpoints" / "step-000004" / "checkpoint.json").write_text("{}")
    hosts = ["job.kind=hosts", 'job.workers=["tcp://127.0.0.2:1"]', "job.place={trainer: [1]}"]
    config = load_config("coding_rlvr", hosts)
    (tmp_path / "run" / "config.yaml").write_text(json.dumps(config.model_dump(mode="json")))
    play = Play(config, Conditions(stack=True), tmp_path, lambda line: None)
    with ExitStack() as stack:
        assert not play._stage("resume", lambda stage: play._resume(stack, stage), "trainer.procs")
    [finding] = play.findings
    assert finding.key.startswith("job.")
    assert "exit code 2" in finding.text
    assert finding.fix


def test_a_run_that_ends_is_reported_with_its_own_error(tmp_path: Path) -> None:
    output = tmp_path / "train.out"
    training = Training(tmp_path / "run", ["coding_rlvr", "grpo.group_size=1"], output)
    with training.watched(), pytest.raises(Exception, match="group_size=1") as caught:
        training.until_step(1)
    assert "use 2 or more" in str(caught.value.fix)


# --- the whole stack


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_default_recipe_passes_every_stage(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "forge_env",
        "rehearse",
        "coding_rlvr",
        "--stack",
        "--json",
        f"output_dir={tmp_path}",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    stages = {stage["stage"]: stage for stage in json.loads(done.stdout)["stages"]}
    assert list(stages)[-5:] == ["start", "training", "generator's death", "checkpoint", "resume"]
    assert stages["resume"]["figures"]["steps"] > stages["checkpoint"]["figures"]["step"]
    assert stages["start"]["figures"]["largest, GiB"] < 3
