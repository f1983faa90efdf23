"""Checkpoints: whole or not there, verified when they are read, and safe to read."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import forge_env
from forge_env.config import RunConfig, load_config
from forge_env.errors import UsageError
from forge_env.run import Run, RunFolder
from forge_env.run.state import HeldOutScore
from trainers.buffer.core import BufferCore
from trainers.buffer.packed import PackedGroup
from trainers.buffer.types import BufferSettings
from trainers.loop.checkpoints import MANIFEST, Checkpoints, Saved

SHAPE = {"hidden_size": 64, "vocab_size": 320}


@pytest.fixture
def config() -> RunConfig:
    return load_config("coding_rlvr", ["grpo.steps=100", "evaluation.every=0", "model.path=tiny"])


@pytest.fixture
def run(config: RunConfig, tmp_path: Path) -> Run:
    return open_run(config, tmp_path)


def open_run(config: RunConfig, root: Path) -> Run:
    folder = RunFolder(root / "run")
    folder.checkpoints.mkdir(parents=True, exist_ok=True)
    return Run(config, folder)


class Trainer:
    """A trainer as far as checkpoints go: its state is one number."""

    def __init__(self, state: int = 0, fails: Callable[[], None] = lambda: None) -> None:
        self.state = state
        self.begun: list[str] = []
        self.released = asyncio.Event()
        self.released.set()
        self._fails = fails

    async def begin_save(self, folder: str) -> asyncio.Future[dict[str, float]]:
        self.begun.append(Path(folder).name.split(".")[0])
        copied = self.state

        async def write() -> dict[str, float]:
            await self.released.wait()
            self._fails()
            (Path(folder) / "model").mkdir(parents=True)
            (Path(folder) / "model" / "model.safetensors").write_text(f"{copied}")
            (Path(folder) / "model" / "config.json").write_text(json.dumps(SHAPE))
            (Path(folder) / "optimizer").mkdir()
            (Path(folder) / "optimizer" / "__0_0.distcp").write_text(f"moments of {copied}")
            return {}

        return asyncio.ensure_future(write())

    async def load(self, folder: str) -> None:
        self.state = int((Path(folder) / "model" / "model.safetensors").read_text())


def saved(step: int) -> Saved:
    buffer: BufferCore[PackedGroup] = BufferCore(BufferSettings(per_step=2, max_off_policy_steps=2))
    return Saved(step, {"order": {"at": step}}, buffer.state_dict())


async def save(run: Run, *steps: int) -> Checkpoints:
    checkpoints = Checkpoints(run)
    for step in steps:
        await checkpoints.save(Trainer(step), saved(step))
    return checkpoints


def names(run: Run) -> list[str]:
    return sorted(path.name for path in run.folder.checkpoints.iterdir())


async def restored(run: Run) -> int | None:
    """Which step a new session would go on from; 0: from the start."""
    checkpoints, trainer = Checkpoints(run), Trainer()
    checkpoints.tidy()
    folder = checkpoints.verify()
    found = await checkpoints.restore(trainer)
    if found is None:
        return 0
    assert found.step == trainer.state == found.state["order"]["at"] == int(folder.name[5:])
    return found.step


# --- whole or not there


async def save_and_die(run: Run, step: int, last: int) -> int:
    """Save in a process that ends before its operation number `last` on a file; how many it had come to."""
    seen = 0
    root = str(run.folder.checkpoints)
    watched = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.symlink", "os.link", "shutil.rmtree")

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal seen
        if event in watched and root in str(arguments[0]) + str(arguments[1:2]):
            if seen == last:
                os._exit(9)
            seen += 1

    sys.addaudithook(watch)
    await save(run, step)
    return seen


def in_a_process(work: Callable[[], int]) -> int:
    """What `work` returns in a process of its own: its exit status."""
    child = os.fork()
    if not child:
        try:
            os._exit(work())
        finally:
            os._exit(255)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
@pytest.mark.slow
def test_whatever_ends_the_process_every_checkpoint_is_whole(tmp_path: Path, config: RunConfig) -> None:
    """Killed before any operation on a file: what is there is the checkpoint before, or the new one."""
    config.checkpoint.keep = 1
    base = open_run(config, tmp_path / "base")
    asyncio.run(save(base, 10))
    found, last = set(), 0
    while True:
        root = tmp_path / f"{last}"
        shutil.copytree(tmp_path / "base", root)
        run = open_run(config, root)
        code = in_a_process(lambda run=run, last=last: min(asyncio.run(save_and_die(run, 20, last)), 8))
        step = asyncio.run(restored(run))
        assert step in (10, 20)
        found.add(step)
        assert not list(run.folder.checkpoints.glob("*.partial")), "the next session removes what is left"
        asyncio.run(save(run, 30))
        assert names(run) == ["step-000030"], "and goes on as if nothing had happened"
        shutil.rmtree(root)
        if code != 9:
            break
        last += 1
    assert found == {10, 20}
    assert last > 20


async def test_what_is_renamed_is_on_the_disk(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: set[str] = set()
    fsync, rename = os.fsync, Path.rename

    def watched(descriptor: int) -> None:
        synced.add(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    def renamed(path: Path, target: Path) -> Path:
        if path.name.startswith("step-000001"):
            inside = {str(inner) for inner in [path, *path.rglob("*")]}
            assert inside <= synced
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", watched)
    monkeypatch.setattr(Path, "rename", renamed)
    await save(run, 1)
    assert str(run.folder.checkpoints) in synced


# --- beside training


async def test_training_goes_on_while_a_checkpoint_is_written(run: Run) -> None:
    trainer, checkpoints = Trainer(1), Checkpoints(run)
    trainer.released.clear()
    await checkpoints.begin(trainer, saved(1))
    assert checkpoints.busy
    trainer.state = 2  # the next step
    trainer.released.set()
    await checkpoints.settled()
    assert not checkpoints.busy
    assert await restored(run) == 1


async def test_the_last_one_waits_for_the_one_before(run: Run) -> None:
    trainer, checkpoints = Trainer(1), Checkpoints(run)
    trainer.released.clear()
    await checkpoints.begin(trainer, saved(1))
    last = asyncio.ensure_future(checkpoints.save(trainer, saved(2)))
    for _ in range(5):
        await asyncio.sleep(0)
    assert trainer.begun == ["step-000001"]
    trainer.state = 2
    trainer.released.set()
    await last
    assert trainer.begun == ["step-000001", "step-000002"]
    assert await restored(run) == 2


async def test_a_step_is_saved_once(run: Run) -> None:
    trainer, checkpoints = Trainer(), Checkpoints(run)
    assert checkpoints.step == 0
    for step in (1, 2, 2, 3):
        trainer.state = step
        await checkpoints.begin(trainer, saved(step))
        await checkpoints.settled()
    await checkpoints.save(trainer, saved(3))
    assert trainer.begun == ["step-000001", "step-000002", "step-000003"]
    assert checkpoints.step == 3
    assert names(run) == ["step-000002", "step-000003"]


async def test_a_failure_on_the_way_is_a_warning_and_of_the_last_one_the_end(run: Run) -> None:
    def fail() -> None:
        raise RuntimeError("CUDA error")

    trainer, checkpoints = Trainer(1, fail), Checkpoints(run)
    await checkpoints.begin(trainer, saved(1))
    await checkpoints.settled()
    assert any("CUDA error" in warning for warning in run.state.warnings)
    assert names(run) == []
    with pytest.raises(RuntimeError, match="CUDA error"):
        await checkpoints.save(trainer, saved(2))
    assert names(run) == []


async def test_full_disk_skips_a_checkpoint_and_the_last_waits(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    free: list[float] = []

    def fail() -> None:
        if free[0] == 0:
            raise RuntimeError("PytorchStreamWriter failed writing file data/0: file write failed")

    monkeypatch.setattr("forge_env.machine.free_disk_gb", lambda path: free[0] if len(free) == 1 else free.pop(0))
    monkeypatch.setattr("trainers.loop.checkpoints.ROOM_S", 0.0)
    checkpoints = Checkpoints(run)
    free[:] = [0.0]  # it runs full while the first one is written
    await checkpoints.begin(Trainer(1, fail), saved(1))
    await checkpoints.settled()
    assert names(run) == []
    assert await checkpoints.save(Trainer(1, fail), saved(1), patient=False) is None
    assert names(run) == []
    free[:] = [0.0, 0.0, 0.0, 0.0, 0.0, 1.0]
    assert await checkpoints.save(Trainer(2, fail), saved(2)) is not None
    assert (checkpoints.step, len(run.state.warnings)) == (2, 1)
    trainer = Trainer(3, fail)
    free[:] = [1e-9]
    await checkpoints.begin(trainer, saved(3))
    assert trainer.begun == [], "one that won't fit is not begun"


async def test_the_last_checkpoint_waits_for_inodes(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Free space says nothing of them."""
    answers = [True, True, False]
    monkeypatch.setattr("forge_env.machine.is_out_of_inodes", lambda path: answers.pop(0))
    monkeypatch.setattr("trainers.loop.checkpoints.ROOM_S", 0.0)
    checkpoints = Checkpoints(run)
    assert await checkpoints.save(Trainer(1), saved(1), patient=False) is None
    assert await checkpoints.save(Trainer(1), saved(1)) is not None
    assert (answers, len(run.state.warnings)) == ([], 1)


