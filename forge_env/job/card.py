"""Cards: a worker's description of its host. A worker answers a question with one card, each a line of JSON.

That takes milliseconds and does not need Monarch, so problems of a host are reported before anything starts. The card
also contains the name under which Monarch knows the worker. It changes whenever the worker restarts, since Monarch
treats a host that came back as the one that was lost.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import platform
import socket
import ssl
import sys
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager, closing, suppress
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import forge_env
from forge_env import machine
from forge_env.concurrency import gather_or_cancel
from forge_env.errors import ForgeError
from forge_env.job.addresses import Address

ANSWER_S = 10.0
"""Seconds that a worker may take to answer."""
LOOK_S = 0.5
"""Seconds between attempts to reach a worker that has not started yet."""
_IDLE = socket.TCP_KEEPIDLE if sys.platform == "linux" else getattr(socket, "TCP_KEEPALIVE", 0x10)
ALIVE = {
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE): 1,
    (socket.IPPROTO_TCP, _IDLE): 4,
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL): 2,
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT): 3,
}
"""Socket options: the kernels probe the connection every few seconds, and it breaks after ten without an answer."""
MOST = 1 << 20
"""Maximum bytes of a question or an answer."""
TLS = {"cert": "HYPERACTOR_TLS_CERT", "key": "HYPERACTOR_TLS_KEY", "ca": "HYPERACTOR_TLS_CA"}
"""Environment variables that name the files; they are Monarch's."""
logger = logging.getLogger(__name__)


class NoWorkerError(ForgeError):
    """Nothing answers at the address of a worker."""


@dataclass(frozen=True, slots=True)
class Question:
    """Optional contents of a card.

    Attributes:
        modules: top-level modules, whose code is compared.
        packages: installed packages, whose versions are compared.
        files: paths, whose contents are compared.
        data: files and folders, whose sizes are compared.
        sandbox: a sandbox engine and its options, to be tried.
        gpus: whether to look for GPUs, which starts a program.
    """

    modules: list[str] = field(default_factory=list)
    packages: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    data: list[str] = field(default_factory=list)
    sandbox: tuple[str, dict[str, Any]] | None = None
    gpus: bool = True


@dataclass(frozen=True, slots=True)
class Card:
    """A worker's description of its host.

    Attributes:
        monarch: the address that Monarch attaches to; changes whenever the worker restarts.
        gpus: ids of GPUs that no run has claimed.
        modules: digest of the code of each requested module; None: it is missing.
        packages: version of each requested package; None: it is missing.
        files: digest of each requested file; None: it is missing.
        data: bytes of each requested file or folder; None: it is missing.
        engine: the sandbox engine chosen for `sandbox`.
        no_engine: why there is none.
        busy_s: busy time since the machine was booted, in seconds summed over all processors.
        at_s: time of that measurement, in seconds of the host's monotonic clock.
    """

    forge_env: str
    monarch: str
    host: str
    python: str
    python_version: str
    cpus: int
    free_memory_gb: float
    gpus: list[str]
    modules: dict[str, str | None] = field(default_factory=dict)
    packages: dict[str, str | None] = field(default_factory=dict)
    files: dict[str, str | None] = field(default_factory=dict)
    data: dict[str, int | None] = field(default_factory=dict)
    engine: str = ""
    no_engine: str = ""
    busy_s: float = 0.0
    at_s: float = 0.0


def write_card(question: Question, monarch: str = "") -> Card:
    """Describe this host."""
    engine, no_engine = _sandbox(question)
    return Card(
        forge_env=forge_env.__version__,
        monarch=monarch,
        host=os.uname().nodename,
        python=sys.executable,
        python_version=platform.python_version().rpartition(".")[0],  # pickled code differs between versions
        cpus=machine.usable_cpus(),
        free_memory_gb=machine.free_memory_gb(),
        gpus=[gpu.uuid for gpu in machine.unclaimed_gpus()] if question.gpus else [],
        modules={name: _digest_of_module(name) for name in question.modules},
        packages={name: _version(name) for name in question.packages},
        files={name: _digest([Path(name)], Path(name).parent) for name in question.files},
        data={name: _size(Path(name)) for name in question.data},
        engine=engine,
        no_engine=no_engine,
        busy_s=machine.busy_cpu_s(),
        at_s=time.monotonic(),
    )


def _sandbox(question: Question) -> tuple[str, str]:
    from forge_env.sandbox.engines import open_engine

    if question.sandbox is None:
        return "", ""
    name, options = question.sandbox
    try:
        return open_engine(name, **options).name, ""
    except ForgeError as error:
        return "", error.message


def _version(package: str) -> str | None:
    try:
        return version(package).partition("+")[0]  # the part that CPU and GPU builds share
    except PackageNotFoundError:
        return None


def _digest_of_module(name: str) -> str | None:
    try:
        spec = find_spec(name)
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        return None
    folders = [Path(location) for location in spec.submodule_search_locations or ()]
    if not folders:
        return _digest([Path(spec.origin)], Path(spec.origin).parent) if spec.origin else None
    return _digest(sorted(folders[0].rglob("*.py")), folders[0])


def _digest(paths: Iterable[Path], root: Path) -> str | None:
    digest = blake2b(digest_size=8)
    try:
        for path in paths:
            digest.update(f"{path.relative_to(root)}\n".encode())
            digest.update(path.read_bytes())
    except OSError:
        return None
    return digest.hexdigest()


def _size(path: Path) -> int | None:
    try:
        return sum(file.stat().st_size for file in (path.rglob("*") if path.is_dir() else [path]) if not file.is_dir())
    except OSError:
        return None


# ---
# Question and answer.


