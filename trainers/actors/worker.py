"""What `forge-env worker` starts: Monarch, waiting for controllers."""

from __future__ import annotations

import os
import socket

from forge_env.job.addresses import Address


def start_worker(address: Address) -> str:
    """Let Monarch listen at an address of this machine, a number; what it starts listens on no network.

    Returns:
        By what others attach to it. No two lives of a worker have the same id or port: Monarch would take the second
        for the first, and other hosts would go on to talk to the first, for ever.
    """
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    with socket.create_server((address.plain_host, 0), family=family) as free:
        address = address._replace(port=free.getsockname()[1])
    os.environ["HYPERACTOR_MESH_DEFAULT_TRANSPORT"] = str(address._replace(port=0))
    from monarch.actor import start_worker_loop_forever
    from monarch.job import new_service_proc_id, service_proc_addr

    from trainers.actors.sockets import keep_private

    keep_private()

    attached_by: str = service_proc_addr(str(address), new_service_proc_id())
    start_worker_loop_forever(ca="trust_all_connections", address=attached_by)
    return attached_by
