"""`forge-env train --plan`: shapes, speeds and what is said of them; no torch."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest

from forge_env.cli.main import main
from forge_env.config import load_config
from forge_env.config.finding import bundled_recipes
from trainers.plan import hardware
from trainers.plan.forecast import Forecast
from trainers.plan.hardware import GPUS, Cluster, parse_cluster
from trainers.plan.memory import GIB, Layout
from trainers.plan.report import widest
from trainers.plan.shape import Shape, model_config, named_config, published
from trainers.plan.speed import Workload, training_parts

PARAMETERS = {
    "Qwen/Qwen3-0.6B": 0.596,
    "Qwen/Qwen3-1.7B": 1.72,
    "Qwen/Qwen3-4B": 4.02,
    "Qwen/Qwen3-8B": 8.19,
    "Qwen/Qwen3-14B": 14.8,
    "Qwen/Qwen3-32B": 32.8,
    "Qwen/Qwen3-30B-A3B": 30.5,
    "Qwen/Qwen3-235B-A22B": 235,
    "meta-llama/Llama-3.1-8B": 8.03,
    "meta-llama/Llama-3.1-70B": 70.6,
    "meta-llama/Llama-3.2-1B-Instruct": 1.236,
    "meta-llama/Llama-3.2-3B-Instruct": 3.213,
    "meta-llama/Llama-3.3-70B-Instruct": 70.6,
    "Qwen/Qwen3-4B-Instruct-2507": 4.02,
    "Qwen/Qwen2.5-0.5B-Instruct": 0.494,
    "Qwen/Qwen2.5-1.5B-Instruct": 1.544,
    "Qwen/Qwen2.5-3B-Instruct": 3.086,
    "Qwen/Qwen2.5-7B-Instruct": 7.616,
    "Qwen/Qwen2.5-14B-Instruct": 14.77,
    "Qwen/Qwen2.5-32B-Instruct": 32.76,
    "Qwen/Qwen2.5-72B-Instruct": 72.7,
    "HuggingFaceTB/SmolLM2-135M-Instruct": 0.1345,
    "HuggingFaceTB/SmolLM2-360M-Instruct": 0.3618,
    "HuggingFaceTB/SmolLM2-1.7B-Instruct": 1.711,
    "mistralai/Mistral-7B-Instruct-v0.3": 7.248,
    "HuggingFaceTB/SmolLM3-3B": 3.075,
    "microsoft/phi-4": 14.66,
    "microsoft/Phi-3.5-mini-instruct": 3.82,
    "microsoft/Phi-4-mini-instruct": 3.84,
    "google/gemma-3-270m-it": 0.268,
    "google/gemma-3-1b-it": 1.0,
    "google/gemma-3-4b-it": 3.88,
    "google/gemma-3-12b-it": 11.77,
    "google/gemma-3-27b-it": 27.0,
    "google/gemma-4-31B-it": 30.7,
    "google/gemma-4-26B-A4B-it": 25.2,
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": 1.777,
    "meta-llama/Meta-Llama-3-8B-Instruct": 8.03,
    "meta-llama/Llama-3.1-405B-Instruct": 405.9,
    "mistralai/Mistral-Small-24B-Instruct-2501": 23.57,
    "Qwen/Qwen3-30B-A3B-Instruct-2507": 30.53,
    "Qwen/Qwen3.5-35B-A3B": 34.7,
    "Qwen/Qwen3.5-122B-A10B": 122,
    "Qwen/Qwen3.5-397B-A17B": 397,
}
"""Billions, as their model cards have them."""
Plan = Callable[..., str]


@pytest.fixture
def plan(capsys: pytest.CaptureFixture[str]) -> Plan:
    """What the command prints."""

    def run(*arguments: str) -> str:
        assert main(["train", *arguments, "--plan"]) == 0
        return capsys.readouterr().out

    return run


def forecast(recipe: str, *overrides: str, gpus: str = "8xH100", **work: int) -> Forecast:
    config = load_config(recipe, overrides)
    return Forecast(config, Workload.of(config, **work), parse_cluster(gpus))


@pytest.mark.parametrize("name", PARAMETERS)
def test_the_published_shapes_have_the_published_number_of_parameters(name: str) -> None:
    assert Shape.of(named_config(name), name).parameters / 1e9 == pytest.approx(PARAMETERS[name], rel=0.006)


def test_a_mixture_computes_with_a_part_of_its_parameters() -> None:
    shape = Shape.of(named_config("Qwen/Qwen3-30B-A3B"), "")
    assert (shape.computed + 2 * shape.embedding) / 1e9 == pytest.approx(3.3, rel=0.03), "A3B"


def planned() -> list[str]:
    """Bundled recipes, but a warm-up, which has no plan, and one whose teacher another recipe makes first."""
    unplanned = re.compile(r"^method: warmup|reference: .*path: runs/", re.MULTILINE)
    return [name for name, file in bundled_recipes().items() if not unplanned.search(file.read_text())]


@pytest.mark.parametrize("recipe", planned())
def test_every_bundled_recipe_has_a_plan(recipe: str, plan: Plan) -> None:
    config = load_config(recipe)
    printed = plan(recipe)
    assert "it will not run" not in printed
    for heading in ("placement", "memory of one process", "a step of", "bottleneck", "steps:", "assumed"):
        assert heading in printed
    assert ("weight sync" in printed) == config.rolls_out


def test_the_published_rate_comes_out() -> None:
    """TorchTitan's: 5,762 tokens/s and GPU with FSDP and selective checkpoints, 6,667 with compilation."""
    shape = Shape.of(named_config("meta-llama/Llama-3.1-8B"), "")
    work = Workload(16, 1, 1, 1, 8191, 8191, 0, sampled=False)
    layout = Layout(data=8, recompute="selective", dtype="bfloat16")
    for compiled, published_rate in ((False, 5762), (True, 6667)):
        parts = training_parts(shape, work, layout, 16384, GPUS["H100"], compiled=compiled)
        assert work.tokens / 8 / sum(parts.values()) == pytest.approx(published_rate, rel=0.05)


