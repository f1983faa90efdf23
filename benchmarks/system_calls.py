"""Report the system calls of real programs that sandboxes refuse, and whether the programs still work.

python -m benchmarks system_calls [-- PROGRAM ARGUMENT ...]

Runs programs of this machine under the seccomp filter of sandboxes, without the rest of the sandbox. Refused calls are
answered by this process, which counts them and returns the error that the filter would return.
"""

from __future__ import annotations

import argparse
import array
import contextlib
import ctypes
import fcntl
import os
import select
import shutil
import socket
import struct
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from benchmarks.frame import table
from sandboxes.runner import kernel, seccomp
from sandboxes.runner.syscalls import ALLOWED, ARCHITECTURES, MISSING, REFUSED

_ERRNO, _ACTION, _ASK = 0x00050000, 0xFFFF0000, 0x7FC00000
_SECCOMP = {"x86_64": 317, "aarch64": 277}
_SET_MODE_FILTER, _NEW_LISTENER = 1, 8
_RECEIVE, _ANSWER = 0xC0502100, 0xC0182101
_QUESTION = struct.Struct("=QIIiIQ6Q")  # id, pid, flags, then `struct seccomp_data`
_REPLY = struct.Struct("=QqiI")


class Outcome(NamedTuple):
    """Result of a program: exit code (negative: signal number), output, and counts of refused calls."""

    code: int
    output: str
    refused: Counter[str]


def answer(machine: str, number: int, arguments: Sequence[int] = (), audit: int | None = None) -> int:
    """Return the filter's result for a system call, by interpreting its BPF instructions."""
    audit = ARCHITECTURES[machine] if audit is None else audit
    data = struct.pack("=IIQ6Q", number & 0xFFFFFFFF, audit, 0, *([*arguments, 0, 0, 0, 0, 0, 0][:6]))
    code = seccomp.instructions(machine)
    value, position = 0, 0
    while True:
        operation, if_true, if_false, operand = code[position]
        position += 1
        if operation == 0x20:
            value = int.from_bytes(data[operand : operand + 4], "little")
        elif operation == 0x54:
            value &= operand
        elif operation in (0x15, 0x35):
            position += if_true if (value == operand if operation == 0x15 else value >= operand) else if_false
        else:
            assert operation == 0x06
            return operand


def names(machine: str) -> dict[int, str]:
    """Return the names of the system calls in the table, by number."""
    column = list(ARCHITECTURES).index(machine)
    return {numbers[column]: name for group in (ALLOWED, REFUSED, MISSING) for name, numbers in group.items()}


def run(argv: list[str], *, cwd: str, env: dict[str, str] | None = None) -> Outcome:
    """Run a program under the filter, and wait for it and all the processes that it started."""
    ours, theirs = socket.socketpair()
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.chdir(cwd)
            for target in (1, 2):
                os.dup2(writing, target)
            _listen(theirs)
            os.execvpe(argv[0], argv, env or dict(os.environ))
        except OSError as error:
            os.write(2, f"{argv[0]}: {error}\n".encode())
        finally:
            os._exit(127)
    theirs.close()
    os.close(writing)
    with ours:
        listener = array.array("i")
        for _, _, data in ours.recvmsg(1, socket.CMSG_SPACE(4))[1]:
            listener.frombytes(data)
    try:
        output, refused = _serve(listener[0] if listener else -1, reading)
    finally:
        for fd in (*listener, reading):
            os.close(fd)
    return Outcome(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), output, refused)


def _listen(channel: socket.socket) -> None:
    """Install the filter and send the descriptor for reading refused calls through the channel."""
    machine = os.uname().machine
    code = [
        (operation, yes, no, _ASK if operation == 0x06 and operand & _ACTION == _ERRNO else operand)
        for operation, yes, no, operand in seccomp.instructions(machine)
    ]
    packed = b"".join(struct.pack("HBBI", *step) for step in code)
    buffer = ctypes.create_string_buffer(packed, len(packed))
    program = seccomp.Program(len(code), ctypes.cast(buffer, ctypes.c_void_p))
    kernel.forbid_new_privileges()
    listener = kernel.syscall("seccomp", _SECCOMP[machine], _SET_MODE_FILTER, _NEW_LISTENER, ctypes.byref(program))
    socket.send_fds(channel, [b"\0"], [listener])
    os.set_inheritable(listener, False)


