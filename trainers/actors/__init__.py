"""Actors, services and processes; the only package besides `trainers.compat` that imports Monarch."""

from __future__ import annotations

import os

from trainers.actors.sockets import own_log_folder

MONARCH = {
    "HYPERACTOR_CODEC_MAX_FRAME_LENGTH": str(64 * 1024**3),
    "HYPERACTOR_MESH_ENABLE_LOG_FORWARDING": "false",
    "HYPERACTOR_MESH_SUPERVISION_POLL_FREQUENCY": "500ms",  # time until a death is noticed; default 10 s
    "HYPERACTOR_MESH_GET_ACTOR_STATE_MAX_IDLE": "10s",  # time until a hanging process is noticed; default 30 s
    "HYPERACTOR_MESH_GET_PROC_STATE_MAX_IDLE": "10s",
    "HYPERACTOR_MESH_PROC_SPAWN_MAX_IDLE": "2m",  # the default of 30 s is too short on a busy machine
    "HYPERACTOR_MESH_ACTOR_SPAWN_MAX_IDLE": "2m",
    # Monarch ends a process whose owner was last heard of this long ago by the wall clock, which may jump. The
    # kernel and `trainers.actors.lease` end processes whose owner is gone.
    "HYPERACTOR_MESH_ORPHAN_TIMEOUT": "3650d",
}
"""Environment variables that Monarch reads at import, here and in the processes that it starts."""

for name, value in MONARCH.items():
    os.environ.setdefault(name, value)
own_log_folder()
