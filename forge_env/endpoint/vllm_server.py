"""A private vLLM server for one checkpoint: start it, wait until it is ready, and stop it reliably."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Self

from forge_env.config.finding import checkpoint_folder, fix_of_folder
from forge_env.endpoint import vllm_warden
from forge_env.endpoint.chat_format import ChatFormat
from forge_env.endpoint.errors import EndpointError
from forge_env.endpoint.http import Connections
from forge_env.errors import GeneratorError, UsageError
from forge_env.files import parent_of_sockets
from forge_env.machine import free_memory_gb, needs_linux, training_extra, usable_cpus, user_path
from forge_env.models import MODELS

ERROR = re.compile(r"(?:^|\s)((?:[\w.]+\.)?[A-Z]\w*(?:Error|Exception)\b: .*)")
"""A line of a traceback that names an exception, whatever process and logger it is from."""
CONSEQUENCES = ("RuntimeError: Engine core initialization failed", "RuntimeError: Engine process failed to start")
"""Exceptions that vLLM raises because another process of it has failed."""
ERROR_LINES = 400
CPU_FLAGS: dict[str, list[str]] = {
    "--no-enable-chunked-prefill": [],  # with chunks, vLLM on a CPU fails on requests with a seed
    "--enforce-eager": [],  # compilation takes minutes
    "--distributed-executor-backend": ["uni"],  # no process besides the engine's
    "--max-num-seqs": ["64"],
}
"""Arguments of `vllm serve` on a CPU, as generators of a training run have them."""
CACHE_SHARE, MOST_CACHE_GB = 0.25, 16
"""Share of the free memory, and GiB, that keys and values take at most on a CPU."""
READY_POLL_S = 0.2
"""Seconds between readiness checks; the server has no event to wait for."""
STOP_S = 20.0


class VLLMServer:
    """`vllm serve` on a Unix socket in a private folder: no port to choose, and no access for other users."""

    base_url = "http://localhost/v1"
    ready_s = 900.0
    """Time limit of the start, in seconds."""
    grace_s = 15.0
    """Seconds that the server may take to end when this process is killed."""

    def __init__(self, model: str, log: Path, args: Sequence[str] = ()) -> None:
        if reason := needs_linux("serving a model with vLLM"):
            raise UsageError(reason, fix="serve it on another machine, and give --base-url")
        self.model = check_checkpoint(model)
        self.name = model.rstrip("/").rpartition("/")[2]
        """Name under which the server serves the model."""
        self.format = ChatFormat.of(self.model)
        self._log = log
        self._args = list(args)
        self._process: asyncio.subprocess.Process | None = None

    async def __aenter__(self) -> Self:
        self._folder = tempfile.mkdtemp(prefix="forge-env-vllm-", dir=parent_of_sockets())
        self.uds = f"{self._folder}/socket"
        try:
            with self._log.open("ab") as log:
                warden = [sys.executable, "-I", vllm_warden.__file__, str(self.grace_s), self._folder]
                self._process = await asyncio.create_subprocess_exec(
                    *warden,
                    *self._command(),
                    stdin=asyncio.subprocess.PIPE,  # closed when this process ends; the warden then stops the server
                    stdout=log,
                    stderr=log,
                    start_new_session=True,  # keep Ctrl-C from the server: running samples still need it
                    env=self._environment(),
                )
            async with asyncio.timeout(self.ready_s):
                await self._ready(self._process)
        except TimeoutError:
            await self._stop()
            raise GeneratorError(f"vLLM did not start within {self.ready_s:g} s", fix=f"see {self._log}") from None
        except BaseException:  # also if cancelled: no server may be left running
            await self._stop()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stop()

    async def ended(self) -> GeneratorError:
        """Wait until the server ends by itself; return the error to report."""
        assert self._process is not None
        status = await self._process.wait()
        how = f"exit code {status}"
        if status - vllm_warden.KILLED in set(signal.Signals):
            how += f" (killed by {signal.Signals(status - vllm_warden.KILLED).name})"
        text = f"vLLM ended during the run with {how}: {self._last_words()}"
        return GeneratorError(text, fix=f"see {self._log} for the cause; --resume plays the missing samples")

    def _environment(self) -> dict[str, str]:
        on_cpu = training_extra() == "train-cpu"
        return {
            "VLLM_NO_USAGE_STATS": "1",
            "GLOO_SOCKET_IFNAME": "lo",  # otherwise torch listens on the host name's network
            "VLLM_RPC_BASE_PATH": self._folder,  # its processes leave their sockets behind
            "VLLM_USE_FLASHINFER_SAMPLER": "0",  # compiled at the first start, and ignores requests' seeds
            **(_cpu_environment() if on_cpu else {}),
            **os.environ,
            "VLLM_API_KEY": "",  # the socket's folder admits this user only; samples send no key
        }

    def _command(self) -> list[str]:
        # the longest context whose keys and values fit into memory
        defaults = {"--served-model-name": [self.name], "--max-model-len": ["auto"], **self.format.vllm_flags()}
        if training_extra() == "train-cpu":
            defaults |= CPU_FLAGS
            if not fast_in_bfloat16():
                defaults["--dtype"] = ["float32"]
        else:
            # FlashInfer's kernel for gated delta layers is compiled at the first request
            defaults["--gdn-prefill-backend"] = ["triton"]
        overridden = {argument.partition("=")[0] for argument in self._args}
        chosen = [item for flag, values in defaults.items() if flag not in overridden for item in (flag, *values)]
        # the `vllm` command requires a distribution named vllm; CPU builds have another name
        serve = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", self.model, "--uds", self.uds]
        return [*serve, *chosen, *self._args]

    async def _ready(self, process: asyncio.subprocess.Process) -> None:
        connections = Connections(self.base_url, uds=self.uds)
        ended = asyncio.ensure_future(process.wait())
        try:
            while not ended.done():
                try:
                    await connections.exchange("GET", "models", timeout_s=10.0)
                except EndpointError:
                    await asyncio.wait([ended], timeout=READY_POLL_S)
                else:
                    return
            raise GeneratorError(f"vLLM ended while starting: {self._last_words()}", fix=f"see {self._log}")
        finally:
            ended.cancel()
            await connections.close()

    def _last_words(self) -> str:
        lines = [line.strip() for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        errors = [match[1] for line in lines[-ERROR_LINES:] if (match := ERROR.search(line))]
        causes = [error for error in errors if not error.startswith(CONSEQUENCES)]
        return (causes or errors or lines or ["no output"])[-1][:300]

    async def _stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            import psutil

            helpers: list[psutil.Process] = []
            with suppress(psutil.NoSuchProcess):
                helpers = psutil.Process(process.pid).children(recursive=True)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            with suppress(TimeoutError):
                async with asyncio.timeout(STOP_S):
                    await process.wait()
                    # its helpers unlink their shared memory just before they exit, multiprocessing's tracker last
                    await asyncio.to_thread(psutil.wait_procs, helpers, STOP_S)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # kill the remaining processes of its group
            await process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


def _cpu_environment() -> dict[str, str]:
    """Environment variables of a server on a CPU."""
    cache_gb = max(1, min(MOST_CACHE_GB, int(CACHE_SHARE * free_memory_gb())))
    return {
        "VLLM_CPU_KVCACHE_SPACE": str(cache_gb),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # otherwise vLLM replaces the executor `uni` by another process
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # other programs may use the same processors
        "OMP_NUM_THREADS": str(usable_cpus()),
        "GOMP_SPINCOUNT": "1000",  # waiting threads spin briefly (docs/decisions/cpu-threads.md)
        "TORCHDYNAMO_DISABLE": "1",  # compiling sampling helpers takes seconds and gains nothing
    }


def fast_in_bfloat16() -> bool:
    """Whether this machine's processor has instructions for matrix products in bfloat16; others are slower in it."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace")
    except OSError:
        return False
    return not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(text.split())


def check_checkpoint(model: str) -> str:
    """Return the model that vLLM should load: a folder, or a name on the hub, which only vLLM can look up.

    Args:
        model: as `model.path` of a recipe: a folder, a bundled or fetched model, or a name on the hub.

    Raises:
        UsageError: vLLM is not installed, or there is no such checkpoint folder.
    """
    if find_spec("vllm") is None:
        raise UsageError("vLLM is not installed", fix="install the training packages: make setup (docs/install.md)")
    if not model:
        raise UsageError("--model vllm: does not name a checkpoint", fix="write --model vllm:PATH")
    folder = checkpoint_folder(model) or user_path(model)
    if folder.exists() and not (folder / "config.json").is_file():
        fix = fix_of_folder(folder, "vllm:") or "give a Hugging Face checkpoint folder; `forge-env export` makes one"
        raise UsageError(f"{model} is not a model folder: there is no config.json in it", fix=fix)
    if not folder.exists() and (model.startswith(("/", ".", "~")) or model.count("/") != 1):
        fetch = f"run `forge-env model get {model}`" if model in MODELS else "check the path, or give a name on the hub"
        raise UsageError(f"there is no checkpoint folder {model}", fix=fetch)
    return str(folder) if folder.exists() else model
