"""The script of docs/hosts.md under a real Slurm of two nodes, which the test installs, starts and stops."""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("monarch")

pytestmark = [pytest.mark.slow, pytest.mark.stack, pytest.mark.timeout(900)]
ROOT = Path(__file__).parents[3]
CLUSTER = Path(__file__).with_name("slurm_cluster.sh")
PACKAGES = ["slurmctld", "slurmd", "slurm-client", "munge"]


@pytest.fixture
def cluster() -> Iterator[Path]:
    """The folder of a cluster that is up; jobs have it as theirs. Where it can be: for root, on Debian."""
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        pytest.skip("a Slurm cluster is started by root on Debian only")
    if any(shutil.which(program) is None for program in ("slurmctld", "slurmd", "sbatch", "munged")):
        command = f"apt-get update -qq && apt-get install -y -qq --no-install-recommends {' '.join(PACKAGES)}"
        if subprocess.run(command, shell=True, stdin=subprocess.DEVNULL, capture_output=True, check=False).returncode:
            pytest.skip("Debian's packages of Slurm can't be installed here")
    folder = Path(tempfile.mkdtemp(prefix="forge-env-slurm-"))  # pytest's own can't be entered by munged
    folder.chmod(stat.S_IRWXU | stat.S_IXGRP | stat.S_IXOTH | stat.S_IRGRP | stat.S_IROTH)
    try:
        subprocess.run([CLUSTER, "up", folder], check=True)
        yield folder
    finally:
        subprocess.run([CLUSTER, "down", folder], check=False)
        shutil.rmtree(folder, ignore_errors=True)


def test_the_documented_script_trains_on_two_nodes(cluster: Path) -> None:
    text = (ROOT / "docs" / "hosts.md").read_text()
    [documented] = [block for block in re.findall(r"```bash\n(.*?)```", text, re.DOTALL) if "#SBATCH" in block]
    script = ROOT / "apps" / "grpo" / "run_grpo.sh"
    assert script.read_text() == documented
    shutil.copy(script, cluster)
    recipe = {
        "environment": {"name": "tests.trainers.loop.dry_run:Sums"},
        "model": {"max_length": 160, "cache_dir": str(cluster / "cache")},
        "grpo": {"steps": 3, "groups_per_step": 2, "group_size": 2, "max_tokens_per_turn": 12},
        "evaluation": {"every": 0, "num_tasks": 3},
        "output_dir": str(cluster / "runs"),
        "job": {"place": {"trainer": [0], "generator": [1]}, "kind": "slurm"},
    }
    (cluster / "recipe.yaml").write_text(json.dumps(recipe))
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "SLURM_CONF": str(cluster / "slurm.conf"), "PATH": path, "PYTHONPATH": str(ROOT)}

    def slurm(*command: str) -> str:
        done = subprocess.run(command, cwd=cluster, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    output = f"--output={cluster}/job.out"
    job = slurm("sbatch", "--parsable", "--nodes=2", output, "run_grpo.sh", "recipe.yaml", "--name", "run")
    slurm("srun", f"--dependency=afterany:{job}", "--nodes=1", "true")  # `sbatch --wait` hears of the end 31 s later
    printed = (cluster / "job.out").read_text()
    print(printed)
    assert "ExitCode=0:0" in slurm("scontrol", "show", "job", job)
    assert "host 0 tcp://node1:26700 (node1)" in printed
    assert re.search(r"host 1 tcp://node2:26700 \(node2\).*generator0", printed)
    assert "done: 3 steps" in printed
    summary = json.loads((cluster / "runs" / "run" / "summary.json").read_text())
    assert (summary["exit"], summary["steps"]) == ("success", 3)
    logs = sorted(path.name for path in (cluster / "runs" / "run" / "logs").iterdir())
    assert logs == ["0-node1.log", "1-node2.log"]
