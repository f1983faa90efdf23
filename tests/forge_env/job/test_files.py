"""Job files: what they ask for, what they refuse, and that their scripts start and end what they should."""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from forge_env.cli.main import main
from forge_env.config.finding import load_config
from forge_env.config.recipe import RunConfig
from forge_env.errors import UsageError
from forge_env.job.files import Hosts, Request, check_secrets, job_files, job_name, needed_hosts

STAND_IN = """
# `forge-env` on a cluster: a worker that listens until it is ended; a run that ends, with a code of its own, once
# another node has found the worker of this one.
import os, socket, sys
if sys.argv[1] == "worker":
    host, port = sys.argv[2].removeprefix("tcp://").split(":")
    with socket.create_server((host, int(port))) as server:
        held = [server.accept()]
        open("found", "w").close()
        held += [server.accept() for _ in iter(int, 1)]
open("found").close()
print(*sys.argv[1:], flush=True)
sys.exit(7)
"""


def files(kind: str, config: RunConfig, **options: Any) -> dict[str, str]:
    request = Request("my-run", config, Hosts(3, 2, 8, 40), "registry/forge-env:1", "H100", **options)
    return {file.name: file.text for file in job_files(kind, request)}


def recipe(*overrides: str) -> RunConfig:
    return load_config("coding_rlvr", overrides)


def test_hosts_have_what_the_plan_of_a_run_asks_for() -> None:
    gpus = ("generator.with_gpus=true", "generator.num_replicas=3", "generator.procs=2", "trainer.with_gpus=true")
    assert needed_hosts(recipe(), 2, 4).gpus == 0
    assert needed_hosts(recipe(*gpus, "trainer.procs=4"), 2, 4).gpus == 6
    assert needed_hosts(recipe(*gpus, "trainer.procs=4", "trainer.hosts=2", "job.kind=slurm"), 2, 4).gpus == 6
    assert needed_hosts(recipe(*gpus, "trainer.procs=4"), 4, 4).gpus == 4
    assert 0 < needed_hosts(recipe(), 3, 4).memory_gb <= needed_hosts(recipe(), 1, 4).memory_gb
    with pytest.raises(UsageError, match="trainer"):
        needed_hosts(recipe("job.kind=slurm", "job.place={trainer: [5]}"), 2, 4)
    with pytest.raises(UsageError, match=r"on each of 3 hosts.* on 1 .*\(host1\), 12 GPUs \("):
        needed_hosts(recipe("job.kind=slurm", *gpus, "trainer.procs=6", "trainer.hosts=3"), 2, 4)


@pytest.mark.parametrize("kind", ["slurm", "kubernetes", "skypilot"])
def test_the_recipe_that_is_written_is_the_one_that_was_given(kind: str, tmp_path: Path) -> None:
    config = recipe("grpo.steps=7", f"job.kind={kind}")
    written = files(kind, config)
    (tmp_path / "recipe.yaml").write_text(written.pop("recipe.yaml"))
    assert load_config(str(tmp_path / "recipe.yaml")) == config
    assert all(f"--job.kind {kind}" in text or kind == "kubernetes" for text in written.values())


def test_workers_of_now_are_not_those_of_the_job() -> None:
    config = recipe("job.kind=hosts", "job.workers=[tcp://10.0.0.5:26700]")
    assert not [name for name, text in files("slurm", config).items() if "10.0.0.5" in text]


def test_a_secret_is_refused_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"environment\.options\.api_key looks like a secret"):
        check_secrets(recipe("environment.options={api_key: abc}"))
    monkeypatch.setenv("SOME_TOKEN", "hunter2hunter2")
    with pytest.raises(UsageError, match=r"environment\.options\.name"):
        check_secrets(recipe("environment.options={name: hunter2hunter2}"))
    with pytest.raises(UsageError, match=r"environment\.options\.url"):
        check_secrets(recipe("environment.options={url: 'http://x/?key=hunter2hunter2'}"))
    check_secrets(recipe())
    for kind in ("kubernetes", "skypilot"):
        text = "".join(files(kind, recipe(), secrets=("SOME_TOKEN",)).values())
        assert "hunter2" not in text
        assert ("SOME_TOKEN" in text) == (kind == "skypilot")  # the keys of a Kubernetes secret are its own


