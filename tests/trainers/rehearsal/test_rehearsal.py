"""A rehearsal names mistakes with their keys, finds nothing in sound recipes, and forecasts a recorded run's waits."""

from __future__ import annotations

import asyncio
import json
import shlex
import time
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("torch")

from forge_env.cli.main import main
from forge_env.config import load_config
from forge_env.config.recipe import RunConfig
from forge_env.job.needs import model_memory
from trainers.plan.forecast import Forecast
from trainers.plan.hardware import GPUS, Cluster
from trainers.rehearsal.clock import StalledError, simulate
from trainers.rehearsal.episodes import Drawn, Recorded, Script, Turn
from trainers.rehearsal.findings import Critic, known_key
from trainers.rehearsal.recorded import Record, differences, fit
from trainers.rehearsal.rehearse import _work
from trainers.rehearsal.stage import Scene, perform
from trainers.rehearsal.timing import Timing

pytestmark = [pytest.mark.stack, pytest.mark.timeout(300)]

SOUND = ("grpo/qwen3_8b", "grpo/qwen3_32b --hosts 4", "grpo/qwen3_0_6b", "coding_rlvr/qwen3_0_6b")
MISTAKES = {
    "replies are cut": ("grpo/qwen3_8b --reply 900:2500", "grpo.max_tokens_per_turn"),
    "the context cuts episodes": ("grpo/qwen3_8b --prompt 1200 --reply 700:1000 --turns 2", "model.max_length"),
    "a group is larger than the cache": (
        "grpo/qwen3_0_6b --generator.kv_cache_gb 1 --grpo.group_size 16 --grpo.groups_per_step 8 --reply 900:1000",
        "generator.kv_cache_gb",
    ),
    "the buffer drops groups": (
        "grpo/qwen3_8b --grpo.replay.max_uses 2 --grpo.replay.capacity 4",
        "grpo.replay.capacity",
    ),
    "staleness starves the trainer": (
        "grpo/qwen3_1_7b --grpo.max_off_policy_steps 0",
        "grpo.max_off_policy_steps",
    ),
    "sandboxes are too few": ("coding_rlvr/qwen3_0_6b --sandbox.concurrency 4 --tool-s 2", "sandbox.concurrency"),
    "checkpoints cost too much": ("grpo/qwen3_8b --checkpoint.every 1 --disk-speed 10", "checkpoint.every"),
    "checkpoints can't be written in time": ("grpo/qwen3_8b --checkpoint.every 1", "checkpoint.every"),
    "a layout can't be sharded": (
        "grpo/qwen3_8b --hosts 4 --job.kind slurm --trainer.hosts 2 --trainer.procs 16 "
        "--trainer.parallelism.tensor_parallel_degree 16",
        "trainer.parallelism.tensor_parallel_degree",
    ),
    "a resume on fewer hosts fails": ("grpo/qwen3_30b_a3b --hosts 2", "trainer.procs"),
    "a host's death is not survived": ("grpo/qwen3_32b --hosts 4 --job.kind slurm --job.on_loss wait", "job.on_loss"),
    "the disk is full of checkpoints": ("grpo/qwen3_8b --disk 300", "checkpoint.keep"),
    "the disk is full of trajectories": ("grpo/qwen3_8b --disk 370 --grpo.steps 5000", "logging.trajectories"),
    "memory runs out": (
        "grpo/qwen3_8b --turns 8 --model.max_length 4096 --reply 800 --memory 190 --grpo.steps 9000",
        "rollouts.workers",
    ),
    "a step looks like a standstill": ("grpo/qwen3_8b --watchdog.end_s 9 --watchdog.warn_s 5", "watchdog.end_s"),
    "episodes miss the deadline": ("grpo/qwen3_8b --grpo.group_timeout_s 0.5 --reply 500:900", "grpo.group_timeout_s"),
    "no checkpoint before the end": (
        "grpo/qwen3_8b --checkpoint.minutes 0 --evaluation.every 0 --grpo.steps 500",
        "checkpoint.minutes",
    ),
    "there are too few GPUs": ("grpo/qwen3_8b --gpus 4xH100", "generator.num_replicas"),
    "the trainer's memory is too small": ("grpo/qwen3_8b --trainer.procs 1", "trainer.procs"),
}


def rehearsed(line: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, str], dict[str, object]]:
    code = main(["rehearse", *shlex.split(line), "--steps", "9", "--json"])
    result = json.loads(capsys.readouterr().out)
    return code, {finding["key"]: finding["text"] for finding in result["findings"]}, result