def _serve(listener: int, reading: int) -> tuple[str, Counter[str]]:
    """Answer refused calls until the last process has closed its output."""
    machine = os.uname().machine
    known = names(machine)
    refused: Counter[str] = Counter()
    output = bytearray()
    poll = select.poll()
    poll.register(reading, select.POLLIN)
    if listener >= 0:
        poll.register(listener, select.POLLIN)
    while True:
        for fd, _ in poll.poll():
            if fd == reading:
                if not (chunk := os.read(reading, 1 << 16)):
                    return output.decode("utf-8", "replace"), refused
                output += chunk
                continue
            question = bytearray(_QUESTION.size)
            with contextlib.suppress(FileNotFoundError):  # the caller was killed in the meantime
                fcntl.ioctl(listener, _RECEIVE, question)
                number, _, _, *arguments = _QUESTION.unpack(question)[3:]
                refused[known.get(number, str(number))] += 1
                error = answer(machine, number, arguments) & 0xFFFF
                fcntl.ioctl(listener, _ANSWER, _REPLY.pack(_QUESTION.unpack(question)[0], 0, -error, 0))


PYTHON = """\
import asyncio, ctypes, mmap, multiprocessing, os, selectors, signal, socket, sqlite3, ssl, subprocess, sys, tempfile
import threading, time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import shared_memory
def square(x): return x * x
def main():
    with ThreadPoolExecutor(8) as pool: assert sum(pool.map(square, range(50))) == 40425
    for method in ('fork', 'spawn', 'forkserver'):
        with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context(method)) as pool:
            assert list(pool.map(square, range(4))) == [0, 1, 4, 9]
    memory = shared_memory.SharedMemory(create=True, size=4096); memory.close(); memory.unlink()
    async def talk():
        server = await asyncio.start_server(lambda r, w: w.close(), '127.0.0.1', 0)
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        assert await reader.read() == b''
        process = await asyncio.create_subprocess_exec('cat', stdin=-1, stdout=-1)
        assert (await process.communicate(b'x'))[0] == b'x'
    asyncio.run(talk())
    database = sqlite3.connect('own.db'); database.execute('pragma journal_mode=wal')
    database.execute('create table t (x)'); database.commit()
    ssl.create_default_context()
    with tempfile.TemporaryFile() as file: file.truncate(8192); mmap.mmap(file.fileno(), 8192).close()
    signal.setitimer(signal.ITIMER_REAL, 0.001); signal.signal(signal.SIGALRM, lambda *_: None)
    os.sched_setaffinity(0, os.sched_getaffinity(0)); os.nice(1); os.posix_spawn('/bin/true', ['true'], {})
    assert ctypes.CFUNCTYPE(ctypes.c_int)(lambda: 7)() == 7
    os.sendfile; os.pidfd_open(os.getpid()); os.mkfifo('f'); os.eventfd(0)
    socket.getaddrinfo('127.0.0.1', 80)
if __name__ == '__main__': main()
"""
_NODE = """\
const {execSync} = require('child_process'), fs = require('fs'), http = require('http'), crypto = require('crypto');
const {Worker} = require('worker_threads');
fs.writeFileSync('n.txt', 'x'); fs.copyFileSync('n.txt', 'm.txt'); fs.watch('.').close();
if (execSync('echo hi').toString() !== 'hi\\n') throw 1;
crypto.generateKeyPairSync('ec', {namedCurve: 'P-256'});
new Worker('require("worker_threads").parentPort.postMessage(1)', {eval: true}).on('message', () => {
  const server = http.createServer((q, a) => a.end('ok')).listen(0, '127.0.0.1', () =>
    http.get({port: server.address().port}, a => { a.resume(); a.on('end', () => { server.close(); }); }));
});
"""
_C = """\
#include <pthread.h>
#include <stdio.h>
void *f(void *p) { return p; }
int main(void) { pthread_t t; pthread_create(&t, 0, f, 0); pthread_join(t, 0); return puts("ok") < 0; }
"""
PROGRAMS: dict[str, tuple[str, str]] = {
    "python": ("python3", f"cat > p.py <<'END'\n{PYTHON}END\n{sys.executable} p.py"),
    "shell tools": (
        "sh",
        "seq 1000 | sort -R | sort -n | gzip | gunzip | tail -1; tar c . | tar t > /dev/null; mkfifo p; "
        "(echo x > p &); cat p; find . | xargs ls -l > /dev/null; timeout 5 sleep 0.01; nice true; date",
    ),
    "gcc": ("gcc", f"cat > c.c <<'END'\n{_C}END\ngcc -O2 -pipe -pthread c.c -o c && ./c"),
    "g++ with a sanitizer": (
        "g++",
        "printf '#include <iostream>\\nint main() { std::cout << 1; }' > c.cc && "
        "g++ -fsanitize=address,undefined c.cc -o cc && ASAN_OPTIONS=detect_leaks=0 ./cc",
    ),
    "make": ("make", "printf 'all: a b\\na b:\\n\\ttouch $@\\n' > Makefile && make -j2"),
    "node": ("node", f"cat > n.js <<'END'\n{_NODE}END\nnode n.js"),
    "git": (
        "git",
        "git init -q r && cd r && git config user.email a@b && git config user.name a && echo x > x && git add x && "
        "git commit -qm x && git gc -q && git clone -q . ../s && git -C ../s log --oneline && git fsck",
    ),
    "sqlite3": (
        "sqlite3",
        "sqlite3 d.db 'pragma journal_mode=wal; create table t(x); insert into t values (1); vacuum'",
    ),
    "openssl": (
        "openssl",
        "openssl req -x509 -newkey rsa:2048 -nodes -subj /CN=x -keyout k -out c && openssl verify -CAfile c c",
    ),
    "curl": (
        "curl",
        f"{sys.executable} -m http.server -b 127.0.0.1 18999 > /dev/null 2>&1 & server=$!; "
        "curl -s --retry 20 --retry-connrefused --retry-delay 1 http://127.0.0.1:18999/ > /dev/null; code=$?; "
        "kill $server; exit $code",
    ),
    "perl": (
        "perl",
        "perl -MIO::Socket -e 'pipe(R, W); if (!fork) { print W 1; exit } wait; print getpwuid($<)'",
    ),
    "java": (
        "java",
        "printf 'class A { public static void main(String[] a) { System.out.println(1); } }' > A.java && java A.java",
    ),
    "rustc": (
        "rustc",
        "printf 'fn main() { std::thread::spawn(|| println!(\"1\")).join().unwrap() }' > r.rs && rustc r.rs && ./r",
    ),
    "numpy": (
        "python3",
        f"{sys.executable} -c 'import numpy as n; a = n.ones((600, 600)); print((a @ a).sum(), n.linalg.svd(a)[1])'",
    ),
}
"""By name: a program that must be installed, and a shell script that runs it in an empty folder."""


def run_program(name: str) -> Outcome | None:
    """Run one of `PROGRAMS`; returns None if it is not installed."""
    needed, script = PROGRAMS[name]
    if not shutil.which(needed):
        return None
    with tempfile.TemporaryDirectory() as folder:
        return run(
            ["sh", "-c", script],
            cwd=folder,
            env={"RUSTUP_HOME": os.path.expanduser("~/.rustup"), **os.environ, "HOME": folder},
        )


def main() -> None:
    """Run all programs and print the table, or run one given program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("argv", nargs="*")
    options = parser.parse_args()
    if options.argv:
        result = run(options.argv, cwd=os.getcwd())
        print(result.output, end="")
        print(f"exit code {result.code}; refused: {dict(result.refused)}", file=sys.stderr)
        sys.exit(result.code)
    rows = []
    for name in PROGRAMS:
        if (outcome := run_program(name)) is not None:
            rows.append((name, outcome.code, ", ".join(f"{call} {n}" for call, n in sorted(outcome.refused.items()))))
            if outcome.code:
                print(f"{name}: {outcome.output[-800:]}", file=sys.stderr)
    print("\n".join(table(("program", "exit code", "refused calls"), rows)))


if __name__ == "__main__":
    main()
