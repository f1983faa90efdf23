"""What benchmarks stand in for still looks like the real thing, and what they look for is what a run leaves."""

from __future__ import annotations

import ast
import inspect
import io
import os
import re
import subprocess
import sys
import time
from mmap import mmap
from pathlib import Path
from uuid import uuid4

import psutil
import pytest

pytest.importorskip("monarch")  # of the training stack

from benchmarks import accept, floor
from benchmarks.chaos.runs import left_in_shared_memory, shared_memory
from benchmarks.frame import DOCUMENT, notes
from benchmarks.rollouts import SimulatedGenerator
from trainers.generator.generator import Generator


def parameters(cls: type, endpoint: str) -> list[str]:
    method = getattr(cls, endpoint)
    return list(inspect.signature(getattr(method, "_method", method)).parameters)


SECTIONS = dict(re.findall(r"<!-- (\w+) -->\n(.*?)<!-- end of", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL))


@pytest.mark.parametrize("name", sorted(SECTIONS.keys() - {"chaos", "faults"}))
def test_a_section_has_the_notes_of_its_benchmark(name: str) -> None:
    module = ast.parse((DOCUMENT.parents[1] / "benchmarks" / f"{name}.py").read_text(encoding="utf-8"))
    assert not [line for line in notes(ast.get_docstring(module) or "") if line not in SECTIONS[name]]


@pytest.mark.parametrize("endpoint", ["generate", "abort"])
def test_a_simulated_generator_is_asked_as_a_real_one(endpoint: str) -> None:
    assert parameters(SimulatedGenerator, endpoint) == parameters(Generator, endpoint)


def test_shared_memory_of_another_program_is_not_taken_for_ours() -> None:
    """Of one that was there before, mapped, and whose program has ended since."""
    theirs, ours = (Path("/dev/shm", f"forge-env-test-{uuid4().hex}") for _ in range(2))
    theirs.write_bytes(bytes(8))
    try:
        with theirs.open("r+b") as file, mmap(file.fileno(), 8):
            before = shared_memory()
        assert theirs.name not in left_in_shared_memory(before)
        ours.write_bytes(bytes(8))
        assert ours.name in left_in_shared_memory(before)
        with ours.open("r+b") as file, mmap(file.fileno(), 8):
            assert ours.name not in left_in_shared_memory(before)
    finally:
        theirs.unlink()
        ours.unlink(missing_ok=True)


@pytest.mark.parametrize(
    ("code", "check", "expected"),
    [
        (0, ["error", 1e-6, "<=", 1e-5], "PASS"),
        (0, ["error", 2e-5, "<=", 1e-5], "FAIL: error is 2e-05"),
        (0, ["error", float("nan"), "<=", 1e-5], "FAIL: error is nan"),
        (0, ["tokens/s", 9.0, ">=", 10], "FAIL: tokens/s is 9"),
        (1, ["tokens/s", 11.0, ">=", 10], "FAIL: exit code 1"),
        ("timed out after 900 s", ["tokens/s", 11.0, ">=", 10], "FAIL: exit code timed out"),
    ],
)
def test_a_stage_of_the_gpu_check_fails_with_its_reason(code: int | str, check: list[object], expected: str) -> None:
    stage = {"stage": "speed", "seconds": 1.0, "code": code, "checks": [check], "figures": {"steps": 3}}
    assert accept.outcome(stage).startswith(expected)
    assert f"| speed | {expected}" in "\n".join(accept.report([stage]))


def test_a_skipped_stage_is_not_a_pass() -> None:
    stage = {"stage": "language-model", "code": 0, "checks": [], "figures": {"skipped": "no model"}}
    assert accept.outcome(stage) == "SKIPPED: no model"


def test_the_floor_is_compared_with_steps_while_the_pipeline_is_full() -> None:
    ends = [40.0, 50.0, 52.0, 54.0, 56.0, 59.0, 70.0, 90.0]  # the first and last steps take longer
    rows = [{"step": step, "time": end, "time/trainer/train": 1.5} for step, end in enumerate(ends, 1)]
    steps, parts = floor.measured(rows, staleness=1)
    assert steps == [4, 5, 6]
    assert parts == {floor.RUN: pytest.approx(7 / 3), "trainer: train": 1.5}
    rounds = [{floor.RUN: 3.0, floor.SAMPLING: 1.0, floor.TRAINING: 1.5}]
    assert floor.report(rounds)[-1] == "| ratio of step to floor | 1.2 (1.2 to 1.2) |"


@pytest.mark.stack
def test_the_gpu_check_leaves_out_what_recipes_may_not_use(tmp_path: Path) -> None:
    from tests.trainers.model.checkpoints import write_checkpoint

    folder = write_checkpoint("Gemma 3", tmp_path)
    supported = [
        accept.is_supported(accept.Options(device, tmp_path), folder, dtype)
        for device, dtype in (("cpu", "float32"), ("cuda", "bfloat16"), ("cuda", "float32"))
    ]
    assert supported == [True, True, False]


LEAVE_A_PROCESS = """if True:
    import signal, subprocess, sys
    left = [sys.executable, "-c", "import signal; print('up', flush=True); signal.pause()"]
    process = subprocess.Popen(left, process_group=0, stdout=subprocess.PIPE)  # like Monarch's processes
    process.stdout.readline()
    print(process.pid, flush=True)
"""


def ended(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_a_stage_of_the_gpu_check_leaves_no_process(capfd: pytest.CaptureFixture[str]) -> None:
    assert accept.in_session([sys.executable, "-c", LEAVE_A_PROCESS], 60) == 0
    assert ended(int(capfd.readouterr().out))


def test_a_stage_that_hangs_ends_with_all_its_processes() -> None:
    command = [sys.executable, "-c", f"{LEAVE_A_PROCESS}    signal.pause()"]
    with subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        left = int(process.stdout.readline())
        assert accept.end_session(process.pid) == 2
    assert ended(left)
    assert accept.in_session(command, 0.01) == "timed out after 0.01 s"


def test_a_stage_ends_with_the_check_that_started_it(monkeypatch: pytest.MonkeyPatch) -> None:
    sessions: list[int] = []
    monkeypatch.setattr(accept, "end_session", sessions.append)
    with subprocess.Popen(["true"]) as starter:
        accept._end_with(os.pidfd_open(starter.pid))
    assert sessions == [os.getpid()]


def test_a_part_of_a_stage_is_shown_with_the_time(tmp_path: Path) -> None:
    terminal, stage = io.StringIO(), accept.Stage()
    options = accept.Options("cpu", tmp_path, terminal=terminal, started=time.monotonic() - 61)
    with options.measured(stage, "start the trainer"):
        assert terminal.getvalue() == "  [1m01s] start the trainer\n"
    assert list(stage.figures) == ["start the trainer, s"]


@pytest.mark.slow
def test_the_gpu_check_runs_on_a_cpu(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks", "accept", "--device", "cpu", "--out", str(tmp_path)]
    done = subprocess.run([*command, "--stages", "machine", "kernels"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "kernels: PASS" in done.stdout
    assert "| attention dq, float32, error |" in (tmp_path / "results.md").read_text(encoding="utf-8")
