"""On a real terminal: what is shown while an evaluation runs, and what Ctrl-C does to it."""

from __future__ import annotations

import asyncio
import fcntl
import os
import pty
import re
import struct
import termios
from pathlib import Path
from typing import Any, Self

import pytest

from tests.forge_env.endpoint.server import Server, http
from tests.forge_env.evaluation.test_kill import COMMAND, ROOT, TOY, behave, results

pytestmark = pytest.mark.slow
CTRL_C = b"\x03"
FLAGS = ["--epochs", "5", "--send-seed", "true", "--concurrency", "3", "--start-concurrency", "3"]
PATIENCE_S = 100.0
SHOW_CURSOR = "\x1b[?25h"


class Terminal:
    """A program on a terminal of its own: keys go in, what it draws comes out."""

    def __init__(self, *words: str, columns: int = 120) -> None:
        self.words = words
        self.columns = columns
        self.shown = b""
        self._more = asyncio.Event()

    async def __aenter__(self) -> Self:
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, self.columns, 0, 0))

        def take_terminal() -> None:
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)

        environ = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}  # xdist's
        self.process = await asyncio.create_subprocess_exec(
            *self.words,
            cwd=ROOT,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            preexec_fn=take_terminal,
            env={**environ, "TERM": "xterm-256color"},
        )
        os.close(theirs)
        asyncio.get_running_loop().add_reader(self._ours, self._read)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self.process.returncode is None:
            self.process.kill()
            await self.process.wait()
        asyncio.get_running_loop().remove_reader(self._ours)
        os.close(self._ours)

    def _read(self) -> None:
        try:
            data = os.read(self._ours, 65_536)
        except OSError:  # the other end is closed
            data = b""
        if not data:
            asyncio.get_running_loop().remove_reader(self._ours)
        self.shown += data
        self._more.set()

    @property
    def text(self) -> str:
        """Everything that was drawn, colours left out."""
        return re.sub(r"\x1b\[[0-9;]*m", "", self.shown.decode(errors="replace"))

    async def until(self, pattern: str) -> None:
        try:
            async with asyncio.timeout(PATIENCE_S):
                while not re.search(pattern, self.text):
                    self._more.clear()
                    await self._more.wait()
        except TimeoutError:
            pytest.fail(f"never shown: {pattern}\n{self.text}")

    async def end(self) -> int:
        try:
            async with asyncio.timeout(PATIENCE_S):
                return await self.process.wait()
        except TimeoutError:
            pytest.fail(f"never ended\n{self.text}")

    def press(self, key: bytes) -> None:
        os.write(self._ours, key)


class Gate:
    """An endpoint that answers the first `free` requests at once and the others when it is opened.

    Request `refused` it refuses; it is `waiting` when `enough` requests are.
    """

    def __init__(self, free: int, *, enough: int = 3, refused: int | None = None) -> None:
        self.free, self.enough, self.refused = free, enough, refused
        self.open = asyncio.Event()
        self.waiting = asyncio.Event()

    async def __call__(self, request: dict[str, Any], n: int) -> Any:
        if n == self.refused:
            return http({"error": {"message": "slow down"}}, 429, {"retry-after": "0"})
        if n >= self.free and not self.open.is_set():
            if n >= self.free + self.enough - 1:
                self.waiting.set()
            await self.open.wait()
        return behave(request, n)


async def test_the_display_says_how_it_goes(tmp_path: Path) -> None:
    prices = tmp_path / "prices.yaml"
    prices.write_text("m: {input: 1.0, output: 10.0}\n")
    gate = Gate(20, enough=1, refused=3)
    async with Server(gate) as server:
        words = [TOY, "--model", "m", "--base-url", server.url, "--out", str(tmp_path / "out"), *FLAGS]
        words += ["--prices", str(prices), "--budget", "1", "--first-delay-s", "0"]
        async with Terminal(*COMMAND, *words) as terminal:
            await gate.waiting.wait()
            await terminal.until(r"Sums +.*\d+/60 +\d\.\d{3} ± \d\.\d{3}")
            await terminal.until(r"[123] running  \d+ tokens  .*cost \d\S* of 1  \d/\d requests in flight  \S+ left")
            await terminal.until(r"failed requests: 1 EndpointOverloadedError")
            gate.open.set()
            assert await terminal.end() == 0
            await terminal.until(r"results: /")
            assert SHOW_CURSOR in terminal.shown.decode(errors="replace")
            assert re.search(r"tokens/s", terminal.text)
            assert "Traceback" not in terminal.text


