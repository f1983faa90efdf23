"""Processes, files, attributes and settings left behind to affect the next program."""

from __future__ import annotations

from forge_env.sandbox_audit.attacks.attack import ATTEMPT, Attack

PROCESSES = (
    Attack("daemon", "leftovers", "Leave a daemon behind by forking twice.", """\
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        while True:
            open('/tmp/alive', 'a').write('x'); time.sleep(0.001)
    os._exit(0)
os.wait(); print('left')
"""),
    Attack("foster parent", "leftovers", "Adopt its orphans, so that they are not seen when it ends.", """\
import ctypes, os, time
if os.fork() == 0:
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)
    for _ in range(3):
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0: time.sleep(60)
            os._exit(0)
    time.sleep(60)
time.sleep(0.05)
"""),
    Attack("false name", "leftovers", "Leave a process that looks like the kernel's own.", """\
import ctypes, os, time
if os.fork() == 0:
    os.setsid(); ctypes.CDLL(None).prctl(15, b'kworker/0:1', 0, 0, 0); time.sleep(60)
"""),
    Attack("stopped process", "leftovers", "Leave a process that is stopped and will be woken later.", """\
import os, signal
if os.fork() == 0:
    os.setsid(); os.kill(os.getpid(), signal.SIGSTOP)
"""),
    Attack("threads after the end", "leftovers", "End only its main thread, and continue in others.", """\
import ctypes, threading, time
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
libc = ctypes.CDLL(None)
libc.pthread_exit(None)
"""),
    Attack("background session", "leftovers",
           "Start daemons from a persistent session, which the next user must not meet.", """\
import subprocess
for _ in range(5): subprocess.Popen(['setsid', 'sleep', '60'] if 0 else ['sleep', '60'], start_new_session=True)
""", session=True),
    Attack("stops its successor", "leftovers", "Stop the process that runs the next program.", ATTEMPT + """\
import os, time
time.sleep(0.05)
for p in os.listdir('/proc'):
    if p.isdigit() and int(p) not in (1, os.getpid(), os.getppid()):
        attempt(lambda: os.kill(int(p), 19))
""", session=True),
    Attack("limits its successor", "leftovers", "Lower the limits of the process that runs the next program.",
           ATTEMPT + """\
import os, resource, time
time.sleep(0.05)
for p in os.listdir('/proc'):
    if p.isdigit() and int(p) not in (1, os.getpid(), os.getppid()):
        for number in (resource.RLIMIT_AS, resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE, resource.RLIMIT_CPU):
            try: resource.prlimit(int(p), number, (4, 4))
            except (OSError, ValueError): pass
        attempt(lambda: os.sched_setaffinity(int(p), {0}))
""", session=True),
    Attack("limits its parents", "leftovers",
           "Lower the limits and restrict the CPUs of every reachable process, including init and the runner.",
           ATTEMPT + """\
import os, resource
for p in sorted({1, os.getppid(), *(int(p) for p in os.listdir('/proc') if p.isdigit())} - {os.getpid()}):
    for number in (resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE, resource.RLIMIT_NPROC, resource.RLIMIT_AS):
        try: resource.prlimit(p, number, (40, 40))
        except (OSError, ValueError): pass
    attempt(lambda: os.sched_setaffinity(p, {0}))
"""),
    Attack("server", "leftovers", "Leave a server on a path, on an abstract name and on a port.", """\
import os, socket, time
servers = []
for family, address in ((1, '/tmp/server'), (1, '\\0server'), (2, ('127.0.0.1', 8099)), (10, ('::1', 8099))):
    try:
        server = socket.socket(family); server.bind(address); server.listen(); servers.append(server)
    except OSError: pass
if os.fork() == 0: os.setsid(); time.sleep(60)
"""),
    Attack("busy ports", "leftovers", "Leave connections that keep ports busy after their processes are gone.", """\
import socket
try:
    server = socket.socket(); server.bind(('127.0.0.1', 8098)); server.listen(200)
    for _ in range(50):
        client = socket.create_connection(('127.0.0.1', 8098)); peer, _ = server.accept(); peer.close(); client.close()
except OSError: pass
"""),
)  # fmt: skip