def tls_context(address: Address, *, serving: bool) -> ssl.SSLContext | None:
    """Create a TLS context in which both sides show a certificate signed by the authority; None for a plain address."""
    if address.scheme != "tls":
        return None
    files = {what: os.environ.get(variable) for what, variable in TLS.items()}
    if missing := [TLS[what] for what, path in files.items() if not path]:
        raise ForgeError(
            f"{address}: {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set",
            fix="set them to this host's certificate, its key, and the authority's certificate (docs/hosts.md)",
        )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if serving else ssl.PROTOCOL_TLS_CLIENT)
    try:
        context.load_cert_chain(str(files["cert"]), str(files["key"]))
        context.load_verify_locations(str(files["ca"]))
    except (OSError, ssl.SSLError) as error:
        raise ForgeError(
            f"{address}: the certificate can't be used: {error}", fix=f"check {', '.join(files)}"
        ) from error
    context.verify_mode = ssl.CERT_REQUIRED
    return context


def listen(address: Address) -> socket.socket:
    """Open a socket that listens at a numeric address of this machine."""
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    try:
        return socket.create_server((address.plain_host, address.port), family=family)
    except OSError as error:
        raise ForgeError(
            f"can't listen at {address}: {_why(error)}", fix="use an address of this machine, and a port that is free"
        ) from error


async def serve_cards(address: Address, monarch: str) -> asyncio.Server:
    """Start a server that answers questions at a worker's address."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with closing(writer):
            try:
                async with asyncio.timeout(ANSWER_S):
                    question = Question(**json.loads(await reader.readline()))
            except (OSError, ValueError, TypeError, RecursionError):  # not a question of forge-env
                return
            writer.write(json.dumps(await asyncio.to_thread(_told, question, monarch)).encode() + b"\n")
            with suppress(OSError):  # the client is gone
                await writer.drain()
                while await reader.read(MOST):  # clients may keep the connection open to notice this worker's end
                    pass

    context = tls_context(address, serving=True)
    return await asyncio.start_server(answer, sock=listen(address), limit=MOST, ssl=context)


def _told(question: Question, monarch: str) -> dict[str, Any]:
    """Return the card of this host, or the error with which writing it failed."""
    try:
        return asdict(write_card(question, monarch))
    except Exception as error:  # any fault of this host is reported to the client
        logger.exception("this host could not be described")
        return {"forge_env": forge_env.__version__, "fault": f"{type(error).__name__}: {error}"}


async def ask(address: Address, question: Question | None = None, *, patience_s: float = 0.0) -> Card:
    """Ask a worker for its card.

    Args:
        patience_s: seconds to wait for the worker to start.

    Raises:
        NoWorkerError: nothing answers there.
        ForgeError: it is of another version, or can't describe its host.
    """
    loop = asyncio.get_running_loop()
    until = loop.time() + patience_s
    while True:
        try:
            async with _asked(address, question or Question()) as (card, _):
                break
        except (OSError, ValueError) as error:
            if loop.time() >= until:
                raise NoWorkerError(
                    f"no worker answers at {address}: {_why(error)}", fix=f"start `forge-env worker {address}` there"
                ) from error
        await asyncio.sleep(LOOK_S)  # nothing announces that a worker has started
    if card.get("forge_env") != forge_env.__version__:
        raise ForgeError(
            f"the worker at {address} runs forge-env {card.get('forge_env')}, this machine has {forge_env.__version__}",
            fix="install the same version on all hosts",
        )
    if "fault" in card:
        raise ForgeError(
            f"the worker at {address} can't describe its host: {card['fault']}",
            fix="fix it there; the worker's output has the traceback",
        )
    return Card(**card)


@asynccontextmanager
async def _asked(address: Address, question: Question) -> AsyncIterator[tuple[dict[str, Any], asyncio.StreamReader]]:
    """Connect to a worker, and yield its answer and the open connection, which carries nothing more but its end."""
    async with AsyncExitStack() as stack:
        async with asyncio.timeout(ANSWER_S):
            context = tls_context(address, serving=False)
            reader, writer = await asyncio.open_connection(address.plain_host, address.port, limit=MOST, ssl=context)
            stack.callback(writer.close)
            for option, value in ALIVE.items():
                writer.get_extra_info("socket").setsockopt(*option, value)
            writer.write(json.dumps(asdict(question)).encode() + b"\n")
            answer: dict[str, Any] = json.loads(await reader.readline())
        yield answer, reader


async def until_lost(address: Address) -> None:
    """Wait until a worker has ended (noticed at once), or until its machine has not been reachable for ten seconds."""
    with suppress(OSError, ValueError):
        async with _asked(address, Question()) as (_, reader):
            await reader.read()


def _why(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return f"no answer within {ANSWER_S:g} s"
    if isinstance(error, json.JSONDecodeError):
        return "something else listens there"
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is refused: {error.verify_message}"
    number = error.errno if isinstance(error, OSError) and not isinstance(error, ssl.SSLError) else None
    return os.strerror(number).lower() if number and number > 0 else str(error)


async def ask_all(addresses: list[Address], question: Question, *, patience_s: float = 0.0) -> list[Card]:
    """Ask workers for their cards, in order.

    Raises:
        NoWorkerError: nothing answers at some addresses; lists all of them.
    """

    async def card(address: Address) -> Card | NoWorkerError:
        try:
            return await ask(address, question, patience_s=patience_s)
        except NoWorkerError as error:
            return error

    answers = await gather_or_cancel([card(address) for address in addresses])
    match [each for each in answers if isinstance(each, NoWorkerError)]:
        case [error]:
            raise error
        case [_, *_] as errors:
            message = "; ".join(error.message for error in errors)
            raise NoWorkerError(message, fix="start `forge-env worker ADDRESS` on each of them")
    return [each for each in answers if isinstance(each, Card)]
