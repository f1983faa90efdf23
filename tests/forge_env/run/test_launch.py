"""How runs end: success, failure, one and two interruptions; and the files that remain."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from forge_env.cli.train import subscribe
from forge_env.config import RunConfig
from forge_env.errors import ForgeError, SandboxError, UsageError
from forge_env.run import Run, RunFolder
from forge_env.run.folder import choose_folder
from forge_env.run.launch import launch as launch_run
from forge_env.run.metrics import read_metrics
from forge_env.run.outcome import RunOutcome, read_summary, save_progress
from forge_env.run.trained import read_trained
from forge_env.trajectory import Trajectory, read_trajectories

launch = partial(launch_run, subscribe=subscribe)


@pytest.fixture(autouse=True)
def undrawn(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures are drawn in the tests of what a run leaves: that takes longer than all else of these runs."""
    if request.function not in (
        test_success_leaves_a_complete_folder,
        test_a_run_that_says_nothing_still_leaves_summary_and_report,
    ):
        monkeypatch.setattr("forge_env.view.report.write_reward_curve", lambda folder: True)


def summary(folder: RunFolder) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(folder.summary.read_text())
    return data


async def learn(run: Run) -> None:
    run.stage("training")
    run.evaluation(0, "eval", 0.4, 128, 0.04)
    for step in range(1, 4):
        run.log(step, {"reward/mean": 0.4 + step / 10, "grpo_loss/total_loss": 0.1, "time/trainer/step": 1.0})
    run.evaluation(3, "eval", 0.7, 128, 0.04)
    run.summary["engine"] = "local"


def test_success_leaves_a_complete_folder(config: RunConfig, folder: RunFolder) -> None:
    assert launch(config, folder, lambda: learn) == RunOutcome("success", 0)
    for path in (folder.config, folder.metrics, folder.summary, folder.report, folder.reward_curve, folder.log):
        assert path.stat().st_size > 0
    assert list(folder.tensorboard.iterdir())
    found = summary(folder)
    assert found["exit"] == "success"
    assert found["started"] <= found["finished"]
    assert (found["model"], found["versions"]["forge-env"]) == (config.model.path, found["forge_env"])
    assert found["machine"]["cpus"] >= 1
    page = folder.report.read_text()
    assert ">finished</span>" in page
    for part in ("0.40 → 0.70", "Loss", "Where the time went", "training reward", "name: coding_rlvr"):
        assert part in page
    assert not re.search(r'(?:src|href)="(?!#|data:)', page), "it loads nothing"


def test_all_output_goes_to_the_log(config: RunConfig, folder: RunFolder, capfd: pytest.CaptureFixture[str]) -> None:
    async def noisy(run: Run) -> None:
        print("from python")
        await asyncio.to_thread(subprocess.run, ["sh", "-c", "echo from a child; echo an error >&2"], check=True)
        run.note("worth a line")

    launch(config, folder, lambda: noisy)
    print("after")
    shown, log = capfd.readouterr().out, folder.log.read_text()
    for text in ("from python", "from a child", "an error"):
        assert text in log
        assert text not in shown
    assert "worth a line" in shown
    assert "after" in shown


def test_failure_is_recorded_with_its_traceback(config: RunConfig, folder: RunFolder) -> None:
    async def fail(run: Run) -> None:
        await learn(run)
        raise RuntimeError("boom")

    outcome = launch(config, folder, lambda: fail)
    assert (outcome.exit, outcome.code, outcome.message) == ("failed", 1, "RuntimeError: boom")
    assert (summary(folder)["exit"], summary(folder)["error"]) == ("failed", "RuntimeError: boom")
    assert summary(folder)["heldout_end"] == 0.7
    assert "Traceback" in folder.log.read_text()
    assert "RuntimeError: boom" in folder.report.read_text()


