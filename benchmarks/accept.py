"""Check forge-env on a GPU or a CPU: kernels, agreement of trainer and generator, speed, learning, failures, resume.

make accept-gpu                                     one GPU of 80 GB, no network
python -m benchmarks accept --device cpu            the same without `compile`, with smaller models, fewer steps
python -m benchmarks accept --stages machine speed  some stages only

Each stage runs in a separate process; if it fails, the next one still runs. `speed` (all weights) and `speed-8b` (LoRA)
use random weights in the shape of real models, `families` small random models, `language-model` SmolLM2, and the others
the checkpoint that is bundled with forge-env. `--out` receives results.json, results.md and the output of each stage.
A stage that takes too long is killed with all its processes. If this program is killed, so is the running stage.
"""

from __future__ import annotations

import argparse
import asyncio
import inspect
import itertools
import json
import math
import os
import random
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any

import psutil

from benchmarks.frame import call, has_succeeded, machine, metrics, shape_folder, summary, table
from benchmarks.mismatch import after_updates, differences, sample, segment
from forge_env.config import RunConfig, load_config
from forge_env.config.finding import checkpoint_folder
from forge_env.config.recipe import (
    EnvironmentSection,
    GeneratorSection,
    JobSection,
    LoRASection,
    ModelSection,
    OptimizerSection,
    TinyModel,
    TrainerSection,
)
from forge_env.errors import UsageError
from forge_env.figures import duration
from forge_env.files import write_whole
from trainers.rehearsal.acceptance import START_S, Stage, Training, failures, outcome

TIMEOUT_S = 900
"""Seconds after which a stage is killed and fails."""
RUN_S, FAMILY_S = 720, 240
"""Time limits of a training run and of a model family's process; beyond them, the stage fails."""
GONE_S = 30
"""Seconds to wait until killed processes have ended: the driver first frees their GPU memory."""
MODEL = "accept-model"
"""Folder below `--out` with random weights; it is removed at the end of a stage."""
QWEN3_0_6B = TinyModel(layers=28, dim=1024, heads=16, kv_heads=8, head_dim=128, hidden_dim=3072, rope_theta=1e6)
QWEN3_8B = TinyModel(layers=36, dim=4096, heads=32, kv_heads=8, head_dim=128, hidden_dim=12288, rope_theta=1e6)
VOCABULARY = {"cuda": 151936, "cpu": 4096}


@dataclass(frozen=True)
class Options:
    """Options of the command."""

    device: str
    """`cuda` or `cpu`."""
    out: Path
    """Folder of the results and of the training runs."""
    steps: int = 0
    """Training steps of the stage `learning`; 0: by device."""
    terminal: IO[str] = sys.stdout
    """Stream for progress."""
    started: float = field(default_factory=time.monotonic)
    """Time of the start, on the monotonic clock."""

    @property
    def on_gpu(self) -> bool:
        """Whether the device is a GPU."""
        return self.device == "cuda"

    def progress(self, text: str) -> None:
        """Print what a stage does next, with the seconds since its start, on the terminal and in its output."""
        for stream in dict.fromkeys((self.terminal, sys.stdout)):
            print(f"  [{duration(time.monotonic() - self.started)}] {text}", file=stream, flush=True)

    @contextmanager
    def measured(self, stage: Stage, name: str) -> Iterator[None]:
        """Print the name of a part of a stage, and record the seconds that the part takes."""
        self.progress(name)
        started = time.perf_counter()
        yield
        stage.figures[f"{name}, s"] = time.perf_counter() - started


def check_machine(options: Options) -> Stage:
    """Check GPU, driver, memory and disk."""
    stage = Stage()
    import torch

    stage.figures |= {
        "processor": machine(),
        "torch": torch.__version__,
        "disk free, GiB": shutil.disk_usage(Path.cwd()).free / 2**30,
    }
    stage.at_least("/dev/shm free, GiB", shutil.disk_usage("/dev/shm").free / 2**30, 1)
    if options.on_gpu:
        stage.at_least("GPUs that torch can use", torch.cuda.device_count(), 1)
        name, driver, total, used = gpu_state()
        stage.figures |= {"GPU": name, "driver": driver, "CUDA": torch.version.cuda or "", "GPU memory, GiB": total}
        stage.at_most("GPU memory in use, GiB", used, 1)
    return stage


