"""`python -m runner CONFIG`, inside a container or under the embedded engine's launcher."""

from __future__ import annotations

import os
import signal
import socket
import sys

from . import kernel, zygote
from .config import RunnerConfig
from .supervisor import Supervisor


def main(argument: str) -> None:
    """Run until the engine hangs up."""
    config = RunnerConfig.loads(argument)
    sys.dont_write_bytecode = True
    if config.connect:
        engine = socket.socket(socket.AF_UNIX)
        engine.connect(config.connect)
    else:
        kernel.die_with_parent()
        engine = socket.socket(fileno=config.control_fd)
    engine.set_inheritable(False)
    if config.proxy_port:
        with socket.create_server(("127.0.0.1", config.proxy_port)) as listener:
            socket.send_fds(engine, [b"\0"], [listener.fileno()])  # the engine accepts what programs connect
    kernel.forbid_new_privileges()
    zygotes = zygote.start(config, close=[engine.fileno()])
    kernel.drop_capabilities()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # orphans that no zygote adopts are reaped at once
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    Supervisor(engine, zygotes, config.memory_mb).run()


main(sys.argv[1])