def test_full_disk_is_named_as_cause(config: RunConfig, folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(run: Run) -> None:
        await learn(run)
        raise RuntimeError("PytorchStreamWriter failed writing file data/0: file write failed")

    async def fail_at_once(run: Run) -> None:
        raise RuntimeError("no space for the model")

    monkeypatch.setattr("forge_env.machine.free_disk_gb", lambda path: 0.0)
    assert "is full (free some space, then start it again)" in launch(config, folder, lambda: fail_at_once).message
    outcome = launch(config, folder, lambda: fail)
    assert outcome.code == 1
    assert f"is full (free some space, then continue with: forge-env train {folder.config} --resume)" in outcome.message
    assert "PytorchStreamWriter" in folder.log.read_text()


@pytest.mark.parametrize("folder_name", ["/dev/shm", "temporary", "run"])
def test_a_disk_without_space_or_inodes_is_named(
    config: RunConfig, folder: RunFolder, monkeypatch: pytest.MonkeyPatch, folder_name: str
) -> None:
    async def fail(run: Run) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    full = {"temporary": tempfile.gettempdir(), "run": str(folder.root)}.get(folder_name, folder_name)
    for function, words in (("free_disk_gb", "is full (free some space"), ("is_out_of_inodes", "has no inodes left (")):
        with monkeypatch.context() as patch:
            is_full = {"free_disk_gb": (0.0, 1.0), "is_out_of_inodes": (True, False)}[function]
            patch.setattr(f"forge_env.machine.{function}", lambda path, values=is_full: values[str(path) != full])
            outcome = launch(config, folder, lambda: fail, resume=folder.exists())
        assert f"the disk of {full} {words}" in outcome.message
        assert outcome.code == 1


@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM, errno.EROFS])
def test_a_missing_permission_is_named_with_its_fix(config: RunConfig, folder: RunFolder, number: int) -> None:
    async def fail(run: Run) -> None:
        await learn(run)
        raise ExceptionGroup("tasks", [PermissionError(number, os.strerror(number), str(folder.checkpoints))])

    outcome = launch(config, folder, lambda: fail)
    assert outcome.code == 1
    assert outcome.message == (
        f"can't write to {folder.checkpoints}: {os.strerror(number)} "
        f"(make it writable again, then continue with: forge-env train {folder.config} --resume)"
    )


