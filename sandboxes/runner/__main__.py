"""`python -m _forge_env_runner CONFIG`, run inside a container or by the embedded engine's launcher."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Sequence

from . import kernel, zygote
from .config import RunnerConfig
from .supervisor import Supervisor
from .wire import StandardStreams


def main(argument: str) -> None:
    """Run until the engine closes the channel."""
    config = RunnerConfig.loads(argument)
    sys.dont_write_bytecode = True
    # Otherwise `/lib` and `/work` would be importable packages.
    sys.path[:] = [folder for folder in sys.path if folder != os.getcwd()]
    if not config.connect and config.control_fd < 0:
        serve(config, streams := StandardStreams(), streams.descriptors)
        return
    if config.connect:
        engine = socket.socket(socket.AF_UNIX)
        engine.connect(config.connect)
    else:
        kernel.die_with_parent()
        engine = socket.socket(fileno=config.control_fd)
    engine.set_inheritable(False)
    if config.proxy_port:
        with socket.create_server(("127.0.0.1", config.proxy_port)) as listener:
            socket.send_fds(engine, [b"\0"], [listener.fileno()])  # the engine accepts the connections of programs
    serve(config, engine, [engine.fileno()])


def serve(config: RunnerConfig, engine: socket.socket | StandardStreams, descriptors: Sequence[int]) -> None:
    """Serve the engine's requests. `descriptors` are the channel's, which zygotes must close."""
    kernel.forbid_new_privileges()
    zygotes = zygote.start(config, close=descriptors)
    kernel.drop_capabilities()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # reaps orphans at once that no zygote adopts
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    Supervisor(engine, zygotes, config.memory_mb).run()


main(sys.argv[1])
