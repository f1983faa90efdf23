"""Addresses of a run's workers. The kinds of job differ only in how this list is filled."""

from __future__ import annotations

import os
import re
import socket
import subprocess
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from forge_env.errors import ForgeError, UsageError
from forge_env.machine import WORKER_ADDRESS

if TYPE_CHECKING:
    from forge_env.config.recipe import JobSection


class Address(NamedTuple):
    """The address of a worker: `scheme://host:port`."""

    scheme: str
    host: str
    port: int

    @classmethod
    def of(cls, text: str) -> Address:
        """Parse an address."""
        match = WORKER_ADDRESS.fullmatch(text)
        if match is None or not 0 < int(match["port"]) < 2**16:
            raise UsageError(
                f"{text!r} is not the address of a worker", fix="write tcp://HOST:PORT, or tls://HOST:PORT"
            )
        return cls(match["scheme"], match["host"], int(match["port"]))

    @property
    def plain_host(self) -> str:
        """The host as sockets expect it: an IPv6 address without its brackets."""
        return self.host.strip("[]")

    def __str__(self) -> str:
        return f"{self.scheme}://{self.host}:{self.port}"


class Platform(NamedTuple):
    """A system that starts a run's hosts and lists them in an environment variable.

    Attributes:
        variable: environment variable that is set inside a job.
        where: description of the places where it is set, for messages.
        nodes: parses the variable's value into host names or addresses.
    """

    variable: str
    where: str
    nodes: Callable[[str], list[str]]

    @property
    def told(self) -> str:
        """The variable's value; empty outside of a job."""
        return os.environ.get(self.variable, "").strip()


def _slurm(nodes: str) -> list[str]:
    try:
        listed = subprocess.run(
            ["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, timeout=30, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise ForgeError(
            f"`scontrol show hostnames {nodes}` failed: {error}", fix="run this where Slurm's commands are installed"
        ) from error
    return listed.stdout.split()


PLATFORMS = {
    "slurm": Platform("SLURM_JOB_NODELIST", "inside an allocation (sbatch or salloc)", _slurm),
    "kubernetes": Platform(
        "FORGE_ENV_WORKERS", "in a pod whose manifest sets it to the workers' DNS names", partial(re.split, r"[\s,]+")
    ),
    "skypilot": Platform("SKYPILOT_NODE_IPS", "in the `run` section of a SkyPilot task", str.split),
}


def worker_addresses(section: JobSection) -> list[Address]:
    """List the workers of a run, by number; empty if it runs on this machine alone."""
    platform = PLATFORMS.get(section.kind)
    if section.workers or platform is None:
        return [Address.of(text) for text in section.workers]
    if not platform.told:
        raise UsageError(
            f"{platform.variable} is not set",
            fix=f"run this {platform.where} (`forge-env job FILE --write` creates the files), or list the "
            "workers in job.workers",
        )
    return [Address("tcp", node, section.port) for node in platform.nodes(platform.told)]


def own_address(section: JobSection, workers: list[Address]) -> str:
    """Return the address at which the workers reach this machine: the local end of a route to the first worker."""
    if section.address is not None:
        return section.address
    first = workers[0]
    try:
        [(family, kind, protocol, _, endpoint), *_] = socket.getaddrinfo(
            first.plain_host, first.port, type=socket.SOCK_DGRAM
        )
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(endpoint)  # sends nothing
            address: str = probe.getsockname()[0]
    except OSError as error:
        raise ForgeError(f"{first} can't be reached: {error.strerror or error}", fix="check the address") from error
    return f"[{address}]" if ":" in address else address