def test_no_room_for_the_summary_fails(config: RunConfig, folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    async def fill(run: Run) -> None:
        await learn(run)
        monkeypatch.setattr("forge_env.run.outcome.write_whole", refuse)

    outcome = launch(config, folder, lambda: fill)
    assert (outcome.exit, outcome.code) == ("failed", 1)
    assert summary(folder)["exit"] == "running"
    assert outcome.ending.endswith(f"forge-env train {shlex.quote(str(folder.config))} --resume")
    monkeypatch.undo()
    assert launch(config, folder, lambda: learn, resume=True).code == 0
    assert summary(folder)["exit"] == "success"


def test_a_run_that_is_interrupted_while_its_report_is_written_can_be_resumed(
    config: RunConfig, folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("forge_env.view.report.write_report", lambda folder: os.kill(os.getpid(), signal.SIGINT))
        outcome = launch(config, folder, lambda: learn)
    assert (outcome.exit, outcome.code) == ("interrupted", 130)
    assert outcome.ending.endswith(f"continue with: forge-env train {shlex.quote(str(folder.config))} --resume")
    assert launch(config, folder, lambda: learn, resume=True).code == 0
    assert folder.report.exists()


@pytest.mark.parametrize("fails_itself", [False, True])
def test_a_run_whose_last_records_cannot_be_written_fails(
    config: RunConfig, folder: RunFolder, monkeypatch: pytest.MonkeyPatch, fails_itself: bool
) -> None:
    """Every file is closed all the same, and an earlier failure is the one that is told."""

    async def record(run: Run) -> None:
        await learn(run)
        run.trajectory(Trajectory(id="1", environment="e", task_id="t"), "eval")
        if fails_itself:
            raise SandboxError("daemon lost")

    def refuse(path: Path, **options: Any) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted", str(path))

    monkeypatch.setattr("forge_env.run.trajectories.TrajectoryWriter", refuse)
    before = set(os.listdir("/proc/self/fd"))
    outcome = launch(config, folder, lambda: record)
    assert set(os.listdir("/proc/self/fd")) <= before
    assert (outcome.exit, outcome.code) == ("failed", 1)
    refused = f"can't write to {folder.trajectories / 'eval.jsonl'}: Operation not permitted"
    assert outcome.message.startswith("daemon lost" if fails_itself else refused)
    assert summary(folder)["error"] == outcome.message


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # TensorBoard's own
def test_a_full_disk_ends_no_run_and_loses_nothing_that_room_is_made_for(config: RunConfig, folder: RunFolder) -> None:
    async def learn_meanwhile(run: Run) -> None:
        most, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        run.log(1, {"reward/mean": 0.1, **padding})
        resource.setrlimit(resource.RLIMIT_FSIZE, (6000, hard))  # of a file's bytes: what is beyond finds no room
        try:
            for step in (2, 3):
                run.log(step, {"reward/mean": 0.1, **padding})
                run.evaluation(step, "eval", 0.4, 128, 0.04)
                run.trajectory(Trajectory(id=f"{step}", environment="e", task_id="t", answer=" " * 7000), "eval-0003")
                run.summary["long"] = " " * 7000
                save_progress(run)
                print(" " * 7000)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))
        run.log(4, {"reward/mean": 0.1})

    padding = {f"metric/{number}": 0.0 for number in range(200)}
    config.logging.tensorboard, config.logging.timeline, config.logging.trajectories = True, True, "all"
    outcome = launch(config, folder, lambda: learn_meanwhile)
    assert outcome == RunOutcome("success", 0)
    assert [row["step"] for row in read_metrics(folder.metrics)] == [1, 2, 2, 3, 3, 4]
    assert [item.id for item in read_trajectories(folder.trajectories / "eval-0003.jsonl")] == ["2", "3"]
    assert (summary(folder)["exit"], summary(folder)["steps"]) == ("success", 4)
    (warning,) = [text for text in summary(folder)["warnings"] if "disk" in text]
    assert "the disk is full: metrics and trajectories stay in memory" in warning
    assert not list(folder.root.rglob("*.partial"))
    assert len(list(folder.tensorboard.iterdir())) > 1  # another file after the one that could not be written


def test_files_of_a_newer_version_are_refused_and_older_ones_read(config: RunConfig, folder: RunFolder) -> None:
    launch(config, folder, lambda: learn)
    newer = {**summary(folder), "schema": 99}
    assert (newer["heldout_end"], summary(folder)["schema"]) == (0.7, 1)
    del newer["schema"]
    folder.summary.write_text(json.dumps(newer))
    assert read_summary(folder.summary)["heldout_end"] == 0.7
    for path, read in ((folder.summary, read_summary), (folder.metrics, lambda path: list(read_metrics(path)))):
        path.write_text(json.dumps({"schema": 99, "step": 1}) + "\n")
        with pytest.raises(UsageError, match=r"version 99, this forge-env reads up to version 1 \(update forge-env"):
            read(path)


@pytest.mark.parametrize("number", ["1" + "0" * 400, "-1e400", "1e200"])
def test_a_summary_with_an_endless_number_is_named(config: RunConfig, folder: RunFolder, number: str) -> None:
    folder.create()
    folder.summary.write_text(f'{{"wall_s": {number}}}')
    with pytest.raises(UsageError, match=r"summary.json can't be read: the number .* is too large") as error:
        read_summary(folder.summary)
    assert error.value.fix


