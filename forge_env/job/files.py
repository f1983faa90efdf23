"""Files that run a recipe on several hosts: a Slurm script, Kubernetes manifests, or a SkyPilot task.

Each of them starts `forge-env worker` on every host, and `forge-env train` once: on the first host, or in a separate
pod. The files contain no secrets, only references to the platform's store of them.
"""

from __future__ import annotations

import math
import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from forge_env import __version__
from forge_env.config.reader import changed_yaml, texts
from forge_env.config.recipe import RunConfig
from forge_env.errors import UsageError
from forge_env.job.addresses import Address
from forge_env.job.card import Card
from forge_env.job.needs import CONTROLLER_GB, SANDBOXES_GB
from forge_env.job.plan import make_plan, units
from forge_env.redaction import learn_environment, redact_settings

RECIPE = "recipe.yaml"
SPARE_GB = 2.0
"""GiB of each host beyond the estimate of a run's needs."""
SHARED_MEMORY_GB = 8
_NOT_IN_A_NAME = re.compile(r"[^a-z0-9]+")


@dataclass(frozen=True)
class Hosts:
    """The hosts to request from a platform."""

    count: int
    gpus: int
    cpus: int
    memory_gb: int

    def __str__(self) -> str:
        gpus = f", {self.gpus} GPUs" if self.gpus else ""
        return f"{self.count} hosts, each with {self.cpus} CPUs, {self.memory_gb} GiB{gpus}"


@dataclass(frozen=True)
class Request:
    """The parameters of a job.

    Attributes:
        image: container image with forge-env (Kubernetes, SkyPilot).
        accelerator: kind of GPU (SkyPilot).
        secrets: names of environment variables whose values the platform stores.
    """

    name: str
    config: RunConfig
    hosts: Hosts
    image: str = "forge-env:latest"
    accelerator: str = "H100"
    secrets: tuple[str, ...] = ()

    @property
    def port(self) -> int:
        """Port of the workers."""
        return self.config.job.port

    @property
    def kubernetes_secret(self) -> str:
        """The command that stores the secrets in Kubernetes, replacing older values; empty if there are none."""
        if not self.secrets:
            return ""
        # printf is a bash builtin, so no process has a value among its arguments, which all users can read
        values = " ".join(f'--from-file={secret}=<(printf %s "${secret}")' for secret in self.secrets)
        create = f"kubectl create secret generic {self.name} {values} --dry-run=client -o yaml"
        return f"{create} | kubectl apply -f -"

    @property
    def sky_secrets(self) -> str:
        """The options that pass the secrets to SkyPilot."""
        return "".join(f" --secret {secret}" for secret in self.secrets)


@dataclass(frozen=True)
class JobFile:
    """One file, and the commands that submit it."""

    name: str
    text: str
    submit: str
    """Commands that submit it; empty for a file that others use."""


def job_name(text: str) -> str:
    """Convert a text to a name that every platform accepts."""
    return _NOT_IN_A_NAME.sub("-", text.lower()).strip("-")[:40] or "forge-env"


def needed_hosts(config: RunConfig, count: int = 2, cpus: int = 4) -> Hosts:
    """Compute the resources that each of `count` hosts must have for the recipe to fit, by planning the run.

    The size of a model on the Hugging Face hub is unknown here, so its memory is not counted.
    """
    parts = {unit.name: unit for unit in units(config)}
    least, most = max(unit.gpus for unit in parts.values()), sum(unit.gpus * unit.hosts for unit in parts.values())
    addresses = [Address("tcp", f"host{number}", config.job.port) for number in range(count)]
    for gpus in range(least, most + 1):
        ids = [str(number) for number in range(gpus)]
        cards = [Card(__version__, "", f"host{n}", "", "", cpus, math.inf, ids) for n in range(count)]
        try:
            plan = make_plan(config, addresses, cards)
        except UsageError:
            if gpus == most:
                raise
        else:
            break
    used = [0.0] * count
    for name, placement in plan.places.items():
        for number in placement.hosts:
            used[number] += parts[name].memory_gb
    memory = max(used) + CONTROLLER_GB + SANDBOXES_GB + config.watchdog.free_memory_gb + SPARE_GB
    return Hosts(count, gpus, cpus, math.ceil(memory))