async def test_ctrl_c_on_a_terminal_finishes_what_is_under_way(tmp_path: Path) -> None:
    gate, out = Gate(20), tmp_path / "out"
    async with Server(gate) as server:
        words = [TOY, "--model", "m", "--base-url", server.url, "--out", str(out), *FLAGS, "--first-delay-s", "0"]
        async with Terminal(*COMMAND, *words) as terminal:
            await gate.waiting.wait()
            terminal.press(CTRL_C)
            await terminal.until("finishing the running samples; Ctrl-C again stops now")
            gate.open.set()
            assert await terminal.end() == 130
            await terminal.until(r"finished samples are kept. Continue: forge-env eval --out \S+ --resume")
            assert SHOW_CURSOR in terminal.shown.decode(errors="replace")
        first = results(out)
        assert len(first) == 23  # what was free, and the three under way
        assert all(valid for valid, _, _ in first.values())
        async with Terminal(*COMMAND, "--out", str(out), "--resume") as terminal:
            assert await terminal.end() == 0
    assert len(results(out)) == 60
    assert results(out).items() >= first.items()
    assert len(server.requests) == 60


async def test_ctrl_c_twice_stops_at_once_and_keeps_what_is_finished(tmp_path: Path) -> None:
    gate, out = Gate(20), tmp_path / "out"
    async with Server(gate) as server:
        words = [TOY, "--model", "m", "--base-url", server.url, "--out", str(out), *FLAGS, "--first-delay-s", "0"]
        async with Terminal(*COMMAND, *words) as terminal:
            await gate.waiting.wait()
            terminal.press(CTRL_C)
            await terminal.until("Ctrl-C again stops now")
            terminal.press(CTRL_C)
            assert await terminal.end() == 130  # the endpoint never answered
            await terminal.until("finished samples are kept")
            assert "Traceback" not in terminal.text
        assert len(results(out)) == 20
        gate.open.set()
        async with Terminal(*COMMAND, "--out", str(out), "--resume") as terminal:
            assert await terminal.end() == 0
    assert len(results(out)) == 60


async def test_ctrl_c_before_anything_is_played(tmp_path: Path) -> None:
    """An endpoint that takes the connection and says nothing."""
    asked = asyncio.Event()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.set()
        await reader.read(-1)
        writer.close()

    async with await asyncio.start_server(silent, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
        words = [TOY, "--model", "m", "--base-url", url, "--out", str(tmp_path / "out")]
        async with Terminal(*COMMAND, *words) as terminal:
            await asked.wait()
            terminal.press(CTRL_C)
            assert await terminal.end() == 130
            assert "Traceback" not in terminal.text


@pytest.mark.slow
@pytest.mark.parametrize("answer", [http({}, 429, {"retry-after": "86400"}), None], ids=["Retry-After", "no answer"])
async def test_sigterm_ends_an_evaluation_that_waits(tmp_path: Path, answer: bytes | None) -> None:
    """Within the ten seconds that `docker stop` waits; the pauses alone could take hours."""
    async with Server(lambda request, n: answer) as server:
        words = [TOY, "--model", "m", "--base-url", server.url, "--out", str(tmp_path / "out"), "--retries", "1000"]
        process = await asyncio.create_subprocess_exec(*COMMAND, *words, stderr=asyncio.subprocess.PIPE)
        assert process.stderr is not None
        await server.asked.wait()
        if answer is not None:
            async for line in process.stderr:
                if b"the endpoint asks to wait" in line:
                    break
        process.terminate()
        _, shown = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 130
    assert "finishing the running samples" in shown.decode()
