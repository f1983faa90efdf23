"""torch's groups on gloo: nobody connects to one that is complete."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

pytest.importorskip("torch")

from tests.listeners import Listener, as_another_user, listeners

pytestmark = [pytest.mark.stack, pytest.mark.slow, pytest.mark.timeout(300)]
RANK = """
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from trainers.actors.gloo import close_complete_groups
from torch.distributed import FileStore

from trainers.actors.ranks import join

rank, size = int(sys.argv[1]), int(sys.argv[2])
join(FileStore(sys.argv[3], size), rank, size, with_gpus=False)
later = dist.new_group(list(range(size)), backend="gloo")
print("ready", flush=True)
input()
for group in (None, later):
    total = torch.tensor([rank + 1.0])
    dist.all_reduce(total, group=group)
    print(total.item(), flush=True)
dist.destroy_process_group()
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_does_not_connect_to_a_complete_group(tmp_path: Path) -> None:
    size = 2
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), str(size), str(tmp_path / "store")],
            env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        for rank in ranks:
            assert rank.stdout.readline() == "ready\n"
        there: set[Listener] = listeners(psutil.Process(rank.pid) for rank in ranks)
        assert len(there) >= 2 * size, "gloo listens as long as a group lives"
        assert set(as_another_user(there).values()) == {"TimeoutError"}
        for rank in ranks:
            rank.stdin.write("\n")
            rank.stdin.flush()
        said = [rank.communicate()[0].split() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert said == [[str(sum(range(size + 1)) + 0.0)] * 2] * size, "the ranks still reach each other"