def check_secrets(config: RunConfig) -> None:
    """Refuse a recipe with a value that looks like a secret, since its text would be in the job's files."""
    learn_environment()
    for key, value in texts(config.model_dump(mode="json")):
        if redact_settings(value, key) != value:
            raise UsageError(
                f"{key} looks like a secret, which would be written in plain text",
                fix="let the code that needs it read an environment variable, and name that with --secret",
            )


def job_files(kind: str, request: Request) -> list[JobFile]:
    """Create the files of a job: the recipe, and the files that the platform reads."""
    check_secrets(request.config)
    job = request.config.job.model_copy(update={"workers": []})  # the platform provides them
    recipe = changed_yaml(request.config.model_copy(update={"job": job}), ["environment"])
    writer = {"slurm": _slurm, "kubernetes": _kubernetes, "skypilot": _skypilot}[kind]
    return [JobFile(RECIPE, recipe, ""), *writer(request, recipe)]


# --- Slurm


_SBATCH = """\
#!/bin/bash
# Runs a recipe on every node of one allocation: a worker on each, the run itself on the first. The allocation ends with
# the run, and with its exit code. A signal from Slurm saves the run first; RESUME=NAME sbatch ... goes on with it.
# Secrets: what is exported where sbatch is called is there too.
{options}
set -u
PATH={bin}:$PATH
cd "${{SLURM_SUBMIT_DIR:-.}}"
RESUME=${{RESUME:-${{SLURM_RESTART_COUNT:+{name}-$SLURM_JOB_ID}}}} # it was requeued
srun --ntasks-per-node=1 --kill-on-bad-exit=0 \\
  bash -c 'exec forge-env worker "tcp://$SLURMD_NODENAME:{port}"' & workers=$!
forge-env train {recipe} --job.kind slurm --job.port {port} \\
  --name "${{RESUME:-{name}-$SLURM_JOB_ID}}" ${{RESUME:+--resume}} "$@" & run=$!
trap 'kill -TERM $run' TERM INT
wait $run; code=$?
while kill -0 $run 2>/dev/null; do wait $run; code=$?; done  # a signal ends only the wait
kill $workers; wait $workers
exit $code
"""


def _slurm(request: Request, recipe: str) -> list[JobFile]:
    """Create the script for sbatch (https://slurm.schedmd.com/sbatch.html)."""
    hosts = request.hosts
    options = {
        "job-name": request.name,
        "nodes": hosts.count,
        "ntasks-per-node": 1,
        "cpus-per-task": hosts.cpus,
        "mem": f"{hosts.memory_gb}G",
        **({"gpus-per-node": hosts.gpus} if hosts.gpus else {}),
        "output": "%x-%j.out",
        "signal": f"B:TERM@{max(60, math.ceil(request.config.checkpoint.grace_s))}",
    }
    text = _SBATCH.format(
        options="\n".join(f"#SBATCH --{option}={value}" for option, value in options.items()),
        bin=shlex.quote(f"{sys.prefix}/bin"),
        recipe=RECIPE,
        name=request.name,
        port=request.port,
    )
    return [JobFile("job.sbatch", text, "sbatch job.sbatch   # with other keys: sbatch job.sbatch --grpo.steps 20")]


# --- Kubernetes