def check_kernels(options: Options) -> Stage:
    """Compare attention over packed rows with float64, and time it for new shapes."""
    import torch

    from trainers.titan.attention import PackedAttention
    from trainers.titan.layout import PackedLayout, Row, layout_of

    stage, where = Stage(), torch.device(options.device)
    module = PackedAttention(PackedAttention.Config())
    rng = random.Random(0)

    def inputs(row: Row, dtype: torch.dtype) -> list[Any]:
        torch.manual_seed(0)
        shape = 1, len(row)
        wide = [torch.randn(*shape, heads, 128, device=where, dtype=torch.float64) for heads in (16, 8, 8)]
        return [each.to(dtype).requires_grad_() for each in wide]

    def attend(tensors: list[Any], layout: Any) -> list[Any]:
        out = module(*tensors, attention_masks=layout, enable_gqa=True)
        return [out, *torch.autograd.grad(out.double().square().sum(), tensors)]

    lengths = [rng.randrange(20, 500) for _ in range(12)]
    shared = [0, *(rng.randrange(min(pair)) for pair in itertools.pairwise(lengths))]
    for kind, row in (("attention", Row.of(lengths)), ("attention of a tree", Row.of(lengths, shared))):
        options.progress(kind)
        exact = attend(inputs(row, torch.float64), PackedLayout.of(row, where))
        for dtype, bound in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
            values = attend(inputs(row, dtype), layout_of(row, where))
            for name, value, reference in zip(("output", "dq", "dk", "dv"), values, exact, strict=True):
                error = (value.double() - reference).norm() / reference.norm()
                stage.at_most(f"{kind} {name}, {str(dtype).removeprefix('torch.')}, error", error.item(), bound)
    if options.on_gpu:
        times = []
        for _ in range(20):
            row = Row.of([rng.randrange(100, 1500) for _ in range(rng.randrange(8, 16))])
            tensors, layout = inputs(row, torch.bfloat16), layout_of(row, where)
            torch.cuda.synchronize()
            started = time.perf_counter()
            attend(tensors, layout)
            torch.cuda.synchronize()
            times.append(time.perf_counter() - started)
        stage.figures["attention of a new shape, forward and backward, ms"] = 1e3 * sorted(times)[10]
        stage.at_most("slowest of the last ten new shapes, ms", 1e3 * max(times[10:]), 50)
    return stage


async def check_agreement(options: Options, engine: str) -> Stage:
    """Compare float32 log-probs of generator and trainer before and after weight updates with requests in flight."""
    from trainers.loop.stack import prepare_controller

    prepare_controller()
    stage, folder = Stage(), checkpoint_folder("coding_rlvr_base")
    assert folder is not None
    options.progress("start trainer and generator, compare after 0 and 8 weight updates")
    with tempfile.TemporaryDirectory(prefix="forge-env-") as scratch:
        taken = await after_updates(recipe(options, engine=engine, path=str(folder)), folder, (0, 8), Path(scratch))
    for count, apart in taken.items():
        stage.at_most(f"mean mismatch after {count} updates", apart.mean(), 5e-3 if options.on_gpu else 1e-5)
        # on a GPU, vLLM's attention multiplies in TF32: single tokens differ by 0.02
        stage.at_most(f"largest mismatch after {count} updates", apart.max(), 0.1 if options.on_gpu else 1e-4)
    return stage


