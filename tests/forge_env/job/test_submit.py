"""Jobs are submitted with the platform's program (here a stand-in), followed, and end as their run does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from forge_env.cli.main import main

SBATCH = """#!/bin/bash
# as the real one with --wait: prints at once, ends with the job's code
[ "$1" = --wait ] || exit 99
echo Submitted batch job 12
grep -q SBATCH "$3" && echo "the run says hello" >> "${2#--output=}"
exit 7
"""
KUBECTL = """#!/bin/bash
echo "kubectl $*"
[ "$*" = "apply -f -" ] && cat
case $1 in
create) echo "a secret with $HF_TOKEN";;
apply) [ "$3" = - ] || [ -f "$3" ];;
wait) exit $FAILED;;
esac
"""
SKY = '#!/bin/bash\necho "sky $*"\n[ -f "$5" ]\n'
WAITS = '#!/bin/bash\necho $$ > "$FIFO"\nexec sleep 1000\n'

Stand = Callable[[str, str], Path]


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stand:
    """Puts a program where it is found, and this process in a folder of its own."""
    for name in ("SLURM_JOB_NODELIST", "FORGE_ENV_WORKERS", "SKYPILOT_NODE_IPS"):
        monkeypatch.delenv(name, raising=False)
    programs = tmp_path / "bin"
    programs.mkdir()
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)

    def stand(name: str, text: str) -> Path:
        program = programs / name
        program.write_text(text)
        program.chmod(0o755)
        return tmp_path

    return stand


def test_train_submits_and_follows_where_it_is_not_in_a_job(stand_in: Stand, capfd: pytest.CaptureFixture[str]) -> None:
    folder = stand_in("sbatch", SBATCH)
    assert main(["train", "coding_rlvr", "grpo.steps=3", "--job.kind", "slurm", "--name", "mine"]) == 7
    said = capfd.readouterr().out
    assert "2 hosts, each with 4 CPUs" in said
    assert "to cancel it: scancel --name=mine" in said
    assert said.endswith("the run says hello\n")
    assert "steps: 3" in (folder / "job-mine" / "recipe.yaml").read_text()
    assert main(["train", "coding_rlvr", "--job.kind", "slurm", "--name", "mine", "--resume"]) == 2
    assert "resume" in capfd.readouterr().err


def test_run_inside_a_job(stand_in: Stand, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    folder = stand_in("sbatch", SBATCH)
    stand_in("scontrol", "#!/bin/bash\necho no such list >&2\nexit 1\n")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "node[1-2]")
    assert main(["train", "coding_rlvr", "--job.kind", "slurm"]) == 1
    assert "scontrol show hostnames node[1-2]" in capfd.readouterr().err
    assert not (folder / "job-coding-rlvr").exists()


@pytest.mark.parametrize("failed", ["0", "1"])
def test_on_kubernetes(
    failed: str, stand_in: Stand, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    stand_in("kubectl", KUBECTL)
    monkeypatch.setenv("HF_TOKEN", "hunter2")
    monkeypatch.setenv("FAILED", failed)
    command = ["job", "coding_rlvr", "--job.kind", "kubernetes", "--secret", "HF_TOKEN", "--write", "here", "--submit"]
    assert main(command) == int(failed)
    said = [line for line in capfd.readouterr().out.splitlines() if line.startswith(("kubectl", "a secret"))]
    assert said == [
        "kubectl apply -f storage.yaml",
        "kubectl apply -f -",
        "kubectl create secret generic coding-rlvr --from-file=HF_TOKEN=/dev/fd/63 --dry-run=client -o yaml",
        "a secret with hunter2",
        "kubectl apply -f job.yaml",
        "kubectl logs -f --pod-running-timeout=24h job/coding-rlvr",
        "kubectl wait --for=condition=complete --timeout=60s job/coding-rlvr",
    ]


def test_with_skypilot(stand_in: Stand, capfd: pytest.CaptureFixture[str]) -> None:
    stand_in("sky", SKY)
    assert main(["job", "coding_rlvr", "--job.kind", "skypilot", "--secret", "HF_TOKEN", "--submit"]) == 0
    assert "sky launch -y -c coding-rlvr job.sky.yaml --secret HF_TOKEN\n" in capfd.readouterr().out


def test_missing_platform(stand_in: Stand, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    folder = stand_in("other", SKY)
    monkeypatch.setenv("PATH", str(folder / "bin"))
    assert main(["job", "coding_rlvr", "--job.kind", "slurm", "--submit"]) == 1
    assert "`sbatch` submits jobs, but is not installed" in capfd.readouterr().err
    assert [path.name for path in folder.iterdir()] == ["bin"]


def test_ctrl_c_ends_what_follows_and_not_the_job(stand_in: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = stand_in("sbatch", WAITS)
    os.mkfifo(folder / "fifo")
    monkeypatch.setenv("FIFO", str(folder / "fifo"))
    command = [sys.executable, "-m", "forge_env", "train", "coding_rlvr", "--job.kind", "slurm"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as run:
        waits = psutil.Process(int((folder / "fifo").read_text()))
        run.send_signal(signal.SIGINT)
        said, _ = run.communicate(timeout=60)
    assert run.returncode == 130
    assert "stopped following; the job continues" in said
    assert not psutil.wait_procs([waits], timeout=60)[1]


def test_early_ctrl_c(stand_in: Stand, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    stand_in("sbatch", "#!/bin/bash\nexec sleep 1000\n")
    started = []

    class Interrupted(subprocess.Popen[bytes]):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            started.append(psutil.Process(self.pid))
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("forge_env.job.submit.subprocess.Popen", Interrupted)
    before = signal.getsignal(signal.SIGINT)
    assert main(["train", "coding_rlvr", "--job.kind", "slurm"]) == 130
    assert "stopped following; the job continues" in capfd.readouterr().err
    assert not psutil.wait_procs(started, timeout=60)[1]
    assert signal.getsignal(signal.SIGINT) is before