def _kubernetes(request: Request, recipe: str) -> list[JobFile]:
    """Create a StatefulSet of workers behind a headless Service, and a Job for the run.

    https://kubernetes.io/docs/concepts/workloads/controllers/statefulset: its pods are `NAME-0.NAME` and so on.
    """
    name, hosts = request.name, request.hosts
    metadata = {"name": name, "labels": {"app": name}}
    workers = ",".join(f"{name}-{number}.{name}" for number in range(hosts.count))
    own_sandboxes = ["--sandbox.engine", "kubernetes"] if request.config.sandbox.engine == "auto" else []
    memory = f"{hosts.memory_gb}Gi"
    limits: dict[str, Any] = {"cpu": str(hosts.cpus), "memory": memory}
    worker = {
        "name": "worker",
        "command": ["sh", "-c", f'exec forge-env worker "tcp://$POD_IP:{request.port}"'],
        "env": [{"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}],
        "resources": {"limits": {**limits, **({"nvidia.com/gpu": str(hosts.gpus)} if hosts.gpus else {})}},
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
    }
    train = {
        "name": "run",
        "command": ["forge-env", "train", f"/etc/forge-env/{RECIPE}", "--name", name, "--job.kind", "kubernetes"],
        "args": ["--job.port", str(request.port), *own_sandboxes],
        "env": [{"name": "FORGE_ENV_WORKERS", "value": workers}],
        "resources": {"limits": {"cpu": "2", "memory": "4Gi"}},
        "volumeMounts": [{"name": "recipe", "mountPath": "/etc/forge-env"}],
    }
    shm = {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": f"{SHARED_MEMORY_GB}Gi"}}
    manifests: list[dict[str, Any]] = [
        {
            **_of("v1", "Service", metadata),
            "spec": {
                "clusterIP": "None",
                "publishNotReadyAddresses": True,
                "selector": {"app": name, "part": "worker"},
                "ports": [{"name": "worker", "port": request.port}],
            },
        },
        {
            **_of("apps/v1", "StatefulSet", metadata),
            "spec": {
                "serviceName": name,
                "replicas": hosts.count,
                "podManagementPolicy": "Parallel",
                "selector": {"matchLabels": {"app": name, "part": "worker"}},
                "template": _pod(request, "worker", worker, [shm]),
            },
        },
        {
            **_of("batch/v1", "Job", metadata),
            "spec": {
                "backoffLimit": 0,
                "template": _pod(
                    request, "run", train, [{"name": "recipe", "configMap": {"name": name}}], restartPolicy="Never"
                ),
            },
        },
        {**_of("v1", "ConfigMap", metadata), "data": {RECIPE: _Block(recipe)}},
        *_access(metadata),
    ]
    head = f"# A recipe on {hosts.count} pods: a StatefulSet of workers, and a Job that is the run.\n"
    submit = [request.kubernetes_secret]
    submit += ["kubectl apply -f job.yaml", f"kubectl logs -f job/{name}", "kubectl delete -f job.yaml   # at its end"]
    return [_storage(metadata), JobFile("job.yaml", head + _yaml(*manifests), "\n".join(submit))]


def _access(metadata: dict[str, Any]) -> list[dict[str, Any]]:
    """Create the manifests for access to the pods, and for the pods' access to the cluster."""
    name = metadata["name"]
    return [
        {  # anyone who can reach a worker can run code there
            **_of("networking.k8s.io/v1", "NetworkPolicy", metadata),
            "spec": {
                "podSelector": {"matchLabels": {"app": name}},
                "policyTypes": ["Ingress"],
                "ingress": [{"from": [{"podSelector": {"matchLabels": {"app": name}}}]}],
            },
        },
        _of("v1", "ServiceAccount", metadata),
        {
            **_of("rbac.authorization.k8s.io/v1", "Role", metadata),
            "rules": [  # for sandboxes in pods (docs/sandboxes/remote.md)
                _rule("", "pods", "create", "list", "watch", "delete"),
                _rule("", "pods/attach", "create", "get"),
                _rule("networking.k8s.io", "networkpolicies", "create", "get"),
                _rule("agents.x-k8s.io", "sandboxes", "create", "list", "delete"),
            ],
        },
        {
            **_of("rbac.authorization.k8s.io/v1", "RoleBinding", metadata),
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name},
            "subjects": [{"kind": "ServiceAccount", "name": name}],
        },
    ]


def _storage(metadata: dict[str, Any]) -> JobFile:
    """Create the volume that all pods share; it is not deleted with the job."""
    claim = {
        **_of("v1", "PersistentVolumeClaim", metadata),
        "spec": {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "100Gi"}}},
    }
    return JobFile(
        "storage.yaml",
        "# The run folder and the model cache of all pods, at /work. It must be of a storage class that many pods\n"
        "# can write to: add spec.storageClassName. Deleting it deletes the results.\n" + _yaml(claim),
        "kubectl apply -f storage.yaml   # once",
    )