async def check_speed(options: Options, shape: TinyModel, lora: LoRASection | None = None) -> Stage:
    """Measure trainer, generator and weight sync with random weights of a shape; on a GPU in bfloat16."""
    from trainers.loop.stack import Stack, prepare_controller
    from trainers.losses import GRPOLoss

    os.environ.setdefault("VLLM_LOGGING_LEVEL", "INFO")  # the log then shows what makes a start slow
    prepare_controller()
    on_gpu, stage = options.on_gpu, Stage()
    dtype, length = ("bfloat16", 2048) if on_gpu else ("float32", 512)
    config = recipe(options, engine="async_llm", dtype=dtype, length=length)
    if lora is not None:
        config.lora, config.trainer.activation_checkpoint = lora, "full"
        if on_gpu:  # sizes for 80 GB
            config.trainer.microbatch_tokens, config.generator.kv_cache_gb = 8192, 12
    section = config.model.model_copy(update={"tiny": shape if on_gpu else TinyModel()})
    # the same path in every run, because it is part of the key of vLLM's cache of compiled graphs
    model = shape_folder(
        options.out / MODEL, section, VOCABULARY[options.device], {"tie_word_embeddings": lora is None}
    )
    async with Stack(config) as stack:
        generators = stack.generators(model)
        async with asyncio.TaskGroup() as group:
            group.create_task(generators.start())  # imports vLLM while the model is written
            with options.measured(stage, "write the model"):
                command = call("benchmarks.accept:random_weights", str(model), options.device)
                await asyncio.to_thread(subprocess.run, command, check=True)
            generators.model_ready.set()
            started = time.perf_counter()
            with options.measured(stage, "start the trainer"):
                trainer = await stack.start_trainer(model)
            options.progress("start the generator")
        stage.figures["start trainer and generator, s"] = time.perf_counter() - started
        await trainer.configure(
            OptimizerSection(lr=1e-6 if lora is None else 1e-3),
            loss=GRPOLoss(),
            steps=100,
            microbatch_tokens=config.trainer.microbatch_tokens,
        )
        await _speed(options, stage, trainer, generators, lora=lora is not None)
        await generators.halt()
    return stage


async def _speed(options: Options, stage: Stage, trainer: Any, generators: Any, *, lora: bool) -> None:
    """Sample, train and send weights; then compare log-probs again."""
    on_gpu = options.on_gpu
    count, tokens = (128 if lora else 256, 512) if on_gpu else (16, 64)
    rng = random.Random(0)
    prompts = [[rng.randrange(10, 300) for _ in range(150)] for _ in range(count)]
    options.progress("first requests")
    await sample(generators, prompts[:8], 16)
    started = time.perf_counter()
    with options.measured(stage, f"sample {count} times {tokens} tokens"):
        completions = await sample(generators, prompts, tokens)
    rate = sum(len(each.token_ids) for each in completions) / (time.perf_counter() - started)
    stage.at_least("generator, tokens/s", rate, (2_000 if lora else 10_000) if on_gpu else 1)
    options.progress("log-probs")
    apart = await differences(trainer, completions[:32])
    stage.figures["largest mismatch"] = float(apart.max())
    stage.at_most("mean mismatch", apart.mean(), 0.03)
    batch = [segment(each, random.Random(number).uniform(-1, 1)) for number, each in enumerate(completions)]
    steps = []
    for number in range(1, 4 if on_gpu else 3):
        options.progress(f"step {number}")
        steps.append(await trainer.train_step(batch))
    stage.figures |= {"trainer, tokens/s": steps[-1]["tokens_per_s"], "first step, s": steps[0]["train_s"]}
    stage.figures |= {"next steps, s": steps[-1]["train_s"]}
    if on_gpu:
        stage.at_least("trainer, model FLOPs utilisation", steps[-1].get("mfu", 0.0), 0.15)
    with options.measured(stage, "weight syncs"):
        await _sync(stage, trainer, generators)
    if on_gpu:
        stage.figures["GPU memory in use, GiB"] = gpu_state()[3]
    stage.figures["change of log-probs by training, mean"] = float(
        (await differences(trainer, completions[:32])).mean()
    )
    apart = await differences(trainer, await sample(generators, prompts[:32], 64))
    stage.at_most("mean mismatch after the weight syncs", apart.mean(), 0.03)


