"""The list of listeners: the page inserts it, and what commands open is in it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from forge_env.cli.main import main
from forge_env.gateway.server import Gateway
from forge_env.listeners import COLUMNS, LISTENERS, matching
from tests.listeners import Listener, as_another_user, listeners

PAGE = Path(__file__).parents[2] / "docs" / "security.md"
ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


def test_the_page_inserts_the_list() -> None:
    assert "<!-- output: forge-env doctor --listeners -->" in PAGE.read_text(encoding="utf-8")


def test_doctor_prints_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--listeners"]) == 0
    printed = capsys.readouterr().out
    for each in LISTENERS:
        assert all(cell in printed for cell in each.cells)
    assert printed.count(COLUMNS[-1]) >= len(LISTENERS)


@pytest.mark.parametrize(
    ("kind", "address", "known"),
    [
        ("unix", "/tmp/forge-env-run-ab12cd34/0123456789abcdefghijABCD", True),
        ("unix", "/tmp/forge-env-run-ab12cd34/.tmpab12cD/gCakREAQRUx", True),
        ("unix", "/tmp/forge-env-run-ab12cd34/.tmpab12cD/gCakREAQRU", True),
        ("unix", "@0123456789abcdefghijABCD", False),
        ("tcp", "127.0.0.1:4000", True),
        ("tcp", "0.0.0.0:4000", False),
        ("tcp", ":::4000", False),
    ],
)
def test_a_run_has_no_abstract_socket_and_none_on_every_network(kind: str, address: str, known: bool) -> None:
    found = [each for each in matching(kind, address, "train") if each.refuses_others]
    assert bool(found) is known


@contextmanager
def command(*arguments: str, ready: str) -> Iterator[set[Listener]]:
    """Where a command and its processes listen, once it has said that it is ready."""
    with (
        tempfile.TemporaryDirectory(prefix="fe-", dir="/tmp") as folder,
        subprocess.Popen(
            [sys.executable, "-m", "forge_env", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            cwd=folder,
            env={**os.environ, "TMPDIR": folder},
        ) as process,
    ):
        try:
            assert process.stdout is not None
            assert next((line for line in process.stdout if ready in line), ""), f"it ended before {ready}"
            found = psutil.Process(process.pid)
            yield listeners([found, *found.children(recursive=True)])
        finally:
            process.terminate()


@pytest.mark.slow
@ROOT
@pytest.mark.parametrize(
    "arguments", [("view", ".", "--no-browser"), ("serve", "wordle", "--port", "0")], ids=lambda each: each[0]
)
def test_commands_listen_where_the_list_says(arguments: Sequence[str]) -> None:
    with command(*arguments, ready="http://") as there:
        assert there
        for each, end in as_another_user(there).items():
            entries = matching(each.kind, each.address, arguments[0])
            assert entries, each
            assert end == "connected", "a token, a key or nothing protects it"


async def test_the_gateway_listens_where_the_list_says() -> None:
    this = psutil.Process()
    before = listeners([this])
    async with Gateway():
        [new] = listeners([this]) - before
    assert [re.sub(":.*", "", each.purpose) for each in matching(new.kind, new.address, "eval")] == ["the gateway"]