def test_the_measured_rates_of_the_cpu_come_out() -> None:
    """Of docs/benchmarks.md: 14.6 k tokens/s trained on two threads, 6.9 k sampled at batches of 128."""
    changes = "model.path=tiny", "trainer.minibatches=1", "trainer.share_prefixes=false"  # there, no prompt is shared
    small = forecast("coding_rlvr", *changes, prompt=60, reply=100)
    learning = small.step.learning["compute"]
    assert small.work.tokens / learning == pytest.approx(14_600, rel=0.15)
    assert small.batch / sum(small.decoding.values()) == pytest.approx(6_910, rel=0.15)


def test_a_prompt_is_computed_once_for_the_episodes_of_a_pass() -> None:
    def tokens(*changes: str, reply: int = 100) -> float:
        changes = "trainer.minibatches=1", "trainer.microbatch_tokens=4096", *changes
        work = forecast("coding_rlvr", *changes, prompt=300, reply=reply).work
        return work.computed / work.episodes

    assert tokens("trainer.share_prefixes=false") == 400
    assert tokens() == 100 + 300 / 8
    assert tokens("trainer.minibatches=2") == 100 + 300 / 4
    assert tokens("trainer.microbatch_tokens=500") == 100 + 300 / 2
    assert tokens("trainer.microbatch_tokens=100") == 400
    together, apart = (
        forecast("coding_rlvr", f"trainer.share_prefixes={share}", prompt=300, reply=100).step.learning["compute"]
        for share in ("true", "false")
    )
    assert together < apart / 2


def test_more_of_what_is_waited_for_makes_a_step_shorter() -> None:
    base = forecast("grpo/qwen3_8b")
    side = base.step.bottleneck.partition(":")[0]
    more = {"generation": "generator.num_replicas=3", "trainer": "trainer.procs=4"}
    assert forecast("grpo/qwen3_8b", more[side]).step.seconds < base.step.seconds
    synchronous = forecast("grpo/qwen3_8b", "grpo.max_off_policy_steps=0").step
    assert synchronous.seconds > base.step.seconds
    assert synchronous.seconds == pytest.approx(
        synchronous.generation_s + synchronous.learning_s + synchronous.sync.seconds - synchronous.sync.copy
    )


def test_what_does_not_fit_is_said(plan: Plan) -> None:
    printed = plan("grpo/qwen3_32b", "--gpus", "16xH100", "--trainer.procs", "2", "trainer.hosts=1")
    assert "it will not run: trainer:" in printed
    assert "it will not run: it needs 16 GPUs, and there are 8" in plan("grpo/qwen3_32b", "--gpus", "8xH100")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--gpus", "8xH1000"), "unknown GPU 'H1000'"),
        (("--gpus", "many"), "unknown GPU 'many'"),
        (("--gpus", "0xH100"), "is not a number and a kind"),
        (("--gpus", "9999999999999999xH100"), "unknown GPU '9999999999999999xH100'"),
        (("--price", "nan"), "--price: invalid number value: 'nan'"),
        (("--price=-1",), "--price -1 must not be negative"),
        (("--reply", "5000"), "doesn't fit model.max_length=2048"),
        (("--model.path", "Nobody/Knows-1B"), "the shape of Nobody/Knows-1B is unknown"),
        (("--model.path", "no: model"), "the shape of no: model is unknown"),
        (("--model.path", "qwen/qwen3-0.6b"), "did you mean 'Qwen/Qwen3-0.6B'?"),
        (("--generator.procs", "3"), "does not divide the model's num_attention_heads"),
    ],
)
def test_wrong_usage_messages(arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "grpo/qwen3_8b", "--plan", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_method_that_knows_nothing_of_plans_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "coding_rlvr/base", "--plan"]) == 2
    assert "method=warmup can't forecast a recipe" in capsys.readouterr().err


