"""How a sandbox looks from inside, to compare one that was used with a clean one."""

from __future__ import annotations

import json
from typing import Any

from forge_env.sandbox.types import ExecResult

LOOK = """\
import builtins, fcntl, glob, json, os, resource, signal, socket, sys, threading
def lines(path):
    try:
        with open(path) as file: return file.read().splitlines()[1:]
    except OSError: return []
def attributes(path):
    info = os.stat(path)
    try: flags = fcntl.ioctl(os.open(path, os.O_RDONLY), 0x80086601, bytes(8)).hex()
    except OSError: flags = ''
    return [oct(info.st_mode), info.st_mtime_ns, os.listxattr(path), flags]
folders = [os.getcwd(), '/tmp', '/dev/shm']
everywhere = [*folders, '/dev/mqueue', '/var/tmp', '/run', '/dev', '/']
look = {
    'processes': len([p for p in os.listdir('/proc') if p.isdigit()]),
    'named sockets': len([line for line in lines('/proc/net/unix') if len(line.split()) > 7]),
    'connections': [line for name in ('tcp', 'tcp6', 'udp', 'udp6', 'raw') for line in lines('/proc/net/' + name)],
    'files': sorted(f'{folder}/{name}' for folder in filter(os.path.isdir, everywhere) for name in os.listdir(folder)),
    'folders': {folder: attributes(folder) for folder in folders},
    'terminals': sorted(glob.glob('/dev/pts/*')),
    'mounts': len(lines('/proc/self/mountinfo')),
    'keys': lines('/proc/keys'),
    'host name': socket.gethostname(),
    'environment': dict(os.environ),
    'limits': [resource.getrlimit(number) for number in range(16)],
    'processors': len(os.sched_getaffinity(0)),
    'priority': os.getpriority(0, 0),
    'umask': os.umask(0o22),
    'signals': [str(signal.getsignal(number)) for number in range(1, 32)],
    'blocked signals': sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
    'alarms': signal.getitimer(signal.ITIMER_REAL),
    'module path': sys.path,
    'modules': sorted(sys.modules),
    'builtins': sorted(vars(builtins)),
    'recursion': sys.getrecursionlimit(),
    'threads': threading.active_count(),
    'out-of-memory score': open('/proc/self/oom_score_adj').read(),
}
with open('new', 'w') as file: file.write('x')
look['new files'] = oct(os.stat('new').st_mode)
os.unlink('new')
print(json.dumps(look))
"""
"""A program that prints, as JSON, all that a program before it could have changed."""
_AT_MOST = ("processes", "named sockets")


def differences(result: ExecResult, usual: dict[str, Any]) -> list[str]:
    """What the program `LOOK` found otherwise than in a clean sandbox, in words."""
    try:
        now = json.loads(result.stdout)
    except ValueError:
        how = "it timed out" if result.timed_out else result.stderr[-200:].strip()
        return [f"the next program does not work: {how}"]
    return [
        f"{name} were left: {_short(now.get(name))} instead of {_short(expected)}"
        for name, expected in usual.items()
        if (now[name] > expected if name in _AT_MOST else now[name] != expected)
    ]


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 200 else f"{text[:200]}..."
