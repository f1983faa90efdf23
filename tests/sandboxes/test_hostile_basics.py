"""A dozen programs that attack their sandbox: contained, nothing left, and the next program sees a clean machine.

The large suite is in tests/hostile.
"""

from __future__ import annotations

import pytest

from forge_env.sandbox import Limits, Sandbox, SandboxEngine

pytestmark = pytest.mark.asyncio(loop_scope="module")
SHORT = Limits(wall_s=1.5, memory_mb=256)

FORK_BOMB = """
import os, signal
while True:
    try:
        if os.fork() == 0:
            os.setsid()
            for s in (1, 2, 15): signal.signal(s, signal.SIG_IGN)
    except OSError: pass
"""
MEMORY_IN_MANY = """
import os, time
for i in range(30):
    try:
        if os.fork() == 0:
            x = bytearray(100 << 20)
            time.sleep(30)
    except OSError: pass
time.sleep(30)
"""
DAEMON = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        while True:
            open('/tmp/alive', 'a').write('x'); time.sleep(0.001)
    os._exit(0)
os.wait(); print('left')
"""
DEEP = """
import os
try:
    for n in range(20000): os.mkdir('d'); os.chdir('d')
except OSError: pass
"""
LOCKED = "import os\nos.makedirs('a/b/c'); os.chmod('a/b', 0); os.chmod('a', 0); os.chmod('.', 0)"

PROGRAMS = {
    "fork bomb": FORK_BOMB,
    "memory bomb": "x = []\nwhile True: x.append(bytearray(10 << 20))",
    "memory bomb in many processes": MEMORY_IN_MANY,
    "output flood": "import os\nwhile True: os.write(1, b'y' * 65536)",
    "ignores signals": "import signal, time\nfor s in (1, 2, 15): signal.signal(s, signal.SIG_IGN)\ntime.sleep(60)",
    "stops itself": "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)",
    "daemon": DAEMON,
    "kills everyone": "import os; os.kill(-1, 9)",
    "kills its parents": "import os\nfor p in (os.getppid(), 1):\n  try: os.kill(p, 9)\n  except OSError: pass",
    "deep folders": DEEP,
    "locked folders": LOCKED,
    "fills the disk": "f = open('/tmp/big', 'wb')\nwhile True: f.write(b'x' * (1 << 20))",
    "fills the inodes": "for n in range(100000): open(f'/dev/shm/{n}', 'w')",
    "segfault": "import ctypes; ctypes.string_at(0)",
}


@pytest.mark.parametrize("name", PROGRAMS)
async def test_contained(engine: SandboxEngine, name: str) -> None:
    async with engine.session() as neighbour, engine.session() as sandbox:
        result = await sandbox.run_python(PROGRAMS[name], limits=SHORT)
        assert result.usage.wall_s < 10
        after = await sandbox.run_python("import os; print(1 + 1)")
        assert after.stdout == "2\n", after
        await look_clean(sandbox, files=False)
        assert (await neighbour.run_python("print('here')")).stdout == "here\n"
    for _ in range(3):
        async with engine.session() as sandbox:
            await look_clean(sandbox)
    assert "poisoned" not in engine.stats()


async def look_clean(sandbox: Sandbox, *, files: bool = True) -> None:
    look = "import os\nprint(len([p for p in os.listdir('/proc') if p.isdigit()]))\n"
    look += "print([f for d in ('.', '/tmp', '/dev/shm') for f in os.listdir(d)][:9])"
    processes, left = (await sandbox.run_python(look)).stdout.splitlines()
    assert int(processes) <= 3  # supervisor, zygote and itself; or init and itself
    assert left == "[]" or not files


READS = {
    "other processes": "import os\nfor p in os.listdir('/proc'):\n  if p.isdigit() and int(p) != os.getpid():\n"
    "    for f in ('environ', 'mem', 'maps', 'root/etc/passwd', 'cwd/x'):\n"
    "      try:\n        if open(f'/proc/{p}/{f}', 'rb').read(10): print('READ', p, f)\n      except OSError: pass",
    "host files": "import os\nfor f in ('/etc/shadow', '/root/.bashrc', '/var/run/docker.sock', '/dev/kmsg',"
    " '/dev/vda', '/proc/kcore', '/home', '/work/../etc/machine-id'):\n"
    "  try: r = os.listdir(f) if os.path.isdir(f) else open(f, 'rb').read(9); print('READ', f) if r else 0\n"
    "  except OSError: pass",
    "network": "import socket\nfor family, address in ((2, ('1.1.1.1', 53)), (2, ('172.17.0.1', 80))):\n"
    "  for kind in (1, 2):\n"
    "    try: s = socket.socket(family, kind); s.settimeout(1); s.connect(address); s.send(b'x'); print('READ')\n"
    "    except OSError: pass\nfor family in (16, 17, 38, 40):\n"
    "  try: socket.socket(family, socket.SOCK_RAW); print('READ family', family)\n  except OSError: pass",
    "privileges": "import ctypes, os\nc = ctypes.CDLL(None, use_errno=True)\n"
    "for name, r in (('unshare', c.unshare(0x10000000)), ('mount', c.mount(b'n', b'/tmp', b'tmpfs', 0, None)),"
    " ('ptrace', c.ptrace(16, os.getppid(), 0, 0)), ('setuid', c.setuid(0)), ('shm', c.shmget(1, 4096, 0o1666)),"
    " ('keyctl', c.syscall(250, 0, -3, 1)), ('bpf', c.syscall(321, 0, 0, 0)), ('uring', c.syscall(425, 1, 0))):\n"
    "  if r >= 0: print('READ', name)\n"
    "for path in ('/x', '/usr/x', '/opt/forge_env/x', '/etc/passwd', '/dev/x', '/proc/sys/kernel/hostname'):\n"
    "  try: open(path, 'a').write('x'); print('READ', path)\n  except OSError: pass",
    "runner's descriptors": "import os\nfor n in range(3, 300):\n"
    "  try: os.write(n, b'x'); print('READ', n)\n  except OSError: pass",
}


@pytest.mark.parametrize("name", READS)
async def test_out_of_reach(sandbox: Sandbox, name: str) -> None:
    result = await sandbox.run_python(READS[name])
    assert result.ok, result
    assert "READ" not in result.stdout


async def test_no_memory_of_earlier_programs(engine: SandboxEngine) -> None:
    scan = (
        "import re\nneedle = b'NEEDLE' + b'-77'\nfound = 0\nfor line in open('/proc/self/maps'):\n"
        "    a, b = (int(x, 16) for x in line.split()[0].split('-'))\n    if 'rw' in line.split()[1]:\n"
        "        try:\n            f = open('/proc/self/mem', 'rb', 0); f.seek(a)\n"
        "            found += f.read(b - a).count(needle)\n"
        "        except (OSError, ValueError): pass\nprint(found <= 1)\n"
    )
    for _ in range(3):
        async with engine.session() as sandbox:
            await sandbox.run_python("x = 'NEEDLE' + '-77'", stdin="NEEDLE-77")
            assert (await sandbox.run_python(scan)).stdout == "True\n"


CHEATS = {
    "exits": "import os; os._exit(0)",
    "equals everything": "class E(int):\n  def __eq__(s, o): return True\n  __hash__ = int.__hash__\n"
    "def f(x): return E(0)",
    "patches the encoder": "import sys\nfor m in list(sys.modules.values()):\n"
    "  if hasattr(m, 'encode') and hasattr(m, 'pack_frame'): m.encode = lambda *a: {'o': 1}\ndef f(x): return 0",
    "writes frames": "import os, struct, json\nfor n in range(3, 50):\n"
    "  try: os.write(n, struct.pack('!I', 9) + b'{\"ok\":1}x')\n  except OSError: pass\ndef f(x): return 0",
    "colliding keys": "def f(x): return {i * (2**61 - 1) for i in range(30000)}",
}


@pytest.mark.parametrize("name", CHEATS)
async def test_wrong_stays_wrong(sandbox: Sandbox, name: str) -> None:
    result = await sandbox.run_calls(CHEATS[name], ["f(1)", "f(2)"])
    right = [
        o.error is None and type(o.value) is int and o.value == e for o, e in zip(result.outcomes, (7, 8), strict=False)
    ]
    assert not any(right)