async def test_disk_full_during_a_checkpoint_is_waited_for(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    started = 0

    def fail() -> None:
        nonlocal started
        started += 1
        if started == 1:
            raise OSError(errno.ENOSPC, "No space left on device")

    def free_disk_gb(path: Path) -> float:
        return 0.0 if started == 1 and list(run.folder.checkpoints.glob("*.partial")) else 1.0

    monkeypatch.setattr("forge_env.machine.free_disk_gb", free_disk_gb)
    monkeypatch.setattr("trainers.loop.checkpoints.ROOM_S", 0.0)
    assert await Checkpoints(run).save(Trainer(1, fail), saved(1)) is not None
    assert (started, len(run.state.warnings)) == (2, 1)


# --- what is kept


async def test_the_best_is_kept_beside_the_newest(run: Run) -> None:
    run.config.evaluation.every = 1
    checkpoints = Checkpoints(run)
    for step, score in ((1, 0.2), (2, 0.6), (3, 0.4), (4, 0.6), (5, 0.1), (6, 0.1)):
        await checkpoints.save(Trainer(step), saved(step))
        assert f"step-{step:06d}" in names(run), "its score is still to come"
        run.state.evaluations.append(HeldOutScore(step, "eval", score, 10, 0.1))
        checkpoints.prune()
    assert names(run) == ["best", "step-000004", "step-000005", "step-000006"]
    assert (run.folder.checkpoints / "best").resolve().name == "step-000004"
    run.config.checkpoint.keep_best = 0
    checkpoints.prune()
    assert names(run) == ["step-000005", "step-000006"]


async def test_when_one_is_due(run: Run) -> None:
    checkpoints, section = Checkpoints(run), run.config.checkpoint
    checkpoints.start_clock()
    section.every, section.minutes, section.keep_best = 4, 0.0, 0
    assert [step for step in range(1, 10) if checkpoints.due(step)] == [4, 8]
    section.keep_best, run.config.evaluation.every = 1, 3
    assert [step for step in range(1, 10) if checkpoints.due(step)] == [3, 4, 6, 8, 9]
    section.every, section.keep_best, section.minutes = 0, 0, 1e-12
    assert checkpoints.due(1)


# --- bad input


def damage(folder: Path, how: str) -> None:
    weights = folder / "model" / "model.safetensors"
    if how == "cut":
        weights.write_bytes(weights.read_bytes()[:-1])
    elif how == "flipped":
        weights.write_bytes(bytes([weights.read_bytes()[0] ^ 1]) + weights.read_bytes()[1:])
    elif how == "missing":
        (folder / "optimizer" / "__0_0.distcp").unlink()
    elif how == "no manifest":
        (folder / MANIFEST).unlink()
    elif how == "half a manifest":
        (folder / MANIFEST).write_text((folder / MANIFEST).read_text()[:-20])
    elif how == "a list":
        (folder / MANIFEST).write_text("[]")
    elif how == "pipe":
        weights.unlink()
        os.mkfifo(weights)
    elif how == "link":
        weights.rename(folder.parent / "weights")
        weights.symlink_to(folder.parent / "weights")
    elif how == "elsewhere":
        manifest = json.loads((folder / MANIFEST).read_text())
        manifest["files"]["../step-000010/checkpoint.json"] = {"bytes": 1, "sha256": ""}
        (folder / MANIFEST).write_text(json.dumps(manifest))
    elif how == "newer":
        (folder / MANIFEST).write_text(json.dumps({**json.loads((folder / MANIFEST).read_text()), "schema": 99}))


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("cut", "model.safetensors has 1 bytes, 2 were written"),
        ("flipped", "safetensors have changed"),
        ("missing", "__0_0.distcp is missing"),
        ("no manifest", "damaged, or was saved by an older version"),
        ("half a manifest", "checkpoint.json is damaged"),
        ("a list", "checkpoint.json is damaged"),
        ("pipe", "model.safetensors is a named pipe, not a file"),
        ("link", "model.safetensors is a link to .*/weights, outside of "),
        ("elsewhere", "checkpoint.json is a link to .*, outside of "),
        ("newer", "has version 99, this forge-env reads up to version"),
    ],
)
async def test_unusable_checkpoint_is_named_and_the_one_before_offered(run: Run, how: str, text: str) -> None:
    await save(run, 10, 20)
    folder = run.folder.checkpoints / "step-000020"
    damage(folder, how)
    with pytest.raises(UsageError, match=text) as caught:
        Checkpoints(run).verify()
    assert "step-000020" in caught.value.message
    assert f"delete {folder} to continue with --resume from step-000010" in str(caught.value.fix)
    shutil.rmtree(folder)
    assert await restored(run) == 10