def test_memory_that_is_not_counted_is_named(plan: Plan) -> None:
    sinks = "masks and scores of attention sinks are not counted"
    assert sinks in plan("grpo/qwen3_8b", "model.path=openai/gpt-oss-20b")
    assert sinks not in plan("grpo/qwen3_8b")


@pytest.mark.slow
def test_512_gpus_have_an_answer(plan: Plan) -> None:
    printed = plan("grpo/qwen3_32b", "--gpus", "512xH100", "--price", "2")
    assert "with 512 H100 in 64 hosts" in printed
    assert "32 times its batch" in printed
    assert " at 2 an hour" in printed
    config = load_config("grpo/qwen3_32b")
    cluster = Cluster(512, GPUS["H100"])
    work = Workload.of(config)
    narrow = Forecast(config, work, cluster).step
    wide, wider = (widest(config, replace(work, episodes=work.episodes * times), cluster) for times in (1, 32))
    assert wide.step.seconds == narrow.seconds == narrow.transfer_s  # which more GPUs don't shorten
    assert wider.step.tokens / wider.step.seconds > wide.step.tokens / wide.step.seconds
    assert wider.needed <= 512


def test_a_recipe_of_cpus_is_placed_on_processors(plan: Plan) -> None:
    printed = plan("grpo/math_cpu")
    assert "on processors" in printed
    assert "GPU hours" not in printed


def test_generators_have_room_for_keys_and_values() -> None:
    holder = forecast("grpo/qwen3_8b").holders[-1]
    assert holder.name == "generator"
    assert holder.memory.peak == pytest.approx(0.9 * 79.6 * GIB)
    assert holder.memory.parts["weights"] == pytest.approx(2 * 8.19e9, rel=0.01)
    assert forecast("grpo/qwen3_8b", "generator.gpu_memory_utilization=0.3").batch < forecast("grpo/qwen3_8b").batch


def test_roles_that_share_gpus_share_their_memory_and_their_time(plan: Plan) -> None:
    apart = forecast("grpo/qwen3_0_6b", "job.share_gpus=false", "generator.kv_cache_gb=1")
    shared = forecast("grpo/qwen3_0_6b", gpus="1xH100")
    trainer, generator = shared.holders
    assert (apart.needed, shared.needed) == (2, 1)
    assert generator.memory.parts["keys and values"] == 16 * GIB
    assert trainer.room == pytest.approx((79.6 - 2) * GIB - generator.memory.peak, rel=0.01)
    assert shared.step.seconds == pytest.approx(shared.step.generation_s + shared.step.learning_s)
    assert "generation and training take turns" in plan("grpo/qwen3_0_6b", "--gpus", "1xH100")
    assert "it will not run: trainer:" in plan("grpo/qwen3_0_6b", "--gpus", "1xH100", "--generator.kv_cache_gb", "60")


def test_generators_that_sleep_leave_their_memory_to_the_trainer(plan: Plan) -> None:
    large = "generator.kv_cache_gb=60"
    awake, asleep = (
        forecast("grpo/qwen3_0_6b", large, f"generator.sleep={sleep}", gpus="1xH100") for sleep in ("false", "true")
    )
    trainer, generator = asleep.holders
    assert [holder.fits for holder in awake.holders] == [False, False]
    assert [holder.fits for holder in asleep.holders] == [True, True]
    assert trainer.room == (79.6 - 2) * GIB
    resting = trainer.memory.parts["weights"] + trainer.memory.parts["optimizer"]
    assert generator.room == trainer.room - resting
    assert asleep.step.learning_s - awake.step.learning_s == pytest.approx(2 * 2 * 0.6e9 / 64e9, rel=0.01)
    slept = ("--gpus", "1xH100", "--generator.kv_cache_gb", "60", "--generator.sleep", "true")
    assert "it will not run" not in plan("grpo/qwen3_0_6b", *slept)


def test_constants_say_where_they_are_from() -> None:
    constants = [value for value in vars(hardware).values() if isinstance(value, hardware.Constant)]
    assert len(constants) > 5
    assert {constant.kind for constant in constants} == {"measured", "published", "assumed"}
    assert all(constant.source for constant in constants)


def test_shapes_of_recipes_need_no_network() -> None:
    for recipe in bundled_recipes():
        config = load_config(recipe)
        Shape.of(model_config(config.model), "")
    assert {"Qwen/Qwen3-8B", "meta-llama/Llama-3.1-8B"} <= published().keys()
