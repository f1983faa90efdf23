"""Rehearse a recipe on the real stack: every process starts here, around a small model (docs/rehearsal.md)."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import yaml

from forge_env import registry
from forge_env.config.reader import read_as, render
from forge_env.config.recipe import RunConfig
from forge_env.errors import ForgeError, UsageError
from forge_env.figures import duration
from forge_env.files import claim, write_whole
from forge_env.job.addresses import PLATFORMS
from forge_env.job.files import RECIPE, Request, job_files, job_name, needed_hosts, write_files
from forge_env.machine import GIB
from forge_env.models import MODELS
from forge_env.run.contract import read_contract
from forge_env.run.rehearsal import Conditions, Finding, Rehearsal
from forge_env.sandbox.engines import LazyEngine
from forge_env.validation.checks import example_episode
from trainers.loop.checkpoints import saved_in
from trainers.loop.checks import check_checkpoint, check_tools
from trainers.model.adapter import targets
from trainers.model.folder import TINY, check_generator_heads, check_heads, local_folder
from trainers.model.tokenizer import FORMATS
from trainers.model.writer import read_companions
from trainers.plan.shape import Shape, model_config
from trainers.rehearsal.acceptance import START_S, Stage, Training, outcome
from trainers.rehearsal.findings import check, refused
from trainers.rehearsal.on_cpu import Edits, number_of_hosts, on_cpu, with_random_weights
from trainers.rehearsal.shrinking import degrees, write_shrunk

SMALL = 8e6
"""Parameters of a model that is used as it is."""
STEPS = 2
"""Training steps before and after each disturbance."""
READY_S = 60.0
"""Seconds that a worker has to start."""
OF_RANDOM_WEIGHTS = ("rewards", "answers", "rounding")
"""Self-checks that a model with random weights may fail."""
Check = Callable[[Stage], Iterable[Finding] | None]


def rehearse_stack(config: RunConfig, conditions: Conditions, show: Callable[[str], object]) -> Rehearsal:
    """Run the stages, and write `results.json` and all files below the rehearsal's folder.

    Args:
        config: the recipe.
        conditions: where to, and on how many hosts.
        show: prints a line.

    Raises:
        UsageError: its method can't be rehearsed.
    """
    if config.method == "warmup":
        raise UsageError("method=warmup can't be rehearsed", fix="train it: its model is small")
    stem = job_name(config.name or conditions.name or config.environment.name)
    folder = claim(Path(config.output_dir).absolute() / f"rehearsal-{stem}")
    play = Play(config, conditions, folder, show)
    result = play.perform()
    write_whole(folder / "results.json", json.dumps(result.as_json(), indent=1) + "\n")
    return result


class Play:
    """The stages of one rehearsal, each after the other.

    Args:
        config: the recipe.
        conditions: number of hosts.
        folder: for all files.
        show: prints a line.
    """

    def __init__(self, config: RunConfig, conditions: Conditions, folder: Path, show: Callable[[str], object]) -> None:
        self.config, self.folder, self.show = config, folder, show
        self.edits = Edits(config)
        self.findings: list[Finding] = []
        self.stages: list[dict[str, Any]] = []
        self.hosts = number_of_hosts(config, conditions.hosts)
        self.hf: dict[str, Any] | None = None
        self.training: Training
        self.workers: list[Worker] = []

    def perform(self) -> Rehearsal:
        """Run all stages that can still say something, and return what they found."""
        config = self.config
        title = f"{config.model.path}, {config.environment.name}: the stack on this machine, in {self.folder}"
        self.show(title)
        ready = [
            self._stage("recipe", self._recipe, "method"),
            self._stage("layout", self._layout, "model.path"),
            self._stage("environment", self._environment, "environment.options"),
            self._stage("job", self._job, "job.kind"),
        ]
        notes = []
        if not all(ready):
            notes.append("no process of the run was started: see the findings")
        elif self._stage("model", self._model, "model.path"):
            for line in self.edits.lines():
                self.show(f"  {line}")
            with ExitStack() as stack:
                try:
                    self._play(stack)
                finally:
                    notes += [f"the run's log is {self.folder / 'run' / 'run.log'}"] if self.findings else []
        return Rehearsal(title, self.findings, assumed=list(self.edits.lines()), notes=notes, stages=self.stages)

    def _stage(self, name: str, check: Check, key: str) -> bool:
        """Run a stage and show its outcome; returns whether it passed."""
        stage, started = Stage(), time.perf_counter()
        try:
            found = list(check(stage) or ())
        except ForgeError as error:
            found = [refused(error, key)]
        seconds = time.perf_counter() - started
        result = {
            "stage": name,
            "seconds": seconds,
            "code": 0,
            "figures": stage.figures,
            "checks": stage.checks,
            "errors": [finding.text for finding in found],
        }
        self.stages.append(result)
        self.findings += [finding for finding in found if finding not in self.findings]
        figures = ", ".join(f"{label} {_figure(value)}" for label, value in stage.figures.items())
        self.show(f"{name + ':':<20} {outcome(result)} ({duration(seconds)}){figures and '  ' + figures}")
        return not found

    # --- before any process of the run

    def _recipe(self, stage: Stage) -> Iterator[Finding]:
        """Make the recipe's own checks."""
        yield from check(self.config)

    def _layout(self, stage: Stage) -> None:
        """Check that trainer and generators can split the model."""
        config, dims = self.config, self.config.trainer.parallelism
        self.hf = hf = model_config(config.model)
        check_heads(hf, dims.tensor_parallel_degree, dims.context_parallel_degree)
        check_generator_heads(hf, config.generator.procs)
        if config.lora is not None:
            targets(config.lora, hf)
        stage.figures = {"model": str(hf["model_type"]), "million parameters": Shape.of(hf, "").parameters / 1e6}

    def _environment(self, stage: Stage) -> Iterator[Finding]:
        """Play one gold episode in the recipe's sandboxes."""
        section, sandbox = self.config.environment, self.config.sandbox

        async def play() -> Any:
            async with LazyEngine(sandbox.engine, **sandbox.engine_options()) as engine:
                make = partial(registry.make, section.name, sandboxes=engine, **section.options)
                return await example_episode(make, make().splits[0])

        episode = asyncio.run(play())
        if not episode.valid:
            yield Finding("sandbox.engine", f"an episode was lost: {episode.error}", "use sandbox.engine=auto")
        stage.figures = {"reward": float(episode.reward or 0.0), "turns": float(len(episode.turns))}

    def _job(self, stage: Stage) -> None:
        """Write the job's files, and parse them as the platform's programs do."""
        kind = self.config.job.kind
        if kind not in PLATFORMS:
            stage.figures = {"kind": kind, "files": 0.0}
            return
        name = job_name(self.config.name or self.config.environment.name)
        files = job_files(kind, Request(name, self.config, needed_hosts(self.config, self.hosts)))
        folder = self.folder / "job"
        write_files(folder, files)
        for file in files:
            if file.name.endswith(".sbatch"):
                check_script(file.text, file.name)
            else:
                for document in yaml.safe_load_all(file.text):
                    check_script(str(document.get("run") or ""), file.name)
        read_as(RunConfig, folder / RECIPE)
        stage.figures = {"kind": kind, "files": float(len(files))}

    # --- the run

    def _model(self, stage: Stage) -> None:
        """Write the small model, and map the recipe to this machine."""
        assert self.hf is not None
        section, edits = self.config.model, self.edits
        shape = Shape.of(self.hf, "")
        if section.path == TINY:
            if shape.parameters > SMALL:
                edits.set("a CPU computes it", model__tiny__layers=2, model__tiny__dim=64, model__tiny__hidden_dim=96)
                edits.set("a CPU computes it", model__tiny__head_dim=32)
        elif shape.parameters > SMALL or local_folder(section.path) is None:
            self._shrink(stage)
        if self.config.grpo.reference.source == "path":
            edits.set("a CPU computes it", grpo__reference__path=edits.get("model.path"))
        self.workers = [Worker(number, self.folder) for number in range(self.hosts)] if self.hosts > 1 else []
        on_cpu(edits, self.folder, [worker.address for worker in self.workers])
        write_whole(self.folder / "recipe.yaml", render(edits.config()))

    def _shrink(self, stage: Stage) -> None:
        """Write a small model of the same family, with the tokenizer of the recipe's model if it is here."""
        assert self.hf is not None
        config, section = self.config, self.config.model
        companions = _companions(section.path)
        environment = registry.make(config.environment.name, **config.environment.options)
        if "tokenizer.json" not in companions:
            self.show(f"  the tokenizer of {section.path} is not on this machine: one is learned from the environment")
            if section.renderer not in ("auto", *FORMATS):
                self.edits.set("the learned tokenizer has no other format", model__renderer="auto")
        folder = self.folder / "model"
        small = self.edits.config().model
        write_shrunk(
            self.hf,
            companions,
            folder,
            model=small,
            environment=environment,
            divided_by=degrees(config),
            seed=config.seed,
        )
        self.edits.set("a CPU computes it", model__path=str(folder))
        with_random_weights(self.edits)
        check_checkpoint(folder, small)
        check_tools(self.edits.config())
        shape = Shape.of(model_config(self.edits.config().model), "")
        stage.figures = {"million parameters": shape.parameters / 1e6, "layers": float(shape.layers)}

    def _play(self, stack: ExitStack) -> None:
        """Start the run, disturb it, end it and resume it; a stage that fails ends this."""
        stages: list[tuple[str, Check, str]] = [
            ("start", partial(self._start, stack), "generator"),
            ("training", self._train, "grpo"),
        ]
        if self.config.rolls_out:
            stages.append(("generator's death", self._kill_generator, "generator.num_replicas"))
        if self.workers:
            stages.append(("host's death", self._kill_host, "job.on_loss"))
        stages += [
            ("checkpoint", self._checkpoint, "checkpoint.every"),
            ("resume", partial(self._resume, stack), "trainer.procs"),
        ]
        all(self._stage(*each) for each in stages)

    def _start(self, stack: ExitStack, stage: Stage) -> None:
        for worker in self.workers:
            stack.enter_context(worker.serving())
        for worker in self.workers:
            worker.wait()
        self._train_with(stack, [str(self.folder / "recipe.yaml")])
        self.training.until_step(1, START_S)
        running = [*self.training.processes(), *(each for worker in self.workers for each in worker.processes())]
        memory = [_memory(process) for process in running]
        stage.figures = {"processes": float(len(memory)), "largest, GiB": max(memory), "all, GiB": sum(memory)}

    def _train_with(self, stack: ExitStack, arguments: list[str]) -> None:
        started = Training(self.folder / "run", arguments, self.folder / "train.out")
        self.training = stack.enter_context(started.watched())

    def _train(self, stage: Stage) -> Iterator[Finding]:
        """Train, and read the run's self-checks."""
        before = max(self.training.steps)
        started = time.perf_counter()
        self.training.until_step(before + STEPS)
        stage.figures["seconds of a step"] = (time.perf_counter() - started) / STEPS
        yield from self._contract(stage)

    def _contract(self, stage: Stage) -> Iterator[Finding]:
        clauses = [clause for clause in read_contract(self.folder / "run" / "contract.jsonl") if clause.step >= 0]
        wrong = [each for each in clauses if each.verdict in ("broken", "doubtful")]
        stage.figures["self-checks passed"] = float(sum(each.verdict == "holds" for each in clauses))
        for clause in wrong:
            if clause.clause not in OF_RANDOM_WEIGHTS:
                yield Finding("generator", f"self-check {clause.words}", "see docs/trust.md")

    def _kill_generator(self, stage: Stage) -> None:
        """Kill a generator; it must come back, and training must continue."""
        training = self.training
        lives = len(training.lives("generator0"))
        started = time.perf_counter()
        os.kill(training.process_of_generator(), signal.SIGKILL)
        training.until(lambda: len(training.lives("generator0")) > lives, START_S, "a new generator")
        stage.figures["back after s"] = time.perf_counter() - started
        training.until_step(max(training.steps) + STEPS, START_S)

    def _kill_host(self, stage: Stage) -> None:
        """Kill a host with all its processes; training must continue on the others."""
        training = self.training
        self.workers[-1].kill()
        started = time.perf_counter()
        training.until_step(max(training.steps) + STEPS, START_S)
        stage.figures["two steps after s"] = time.perf_counter() - started

    def _checkpoint(self, stage: Stage) -> None:
        """Interrupt the run, which saves a checkpoint."""
        code = self.training.interrupt()
        if code != 130:
            raise self.training.failure(f"exit code {code} after an interrupt")
        saved = saved_in(self.folder / "run" / "checkpoints")
        if not saved:
            raise self.training.failure("no checkpoint was saved")
        step, newest = list(saved.items())[-1]
        size = sum(file.stat().st_size for file in newest.rglob("*") if file.is_file())
        stage.figures = {"step": float(step), "MiB": size / 2**20}

    def _resume(self, stack: ExitStack, stage: Stage) -> Iterator[Finding]:
        """Resume on one host less, or with fewer trainer processes, if the run has more than one."""
        step = max(saved_in(self.folder / "run" / "checkpoints"))
        keys = fewer(self.edits.config(), self.hosts)
        steps = "sft.steps" if self.config.method == "sft" else "grpo.steps"
        arguments = [str(self.folder / "run" / "config.yaml"), "--resume", f"{steps}={step + STEPS}"]
        self._train_with(stack, [*arguments, *(f"{key}={json.dumps(value)}" for key, value in keys.items())])
        stage.figures = {key: value if isinstance(value, int) else len(value) for key, value in keys.items()}
        if (code := self.training.wait(START_S)) != 0:
            raise self.training.failure(f"the resumed run ended with exit code {code}")
        stage.figures["steps"] = float(step + STEPS)
        yield from self._contract(stage)