def _yaml(*documents: dict[str, Any]) -> str:
    return yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, width=120)


def _of(version: str, kind: str, metadata: dict[str, Any]) -> dict[str, Any]:
    return {"apiVersion": version, "kind": kind, "metadata": dict(metadata)}


def _rule(group: str, resource: str, *verbs: str) -> dict[str, Any]:
    return {"apiGroups": [group], "resources": [resource], "verbs": list(verbs)}


def _pod(
    request: Request, part: str, container: dict[str, Any], volumes: list[dict[str, Any]], **spec: Any
) -> dict[str, Any]:
    """Create a pod of this job, which runs as an unprivileged user and uses the shared folder as working directory."""
    name = request.name
    container = {
        **container,
        "image": request.image,
        "workingDir": "/work",
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": [{"name": "work", "mountPath": "/work"}, *container["volumeMounts"]],
    }
    if request.secrets:
        container["envFrom"] = [{"secretRef": {"name": name}}]
    return {
        "metadata": {"labels": {"app": name, "part": part}},
        "spec": {
            "serviceAccountName": name,
            "securityContext": {"runAsNonRoot": True, "runAsUser": 10001, "fsGroup": 10001},
            "containers": [container],
            "volumes": [{"name": "work", "persistentVolumeClaim": {"claimName": name}}, *volumes],
            **spec,
        },
    }


# --- SkyPilot


_RUN = """\
export PATH=/opt/venv/bin:$PATH
address=$(sed -n "$((SKYPILOT_NODE_RANK + 1))p" <<< "$SKYPILOT_NODE_IPS")
head=$(head -n1 <<< "$SKYPILOT_NODE_IPS")
forge-env worker "tcp://$address:{port}" & worker=$!
if [ "$SKYPILOT_NODE_RANK" = 0 ]; then
  name={name}-$SKYPILOT_TASK_ID # the same when a managed job is recovered
  [ -f {folder}/"$name"/config.yaml ] && resume=--resume
  forge-env train {recipe} --job.kind skypilot --job.port {port} --name "$name" ${{resume:-}}
  code=$?
else  # the task ends when all nodes have ended: this one with the worker of the first, which holds a connection open
  until (exec 3<>/dev/tcp/$head/{port}) 2>/dev/null; do sleep 1; done
  while (exec 3<>/dev/tcp/$head/{port} && cat <&3) 2>/dev/null; do :; done
  code=0
fi
kill $worker; wait $worker
exit $code
"""


def _skypilot(request: Request, recipe: str) -> list[JobFile]:
    """Create a task (https://docs.skypilot.co/en/latest/reference/yaml-spec.html)."""
    hosts = request.hosts
    folder = shlex.quote(str(request.config.output_dir))
    accelerators = {"accelerators": f"{request.accelerator}:{hosts.gpus}"} if hosts.gpus else {}
    task = {
        "name": request.name,
        "num_nodes": hosts.count,
        "resources": {
            "cpus": f"{hosts.cpus}+",
            "memory": f"{hosts.memory_gb}+",
            **accelerators,
            "image_id": f"docker:{request.image}",
        },
        **({"secrets": dict.fromkeys(request.secrets)} if request.secrets else {}),
        "workdir": ".",
        "run": _Block(_RUN.format(port=request.port, recipe=RECIPE, name=request.name, folder=folder)),
    }
    head = (
        "# A recipe on every node of one cluster: a worker on each, the run on the first. output_dir and\n"
        "# model.cache_dir must be on storage that all nodes mount (file_mounts).\n"
    )
    submit = f"sky launch -c {request.name} job.sky.yaml{request.sky_secrets}"
    return [JobFile("job.sky.yaml", head + _yaml(task), submit)]


class _Block(str):
    """A text that YAML writes as a literal block."""


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


_Dumper.add_representer(_Block, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|"))


def write_files(folder: Path, files: list[JobFile]) -> None:
    """Write the files, replacing existing ones."""
    from forge_env.files import write_whole

    folder.mkdir(parents=True, exist_ok=True)
    for file in files:
        write_whole(folder / file.name, file.text)
