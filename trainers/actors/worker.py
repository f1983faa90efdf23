"""The Monarch worker that `forge-env worker` runs: it waits for controllers to attach."""

from __future__ import annotations

import os
import socket

from forge_env.job.addresses import Address


def start_worker(address: Address) -> str:
    """Start Monarch's worker loop, listening at a numeric address of this machine.

    The processes that it starts don't listen on any network.

    Returns:
        The address that controllers attach to. Each start uses a new id and port: otherwise Monarch would mistake a
        restarted worker for the earlier one, and other hosts would keep sending to that forever.
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
