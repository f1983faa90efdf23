"""GPUs of ranks and threads, with torch's CUDA calls replaced by ones that keep the current device per thread."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

torch = pytest.importorskip("torch")

from trainers.actors import ranks  # noqa: E402

pytestmark = pytest.mark.stack


@pytest.fixture(autouse=True)
def devices(monkeypatch: pytest.MonkeyPatch) -> None:
    current = threading.local()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: setattr(current, "device", index))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: getattr(current, "device", 0))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda *args, **kwargs: None)


@pytest.mark.parametrize(("rank", "device"), [(0, 0), (1, 1), (3, 1)])
async def test_every_thread_of_a_rank_computes_on_its_gpu(rank: int, device: int) -> None:
    ranks.join(None, rank, 4, with_gpus=True)
    assert torch.cuda.current_device() == device
    barrier = threading.Barrier(2)  # both calls run at the same time, so in different threads

    def compute() -> int:
        barrier.wait(timeout=30)
        return int(torch.cuda.current_device())

    assert set(await asyncio.gather(asyncio.to_thread(compute), asyncio.to_thread(compute))) == {device}
    with ThreadPoolExecutor(1, initializer=ranks.on_this_gpu()) as thread:
        assert thread.submit(torch.cuda.current_device).result() == device


async def test_a_rank_whose_gpus_cannot_be_used_reports_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_old() -> None:
        raise RuntimeError("the driver is too old")

    monkeypatch.setattr(torch.cuda, "init", too_old)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(RuntimeError, match="the driver is too old"):
        ranks.join(None, 0, 2, with_gpus=True)


def test_without_a_gpu_threads_need_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert ranks.on_this_gpu() is None
