"""Submission of a run to its platform as a job, from outside of it, and following the job until it ends."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path
from typing import NamedTuple

from forge_env.config.recipe import JobSection
from forge_env.errors import ForgeError
from forge_env.interrupts import say
from forge_env.job.addresses import PLATFORMS
from forge_env.job.files import Request, job_files, write_files


class _Way(NamedTuple):
    """Commands for submitting a job to a platform.

    Attributes:
        script: submits the files of the current folder, shows the run's output, and exits with the run's exit code.
    """

    program: str
    script: str
    end: str


WAYS = {
    "slurm": _Way(
        "sbatch",
        """\
out=$(mktemp "$PWD/{name}-XXXXXX.out")
sbatch --wait --output="$out" job.sbatch & job=$!
tail -n +1 -F --pid=$job "$out" 2>/dev/null
wait $job
""",
        "scancel --name={name}",
    ),
    "kubernetes": _Way(
        "kubectl",
        """\
set -e
kubectl apply -f storage.yaml
{secret}
kubectl apply -f job.yaml
kubectl logs -f --pod-running-timeout=24h job/{name}
kubectl wait --for=condition=complete --timeout=60s job/{name}
""",
        "kubectl delete -f {folder}/job.yaml",
    ),
    "skypilot": _Way("sky", "sky launch -y -c {name} job.sky.yaml{secrets}", "sky down {name}"),
}


def to_be_submitted(section: JobSection) -> bool:
    """Whether a run is for a platform, is not inside one of its jobs, and the platform's program is installed here."""
    platform = PLATFORMS.get(section.kind)
    if platform is None or section.workers or platform.told:
        return False
    return shutil.which(WAYS[section.kind].program) is not None


def submit(request: Request, folder: Path) -> int:
    """Write the files of a job, submit them, and show the run's output; return the run's exit code."""
    way = WAYS[request.config.job.kind]
    if shutil.which(way.program) is None:
        raise ForgeError(f"`{way.program}` submits jobs, but is not installed", fix="run this on a machine that has it")
    write_files(folder, job_files(request.config.job.kind, request))
    secrets = {"secret": request.kubernetes_secret, "secrets": request.sky_secrets}
    command = ["bash", "-c", way.script.format(name=request.name, **secrets)]
    print(f"{request.hosts}; files in {folder}", flush=True)
    print(f"to cancel it: {way.end.format(name=request.name, folder=folder)}", flush=True)
    interrupts: list[int] = []  # held back while the process starts, which would otherwise be left behind
    before = signal.signal(signal.SIGINT, lambda number, frame: interrupts.append(number))
    try:
        # in a new session: Ctrl-C reaches only this process, which ends all of them
        with subprocess.Popen(command, cwd=folder, stdin=subprocess.DEVNULL, start_new_session=True) as following:
            try:
                signal.signal(signal.SIGINT, before)
                if interrupts:
                    raise KeyboardInterrupt
                return following.wait()
            except KeyboardInterrupt:
                os.killpg(following.pid, signal.SIGTERM)
                say("stopped following; the job continues")
                raise
    finally:
        signal.signal(signal.SIGINT, before)