def test_a_resumed_run_starts_from_the_counts_it_had(config: RunConfig, folder: RunFolder) -> None:
    async def count(run: Run) -> None:
        run.summary["tokens_generated"] = run.earlier.get("tokens_generated", 0) + 10
        run.summary["engine"] = "local"

    async def nothing(run: Run) -> None:
        pass

    launch(config, folder, lambda: count)
    launch(config, folder, lambda: count, resume=True)
    launch(config, folder, lambda: nothing, resume=True)
    assert (summary(folder)["tokens_generated"], summary(folder)["engine"]) == (20, "local")


def test_the_deliberate_error_of_a_group_is_the_one_shown(config: RunConfig, folder: RunFolder) -> None:
    async def fail(run: Run) -> None:
        raise BaseExceptionGroup("tasks", [ValueError("noise"), ExceptionGroup("inner", [SandboxError("daemon lost")])])

    outcome = launch(config, folder, lambda: fail)
    assert outcome.message == "daemon lost"
    assert isinstance(outcome.error, ForgeError)


def test_a_trainer_that_cannot_be_imported_fails_the_run(config: RunConfig, folder: RunFolder) -> None:
    def broken() -> Any:
        raise ForgeError("no such trainer", fix="install it")

    assert launch(config, folder, broken).message == "no such trainer (install it)"


def test_one_interruption_finishes_cleanly(config: RunConfig, folder: RunFolder) -> None:
    async def until_stopped(run: Run) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        await run.stop.wait()
        await learn(run)

    outcome = launch(config, folder, lambda: until_stopped)
    assert (outcome.exit, outcome.code) == ("interrupted", 130)
    assert (summary(folder)["exit"], summary(folder)["steps"]) == ("interrupted", 3)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_two_interruptions_cancel_the_trainer_which_still_cleans_up(config: RunConfig, folder: RunFolder) -> None:
    cleaned = []

    async def stubborn(run: Run) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        await run.stop.wait()
        os.kill(os.getpid(), signal.SIGINT)
        try:
            await asyncio.Event().wait()
        finally:
            cleaned.append(True)

    outcome = launch(config, folder, lambda: stubborn)
    assert (outcome.exit, outcome.code, cleaned) == ("interrupted", 130, [True])


@pytest.mark.parametrize(
    ("steps", "saved", "error", "line"),
    [
        (2, None, None, "done: 2 steps"),
        (0, 0, RuntimeError(), "failed before the first step: there is nothing to resume"),
        (0, 0, KeyboardInterrupt(), "interrupted before the first step; nothing was saved; start again with: COMMAND"),
        (1, 0, RuntimeError(), "failed after 1 step; nothing was saved; start again with: COMMAND"),
        (7, 5, RuntimeError(), "failed after 7 steps, saved after 5; continue with: COMMAND"),
        (7, 7, KeyboardInterrupt(), "interrupted after 7 steps; continue with: COMMAND"),
        (7, None, RuntimeError(), "failed after 7 steps; continue with: COMMAND"),
        (0, None, UsageError("wrong"), "failed before the first step: there is nothing to resume"),
        (2, None, UsageError("wrong"), "failed after 2 steps"),
    ],
)
def test_the_last_line_says_how_a_run_ended_and_how_to_go_on(
    config: RunConfig, folder: RunFolder, steps: int, saved: int | None, error: BaseException | None, line: str
) -> None:
    async def end(run: Run) -> None:
        for step in range(1, steps + 1):
            run.log(step, {})
        if saved is not None:
            run.saved(saved)
        if isinstance(error, KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGHUP)
            await run.stop.wait()
        elif error is not None:
            raise error

    outcome = launch(config, folder, lambda: end)
    assert outcome.ending == line.replace("COMMAND", f"forge-env train {shlex.quote(str(folder.config))} --resume")
    assert folder.log.read_text().splitlines()[-1].endswith(outcome.ending)


def test_a_trainer_cancelled_from_within_is_a_failure(config: RunConfig, folder: RunFolder) -> None:
    async def cancelled(run: Run) -> None:
        raise asyncio.CancelledError

    assert launch(config, folder, lambda: cancelled).exit == "failed"