def fewer(config: RunConfig, hosts: int) -> dict[str, Any]:
    """Keys of a resume on one host less, or, on one host, with fewer processes of the trainer."""
    if hosts > 1:
        return {"job.workers": config.job.workers[:-1]}
    dims, procs = config.trainer.parallelism, config.trainer.procs
    inner = dims.tensor_parallel_degree * dims.context_parallel_degree
    lower = [each for each in range(inner, procs, inner) if procs % each == 0]
    if not lower:
        return {}
    return {"trainer.procs": lower[-1], "trainer.parallelism.data_parallel_shard_degree": -1}


def check_script(text: str, name: str) -> None:
    """Check the syntax of a shell script, which isn't run.

    Raises:
        UsageError: it is wrong.
    """
    done = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UsageError(f"{name} can't be parsed: {done.stderr.strip()}", fix="check the recipe's name and job")


def _companions(path: str) -> dict[str, bytes]:
    """Files of a model besides its weights, if they are on this machine."""
    if path in MODELS or local_folder(path) is not None:
        return read_companions(local_folder(path) or Path())
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(path, "tokenizer.json")
    return read_companions(Path(cached).parent) if isinstance(cached, str) else {}


def _memory(process: psutil.Process) -> float:
    with suppress(psutil.NoSuchProcess):
        return float(process.memory_info().rss) / GIB
    return 0.0