def random_weights(folder: str, device: str) -> None:
    """Write random weights for a folder's config.json, in bfloat16 on a GPU and in float32 on a CPU."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device(device):
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=dtype).save_pretrained(folder)


async def _sync(stage: Stage, trainer: Any, generators: Any) -> None:
    """Measure the last of several weight syncs; the first ones also allocate memory."""
    for version in range(1, 5):
        published, pushed = await (await trainer.begin_push(version))
        pulled = await generators.update_weights(version, published)
    stage.figures["weights, GB"] = pushed["bytes"] / 1e9
    stage.at_most("weight sync: snapshot, s", pushed["snapshot_s"], 1.0)
    stage.figures["weight sync: pull, s"] = pulled["pull_s"]
    stage.at_most("weight sync: pause in generation, s", pulled["stall_s"], 0.5)
    sums = await trainer.checksums()
    served = [each.taken == sums for each in (await generators.checksums(published)).values()]
    stage.at_least("generators with the trainer's weights, of 1", sum(served), 1)


def check_families(options: Options) -> Stage:
    """Compare log-probs of generator and trainer for each model family, with weight updates in flight."""
    from tests.trainers.model.checkpoints import CHECKPOINTS, write_checkpoint

    stage, names = Stage(), list(CHECKPOINTS) if options.on_gpu else ["Llama 3.2"]
    dtypes = ("float32", "bfloat16") if options.on_gpu else ("float32",)
    with tempfile.TemporaryDirectory(prefix="forge-env-") as scratch, ThreadPoolExecutor(8) as pool:
        folders = {name: write_checkpoint(name, Path(scratch, name)) for name in names}
        pairs = [pair for pair in itertools.product(names, dtypes) if is_supported(options, folders[pair[0]], pair[1])]
        results = pool.map(lambda pair: compare_family(options, folders[pair[0]], pair[1]), pairs)
        for (name, dtype), result in zip(pairs, results, strict=True):
            options.progress(f"{name}, {dtype}: {result}")
            if isinstance(result, str):
                stage.figures[f"{name}, {dtype}: error"] = result
                stage.at_least(f"{name}, {dtype}: completed", 0, 1)
                continue
            stage.at_most(f"{name}, {dtype}: mean mismatch", result[0], mismatch_bound(CHECKPOINTS[name], dtype))
            stage.figures[f"{name}, {dtype}: largest mismatch"] = result[1]
    return stage


def mismatch_bound(shape: Mapping[str, Any], dtype: str) -> float:
    """Upper bound of a family's mean mismatch, larger for experts in bfloat16, where rounding changes their choice.

    On a CPU, the log-probs of the small gpt-oss in bfloat16 differ from those in float32 by 0.034 in the trainer and
    0.027 in vLLM.
    """
    if dtype == "float32":
        return 2e-3
    return 0.06 if any(key.endswith("experts") for key in shape) else 0.03


def family_recipe(options: Options, folder: Path, dtype: str) -> RunConfig:
    """Recipe for a small model of a family."""
    config = recipe(options, engine="in_process", path=str(folder), dtype=dtype, length=256)
    config.generator.enforce_eager = True
    config.generator.max_num_seqs = 8
    return config


def is_supported(options: Options, folder: Path, dtype: str) -> bool:
    """Whether a recipe may use this precision for a model; on a GPU, some layers don't support float32."""
    from trainers.loop.checks import check_precision

    try:
        check_precision(family_recipe(options, folder, dtype), folder)
    except UsageError:
        return False
    return True


def compare_family(options: Options, folder: Path, dtype: str) -> list[float] | str:
    """Run `one_family` in a process; return the mean and the largest mismatch, or the error."""
    report = folder.with_name(f"{folder.name} {dtype}.json")
    command = call("benchmarks.accept:one_family", str(folder), dtype, options.device, str(report))
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=FAMILY_S)
    except subprocess.TimeoutExpired:
        return f"took more than {FAMILY_S} s"
    if done.returncode == 0:
        result: list[float] = json.loads(report.read_text())
        return result
    print(folder.name, dtype, done.stderr[-4000:])
    return f"exit code {done.returncode}: " + "".join(done.stderr.strip().splitlines()[-1:])[:200]


def one_family(folder: str, dtype: str, device: str, report: str) -> None:
    """Compare vLLM with the trainer for a small model; write the mean and the largest mismatch after weight updates."""
    from tests.trainers.generator.family_parity import Pair
    from trainers.generator.arguments import engine_arguments
    from trainers.generator.generator import import_engine
    from trainers.titan.device import use_device

    options = Options(device, Path(report).parent)
    import_engine(with_gpus=options.on_gpu, threads=1, kv_cache_gb=1)
    trainer_device = use_device(with_gpus=options.on_gpu)

    async def mismatch() -> Any:
        arguments = engine_arguments(family_recipe(options, Path(folder), dtype), Path(folder))
        pair = Pair(Path(folder), arguments, trainer_device, dtype)
        assert await pair.update(1) > 1, "no update arrived during a request"
        apart = pair.mismatch(await pair.sample(40))
        await pair.engine.close()
        return apart

    apart = asyncio.run(mismatch())
    write_whole(Path(report), json.dumps([float(apart.mean()), float(apart.max())]))