async def test_without_one_before_a_new_run_from_its_model_is_offered(run: Run) -> None:
    await save(run, 10)
    folder = run.folder.checkpoints / "step-000010"
    damage(folder, "missing")
    with pytest.raises(UsageError) as caught:
        Checkpoints(run).verify()
    assert f"start a new run from its model: model.path={folder / 'model'}" in str(caught.value.fix)


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("method=distillation", "method"),
        ("seed=7", "seed: 0 -> 7"),
        ("environment.name=gsm8k", 'environment.name: "coding_rlvr" -> "gsm8k"'),
        ("model.tiny.dim=64", "model.tiny"),
        ("model.path=somewhere", "model.path=tiny: true -> false"),
        ("trainer.optimizer.muon_lr=0.1", "muon_lr above 0: false -> true"),
        ("lora.rank=4", 'lora: null -> {"rank": 4'),
    ],
)
async def test_another_recipe_is_named(run: Run, config: RunConfig, tmp_path: Path, override: str, text: str) -> None:
    await save(run, 10)
    key, _, value = override.partition("=")
    overrides = ["grpo.steps=100", f"{key}={value}", *(["model.path=tiny"] if key != "model.path" else [])]
    if key == "environment.name":
        overrides.append("environment.options={}")
    other = open_run(load_config("coding_rlvr", overrides), tmp_path)
    with pytest.raises(UsageError, match="step-000010 was saved with another recipe") as caught:
        Checkpoints(other).verify()
    assert text in caught.value.message
    assert "start a new run" in caught.value.fix


