"""A dozen kinds of attack, for `forge-env sandbox audit` and the tests. Names say what; `tries` says how."""

from __future__ import annotations

from forge_env.sandbox.audit import Attack

ATTACKS = (
    Attack(
        "fork bomb",
        "starvation",
        "multiply without end, in sessions of its own, deaf to signals",
        """\
import os, signal
while True:
    try:
        if os.fork() == 0:
            os.setsid()
            for s in (1, 2, 15): signal.signal(s, signal.SIG_IGN)
    except OSError: pass
""",
    ),
    Attack(
        "memory bomb",
        "starvation",
        "take all memory in one process",
        """\
x = []
while True: x.append(bytearray(10 << 20))
""",
    ),
    Attack(
        "memory bomb in many processes",
        "starvation",
        "take all memory in thirty processes",
        """\
import os, time
for i in range(30):
    try:
        if os.fork() == 0:
            x = bytearray(100 << 20)
            time.sleep(30)
    except OSError: pass
time.sleep(30)
""",
    ),
    Attack(
        "output flood",
        "starvation",
        "drown the engine in output",
        """\
import os
while True: os.write(1, b'y' * 65536)
""",
    ),
    Attack(
        "ignores signals",
        "starvation",
        "sleep on after its time, deaf to signals",
        """\
import signal, time
for s in (1, 2, 15): signal.signal(s, signal.SIG_IGN)
time.sleep(60)
""",
    ),
    Attack(
        "stops itself",
        "starvation",
        "stop, so that nobody sees it end",
        """\
import os, signal; os.kill(os.getpid(), signal.SIGSTOP)
""",
    ),
    Attack(
        "daemon",
        "leftovers",
        "leave a daemon behind by forking twice",
        """\
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        while True:
            open('/tmp/alive', 'a').write('x'); time.sleep(0.001)
    os._exit(0)
os.wait(); print('left')
""",
    ),
    Attack(
        "kills everyone",
        "starvation",
        "kill every process in sight",
        """\
import os; os.kill(-1, 9)
""",
    ),
    Attack(
        "kills its parents",
        "starvation",
        "kill the runner",
        """\
import os
for p in (os.getppid(), 1):
  try: os.kill(p, 9)
  except OSError: pass
""",
    ),
    Attack(
        "deep folders",
        "leftovers",
        "leave folders too deep to name",
        """\
import os
try:
    for n in range(20000): os.mkdir('d'); os.chdir('d')
except OSError: pass
""",
    ),
    Attack(
        "locked folders",
        "leftovers",
        "lock its folders against removal",
        """\
import os
os.makedirs('a/b/c'); os.chmod('a/b', 0); os.chmod('a', 0); os.chmod('.', 0)
""",
    ),
    Attack(
        "fills the disk",
        "starvation",
        "fill the disk",
        """\
f = open('/tmp/big', 'wb')
while True: f.write(b'x' * (1 << 20))
""",
    ),
    Attack(
        "fills the inodes",
        "starvation",
        "use up all inodes",
        """\
for n in range(100000): open(f'/dev/shm/{n}', 'w')
""",
    ),
    Attack(
        "segfault",
        "starvation",
        "crash the interpreter",
        """\
import ctypes; ctypes.string_at(0)
""",
    ),
    Attack(
        "other processes",
        "escape",
        "read other processes' environment, memory and files",
        """\
import os
for p in os.listdir('/proc'):
  if p.isdigit() and int(p) != os.getpid():
    for f in ('environ', 'mem', 'maps', 'root/etc/passwd', 'cwd/x'):
      try:
        if open(f'/proc/{p}/{f}', 'rb').read(10): print('LEAK', p, f)
      except OSError: pass
""",
    ),
    Attack(
        "host files",
        "escape",
        "read the host's files and devices",
        """\
import os
places = "/etc/shadow /root/.bashrc /var/run/docker.sock /dev/kmsg /dev/vda /proc/kcore /home /work/../etc/machine-id"
for f in places.split():
  try:
    if os.listdir(f) if os.path.isdir(f) else open(f, 'rb').read(9): print('LEAK', f)
  except OSError: pass
""",
    ),
    Attack(
        "network",
        "network",
        "reach the network, the host, and unusual socket families",
        """\
import socket
for family, address in ((2, ('1.1.1.1', 53)), (2, ('172.17.0.1', 80))):
  for kind in (1, 2):
    try: s = socket.socket(family, kind); s.settimeout(1); s.connect(address); s.send(b'x'); print('LEAK')
    except OSError: pass
for family in (16, 17, 38, 40):
  try: socket.socket(family, socket.SOCK_RAW); print('LEAK family', family)
  except OSError: pass
""",
    ),
    Attack(
        "privileges",
        "escape",
        "gain privileges, write to the system, use dangerous system calls",
        """\
import ctypes, os
c = ctypes.CDLL(None, use_errno=True)
calls = {
  'unshare': c.unshare(0x10000000), 'mount': c.mount(b'n', b'/tmp', b'tmpfs', 0, None),
  'ptrace': c.ptrace(16, os.getppid(), 0, 0), 'setuid': c.setuid(0), 'shm': c.shmget(1, 4096, 0o1666),
  'keyctl': c.syscall(250, 0, -3, 1), 'bpf': c.syscall(321, 0, 0, 0), 'io_uring': c.syscall(425, 1, 0),
}
for name, result in calls.items():
  if result >= 0: print('LEAK', name)
for path in ('/x', '/usr/x', '/opt/forge_env/x', '/etc/passwd', '/dev/x', '/proc/sys/kernel/hostname'):
  try: open(path, 'a').write('x'); print('LEAK', path)
  except OSError: pass
""",
    ),
    Attack(
        "runner's descriptors",
        "escape",
        "write to descriptors it may have inherited",
        """\
import os
for n in range(3, 300):
  try: os.write(n, b'x'); print('LEAK', n)
  except OSError: pass
""",
    ),
    Attack(
        "exits",
        "cheating",
        "end with success before it is judged",
        """\
import os; os._exit(0)
""",
    ),
    Attack(
        "equals everything",
        "cheating",
        "return a number that equals everything",
        """\
class E(int):
  def __eq__(s, o): return True
  __hash__ = int.__hash__
def f(x): return E(0)
""",
    ),
    Attack(
        "patches the encoder",
        "cheating",
        "change how its values are sent",
        """\
import sys
for m in list(sys.modules.values()):
  if hasattr(m, 'encode') and hasattr(m, 'pack_frame'): m.encode = lambda *a: {'o': 1}
def f(x): return 0
""",
    ),
    Attack(
        "writes frames",
        "cheating",
        "write results to every descriptor",
        """\
import os, struct, json
for n in range(3, 50):
  try: os.write(n, struct.pack('!I', 9) + b'{"ok":1}x')
  except OSError: pass
def f(x): return 0
""",
    ),
    Attack(
        "colliding keys",
        "cheating",
        "stall the judge with colliding hashes",
        """\
def f(x): return {i * (2**61 - 1) for i in range(30000)}
""",
    ),
)