def _figure(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:,.4g}"


class Worker:
    """A worker process at a loopback address, which plays a host.

    Args:
        number: of the host.
        folder: for its output.
    """

    def __init__(self, number: int, folder: Path) -> None:
        host = f"127.0.0.{number + 2}"
        with socket.create_server((host, 0)) as free:
            self.address = f"tcp://{host}:{free.getsockname()[1]}"
        self._output = folder / f"worker{number}.out"
        self._process: subprocess.Popen[bytes]

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Start it, and kill it with its processes at the end of the block."""
        with self._output.open("wb") as output:
            command = [sys.executable, "-m", "forge_env", "worker", self.address]
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
        try:
            yield
        finally:
            self.kill()

    def wait(self) -> None:
        """Wait until it is ready.

        Raises:
            ForgeError: it ended, or isn't ready in time.
        """
        deadline = time.monotonic() + READY_S
        while "worker ready" not in (output := self._output.read_text(encoding="utf-8", errors="replace")):
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise ForgeError(f"the worker at {self.address} didn't start: {output[-200:]}", fix="see its output")
            time.sleep(0.1)

    def processes(self) -> list[psutil.Process]:
        """The worker and all processes below it."""
        with suppress(psutil.NoSuchProcess):
            own = psutil.Process(self._process.pid)
            return [own, *own.children(recursive=True)]
        return []

    def kill(self) -> None:
        """Kill it with all its processes, as the loss of a host does."""
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.wait()