def test_kubernetes_objects_fit_together() -> None:
    written = files("kubernetes", recipe(), secrets=("HF_TOKEN",))
    objects = {found["kind"]: found for found in yaml.safe_load_all(written["job.yaml"])}
    workers, run = objects["StatefulSet"], objects["Job"]["spec"]["template"]["spec"]
    (worker,), (train,) = workers["spec"]["template"]["spec"]["containers"], run["containers"]
    assert workers["spec"]["serviceName"] == objects["Service"]["metadata"]["name"] == "my-run"
    assert objects["Service"]["spec"]["publishNotReadyAddresses"]  # workers are known before they are asked
    assert train["env"] == [{"name": "FORGE_ENV_WORKERS", "value": "my-run-0.my-run,my-run-1.my-run,my-run-2.my-run"}]
    assert worker["resources"]["limits"] == {"cpu": "8", "memory": "40Gi", "nvidia.com/gpu": "2"}
    assert train["command"][:3] == ["forge-env", "train", "/etc/forge-env/recipe.yaml"]
    assert objects["ConfigMap"]["data"]["recipe.yaml"] == written["recipe.yaml"]
    assert objects["NetworkPolicy"]["spec"]["ingress"] == [
        {"from": [{"podSelector": {"matchLabels": {"app": "my-run"}}}]}
    ]
    assert "--sandbox.engine" in train["args"]
    assert "--sandbox.engine" not in files("kubernetes", recipe("sandbox.engine=local"))["job.yaml"]
    for container in (worker, train):
        assert container["envFrom"] == [{"secretRef": {"name": "my-run"}}]
        assert container["image"] == "registry/forge-env:1"
    assert "PersistentVolumeClaim" not in objects  # what deletes the job must not delete its results


def test_slurm_script(tmp_path: Path) -> None:
    text = files("slurm", recipe("checkpoint.grace_s=200"))["job.sbatch"]
    for option in ("nodes=3", "gpus-per-node=2", "cpus-per-task=8", "mem=40G", "signal=B:TERM@200"):
        assert f"#SBATCH --{option}\n" in text
    assert text.index("#SBATCH") < text.index("set -u")  # options after a command are not read
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    assert "gpus-per-node" not in job_files("slurm", Request("a", recipe(), Hosts(1, 0, 1, 1), "", ""))[1].text


def test_a_skypilot_task_ends_with_its_run(tmp_path: Path) -> None:
    """On both nodes: the first with the run's code, the second when the worker of the first is gone."""
    with socket.create_server(("127.8.7.1", 0)) as free:
        port = free.getsockname()[1]
    task = yaml.safe_load(files("skypilot", recipe(f"job.port={port}"))["job.sky.yaml"])
    assert (task["num_nodes"], task["resources"]["accelerators"]) == (3, "H100:2")
    (tmp_path / "stand_in.py").write_text(STAND_IN)
    program = tmp_path / "forge-env"  # a path with a blank can't be named after #!
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$(dirname "$0")/stand_in.py" "$@"\n')
    program.chmod(0o755)
    os.mkfifo(tmp_path / "found")
    lines = task["run"].replace("/opt/venv/bin", shlex.quote(str(tmp_path)))
    with ExitStack() as stack:
        nodes = []
        for rank in (0, 1):
            variables = {"SKYPILOT_NODE_IPS": "127.8.7.1\n127.8.7.2\n", "SKYPILOT_NODE_RANK": str(rank)}
            node = subprocess.Popen(
                ["bash", "-c", lines],
                env={**os.environ, **variables, "SKYPILOT_TASK_ID": "sky-1"},
                cwd=tmp_path,
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
            nodes.append(stack.enter_context(node))
            stack.callback(_end_session, node.pid)
        first, second = nodes
        said, _ = first.communicate(timeout=30)
        second.communicate(timeout=30)
    assert said == f"train recipe.yaml --job.kind skypilot --job.port {port} --name my-run-sky-1\n"
    assert (first.returncode, second.returncode) == (7, 0)


def _end_session(leader: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def test_names_suit_every_platform() -> None:
    assert job_name("Qwen3_0.6B  run!") == "qwen3-0-6b-run"
    assert job_name("__") == "forge-env"


def test_the_command_writes_and_says_how_to_submit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["job", "coding_rlvr", "--write", str(tmp_path / "job"), "--hosts", "3", "--secret", "HF_TOKEN"]) == 0
    said = capsys.readouterr().out
    for name in ("recipe.yaml", "job.sbatch", "storage.yaml", "job.yaml", "job.sky.yaml"):
        assert (tmp_path / "job" / name).is_file()
        assert str(tmp_path / "job" / name) in said
    for command in ("sbatch job.sbatch", "kubectl apply -f job.yaml", "sky launch -c coding-rlvr job.sky.yaml"):
        assert command in said
    assert main(["job", "coding_rlvr", "--job.kind", "slurm"]) == 0
    assert "#SBATCH --nodes=2" in capsys.readouterr().out
    for wrong in (["--hosts", "0"], ["--memory", "-3"], ["--secret", "A B"], ["--submit"]):
        assert main(["job", "coding_rlvr", *wrong]) == 2
        assert wrong[0] in capsys.readouterr().err
