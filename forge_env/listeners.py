"""List of all sockets on which forge-env's processes listen, with address, access and protection.

`forge-env doctor --listeners` prints the list, and docs/security.md contains it. Tests compare it with the sockets that
the kernel reports while the commands run.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

FOLDER = r"unix:\S*/"
"""Prefix of patterns for Unix sockets in a folder."""
LOOPBACK = r"tcp:127\.0\.0\.1:\d+"
OWN_USER = "this user"
NO_ONE = "no one"
COLUMNS = ("commands", "what listens", "address", "who can connect", "protection")


@dataclass(frozen=True, slots=True)
class Listener:
    """One kind of listening socket.

    Attributes:
        purpose: the listening component, and when it listens.
        protection: mechanism that keeps others out.
        pattern: regular expression for `unix:PATH` or `tcp:HOST:PORT`.
    """

    commands: Sequence[str]
    purpose: str
    address: str
    access: str
    protection: str
    pattern: str

    @property
    def refuses_others(self) -> bool:
        """Whether other users of this machine can't connect."""
        return self.access in (OWN_USER, NO_ONE)

    @property
    def cells(self) -> tuple[str, ...]:
        """Table row with the columns `COLUMNS`."""
        return ", ".join(self.commands), self.purpose, self.address, self.access, self.protection


PRIVATE = "the folder's permissions (0700)"
NETWORK = "none: use a private network, or tls:// addresses"
ON_HOSTS = r"(tcp):\S+:\d+"
LISTENERS = (
    Listener(
        ("train", "worker"),
        "Monarch: the controller, each worker of several hosts",
        "a path in the process's temporary folder",
        OWN_USER,
        PRIVATE,
        FOLDER + r"forge-env-(run|sockets)-\w+/\w{24}",
    ),
    Listener(
        ("train", "worker"),
        "Monarch: each process of an actor, spare ones too",
        "a path in a folder that Monarch makes in the run's temporary folder",
        OWN_USER,
        PRIVATE,
        FOLDER + r"\.tmp\w{6}/\w{1,11}",
    ),
    Listener(
        ("train",),
        "torch (gloo): each group of processes of a trainer, reference or generator",
        "TCP on 127.0.0.1; for one actor on several hosts, the host's address",
        NO_ONE,
        "a socket filter drops connections once the group is complete; while it forms (milliseconds), none",
        LOOPBACK,
    ),
    Listener(
        ("train",),
        "vLLM's own processes (`generator.engine=async_llm`)",
        "a path in the run's temporary folder",
        OWN_USER,
        PRIVATE,
        FOLDER + r"forge-env-run-\w+/[0-9a-f-]{36}",
    ),
    Listener(
        ("train",),
        "NCCL on GPUs (untested)",
        "TCP at the host's address",
        "every user of this machine, and of machines that can connect",
        "none of forge-env's; NCCL compares a random number",
        ON_HOSTS,
    ),
    Listener(
        ("train --job.kind hosts",),
        "Monarch: the controller",
        "TCP at the address from which the workers are reached (`job.address`)",
        "tls://: clients with a certificate of your authority; tcp://: everyone who can connect, who can then run code",
        f"tls://: certificates on both sides; tcp://: {NETWORK}",
        ON_HOSTS,
    ),
    Listener(
        ("worker",),
        "questions about the host; Monarch (a separate port)",
        "TCP at the address that you name",
        "tls://: clients with a certificate of your authority; tcp://: everyone who can connect, who can then run code",
        f"tls://: certificates on both sides; tcp://: {NETWORK}",
        ON_HOSTS,
    ),
    Listener(
        ("worker",),
        "weights, in each process of the trainer",
        "TCP at the worker's address",
        "everyone who can connect; only the run's processes are answered",
        "a secret of 16 random bytes, and with tls:// certificates",
        ON_HOSTS,
    ),
    Listener(
        ("worker",),
        "torch: ranks of one actor on several hosts find each other",
        "TCP at the host's address",
        "everyone who can connect",
        "none: use a private network",
        ON_HOSTS,
    ),
    Listener(
        ("train", "eval", "validate"),
        "the gateway: the model for programs (`ProgramEnvironment`)",
        "TCP on 127.0.0.1",
        "every user of this machine; only running episodes are answered",
        "a key of 24 random bytes for each episode",
        LOOPBACK,
    ),
    Listener(
        ("eval --model vllm:...",),
        "vLLM's server and its processes",
        "paths in a temporary folder",
        OWN_USER,
        PRIVATE,
        FOLDER + r"forge-env-vllm-\w+/\S+",
    ),
    Listener(
        ("eval --model vllm:...",),
        "torch (gloo) in vLLM's processes",
        "TCP on 127.0.0.1",
        "every user of this machine",
        "none of forge-env's; each group is complete before the first request (untested as another user)",
        LOOPBACK,
    ),
    Listener(
        ("train", "eval", "validate", "serve", "sandbox"),
        "a sandbox of the Docker engine, until its runner has connected",
        "a path in a temporary folder",
        OWN_USER,
        f"{PRIVATE}; the container has the folder below it",
        FOLDER + r"forge-env-[\w-]+/c/s",
    ),
    Listener(
        ("train", "eval", "validate", "serve", "sandbox"),
        "the proxy of a sandbox with `allow`",
        "TCP on 127.0.0.1 of the sandbox's own network namespace",
        "programs of this sandbox",
        "the network namespace; the proxy forwards to allowed hosts only",
        r"sandbox:127\.0\.0\.1:\d+",
    ),
    Listener(
        ("train with `logging.loggers: [prometheus]`",),
        "the newest metrics, for reading",
        "TCP on 127.0.0.1:9464, or $FORGE_ENV_METRICS",
        "every user of this machine, or of the network of that address",
        "none: metrics have names and numbers only",
        r"tcp:\S+:\d+",
    ),
    Listener(
        ("view",),
        "pages of runs",
        "TCP on 127.0.0.1",
        "every user of this machine; only this user's browsers with the token are answered",
        "the user of the connection; a token in the address, new at every start",
        LOOPBACK,
    ),
    Listener(
        ("serve",),
        "environments for other programs",
        "TCP on 127.0.0.1, or --host",
        "every user of this machine, or of the network of --host",
        "none: a proxy with a password in front of it; pages of other sites are refused",
        r"tcp:\S+:\d+",
    ),
)


def matching(kind: str, address: str, command: str) -> list[Listener]:
    """Find the entries that describe a socket."""
    text = f"{kind}:{address}"
    return [each for each in LISTENERS if command in each.commands and re.fullmatch(each.pattern, text)]


def text() -> str:
    """Format the list for a terminal."""
    blocks = []
    for each in LISTENERS:
        commands, *values = each.cells
        purpose, *rest = values
        lines = [f"  {name:<16} {value}" for name, value in zip(COLUMNS[2:], rest, strict=True)]
        blocks.append("\n".join([f"{purpose} [{commands}]", *lines]))
    return "\n\n".join(blocks)