def check_learning(options: Options) -> Stage:
    """Train with the default recipe, asynchronously; its score must rise and its self-checks must pass."""
    steps = options.steps or (50 if options.on_gpu else 4)
    stage, result = train("learning", options, [f"grpo.steps={steps}", "grpo.max_off_policy_steps=2"])
    stage.at_least("held-out score at the end", result.get("heldout_end", math.nan), 0.72 if options.on_gpu else 0.2)
    return stage


def check_variant(options: Options, name: str, file: str, overrides: Sequence[str]) -> Stage:
    """Train a few steps with a changed setting; the run's self-checks must pass."""
    small = (
        ["grpo.steps=6", "evaluation.num_tasks=64", "evaluation.extra_splits=[]"]
        if options.on_gpu
        else ["grpo.steps=2"]
    )
    stage, result = train(name, options, [*small, *overrides], file)
    stage.figures["held-out score at the end"] = result.get("heldout_end", math.nan)
    return stage


def check_language_model(options: Options) -> Stage:
    """Train SmolLM2 to answer with JSON, if `forge-env model get smollm2` has fetched it."""
    if checkpoint_folder("smollm2") is None:
        return Stage({"skipped": "SmolLM2 is not on this machine: `forge-env model get smollm2`"})
    stage, result = train("language-model", options, [] if options.on_gpu else ["grpo.steps=2"], "smollm2/cards")
    stage.at_least("held-out score at the end", result.get("heldout_end", math.nan), 0.7 if options.on_gpu else 0)
    return stage


def train(name: str, options: Options, overrides: Sequence[str], file: str = "coding_rlvr") -> tuple[Stage, Any]:
    """Run a recipe to its end; return a stage with the checks of every run, and the run's summary."""
    stage, folder = Stage(), options.out / f"accept-{name}"
    shutil.rmtree(folder, ignore_errors=True)
    started = time.perf_counter()
    with start(name, options, overrides, file=file).watched() as training:
        code = follow(options, training)
    stage.figures["wall, s"] = time.perf_counter() - started
    stage.at_most("exit code", abs(code), 0)
    if code != 0 or not has_succeeded(folder):
        stage.figures["error"] = str(training.failure(f"exit code {code}"))
        return stage, {}
    result = summary(folder)
    keep = "heldout_start", "steps", "max_staleness", "wall_s", "time_to_first_step_s"
    stage.figures |= {name: result[name] for name in keep if name in result}
    config = load_config(str(folder / "config.yaml"))
    if options.on_gpu:
        stage.at_least("roles on the GPU, of 2", config.generator.with_gpus + config.trainer.with_gpus, 2)
    last = {name: value for row in metrics(folder) for name, value in row.items()}
    wanted = "mismatch/mean", "mismatch/max", "trainer/train_s", "trainer/skipped_updates", "groups/discarded_stale"
    stage.figures |= {f"{name}, last": last[name] for name in wanted if name in last}
    return stage, result


def follow(options: Options, training: Training) -> int:
    """Wait for the end of a run and show what it prints; returns its exit code."""
    shown = len(training.printed)

    def ended() -> bool:
        nonlocal shown
        done, printed = training.process.poll() is not None, training.printed
        end = printed.rfind("\n") + 1
        for line in printed[shown:end].splitlines():
            options.progress(line)
        shown = max(shown, end)
        return done

    training.until(ended, RUN_S, "its end")
    return int(training.process.returncode)


