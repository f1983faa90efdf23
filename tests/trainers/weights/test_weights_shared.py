"""Tensors in memory that several processes map, and weights that lie in it."""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from forge_env.job.addresses import Address
from tests.trainers.actors.workers import certificates
from tests.trainers.weights import processes
from trainers.actors.processes import ADDRESS
from trainers.model.parts import Part
from trainers.weights import network, shared
from trainers.weights.flat import Flat, Layout
from trainers.weights.reader import Reader
from trainers.weights.transport import Offer, Published, Sender, unpack

pytestmark = pytest.mark.stack


def descriptors() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.slow
def test_another_process_has_the_same_memory() -> None:
    dtypes = [torch.float32, torch.bfloat16, torch.int64]
    tensors = [shared.empty(100, dtype).copy_(torch.arange(100)) for dtype in dtypes]
    handles = [shared.handle(tensor) for tensor in tensors]
    process = multiprocessing.get_context("spawn").Process(target=processes.negate, args=(handles,))
    process.start()
    process.join()
    assert process.exitcode == 0
    assert all(torch.equal(tensor, -torch.arange(100).to(tensor.dtype)) for tensor in tensors)


def test_what_is_let_go_of_is_gone_but_for_two_mappings() -> None:
    before = descriptors()
    for _ in range(5):
        tensor = shared.empty(1000, torch.float32)
        handle = shared.handle(tensor)
        assert handle.process.source is None  # there are no other hosts
        view = shared.attach(handle)[10:20]
        del tensor
        view.fill_(1.0)  # a view of an attached tensor keeps it mapped
        del view
        gc.collect()
        assert descriptors() <= before + 4  # a mapping has one, and Python's another
        with pytest.raises(FileNotFoundError):
            shared.attach(handle)


def test_a_block_that_is_read_again_is_not_mapped_again() -> None:
    tensors = [shared.empty(1000, torch.float32), shared.empty(1000, torch.float32)]
    places = [shared.attach(shared.handle(tensor)).data_ptr() for tensor in tensors]
    for version in range(4):
        tensor = tensors[version % 2]
        gc.collect()
        assert shared.reuse(tensor)
        tensor.fill_(version)
        reading = shared.attach(shared.handle(tensor))
        assert reading.data_ptr() == places[version % 2]
        assert reading.unique().tolist() == [version]
        del reading


def test_a_descriptor_that_is_another_by_now_is_noticed() -> None:
    tensor = shared.empty(8, torch.float32)
    handle = shared.handle(tensor)
    del tensor
    other = shared.empty(8, torch.float32)
    assert shared.handle(other) != handle
    with pytest.raises(FileNotFoundError):
        shared.attach(handle)


class Driver:
    """Stand-in for `torch.cuda.cudart()`."""

    def __init__(self, error: int = 0) -> None:
        self.error = error
        self.pinned: dict[int, int] = {}

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        assert address not in self.pinned
        if not self.error:
            self.pinned[address] = size
        return self.error

    def cudaHostUnregister(self, address: int) -> int:
        assert f"{address:x}-" in Path("/proc/self/maps").read_text(), "it is unmapped already"
        del self.pinned[address]
        return 0


