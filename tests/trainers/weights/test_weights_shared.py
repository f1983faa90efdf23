"""Tensors in memory that several processes map."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torchstore")

import torch

from tests.trainers.actors.workers import certificates
from trainers.actors.processes import ADDRESS
from trainers.weights import network, shared
from trainers.weights.compat import SharedTransportBuffer
from trainers.weights.flat import Layout
from trainers.weights.store import WeightStore


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def negate(handles: list[shared.Handle]) -> None:
    for handle in handles:
        shared.attach(handle).neg_()


@pytest.mark.slow
def test_another_process_has_the_same_memory() -> None:
    dtypes = [torch.float32, torch.bfloat16, torch.int64]
    tensors = [shared.empty(100, dtype).copy_(torch.arange(100)) for dtype in dtypes]
    handles = [shared.handle(tensor) for tensor in tensors]
    process = multiprocessing.get_context("spawn").Process(target=negate, args=(handles,))
    process.start()
    process.join()
    assert process.exitcode == 0
    assert all(torch.equal(tensor, -torch.arange(100).to(tensor.dtype)) for tensor in tensors)


def test_nothing_is_left() -> None:
    before = descriptors()
    tensor = shared.empty(1000, torch.float32)
    handle = shared.handle(tensor)
    assert handle is not None
    assert handle.source is None  # there are no other hosts
    view = shared.attach(handle)[10:20]
    assert shared.borrowed(shared.attach(handle))
    del tensor
    view.fill_(1.0)  # a view of an attached tensor keeps it mapped
    del view
    gc.collect()
    assert descriptors() == before
    with pytest.raises(FileNotFoundError):
        shared.attach(handle)


def test_a_descriptor_that_is_another_by_now_is_noticed() -> None:
    tensor = shared.empty(8, torch.float32)
    handle = shared.handle(tensor)
    del tensor
    other = shared.empty(8, torch.float32)
    assert handle is not None
    assert shared.handle(other) != handle
    with pytest.raises(FileNotFoundError):
        shared.attach(handle)


def test_only_whole_blocks_have_handles() -> None:
    assert shared.handle(torch.zeros(8)) is None
    assert shared.handle(shared.empty(8, torch.float32)[:4]) is None
    assert shared.handle(shared.empty(0, torch.float32)) is None


@pytest.mark.parametrize("whole", [True, False])
async def test_the_transport_brings_tensors_across(whole: bool) -> None:
    tensor = shared.empty(9, torch.float32).copy_(torch.arange(9.0))
    sent = SharedTransportBuffer()
    await sent.write_from(tensor if whole else tensor[1:])
    message = pickle.dumps(sent)
    received: SharedTransportBuffer = pickle.loads(message)
    got = await received.read_into()
    assert torch.equal(got, tensor if whole else tensor[1:])
    assert got.data_ptr() != tensor.data_ptr()
    assert (shared.handle(got) is None) != whole
    into = torch.zeros(9 if whole else 8)
    assert await received.read_into(into) is into
    assert torch.equal(into, got)
    await sent.drop()
    assert sent.tensor is None


@pytest.fixture(params=["tcp", "tls"])
def elsewhere(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process has an address at which other hosts reach it."""
    monkeypatch.setenv(ADDRESS, f"{request.param}://127.0.0.1:26700")
    if request.param == "tls":
        for name, value in certificates(tmp_path).items():
            monkeypatch.setenv(name, value)
    network.serve.cache_clear()
    yield
    network.serve.cache_clear()


def offered(tensor: torch.Tensor) -> shared.Handle:
    """What a process of another host gets of a tensor."""
    handle = shared.handle(tensor)
    assert handle is not None
    return replace(handle, host="another")


@pytest.mark.usefixtures("elsewhere")
async def test_another_host_fetches_the_bytes() -> None:
    tensor = shared.empty(3_000_000, torch.bfloat16).copy_(torch.arange(3_000_000) % 251).view(3, 1_000_000)
    received = SharedTransportBuffer()
    received.handle = offered(tensor)
    got = await received.read_into()
    assert torch.equal(got, tensor)
    assert not shared.borrowed(got)
    assert shared.handle(got) is not None  # so that it can be handed on
    tensor.fill_(1)
    assert await received.read_into(got) is got
    assert torch.equal(got, tensor)


@pytest.mark.usefixtures("elsewhere")
async def test_nobody_fetches_what_was_dropped_or_without_the_secret() -> None:
    kept = shared.empty(9, torch.float32)
    handle = offered(kept)
    assert handle.source is not None
    stranger = replace(handle, source=replace(handle.source, secret=bytes(network.SECRET)))
    with pytest.raises(FileNotFoundError):
        await shared.fetch(stranger)
    del kept
    gc.collect()
    with pytest.raises(FileNotFoundError):
        await shared.fetch(handle)
    with pytest.raises(ConnectionError):
        await shared.fetch(replace(handle, source=None))


def test_packed_weights_are_shared() -> None:
    state = {"a": torch.ones(2, 3), "b": torch.zeros(4, dtype=torch.int64), "c": torch.full((5,), 2.0)}
    layout = Layout.of(state)
    buffers = layout.pack(state)
    assert all(shared.handle(buffer) for buffer in buffers.values())
    for name, tensor in layout.unpack(buffers):
        assert torch.equal(tensor, state[name])


def test_weights_leave_in_the_precision_that_generators_compute_with() -> None:
    state = {"matrix": torch.randn(3, 4), "counter": torch.arange(3)}
    snapshot = WeightStore(torch.bfloat16).snapshot(state)
    received = dict(Layout.of(state, torch.bfloat16).unpack(snapshot))
    assert {tensor.dtype for tensor in received.values()} == {torch.bfloat16, torch.int64}
    assert torch.equal(received["matrix"], state["matrix"].bfloat16())
    assert sum(tensor.nbytes for tensor in snapshot.values()) == 2 * 12 + 8 * 3
