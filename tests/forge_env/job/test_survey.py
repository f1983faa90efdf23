"""What workers tell of their hosts, over real sockets, and what a run makes of it before it starts."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import tracemalloc
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest

import forge_env
from forge_env import machine
from forge_env.cli.main import main
from forge_env.config import RunConfig
from forge_env.errors import ForgeError
from forge_env.job import card, survey
from forge_env.job.addresses import Address
from forge_env.job.card import Card, NoWorkerError, Question, ask, ask_all, serve_cards, until_lost, write_card
from forge_env.job.plan import Plan
from tests.trainers.actors.workers import certificates


def free_address() -> Address:
    with socket.create_server(("127.0.0.2", 0)) as server:
        return Address("tcp", "127.0.0.2", server.getsockname()[1])


@asynccontextmanager
async def worker(
    monkeypatch: pytest.MonkeyPatch, changed: Callable[[Card], Card] | None = None
) -> AsyncIterator[Address]:
    """Only its cards: nothing is started on it."""
    address = free_address()

    def written(question: Question, monarch: str = "") -> Card:
        found = write_card(question, monarch)
        return found if changed is None else changed(found)

    monkeypatch.setattr(card, "write_card", written)
    async with await serve_cards(address, "service"):
        yield address


def recipe(address: Address, folder: Path) -> RunConfig:
    return RunConfig.model_validate(
        {
            "environment": {"name": "wordle"},
            "model": {"cache_dir": str(folder / "cache")},
            "job": {"kind": "hosts", "workers": [str(address)]},
        }
    )


async def test_a_host_like_this_one_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async with worker(monkeypatch) as address:
        found = await survey.survey(recipe(address, tmp_path), tmp_path / "run")
    assert {place.hosts for place in found.plan.places.values()} == {(0,)}
    assert f"host 0 {address}" in str(found.plan)
    assert not os.listdir(tmp_path), "the marks are gone"


DIFFERENT: list[tuple[Callable[[Card], Card], str]] = [
    (lambda own: replace(own, forge_env="0.0.1"), "runs forge-env 0.0.1"),
    (lambda own: replace(own, python_version="3.9"), r"Python 3.9 \(here 3.11\)"),
    (lambda own: replace(own, packages={**own.packages, "torch": None}), "torch missing"),
    (lambda own: replace(own, modules={**own.modules, "environments": "0"}), "environments with different code"),
    (lambda own: replace(own, modules={**own.modules, "forge_env": None}), "forge_env missing"),
    (lambda own: replace(own, files=dict.fromkeys(own.files)), "lacks .*run"),
    (
        lambda own: replace(own, no_engine="no engine can run"),
        "rollouts0 is placed on host 0 .*: no engine can run",
    ),
    (lambda own: replace(own, free_memory_gb=0.1), "no host has room for trainer"),
]


@pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed")
@pytest.mark.parametrize(("changed", "said"), DIFFERENT)
async def test_a_host_on_which_it_would_be_another_run_is_refused_by_name(
    changed: Callable[[Card], Card], said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async with worker(monkeypatch, changed) as address:
        with pytest.raises(ForgeError, match=said):
            await survey.survey(recipe(address, tmp_path), tmp_path / "run")


async def test_model_that_a_host_lacks_is_staged(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for name in ("config.json", "tokenizer.json"):
        (model / name).write_text("{}")

    def changed(own: Card) -> Card:
        return replace(
            own, files={path: None if path.startswith(f"{model}/") else seen for path, seen in own.files.items()}
        )

    async with worker(monkeypatch, changed) as address:
        config = recipe(address, tmp_path)
        config.model.path = str(model)
        monkeypatch.setattr(survey, "make_plan", lambda config, addresses, cards: Plan(config.job, addresses, cards))
        monkeypatch.setattr(survey, "_check_rollouts", lambda *_: None)
        found = await survey.survey(config, tmp_path / "run")
    assert found.unseen == {model}


def test_a_staged_model_is_a_copy_that_is_made_again_when_the_model_has_changed(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (tmp_path / "elsewhere").write_text("1")
    (model / "weights").symlink_to(tmp_path / "elsewhere")
    first = survey.stage(model, tmp_path / "cache")
    assert (first / "weights").read_text() == "1"
    assert not (first / "weights").is_symlink()
    assert survey.stage(model, tmp_path / "cache") == first
    (tmp_path / "elsewhere").write_text("22")
    second = survey.stage(model, tmp_path / "cache")
    assert second != first
    assert (second / "weights").read_text() == "22"
    assert sorted((tmp_path / "cache" / "staged").iterdir()) == sorted([first, second])
    (tmp_path / "elsewhere").unlink()
    with pytest.raises(ForgeError, match="can't be copied"):
        survey.stage(model, tmp_path / "cache")


async def test_data_that_a_host_of_rollouts_lacks_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    data = tmp_path / "tasks.jsonl"
    data.write_text("{}")
    lacking = partial(replace, data={str(data): None})
    for changed, said in ((None, None), (lacking, "rollouts0 is placed on host 0 .*, where .*tasks.jsonl")):
        async with worker(monkeypatch, changed) as address:
            config = recipe(address, tmp_path)
            config.environment.options = {"nested": [{"file": str(data), "word": "data", "none": "/no/such.file"}]}
            if said is None:
                assert await survey.survey(config, tmp_path / "run") is not None
            else:
                with pytest.raises(ForgeError, match=said):
                    await survey.survey(config, tmp_path / "run")


async def test_other_code_in_the_same_version_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = tmp_path / "somebodys.py"
    module.write_text("A = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    question = Question(modules=["somebodys", "nobodys"])
    before = write_card(question).modules
    module.write_text("A = 2\n")
    after = write_card(question).modules
    assert before["somebodys"] != after["somebodys"]
    assert before["nobodys"] is after["nobodys"] is None


async def test_nobody_there_is_said_at_once_or_waited_for() -> None:
    address = free_address()
    with pytest.raises(NoWorkerError, match=f"no worker answers at {address}: .*refused.*forge-env worker {address}"):
        await ask(address)
    asking = asyncio.ensure_future(ask(address, patience_s=60.0))
    await asyncio.sleep(0)
    async with await serve_cards(address, "service"):
        assert (await asking).forge_env == forge_env.__version__


async def test_all_that_do_not_answer_are_named() -> None:
    silent = [free_address(), free_address()]
    async with await serve_cards(address := free_address(), "service"):
        with pytest.raises(NoWorkerError, match=f"at {silent[0]}: .*refused; .* at {silent[1]}: .*on each of them"):
            await ask_all([silent[0], address, silent[1]], Question())
        [found] = await ask_all([address], Question())
    assert found.monarch == "service"


async def test_certificate_for_another_address_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in certificates(tmp_path).items():
        monkeypatch.setenv(name, value)
    good = free_address()._replace(scheme="tls")
    wrong = good._replace(host="127.0.0.5")
    async with await serve_cards(good, "service"), await serve_cards(wrong, "service"):
        assert (await ask(good)).monarch == "service"
        with pytest.raises(NoWorkerError, match=r"its certificate is refused: IP address mismatch.*127\.0\.0\.5"):
            await ask(wrong)


async def test_strangers_and_noise_harm_nobody(caplog: pytest.LogCaptureFixture) -> None:
    address = free_address()
    async with await serve_cards(address, "service"):
        for noise in (b"\n", b"GET / HTTP/1.1\r\n\r\n", b'{"other": 1}\n', b"[" * 4096 + b"\n"):
            reader, writer = await asyncio.open_connection(address.host, address.port)
            writer.write(noise)
            assert await reader.read() == b""
            writer.close()
        assert (await ask(address)).monarch == "service"
    assert not caplog.records, "a stranger's fault is nobody's here"


async def test_what_is_wrong_with_a_host_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_drivers() -> list[object]:
        raise RuntimeError("the driver is of another version")

    monkeypatch.setattr(machine, "unclaimed_gpus", no_drivers)
    async with await serve_cards(address := free_address(), "service"):
        with pytest.raises(ForgeError, match=f"{address} can't describe its host: RuntimeError: the driver is of"):
            await ask(address)


async def test_the_end_of_a_worker_is_noticed() -> None:
    address = free_address()
    with socket.create_server((address.host, address.port)) as listening:
        losing = asyncio.ensure_future(until_lost(address))
        listening.setblocking(False)
        connection, _ = await asyncio.get_running_loop().sock_accept(listening)
        reader, writer = await asyncio.open_connection(sock=connection)
        assert json.loads(await reader.readline()) == asdict(Question())
        writer.write(b"{}\n")
        await writer.drain()
        await asyncio.sleep(0)
        assert not losing.done()
        writer.close()
        await losing
    await until_lost(address)  # nobody is there
    async with await serve_cards(address, "service"):
        losing = asyncio.ensure_future(until_lost(address))
        assert (await ask(address)).monarch == "service"
        assert not losing.done(), "the connection is kept"
        losing.cancel()
        await asyncio.wait([losing])


async def test_two_can_not_listen_at_one_address() -> None:
    address = free_address()
    async with await serve_cards(address, "service"):
        with pytest.raises(ForgeError, match=f"can't listen at {address}: address already in use"):
            await serve_cards(address, "service")


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("tcp://0.0.0.0:26700", "on every network"),
        ("tcp://[::]:26700", "on every network"),
        ("10.0.0.1:26700", "write tcp://HOST:PORT"),
        ("tcp://no-such-host.invalid:26700", "give an IP address"),
        ("tcp://192.0.2.1:26700", "can't listen at tcp://192.0.2.1:26700: cannot assign requested address"),
        ("tls://127.0.0.1:26700", "HYPERACTOR_TLS_CERT"),
    ],
)
def test_a_worker_listens_at_one_named_address(address: str, said: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["worker", address]) in (1, 2)
    assert said in capfd.readouterr().err


async def test_what_is_sent_after_a_question_is_dropped() -> None:
    async with await serve_cards(address := free_address(), "service"):
        reader, writer = await asyncio.open_connection(address.host, address.port)
        writer.write(json.dumps(asdict(Question())).encode() + b"\n")
        assert json.loads(await reader.readline())["monarch"] == "service"
        tracemalloc.start()
        try:
            for _ in range(32):
                writer.write(bytes(1 << 20))
                await writer.drain()
            assert tracemalloc.get_traced_memory()[1] < 8 << 20
        finally:
            tracemalloc.stop()
            writer.close()
