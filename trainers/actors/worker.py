"""What `forge-env worker` starts: Monarch, waiting for controllers."""

from __future__ import annotations

import os
import socket

from forge_env.errors import ForgeError
from forge_env.job.addresses import Address


def start_worker(address: Address) -> str:
    """Let Monarch listen at an address of this machine, a number; what it starts listens on no network.

    Returns:
        By what controllers attach to it. No two lives of a worker have the same: Monarch would take the second for
        the first.

    Raises:
        ForgeError: the port is taken.
    """
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    try:
        socket.create_server((address.plain_host, address.port), family=family).close()
    except OSError as error:
        raise ForgeError(f"can't listen at {address}: {error.strerror}", fix="choose another port") from error
    os.environ["HYPERACTOR_MESH_DEFAULT_TRANSPORT"] = str(address._replace(port=0))
    from monarch.actor import start_worker_loop_forever
    from monarch.job import new_service_proc_id, service_proc_addr

    attached_by: str = service_proc_addr(str(address), new_service_proc_id())
    start_worker_loop_forever(ca="trust_all_connections", address=attached_by)
    return attached_by