def check_life(options: Options) -> Stage:
    """Kill a run's generator, then interrupt the run and resume it; no process may remain on the GPU."""
    stage, steps = Stage(), 20 if options.on_gpu else 10
    folder = options.out / "accept-life"
    shutil.rmtree(folder, ignore_errors=True)
    with start("life", options, [f"grpo.steps={steps}"]).watched() as training:
        options.progress("train two steps")
        training.until_step(2, START_S)
        options.progress("kill the generator, train two more")
        started = time.perf_counter()
        os.kill(training.process_of_generator(), signal.SIGKILL)
        training.until_step(max(training.steps) + 2)
        stage.at_most("from killing the generator to the second step after, s", time.perf_counter() - started, 180)
        options.progress("interrupt")
        stage.figures["exit code after an interrupt"] = training.interrupt()
    started = time.perf_counter()
    with start("life", options, [], resume=True).watched() as training:
        stage.at_most("exit code of the resumed run", abs(follow(options, training)), 0)
    stage.at_least("resumed run has succeeded", has_succeeded(folder), 1)
    stage.figures["resumed run, s"] = time.perf_counter() - started
    if options.on_gpu:
        listed = nvidia_smi("--query-compute-apps=pid")
        stage.at_most("processes left on the GPU", len([line for line in listed if line.strip().isdigit()]), 0)
    return stage


STAGES: dict[str, Callable[[Options], Stage | Coroutine[None, None, Stage]]] = {
    "machine": check_machine,
    "kernels": check_kernels,
    "agreement-async": partial(check_agreement, engine="async_llm"),
    "agreement-in-process": partial(check_agreement, engine="in_process"),
    "speed": partial(check_speed, shape=QWEN3_0_6B),
    "speed-8b": partial(check_speed, shape=QWEN3_8B, lora=LoRASection(rank=16, alpha=32)),
    "families": check_families,
    "learning": check_learning,
    "lora": partial(check_variant, name="lora", file="coding_rlvr/lora", overrides=()),
    "bfloat16": partial(check_variant, name="bfloat16", file="coding_rlvr", overrides=["model.dtype=bfloat16"]),
    "sleep": partial(check_variant, name="sleep", file="coding_rlvr", overrides=["generator.sleep=true"]),
    "compile": partial(
        check_variant, name="compile", file="coding_rlvr", overrides=["model.dtype=bfloat16", "trainer.compile=true"]
    ),
    "language-model": check_language_model,
    "life": check_life,
}
GPU_ONLY = {"compile"}
"""Stages that a CPU can't run."""


def recipe(
    options: Options, *, engine: str, path: str = "tiny", dtype: str = "float32", length: int = 512
) -> RunConfig:
    """Recipe with trainer and generator on one device."""
    on_gpu, common = options.on_gpu, {"engine": engine, "spare": False}
    return RunConfig(
        environment=EnvironmentSection(name="coding_rlvr"),
        model=ModelSection.model_validate({"path": path, "dtype": dtype, "max_length": length}),
        generator=GeneratorSection.model_validate(
            {**common, "with_gpus": True, "kv_cache_gb": 16 if length > 512 else 1, "max_num_seqs": 256}
            if on_gpu
            else {**common, "with_gpus": False}
        ),
        trainer=TrainerSection(with_gpus=on_gpu, microbatch_tokens=16384 if on_gpu else 2048),
        job=JobSection(share_gpus=on_gpu),
    )


def start(
    name: str, options: Options, arguments: Sequence[str], *, file: str = "coding_rlvr", resume: bool = False
) -> Training:
    """Start a training run of a recipe, or resume it. On a GPU, the recipe chooses its devices itself."""
    folder = options.out / f"accept-{name}"
    output = options.out / f"accept-{name}.txt"
    if resume:
        return Training(folder, [str(folder / "config.yaml"), "--resume"], output)
    small = ["evaluation.num_tasks=32", "evaluation.extra_splits=[]", "grpo.groups_per_step=8"]
    on_cpu = ["generator.with_gpus=false", "trainer.with_gpus=false"]
    overrides = ["job.share_gpus=true", "generator.kv_cache_gb=4"] if options.on_gpu else small + on_cpu
    new = [file, "--name", folder.name, f"output_dir={options.out}"]
    return Training(folder, [*new, *overrides, *arguments], output)


def nvidia_smi(query: str) -> list[str]:
    """Run an nvidia-smi query and return its lines."""
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


def gpu_state() -> tuple[str, str, float, float]:
    """Name, driver, memory and used memory (GiB) of the first GPU."""
    name, driver, total, used = nvidia_smi("--query-gpu=name,driver_version,memory.total,memory.used")[0].split(", ")
    return name, driver, float(total) / 1024, float(used) / 1024


