"""Faults at chosen moments of a run: an action, the required end of the run, and the required continuation.

All runs are synchronous, so that their final weights must equal those of an undisturbed run, bit for bit. Names are
"WHAT HOW at MOMENT" or "WHAT CONDITION".
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from benchmarks.chaos.runs import END_S, SHORT, START_S, STEP_S, SYNCHRONOUS, Death, Run
from benchmarks.chaos.runs import Scene as AnyScene
from forge_env.trajectory_index import IndexReader, is_index

STEPS = 6
SETTINGS: dict[str, object] = {**SHORT, **SYNCHRONOUS, "grpo.steps": STEPS, "seed": 5, "watchdog.end_s": START_S}
PRIVATE_MEMORY = ("unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size=64m none /dev/shm && exec "$@"', "sh")
"""Prefix that runs a command with a private /dev/shm, removed when the command ends."""


class NotPossibleError(Exception):
    """The fault is not possible on this machine."""


MOMENTS: dict[str, Callable[[Run], object]] = {
    "start-up": lambda run: "trainer and generators" in run.said,
    "first evaluation": lambda run: "before training" in run.said,
    "training": lambda run: run.steps and any((run.folder / "checkpoints").glob("step-*/checkpoint.json")),
    "checkpoint write": lambda run: any((run.folder / "checkpoints").glob("step-*.partial")),
    "final evaluation": lambda run: "after training" in run.said,
    "report": lambda run: f"after step {STEPS}:" in run.said,
}


class Scene(AnyScene):
    """Runs with a fault, and the result."""

    def __init__(self, name: str, place: Path, cache: Path, settings: Mapping[str, object]) -> None:
        role, _, kind = name.partition(" ")
        self.death = Death(seed="", role=role, kind=kind, when="")
        super().__init__(place, cache, {**SETTINGS, **settings}, self.death.problems)

    def start_until(self, moment: str) -> Run:
        """Start the run and wait for a moment of it."""
        run = self.start()
        self.reach(run, moment)
        self.death.at = time.monotonic()
        return run

    def reach(self, run: Run, moment: str) -> None:
        """Wait for a moment of a run, by its key in `MOMENTS`."""
        came = run.poll(lambda: MOMENTS[moment](run), START_S + STEP_S, every=0.02)
        self.expect(came, f"{moment} never came: {run.said[-400:]}")
        run.look()

    def end(self, run: Run, *codes: int, says: str = "", within: float = END_S) -> None:
        """Wait until a run ends; check its exit code, its output, and that nothing is left of it."""
        if not run.poll(lambda: run.ended or not run.look(), within, watch_end=False, every=1.0):
            self.problems.append(run.hung())
        else:
            code = run.process.wait()
            self.death.outcome += f", then {code}" if self.death.outcome else f"exit {code}"
            self.death.cause = self.death.cause or run.cause
            self.expect(code in codes, f"it ended with code {code}, not {codes}: {run.said[-600:]}")
            self.expect(re.search(says, run.said), f"it doesn't say {says!r}: {run.said[-600:]}")
        if run.process.returncode:
            self.death.noticed_s = self.death.noticed_s or time.monotonic() - self.death.at
        self.problems += run.leave_nothing()

    def resume(self) -> None:
        """Resume the run and wait until it completes like an undisturbed one."""
        run, begun = self.start(resume=(self.folder / "config.yaml").exists()), time.monotonic()
        self.expect(run.poll(lambda: run.steps or run.ended, START_S), "it trains no further")
        self.death.back_s = time.monotonic() - begun
        self.finish(run)

    def finish(self, run: Run) -> None:
        """Wait until a run completes, and check that it did so like an undisturbed one."""
        self.end(run, 0, within=START_S + STEP_S)
        if not run.process.returncode:
            self.check(run)


def command(*words: object) -> None:
    """Run a system command; raises `NotPossibleError` if it fails."""
    try:
        subprocess.run([str(word) for word in words], check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise NotPossibleError(str(getattr(error, "stderr", "") or error).strip().splitlines()[-1]) from error


@contextmanager
def mounted(folder: Path, *how: object) -> Iterator[None]:
    """Mount a file system at `folder` for the block, by the command `how` with the folder as its last argument."""
    folder.mkdir(parents=True, exist_ok=True)
    command(*how, folder)
    try:
        yield
    finally:
        command("umount", "--lazy", folder)


def fill(file: Path) -> None:
    """Fill the disk that contains `file` by growing the file, also while others write to that disk."""
    with file.open("ab") as output:
        size, piece = output.tell(), 1 << 20
        while piece:
            try:
                os.posix_fallocate(output.fileno(), size, piece)
                size += piece
            except OSError:
                piece //= 2


# --- ends


def sent(signal_: signal.Signals, moment: str, scene: Scene) -> None:
    """Send a signal to the command: SIGKILL, or a request to end."""
    run = scene.start_until(moment)
    run.process.send_signal(signal_)
    killed = signal_ == signal.SIGKILL
    late = (0,) if moment in ("report", "final evaluation") else ()  # it may complete before the signal
    scene.end(run, *((-signal.SIGKILL,) if killed else (130, *late)))
    scene.expect(killed or run.process.returncode == 0 or "--resume" in run.last_line, f"no way on: {run.last_line}")
    scene.resume()


# --- disks


def disk_full(how: str, scene: Scene) -> None:
    """Exhaust space or inodes from the first checkpoint on, until space is freed or the run is asked to end."""
    runs = scene.place / "runs"
    with mounted(runs, "mount", "-t", "tmpfs", "-o", "size=450m,nr_inodes=10k", "none"):
        run = scene.start_until("training")
        if inodes := how.startswith("without inodes"):
            used = os.statvfs(runs)
            command("mount", "-o", f"remount,nr_inodes={used.f_files - used.f_ffree}", runs)
        else:
            fill(runs / "fill")
        scene.expect(run.poll(lambda: "disk is full" in run.said, STEP_S), "it does not say that the disk is full")
        scene.death.noticed_s = time.monotonic() - scene.death.at

        def still_full() -> bool:
            fill(runs / "fill")  # also uses the space that the run frees
            return run.ended

        if "stopped" in how:
            for _ in range(2):  # after the first signal the run still waits for space for its checkpoint
                run.process.send_signal(signal.SIGTERM)
                run.poll(still_full, 10)
            scene.end(run, 130, says="--resume")
        if inodes:
            command("mount", "-o", "remount,nr_inodes=10k", runs)
        else:
            (runs / "fill").unlink()
        if run.ended:
            scene.resume()
        else:
            scene.finish(run)


def memory_full(moment: str, scene: Scene) -> None:
    """Fill /dev/shm."""
    scene.prefix = PRIVATE_MEMORY
    run = scene.start_until(moment)
    fill(Path(f"/proc/{run.process.pid}/root/dev/shm/fill"))
    run.poll(lambda: run.ended, STEP_S + END_S)
    if run.ended and run.process.returncode:
        scene.end(run, 1, says="shared memory|/dev/shm")
        scene.resume()
    else:
        scene.finish(run)


def not_writable(how: str, moment: str, scene: Scene) -> None:
    """Make the run folder unwritable: by a read-only mount, or by immutable attributes."""
    run = scene.start_until(moment)
    folders = [scene.folder, scene.folder / "checkpoints"]
    with ExitStack() as stack:
        if how == "read-only":
            stack.enter_context(mounted(scene.folder, "mount", "--bind", scene.folder))
            command("mount", "-o", "remount,bind,ro", scene.folder)
        else:
            command("chattr", "+i", *folders)
            stack.callback(command, "chattr", "-i", *folders)
        scene.end(run, 1, says="[Rr]ead-only|not permitted", within=STEP_S)
    scene.resume()


def folder_gone(how: str, scene: Scene) -> None:
    """Remove, replace or move the run folder: the run must save its state elsewhere, report the location, and fail."""
    run = scene.start_until("training")
    if how == "moved":
        scene.folder.rename(scene.place / "aside")
    else:
        shutil.rmtree(scene.folder, ignore_errors=True)
        shutil.rmtree(scene.folder, ignore_errors=True)  # files written in the meantime
    if how == "replaced":
        scene.folder.mkdir(parents=True)
    scene.end(run, 1, says=str(scene.folder), within=STEP_S)
    named = {Path(word.rstrip(".,;:)")) for word in re.findall(r"/[^\s'\"]+", run.said)} - {scene.folder}
    saved = next((path for path in named if any(path.glob("checkpoints/step-*"))), None)
    scene.expect(saved, f"no folder with a checkpoint is named: {run.said[-600:]}")
    if saved is not None:
        shutil.rmtree(scene.folder, ignore_errors=True)
        saved.rename(scene.folder)
        scene.resume()


def slow_disk(scene: Scene) -> None:
    """Delay file writes, fsync and changes of names with a preloaded library."""
    library = scene.place / "slow_disk.so"
    command("cc", "-shared", "-fPIC", "-O1", "-o", library, Path(__file__).with_name("slow_disk.c"), "-ldl")
    scene.variables["LD_PRELOAD"] = str(library)
    scene.finish(scene.start())


# --- damaged files and occupied names


def truncate(path: Path) -> None:
    """Cut off the last third of a file."""
    os.truncate(path, path.stat().st_size * 2 // 3)


def zero(path: Path) -> None:
    """Overwrite a file with zeros."""
    path.write_bytes(bytes(path.stat().st_size))


CHECKPOINT = f"checkpoints/step-{STEPS:06d}"
DAMAGE: dict[str, tuple[str, Callable[[Path], object]]] = {
    "model truncated": (f"{CHECKPOINT}/model/model.safetensors", truncate),
    "optimizer zeroed": (f"{CHECKPOINT}/optimizer/__0_0.distcp", zero),
    "checkpoint.json emptied": (f"{CHECKPOINT}/checkpoint.json", partial(os.truncate, length=0)),
    "state.pt removed": (f"{CHECKPOINT}/state.pt", Path.unlink),
    "index garbled": ("trajectories/train.index.jsonl", lambda path: path.write_bytes(b'{"id": 1}\n\0\0garbage{')),
    "episodes truncated": ("trajectories/train.jsonl", truncate),
    "metrics truncated": ("metrics.jsonl", truncate),
    "summary emptied": ("summary.json", partial(os.truncate, length=0)),
}


def damaged(what: str, scene: Scene) -> None:
    """Damage a file of a completed run: a checkpoint is refused with a fix, applied here; other files are repaired."""
    name, damage = DAMAGE[what]
    shutil.copytree(scene.undisturbed(), scene.folder, symlinks=True)
    damage(scene.folder / name)
    scene.death.at = time.monotonic()
    if name.startswith(CHECKPOINT):
        run = scene.start(resume=True, more=1)
        scene.end(run, 2, says=f"delete .*{CHECKPOINT} to continue with --resume", within=START_S)
    shutil.rmtree(scene.folder / CHECKPOINT)
    scene.resume()
    check_index(scene)


def check_index(scene: Scene) -> None:
    """Check that the indices list every recorded episode."""
    for file in (scene.folder / "trajectories").glob("*.jsonl"):
        if is_index(file):
            continue
        rows, episodes = len(list(IndexReader(file).news())), file.read_bytes().count(b"\n")
        scene.expect(rows == episodes, f"the index of {file.name} has {rows} rows of {episodes} episodes")


def doubled(moment: str, scene: Scene) -> None:
    """Start a second and a resumed run of the same name: both are refused, and the first continues."""
    run = scene.start_until(moment)
    for resume in (False, True):
        other = scene.start(resume=resume, output=f"other-{resume}.out")
        scene.end(other, 2, says="another process|exists already")
        scene.expect("  ->" in other.said, f"no fix: {other.said}")
    scene.finish(run)


def at_once(scene: Scene) -> None:
    """Start two runs of one name at the same time: exactly one of them runs."""
    one, two = scene.start(), scene.start(output="other.out")
    scene.death.at = time.monotonic()
    one.poll(lambda: one.ended or two.ended, END_S, watch_end=False)
    first, second = (two, one) if one.ended else (one, two)
    scene.end(second, 2, says="another process|exists already")
    scene.finish(first)


ENDS = {"killed": signal.SIGKILL, "terminated": signal.SIGTERM}
FAULTS: dict[str, Callable[[Scene], None]] = {
    **{f"controller {how} at {at}": partial(sent, ENDS[how], at) for at in MOMENTS if at != "training" for how in ENDS},
    **{
        f"disk {how}": partial(disk_full, how)
        for how in ("full for a while", "full until stopped", "without inodes for a while")
    },
    **{f"/dev/shm full at {moment}": partial(memory_full, moment) for moment in ("start-up", "training")},
    **{
        f"folder {how} at {moment}": partial(not_writable, how, moment)
        for how in ("read-only", "immutable")
        for moment in ("start-up", "training")
    },
    **{f"folder {how}": partial(folder_gone, how) for how in ("removed", "replaced", "moved")},
    "disk slow": slow_disk,
    **{f"file {what}": partial(damaged, what) for what in DAMAGE},
    **{f"name taken at {moment}": partial(doubled, moment) for moment in ("start-up", "training")},
    "name taken at once": at_once,
}
"""Faults by name."""


def play(name: str, place: Path, cache: Path, settings: Mapping[str, object]) -> Death:
    """Play one fault, with additional recipe settings.

    Raises:
        NotPossibleError: this machine lacks what the fault needs.
    """
    scene = Scene(name, place, cache, settings)
    cache.mkdir(parents=True, exist_ok=True)
    scene.undisturbed()
    try:
        FAULTS[name](scene)
    finally:
        scene.close()
    print(scene.death, flush=True)
    return scene.death
