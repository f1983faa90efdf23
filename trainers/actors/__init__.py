"""The only room that knows Monarch: actors, services, processes."""

from __future__ import annotations

import os

from trainers.actors.sockets import own_log_folder

MONARCH = {
    "HYPERACTOR_CODEC_MAX_FRAME_LENGTH": str(64 * 1024**3),
    "HYPERACTOR_MESH_ENABLE_LOG_FORWARDING": "false",
    "HYPERACTOR_MESH_SUPERVISION_POLL_FREQUENCY": "500ms",  # how soon a death is noticed: 10 s if not set
    "HYPERACTOR_MESH_GET_ACTOR_STATE_MAX_IDLE": "10s",  # and a process that does not answer: 30 s if not set
    "HYPERACTOR_MESH_GET_PROC_STATE_MAX_IDLE": "10s",
    "HYPERACTOR_MESH_PROC_SPAWN_MAX_IDLE": "2m",  # on a machine that is busy with other things, 30 s are too few
    "HYPERACTOR_MESH_ACTOR_SPAWN_MAX_IDLE": "2m",
}
"""What Monarch reads when it is imported, here and in the processes that it starts."""

for name, value in MONARCH.items():
    os.environ.setdefault(name, value)
own_log_folder()