@pytest.mark.slow
@pytest.mark.parametrize(("line", "key"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_named(line: str, key: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, findings, _ = rehearsed(line, capsys)
    assert code == 1
    assert key in findings, findings
    assert all(map(known_key, findings))


@pytest.mark.slow
@pytest.mark.core
@pytest.mark.parametrize("line", SOUND)
def test_a_sound_recipe_has_no_finding(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, findings, result = rehearsed(line, capsys)
    assert (code, findings) == (0, {})
    for shares in result["shares"].values():
        assert sum(shares.values()) == pytest.approx(1.0)


@pytest.mark.slow
def test_a_resume_with_the_named_keys_fits(capsys: pytest.CaptureFixture[str]) -> None:
    main(["rehearse", "grpo/qwen3_8b", "--hosts", "2", "--gpus", "4xH100", "--steps", "3"])
    printed = capsys.readouterr().out
    assert "a resume on 1 host fails" in printed
    fix = next(line for line in printed.splitlines() if "resume with" in line)
    keys = [f"--{word}" for word in fix.split(";")[0].split() if "=" in word]
    main(["rehearse", "grpo/qwen3_8b", "--hosts", "1", "--gpus", "4xH100", "--steps", "3", *keys])
    assert "no host has room" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("grpo/qwen3_8b --reply 900:200", "the 95th percentile is below the median"),
        ("grpo/qwen3_8b --reply x", "is not MEDIAN"),
        ("grpo/qwen3_8b --hosts 0", "--hosts 0 must be above 0"),
        ("grpo/qwen3_8b --disk nan", "--disk: invalid number value: 'nan'"),
        ("grpo/qwen3_8b --tool-s inf", "--tool-s: invalid number value: 'inf'"),
        (f"grpo/qwen3_8b --reply {'9' * 5000}", "is not MEDIAN or MEDIAN:P95"),
        ("grpo/qwen3_8b --like nowhere --turns 2", "both say how long episodes are"),
        ("grpo/qwen3_8b --like nowhere", "has no training episodes"),
        ("sft/qwen3_8b", "method=sft can't be rehearsed"),
        ("grpo/qwen3_8b --gpus 8xH1", "unknown GPU"),
    ],
)
def test_bad_input_is_one_message(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rehearse", *words.split()]) == 2
    assert message in capsys.readouterr().err


def test_a_family_that_is_unknown_is_a_finding(capsys: pytest.CaptureFixture[str]) -> None:
    code, findings, _ = rehearsed("grpo/qwen3_8b --model.path nobody/unknown-1B", capsys)
    assert code == 1
    assert any("nobody/unknown-1B" in text for text in findings.values())


# --- the clock, and the simulation against a recorded run


def test_simulated_time_takes_no_time() -> None:
    async def sleeps() -> float:
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as group:
            group.create_task(asyncio.sleep(3600))
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(1800):
                    await asyncio.sleep(7200)
            assert loop.time() == pytest.approx(1800)
        return loop.time()

    began = time.perf_counter()
    assert simulate(sleeps()) == pytest.approx(3600)
    assert time.perf_counter() - began < 60


def test_a_standstill_is_an_error() -> None:
    async def waits() -> None:
        await asyncio.Event().wait()

    with pytest.raises(StalledError):
        simulate(waits())


DATA = json.loads((Path(__file__).parent / "recorded.json").read_text())
"""Times of two runs of coding_rlvr on two cores, with 12 groups a step, and lengths of the first one's episodes."""
OVERRIDES = ("grpo.groups_per_step=12", "grpo.steps=14", "evaluation.every=0")
WITHIN = 0.10


def recorded(name: str) -> tuple[RunConfig, Record]:
    data = DATA[name]
    config = load_config("coding_rlvr", [*OVERRIDES, f"grpo.max_off_policy_steps={data['staleness']}"])
    return config, Record(config, 11, data["step_s"], data["seconds"], data["transfer"])


def scene(config: RunConfig) -> Scene:
    groups = [
        [Script(tuple(Turn(*turn) for turn in turns), reset_s, close_s) for reset_s, close_s, turns in group]
        for group in DATA["groups"]
    ]
    episodes = Recorded(config.grpo.group_size, groups, [True] * len(groups))
    forecast = Forecast(config, _work(config, *episodes.mean()), Cluster(1, GPUS["H100"]))
    timing = Timing.of(forecast, model_memory(config), 1e9, cpus=2)
    return Scene(config, timing, episodes, "turn", 2, 14, 60.0)


@pytest.mark.slow
@pytest.mark.core
def test_a_recorded_run_forecasts_the_waits_of_another() -> None:
    config, record = recorded("asynchronous")
    fitted = fit(record, scene(config))
    assert fitted.off <= WITHIN
    other, measured = recorded("synchronous")
    before = scene(other)
    performance = perform(Scene(other, fitted.apply(before.timing), before.episodes, "turn", 2, 14, 60.0))
    off = differences(measured, performance)
    assert max(off)[0] <= WITHIN, off
    assert measured.share("trainer", "train") != pytest.approx(record.share("trainer", "train"), abs=WITHIN)


def simple(**options: object) -> Scene:
    given = [f"{key}={value}" for key, value in options.items()]
    config = load_config("grpo/qwen3_1_7b", ["grpo.groups_per_step=8", "evaluation.every=0", *given])
    episodes = Drawn(config.grpo.group_size, 256, 300, 450, 1, 0.0)
    forecast = Forecast(config, _work(config, 256, 300), Cluster(8, GPUS["H100"]))
    return Scene(config, Timing.of(forecast, model_memory(config), 1e9, 64), episodes, "no", 64, 8, 30.0)


def test_the_buffer_bounds_staleness_and_the_simulation_repeats_itself() -> None:
    one, two = perform(simple()), perform(simple())
    assert one.steps == 8
    assert one.seconds == two.seconds
    assert one.stats.max_staleness == 1
    assert not one.stats.discarded_stale
    assert perform(simple(**{"grpo.max_off_policy_steps": 0})).stats.max_staleness == 0
    assert not list(Critic(simple(), one).findings())


def test_drawn_lengths_have_the_stated_quantiles() -> None:
    drawn = Drawn(8, 100, 400, 900, 1, 0.0)
    lengths = sorted(script.turns[0].reply for index in range(400) for script in drawn.group(index))
    assert lengths[len(lengths) // 2] == pytest.approx(400, rel=0.1)
    assert lengths[int(0.95 * len(lengths))] == pytest.approx(900, rel=0.1)
    assert Counter(map(len, (drawn.group(index) for index in range(3)))) == {8: 3}