def test_a_resumed_run_goes_on_in_time_and_metrics(config: RunConfig, folder: RunFolder) -> None:
    launch(config, folder, lambda: learn)
    before = summary(folder)["wall_s"]

    async def more(run: Run) -> None:
        assert run.resume
        assert run.state.step == 3
        run.log(4, {"reward/mean": 0.9})
        run.evaluation(4, "eval", 0.9, 128, 0.02)

    launch(config, folder, lambda: more, resume=True)
    rows = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 3, 4, 4]
    assert rows[-1]["time"] >= rows[4]["time"]
    assert summary(folder)["wall_s"] > before
    assert (summary(folder)["heldout_start"], summary(folder)["heldout_end"]) == (0.4, 0.9)


def test_a_run_that_says_nothing_still_leaves_summary_and_report(config: RunConfig, folder: RunFolder) -> None:
    async def silent(run: Run) -> None:
        return

    launch(config, folder, lambda: silent)
    assert summary(folder)["heldout_start"] is None
    assert folder.report.exists()
    assert not folder.reward_curve.exists()


@pytest.mark.slow
def test_a_killed_run_is_recognizable_and_can_be_resumed(config: RunConfig, folder: RunFolder) -> None:
    code = (
        "import os, signal, sys\n"
        "from forge_env.config import RunConfig\n"
        "from forge_env.run.folder import RunFolder\n"
        "from forge_env.run.launch import launch\n"
        "async def train(run):\n"
        "    run.log(1, {'reward/mean': 0.5})\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "config = RunConfig.model_validate({'environment': {'name': 'coding_rlvr'}})\n"
        f"launch(config, RunFolder({str(folder.root)!r}), lambda: train)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -signal.SIGKILL
    assert summary(folder)["exit"] == "running"
    assert launch(config, folder, lambda: learn, resume=True).exit == "success"


def replaced(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


def exchanged_for_a_link(folder: Path) -> None:
    folder.rename(folder.with_name("elsewhere"))
    other = folder.with_name("other")
    other.mkdir()
    folder.symlink_to(other)


def emptied(folder: Path) -> None:
    """What `rm -rf` leaves if a file is made while it runs."""
    shutil.rmtree(folder)
    (folder / "checkpoints").mkdir(parents=True)


def exchanged_for_a_file(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_text("")


LOSSES: dict[str, Callable[[Path], object]] = {
    "removed": shutil.rmtree,
    "removed with its parent": lambda folder: shutil.rmtree(folder.parent),
    "renamed": lambda folder: folder.rename(folder.with_name("elsewhere")),
    "replaced": replaced,
    "emptied": emptied,
    "exchanged for a link": exchanged_for_a_link,
    "exchanged for a file": exchanged_for_a_file,
}


@pytest.mark.parametrize("how", LOSSES)
@pytest.mark.parametrize("when", [1, 3])
def test_run_of_a_lost_folder_is_saved_elsewhere(config: RunConfig, folder: RunFolder, how: str, when: int) -> None:
    """`rm -rf runs/X` ended with exit code 0 and "done: 6 steps"."""
    config.logging.trajectories = "all"
    original = folder.root
    stopped: list[bool] = []

    async def train(run: Run) -> None:
        run.evaluation(0, "eval", 0.4, 128, 0.04)
        for step in range(1, 4):
            run.trajectory(Trajectory(id=f"{step}", environment="e", task_id="t"), "train")
            run.trained(step, [])
            run.log(step, {"reward/mean": 0.4})
            await run._trajectories.written()
            print(f"printed in step {step}")
            if step == when:
                LOSSES[how](original)
            stopped.append(run.stop.is_set())

    outcome = launch(config, folder, lambda: train)
    assert (outcome.exit, outcome.code) == ("failed", 1)
    assert folder.root == original.with_name("first.rescued-1")
    assert outcome.message == (
        f"{original} was removed, renamed or replaced while it was written to "
        f"(all that could be saved is in {folder.root})"
    )
    again = f"forge-env train {shlex.quote(str(folder.config))} --resume"
    assert outcome.ending == f"failed after 3 steps; nothing was saved; start again with: {again}"
    assert stopped == [when < step for step in range(1, 4)]
    assert [row["step"] for row in read_metrics(folder.metrics)] == [0, 1, 2, 3]
    assert [own.id for own in read_trajectories(folder.trajectories / "train.jsonl")] == ["1", "2", "3"]
    assert sorted(read_trained(folder.trained).steps) == [1, 2, 3]
    assert (summary(folder)["exit"], summary(folder)["steps"]) == ("failed", 3)
    assert "name: first.rescued-1" in folder.config.read_text()
    assert all(f"printed in step {step}" in folder.log.read_text() for step in range(1, 4))
    assert original.exists() == (how not in ("removed", "removed with its parent", "renamed"))
    assert not (original / "metrics.jsonl").exists()


def test_a_rescue_that_is_lost_too_and_one_that_has_no_place(
    config: RunConfig, folder: RunFolder, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    original = folder.root
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    async def train(run: Run) -> None:
        run.log(1, {"reward/mean": 0.4})
        shutil.rmtree(original)
        run.log(2, {"reward/mean": 0.4})
        assert run.folder.root.name == "first.rescued-1"
        shutil.rmtree(original.parent)
        original.parent.write_text("not a folder any more")
        run.log(3, {"reward/mean": 0.4})

    outcome = launch(config, folder, lambda: train)
    assert outcome.code == 1
    assert folder.root.parent == tmp_path
    assert folder.root.name.startswith("first.rescued-")
    assert [row["step"] for row in read_metrics(folder.metrics)] == [1, 2, 3]


def test_a_failure_after_the_folder_is_gone_does_not_hide_that(config: RunConfig, folder: RunFolder) -> None:
    async def train(run: Run) -> None:
        run.log(1, {"reward/mean": 0.4})
        shutil.rmtree(run.folder.root)
        raise RuntimeError("boom")

    outcome = launch(config, folder, lambda: train)
    assert "was removed, renamed or replaced" in outcome.message
    assert "RuntimeError: boom" in folder.log.read_text()


@pytest.mark.parametrize("error", [UsageError("no such model"), RuntimeError("the weights lack a tensor")])
def test_empty_run_leaves_its_log_and_name(config: RunConfig, folder: RunFolder, error: Exception) -> None:
    """A model that can't be loaded left a folder whose last line advised `--resume`."""

    async def fail(run: Run) -> None:
        run.stage("model")
        raise error

    outcome = launch(config, folder, lambda: fail)
    assert outcome.ending == "failed before the first step: there is nothing to resume"
    assert sorted(path.name for path in folder.root.iterdir()) == ["run.log", "summary.json"]
    assert (summary(folder)["exit"], summary(folder)["error"]) == ("failed", outcome.message)
    assert "Traceback" in folder.log.read_text()
    output_dir, name = str(folder.root.parent), folder.root.name
    with pytest.raises(UsageError, match="there is no run"):
        choose_folder(output_dir, name, "recipe", resume=True)
    assert launch(config, choose_folder(output_dir, name, "recipe", resume=False), lambda: learn).exit == "success"


def test_a_failure_after_a_score_keeps_what_was_recorded(config: RunConfig, folder: RunFolder) -> None:
    async def fail(run: Run) -> None:
        run.evaluation(0, "eval", 0.4, 128, 0.04)
        run.saved(0)
        raise RuntimeError("boom")

    outcome = launch(config, folder, lambda: fail)
    assert "failed before the first step; nothing was saved; start again with: " in outcome.ending
    assert folder.exists()
    assert launch(config, folder, lambda: learn, resume=True).exit == "success"