def one_stage(name: str, device: str, out: str, steps: int, starter: int) -> None:
    """Run a stage in this process, which leads a session, and write its result; its output goes to a file.

    Args:
        starter: id of the process that started this one; the stage ends with it.
    """
    descriptor = os.pidfd_open(starter)
    if os.getppid() != starter:  # it ended while this process was importing, and another may have its id
        return
    threading.Thread(target=_end_with, args=(descriptor,), daemon=True).start()
    terminal = os.fdopen(os.dup(1), "w")
    log = os.open(Path(out, f"{name}.log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(log, stream)
    stage: Any = STAGES[name](Options(device, Path(out), steps, terminal))
    result = asyncio.run(stage) if inspect.iscoroutine(stage) else stage
    Path(out, f"{name}.json").write_text(json.dumps(asdict(result)))


def _end_with(starter: int) -> None:
    """Wait until the process with this descriptor ends; then end the session of this process."""
    ended = select.poll()
    ended.register(starter, select.POLLIN)
    ended.poll()
    end_session(os.getpid())


def end_session(leader: int) -> int:
    """Kill the processes of a session, also those in other process groups; returns how many there were."""
    processes = []
    for process in psutil.process_iter():
        with suppress(ProcessLookupError, psutil.NoSuchProcess):
            if os.getsid(process.pid) == leader and process.status() != psutil.STATUS_ZOMBIE:
                processes.append(process)
    for process in sorted(processes, key=lambda each: each.pid == os.getpid()):  # this process last
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, GONE_S)
    return len(processes)


def run_stage(name: str, options: Options) -> dict[str, Any]:
    """Run a stage in a new session, end all its processes, and return its result."""
    result, model = options.out / f"{name}.json", options.out / MODEL
    result.unlink(missing_ok=True)
    shutil.rmtree(model, ignore_errors=True)
    arguments = (name, options.device, str(options.out), options.steps, os.getpid())
    command = call("benchmarks.accept:one_stage", *arguments)
    started = time.perf_counter()
    code = in_session(command, TIMEOUT_S)
    seconds = time.perf_counter() - started
    shutil.rmtree(model, ignore_errors=True)
    data: dict[str, Any] = json.loads(result.read_text()) if result.exists() else {"figures": {}, "checks": []}
    data |= {"stage": name, "seconds": seconds, "code": code}
    return data


def in_session(command: Sequence[str], seconds: float) -> int | str:
    """Run a command in a new session and kill its remaining processes; returns the exit code, or that it timed out."""
    process = subprocess.Popen(command, start_new_session=True)
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return f"timed out after {seconds:g} s"
    finally:
        end_session(process.pid)
        process.wait()


def report(stages: Sequence[dict[str, Any]]) -> list[str]:
    """Format results as Markdown."""
    rows = [[each["stage"], outcome(each), each["seconds"]] for each in stages]
    lines = table(["stage", "result", "s"], rows)
    for each in stages:
        rows = [[name, value, f"{sign} {bound:g}"] for name, value, sign, bound in each["checks"]]
        rows += [[name, value, ""] for name, value in each["figures"].items()]
        lines += ["", f"**{each['stage']}**", "", *table(["figure", "value", "bound"], rows)]
    return lines


def main() -> int:
    """Run the stages and print their results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--stages", nargs="+", choices=list(STAGES), default=None)
    parser.add_argument("--steps", type=int, default=0, help="of the stage `learning`; default: 50, or 4 on a CPU")
    parser.add_argument("--out", type=Path, default=Path("runs/accept"), help="folder for the results")
    args = parser.parse_args()
    options = Options(args.device, args.out.absolute(), args.steps)
    out = options.out
    out.mkdir(parents=True, exist_ok=True)
    done = []
    for name in args.stages or [each for each in STAGES if options.on_gpu or each not in GPU_ONLY]:
        print(f"{name} ...", flush=True)
        done.append(run_stage(name, options))
        print(f"{name}: {outcome(done[-1])} ({duration(done[-1]['seconds'])})", flush=True)
        write_whole(out / "results.json", json.dumps(done, indent=1))
        write_whole(out / "results.md", "\n".join(report(done)) + "\n")
    print("\n".join(report(done)))
    print(f"results: {out}")
    return int(any(failures(each) for each in done))


if __name__ == "__main__":
    sys.exit(main())