FILES = (
    Attack("files everywhere", "leftovers", "Leave files with odd names in every folder.", ATTEMPT + """\
import os
for folder in (b'.', b'/tmp', b'/dev/shm', b'/dev/mqueue', b'/var/tmp', b'/run', b'/work', b'/work-judge'):
    for name in (b'left', b'.hidden', b'new\\nline', b'\\xff\\xfe', b'-rf', b'x' * 255, b' ', b'.wipe-0'):
        attempt(lambda: open(folder + b'/' + name, 'w').write('left'))
""", unguarded="user"),
    Attack("deep folders", "leftovers", "Leave folders too deep to name.", """\
import os
try:
    for n in range(20000): os.mkdir('d'); os.chdir('d')
except OSError: pass
""", unguarded="user"),
    Attack("locked folders", "leftovers", "Lock its folders against removal.", """\
import os
os.makedirs('a/b/c'); os.chmod('a/b', 0); os.chmod('a', 0); os.chmod('.', 0)
""", unguarded="user"),
    Attack("links and pipes", "leftovers", "Leave links out of the folder, loops, pipes and sockets.", """\
import os, socket
for n, target in enumerate(('/', '/tmp', '..', 'loop', '/proc/self', '/dev/null')): os.symlink(target, f'l{n}')
os.symlink('loop', 'loop'); os.mkfifo('pipe'); socket.socket(socket.AF_UNIX).bind('socket')
open('one', 'w').close(); os.link('one', 'two'); os.mkdir('dir'); os.chmod('dir', 0o1000)
""", unguarded="user"),
    Attack("attributes of the folder", "leftovers",
           "Leave a message, and access lists that spoil new files, on the folder itself.", ATTEMPT + """\
import os, struct
acl = struct.pack('<I', 2) + b''.join(struct.pack('<HHI', tag, 0, 0xffffffff) for tag in (1, 4, 32))
for folder in ('.', '/tmp', '/dev/shm'):
    for name, value in (('user.message', b'70417'), ('system.posix_acl_default', acl)):
        attempt(lambda: os.setxattr(folder, name, value))
""", unguarded="user"),
    Attack("times of the folder", "leftovers", "Leave a message in the folder's times.", ATTEMPT + """\
import os
for folder in ('.', '/tmp', '/dev/shm'):
    attempt(lambda: os.utime(folder, ns=(70417, 80231)))
""", unguarded="user"),
    Attack("flags of the folders", "leftovers",
           "Leave a message in the flags that file systems keep with a folder.", ATTEMPT + """\
import fcntl, os
for folder in ('.', '/tmp', '/dev/shm'):
    attempt(lambda: fcntl.ioctl(os.open(folder, 0), 0x40086602, (0xC0).to_bytes(8, 'little')))
""", unguarded="user"),
    Attack("modes of the folders", "leftovers", "Change the modes of the folders that the next program works in.",
           ATTEMPT + """\
import os
for folder in ('.', '/tmp', '/dev/shm', '/dev', '/'):
    attempt(lambda: os.chmod(folder, 0o3777))
""", unguarded="user"),
    Attack("start-up files", "leftovers", "Leave files that shells and interpreters run when they start.", """\
import os, site, sys
packages = site.getusersitepackages()
for path in ('.bashrc', '.profile', '.bash_profile', '.pythonrc', 'sitecustomize.py', 'usercustomize.py', '.pdbrc',
             'os.py', '.config/systemd/user/x.service', f'{packages}/x.pth', f'{packages}/sitecustomize.py'):
    try:
        if os.path.dirname(path): os.makedirs(os.path.dirname(path), exist_ok=True)
        open(path, 'w').write('print("left")')
    except OSError: pass
os.environ['PYTHONSTARTUP'] = '.pythonrc'
""", unguarded="user"),
    Attack("scheduled jobs", "leftovers",
           "Make the machine run it later: cron, at, systemd, the loader, profiles.", """\
import os
for path in '''/etc/cron.d/x /etc/crontab /var/spool/cron/crontabs/root /var/spool/cron/atjobs/x /etc/ld.so.preload
        /etc/profile.d/x.sh /etc/systemd/system/x.service /etc/rc.local /etc/environment /etc/inputrc'''.split():
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, 'a'): print('LEAK', path)
    except OSError: pass
"""),
    Attack("poisoned library", "leftovers", "Replace compiled modules of the library and of the runner.", ATTEMPT + """\
import glob, json, os, sys
for folder in (os.path.dirname(json.__file__), '/opt/forge_env/_forge_env_runner', os.path.dirname(os.__file__)):
    for path in glob.glob(folder + '/__pycache__/*.pyc')[:20]:
        attempt(lambda: os.open(path, os.O_WRONLY), path)
        try: os.rename(path, path + 'x'); print('LEAK', path); os.rename(path + 'x', path)
        except OSError: pass
"""),
    Attack("shared memory", "leftovers", "Leave shared memory, semaphores and queues, which outlive processes.", """\
import ctypes, os
libc = ctypes.CDLL(None)
if libc.shmget(0x70417, 4096, 0o1666) >= 0: print('LEAK shm')
if libc.semget(0x70417, 1, 0o1666) >= 0: print('LEAK sem')
if libc.msgget(0x70417, 0o1666) >= 0: print('LEAK msg')
for call in ('mq_open', 'shm_open', 'sem_open'):
    try: result = getattr(libc, call)(b'/left', 0o102, 0o666, None)
    except AttributeError: continue
    if call == 'mq_open' and result >= 0: print('LEAK queue')
"""),
    Attack("its own settings", "leftovers",
           "Change environment, folder, umask, priority, affinity and time zone, and modules of the interpreter.", """\
import builtins, json, os, resource, signal, sys, time
os.environ.update(LEFT='1', PATH='/tmp', LD_PRELOAD='/tmp/x.so', PYTHONPATH='/tmp', TZ='UTC+7'); time.tzset()
os.chdir('/'); os.umask(0o777); os.nice(5); os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 64)); signal.alarm(1)
resource.setrlimit(resource.RLIMIT_NOFILE, (5, 5)); sys.path.insert(0, '/tmp'); sys.setrecursionlimit(60)
builtins.print = json.dumps = len; sys.modules['os'] = None
"""),
    Attack("settings of a session", "leftovers", "Leave variables, aliases and modules in a persistent session.", """\
import builtins, os, sys
os.environ['LEFT'] = '1'; builtins.left = 1; sys.modules['left'] = sys; os.umask(0)
""", session=True),
    Attack("core files", "leftovers", "Leave a core file, or make the host keep one.", """\
import os, resource
try: resource.setrlimit(resource.RLIMIT_CORE, (-1, -1))
except (OSError, ValueError): pass
os.abort()
"""),
)  # fmt: skip