def test_memory_is_pinned_once_and_until_it_is_unmapped(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    monkeypatch.setattr("torch.cuda.cudart", lambda: driver)
    tensor = shared.empty(1000, torch.float32)
    shared.pin(tensor)
    shared.pin(tensor)
    shared.pin(torch.empty(0))
    assert list(driver.pinned) == [tensor.data_ptr()]
    assert driver.pinned[tensor.data_ptr()] >= 4000
    del tensor
    gc.collect()
    assert not driver.pinned


def test_memory_that_cannot_be_pinned_still_works(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("torch.cuda.cudart", lambda: Driver(error=2))
    monkeypatch.setattr("torch.zeros", lambda *size, device: None)
    tensor = shared.empty(1000, torch.float32)
    shared.pin(tensor)
    shared.pin(tensor)
    assert caplog.text.count("pinning the memory of weights failed (CUDA error 2)") == 1
    assert torch.equal(shared.attach(shared.handle(tensor.fill_(3.0))), tensor)


@pytest.mark.parametrize("tensor", [torch.zeros(8), shared.empty(8, torch.float32)[:4], torch.zeros(0)])
def test_only_whole_blocks_have_handles(tensor: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="not a whole block"):
        shared.handle(tensor)


def test_memory_is_filled_anew_only_when_nobody_reads_it() -> None:
    tensor = shared.empty(8, torch.bfloat16)
    handle = shared.handle(tensor)
    reading = shared.attach(handle)
    assert not shared.reuse(tensor)
    assert torch.equal(shared.attach(handle), reading), "one more may read it"
    del reading
    gc.collect()
    assert shared.reuse(tensor)
    with pytest.raises(FileNotFoundError, match="dropped"):
        shared.attach(handle)
    assert shared.attach(shared.handle(tensor)).data_ptr() != tensor.data_ptr()


def test_of_three_blocks_those_two_stay_mapped_that_were_read_last() -> None:
    one, two, three = [shared.empty(1000, torch.float32) for _ in range(3)]
    for tensor in (one, two, one, three):
        shared.attach(shared.handle(tensor))
    gc.collect()
    maps = Path("/proc/self/maps").read_text()
    mapped = [maps.count(f" {shared.handle(tensor).inode} ") for tensor in (one, two, three)]
    assert mapped == [2, 1, 2], "its owner has each mapped too"


@pytest.mark.slow
def test_a_process_may_end_with_memory_in_use() -> None:
    code = """if True:
        import torch
        from trainers.weights import shared

        tensor = shared.empty(10, torch.float32)
        reading = shared.attach(shared.handle(tensor))
    """
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stderr == ""


@pytest.mark.slow
def test_who_dies_leaves_no_memory_and_readers_keep_what_they_read() -> None:
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    process = context.Process(target=processes.offer, args=(theirs,))
    process.start()
    handle = mine.recv()
    reading = shared.attach(handle)
    assert process.pid is not None
    link = os.readlink(f"/proc/{process.pid}/fd/{handle.descriptor}")
    assert link == "/memfd:weights (deleted)", "it has no name that could be left behind"
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert torch.equal(reading, torch.arange(1000.0))
    with pytest.raises(OSError, match="No such file"):
        shared.attach(handle)
    del reading
    gc.collect()
    other = shared.empty(8, torch.float32)
    shared.attach(shared.handle(other))
    assert f" {handle.inode} " not in Path("/proc/self/maps").read_text(), "its memory stays mapped"


@pytest.mark.slow
def test_who_dies_while_it_reads_does_not_keep_the_memory() -> None:
    tensor = shared.empty(8, torch.float32)
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    process = context.Process(target=processes.read, args=(theirs, shared.handle(tensor)))
    process.start()
    mine.recv()
    assert not shared.reuse(tensor)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert shared.reuse(tensor)


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


def elsewhere_is(handle: shared.Handle) -> shared.Handle:
    """What a process of another host gets of a handle."""
    return replace(handle, process=replace(handle.process, host="another"))


@pytest.mark.usefixtures("elsewhere")
async def test_another_host_fetches_the_bytes() -> None:
    tensor = shared.empty(3_000_000, torch.bfloat16).copy_(torch.arange(3_000_000) % 251).view(3, 1_000_000)
    got = await shared.fetch(elsewhere_is(shared.handle(tensor)))
    assert torch.equal(got, tensor)
    assert shared.attach(shared.handle(got)).shape == (3, 1_000_000), "it can be handed on"
    tensor.fill_(1)
    assert await shared.fetch(elsewhere_is(shared.handle(tensor)), got) is got
    assert torch.equal(got, tensor)


@pytest.mark.usefixtures("elsewhere")
async def test_nobody_fetches_what_was_dropped_or_without_the_secret() -> None:
    kept = shared.empty(9, torch.float32)
    handle = elsewhere_is(shared.handle(kept))
    assert handle.process.source is not None
    source = replace(handle.process.source, secret=bytes(network.SECRET))
    stranger = replace(handle, process=replace(handle.process, source=source))
    with pytest.raises(FileNotFoundError):
        await shared.fetch(stranger)
    assert shared.reuse(kept)
    with pytest.raises(FileNotFoundError):
        await shared.fetch(handle)
    assert len(await shared.fetch(elsewhere_is(shared.handle(kept)))) == 9
    del kept
    gc.collect()
    with pytest.raises(FileNotFoundError):
        await shared.fetch(handle)
    with pytest.raises(ConnectionError):
        await shared.fetch(replace(handle, process=replace(handle.process, source=None)))


@pytest.mark.slow
@pytest.mark.usefixtures("elsewhere")
async def test_another_host_notices_the_end_of_a_process() -> None:
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    process = context.Process(target=processes.offer, args=(theirs,))
    process.start()
    handle = elsewhere_is(mine.recv())
    ending = asyncio.ensure_future(handle.process.end())
    assert len(await shared.fetch(handle)) == 1000
    assert not ending.done()
    process.kill()
    await ending
    await handle.process.end()
    process.join()


@pytest.mark.usefixtures("elsewhere")
def test_what_is_sent_is_not_filled_anew() -> None:
    tensor = shared.empty(9, torch.float32)
    handle = shared.handle(tensor)
    sending = shared._find(handle.inode, handle.stamp)
    assert not shared.reuse(tensor)
    del sending
    gc.collect()
    assert shared.reuse(tensor)


def test_whoever_is_silent_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "PATIENCE_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = Address.of(f"tcp://127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(TimeoutError):
            network.fetch(network.Source(address, bytes(network.SECRET)), 1, 0, memoryview(bytearray(9)))


# --- weights


def thirds(whole: torch.Tensor) -> list[Part]:
    """A matrix in three boxes: two above each other, one beside them."""
    shape = tuple(whole.shape)
    return [
        Part("matrix", (0, 0), shape, whole[:2, :4]),
        Part("matrix", (2, 0), shape, whole[:, :4], torch.tensor([2, 3])),
        Part("matrix", (0, 4), shape, whole[:, 4:]),
    ]


def test_weights_come_out_as_they_went_in() -> None:
    state = {"a": torch.randn(2, 3), "b": torch.arange(4), "c": torch.randn(5), "d": torch.tensor(2.0)}
    flat = Flat.of(state)
    assert len(flat.buffers[0]) == 2
    found = dict(flat)
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in state.items())


def test_boxes_of_several_processes_make_one_tensor() -> None:
    whole = torch.randn(4, 6)
    one, other, third = thirds(whole)
    parts = [[one, Part("norm", (0,), (3,), torch.ones(3))], [other], [third]]
    layouts = [Layout.of(own) for own in parts]
    buffers = [layout.pack(own) for layout, own in zip(layouts, parts, strict=True)]
    found = dict(Flat(layouts, buffers))
    assert torch.equal(found["matrix"], whole)
    assert dict(Flat(layouts, buffers, torch.device("meta")))["matrix"].is_meta, "joined on the receiving device"
    assert torch.equal(found["norm"], torch.ones(3))
    with pytest.raises(ValueError, match=r"24 elements, of which 16 .*: give `Sender.publish` the offers of all"):
        dict(Flat(layouts[:2], [layout.pack(own) for layout, own in zip(layouts[:2], parts, strict=False)]))


class Operations(TorchDispatchMode):
    """Recorder of the device and data type of each operation's result."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[tuple[str, torch.dtype]] = []

    def __torch_dispatch__(self, function: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.seen.append((result.device.type, result.dtype))
        return result


@pytest.mark.parametrize("rows", [None, torch.tensor([1, 0])])
def test_weights_are_converted_after_the_copy_to_the_device(rows: torch.Tensor | None) -> None:
    """In bfloat16, half the bytes are copied, and the CPU has nothing to convert."""
    tensor, values = torch.empty(2, 3, device="meta"), torch.ones(2, 3, dtype=torch.bfloat16)
    with Operations() as operations:
        Part("matrix", (0, 0), (2, 3), tensor, rows).put(values)
    assert operations.seen[0] == ("meta", torch.bfloat16)
    assert operations.seen[-1] == ("meta", torch.float32)


def test_weights_leave_in_the_precision_that_generators_compute_with() -> None:
    state = {"matrix": torch.randn(3, 4), "counter": torch.arange(3)}
    sender = Sender(torch.bfloat16)  # the weights end with it
    offer = sender.snapshot(Part.all_of(state))
    buffers = {dtype: shared.attach(handle) for dtype, handle in offer.handles.items()}
    received = dict(Flat(unpack([offer.layout]), [buffers]))
    assert {tensor.dtype for tensor in received.values()} == {torch.bfloat16, torch.int64}
    assert torch.equal(received["matrix"], state["matrix"].bfloat16())
    assert offer.nbytes == 2 * 12 + 8 * 3


Make = Callable[..., Published]


@pytest.fixture(params=["here", "elsewhere"])
def published(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Publishes offers as a process of the same host, or of another host, sees them."""
    monkeypatch.setenv(ADDRESS, "tcp://127.0.0.1:26700")
    network.serve.cache_clear()

    def make(*offers: Offer) -> Published:
        seen = elsewhere_is if request.param == "elsewhere" else replace
        handles = tuple({dtype: seen(each) for dtype, each in one.handles.items()} for one in offers)
        return replace(Sender().publish(offers), handles=handles)

    yield make
    network.serve.cache_clear()


async def test_a_slow_reader_gets_whole_versions_and_delays_no_push(published: Make) -> None:
    ranks = [Sender(), Sender()]

    def push(version: int) -> list[Offer]:
        halves = [Part("layer", (2 * rank,), (4,), torch.full((2,), float(version))) for rank in (0, 1)]
        return [sender.snapshot([half]) for sender, half in zip(ranks, halves, strict=True)]

    reader, first = Reader(), published(*push(1))
    slow = await reader.take(first)
    later = [push(version) for version in range(2, 6)]
    assert dict(slow)["layer"].tolist() == [1.0] * 4, "it keeps the version that it has begun to read"
    with pytest.raises(OSError, match=r"dropped|No such file"):
        await Reader().take(published(*later[0]))
    assert dict(await reader.take(published(*later[-1])))["layer"].tolist() == [5.0] * 4


async def test_every_version_can_be_read_without_an_earlier_one(published: Make) -> None:
    sender, reader = Sender(), Reader()
    for version in (1, 2, 3):
        offer = sender.snapshot(Part.all_of({"layer": torch.full((9,), float(version))}))
        for each in (reader, Reader()):
            assert dict(await each.take(published(offer)))["layer"][0] == version
    another = Sender()
    offer = another.snapshot(Part.all_of({"other": torch.ones(3)}))
    assert dict(await reader.take(published(offer))).keys() == {"other"}, "another trainer's"


async def test_memory_goes_from_version_to_version() -> None:
    before, inodes = descriptors(), []
    sender = Sender()
    for version in range(6):
        offer = sender.snapshot(Part.all_of({"layer": torch.full((9,), float(version))}))
        inodes.append(offer.handles[torch.float32].inode)
    assert inodes[2:] == inodes[:2] * 2
    del sender, offer
    gc.collect()
    assert descriptors() == before