async def test_another_version_is_named(run: Run) -> None:
    await save(run, 10)
    manifest = run.folder.checkpoints / "step-000010" / MANIFEST
    manifest.write_text(manifest.read_text().replace(f'"{forge_env.__version__}"', '"9.9.9"'))
    assert Checkpoints(run).verify() is not None
    assert any("saved by forge-env 9.9.9" in warning for warning in run.state.warnings)


async def test_what_may_change_on_the_way_may(run: Run, tmp_path: Path) -> None:
    await save(run, 10)
    turned = ["grpo.steps=200", "trainer.optimizer.lr=1e-5", "grpo.groups_per_step=2"]
    more = load_config("coding_rlvr", [*turned, "model.path=tiny"])
    assert Checkpoints(open_run(more, tmp_path)).verify() is not None


async def test_another_model_is_named(run: Run, tmp_path: Path) -> None:
    await save(run, 10)
    (tmp_path / "config.json").write_text(json.dumps({**SHAPE, "hidden_size": 128}))
    with pytest.raises(UsageError, match=r"was trained from another model than .*hidden_size: 64 -> 128"):
        Checkpoints(run).verify(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**SHAPE, "transformers_version": "9"}))
    assert Checkpoints(run).verify(tmp_path) is not None


async def test_the_manifest_says_what_was_written(run: Run) -> None:
    await save(run, 10)
    folder = run.folder.checkpoints / "step-000010"
    files = json.loads((folder / MANIFEST).read_text())["files"]
    inside = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert set(files) == inside - {MANIFEST}
    for name, about in files.items():
        content = (folder / name).read_bytes()
        assert about == {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


async def test_what_a_killed_session_left_is_told_and_removed(run: Run) -> None:
    await save(run, 10)
    (run.folder.checkpoints / "step-000020.1.partial" / "model").mkdir(parents=True)
    (run.folder.checkpoints / "best.partial").symlink_to("step-000010")
    said: list[str] = []
    run.note = said.append
    assert await restored(run) == 10
    assert said == ["step-000020 is incomplete and was removed"]
    assert names(run) == ["step-000010"]
