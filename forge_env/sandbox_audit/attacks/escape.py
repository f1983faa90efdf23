"""Escapes through files: the host's, other processes', devices, and inherited descriptors."""

from __future__ import annotations

from forge_env.sandbox_audit.attacks.attack import ATTEMPT, Attack

FILES = (
    Attack("host secrets", "escape", "Read password hashes, keys and homes of the host.", """\
import glob
for pattern in '/etc/shadow /etc/ssh/*_key /root/.* /root/*/* /home/*/* /etc/machine-id /tmp/../etc/gshadow'.split():
    for path in glob.glob(pattern):
        try:
            if open(path, 'rb').read(1): print('LEAK', path)
        except OSError: pass
""", unguarded="root"),
    Attack("container sockets", "escape",
           "Find a Docker, containerd or any other socket in the file system and connect to it.", """\
import os, socket, stat
for top in ('/run', '/var/run', '/var/lib', '/tmp', '/dev', '/opt', '/work', '/srv', '/mnt'):
    for folder, _, names in os.walk(top):
        for name in names:
            path = os.path.join(folder, name)
            try:
                if stat.S_ISSOCK(os.stat(path).st_mode):
                    socket.socket(socket.AF_UNIX).connect(path)
                    print('LEAK', path)
            except OSError: pass
"""),
    Attack("raw devices", "escape",
           "Open disks, kernel memory, the kernel log, virtual machines and accelerators.", ATTEMPT + """\
import glob
for pattern in '''/dev/[sv]d* /dev/nvme* /dev/loop* /dev/dm-* /dev/mem /dev/port /dev/kmsg /dev/kvm /dev/fuse
                /dev/net/tun /dev/userfaultfd /dev/nvidia* /dev/dri/* /dev/vhost* /dev/cpu/*/* /dev/mapper/*
                /dev/input/*'''.split():
    for path in glob.glob(pattern):
        attempt(lambda: open(path, 'rb', 0), path)
""", unguarded="root"),
    Attack("makes devices", "escape", "Make device files in every writable folder.", """\
import os, stat
for folder in ('.', '/tmp', '/dev/shm', '/dev', '/var/tmp'):
    for kind, major, minor in ((stat.S_IFBLK, 8, 0), (stat.S_IFBLK, 254, 0), (stat.S_IFCHR, 1, 1)):
        path = f'{folder}/node{os.getpid()}'
        try:
            os.mknod(path, kind | 0o666, os.makedev(major, minor)); print('LEAK', path); os.unlink(path)
        except OSError: pass
""", unguarded="root"),
    Attack("other processes", "escape", "Read environment, memory, files and root folder of every other process.", """\
import os
for p in os.listdir('/proc'):
    if p.isdigit() and int(p) != os.getpid():
        try: print('LEAK', p, os.readlink(f'/proc/{p}/fd/0'), os.listdir(f'/proc/{p}/fd'))
        except OSError: pass
        for f in ('environ', 'mem', 'maps', 'root/etc/passwd', 'cwd/x', 'stack', 'syscall', 'auxv'):
            try:
                if open(f'/proc/{p}/{f}', 'rb').read(10): print('LEAK', p, f)
            except OSError: pass
""", unguarded="user"),
    Attack("memory of its parents", "escape", "Open the memory of its parents, and of the init, for writing.",
           ATTEMPT + """\
import os
for p in (os.getppid(), 1):
    for f in ('mem', 'clear_refs', 'oom_score_adj', 'comm', 'uid_map'):
        attempt(lambda: os.open(f'/proc/{p}/{f}', os.O_WRONLY), p, f)
""", unguarded="root"),
    Attack("kernel settings", "escape", "Open kernel settings for writing, such as core_pattern.", ATTEMPT + """\
import os
for path in '''/proc/sys/kernel/core_pattern /proc/sys/kernel/modprobe /proc/sys/kernel/hostname /proc/sysrq-trigger
        /proc/sys/vm/overcommit_memory /proc/sys/fs/binfmt_misc/register /proc/irq/0/smp_affinity
        /proc/sys/net/ipv4/ip_forward /proc/sys/kernel/yama/ptrace_scope /proc/acpi/wakeup /proc/mtrr'''.split():
    attempt(lambda: os.open(path, os.O_WRONLY), path)
""", unguarded="root"),
    Attack("sysfs and control groups", "escape",
           "Open anything for writing below /sys, such as a control group's release agent or its limits.",
           ATTEMPT + """\
import os, time
end = time.monotonic() + 0.3
for top in ('/sys/fs/cgroup', '/sys/kernel', '/sys/module', '/sys/power', '/sys/block'):
    for folder, folders, names in os.walk(top):
        folders[:] = [name for name in folders if name not in ('debug', 'tracing', 'security')]
        for name in names:
            attempt(lambda: os.open(os.path.join(folder, name), os.O_WRONLY), folder, name)
        if time.monotonic() > end: break
""", unguarded="root"),
    Attack("system folders", "escape", "Write to programs, libraries, accounts and the runner.", ATTEMPT + """\
import glob, os, sys
folders = ['/', '/bin', '/usr', '/usr/bin', '/usr/lib', '/etc', '/opt', '/opt/forge_env',
           '/opt/forge_env/_forge_env_runner', '/root', '/run', '/var', '/sys', '/proc', '/dev',
           os.path.dirname(os.__file__), os.path.dirname(sys.executable)]
for folder in folders:
    attempt(lambda: os.open(folder, os.O_TMPFILE | os.O_WRONLY), folder)
    for path in glob.glob(folder + '/*')[:30]:
        if os.path.isfile(path) and not os.path.islink(path) and not folder.startswith(('/proc', '/sys', '/dev')):
            attempt(lambda: os.open(path, os.O_WRONLY), path)
""", unguarded="root"),
    Attack("kernel memory", "escape",
           "Read kernel memory, symbols' addresses, physical pages and boot parameters with secrets.", """\
for path, harmless in (('/proc/kcore', b''), ('/proc/kmsg', b''), ('/proc/kpagecount', b''), ('/proc/kpageflags', b''),
                       ('/proc/kallsyms', b'0000000000000000'), ('/proc/iomem', b'00000000-00000000'),
                       ('/proc/vmallocinfo', b''), ('/proc/slabinfo', b''), ('/proc/timer_list', b''),
                       ('/sys/kernel/debug/sched', b''), ('/sys/firmware/acpi/tables/DSDT', b'')):
    try:
        with open(path, 'rb', 0) as file:
            import os; os.set_blocking(file.fileno(), False)
            line = file.read(64)
            if line and not (harmless and line.lstrip().startswith(harmless)): print('LEAK', path)
    except OSError: pass
""", unguarded="root"),
    Attack("breaks out of chroot", "escape",
           "Climb above its root with a second chroot, as programs with privileges can.", """\
import os
top = os.open('/', os.O_RDONLY)
os.makedirs('jail', exist_ok=True)
try:
    os.chroot('jail'); print('LEAK chroot')
    os.fchdir(top)
    for _ in range(50): os.chdir('..')
    os.chroot('.')
except OSError: pass
""", unguarded="root"),
    Attack("inherited descriptors", "escape",
           "Use descriptors that it may have inherited, and folders behind them.", """\
import os
for n in range(3, 1024):
    try: link = os.readlink(f'/proc/self/fd/{n}')
    except OSError: continue
    if link != f'/proc/{os.getpid()}/fd': print('LEAK', n, link)
for n in range(3):
    try: os.close(os.open('..', os.O_RDONLY, dir_fd=n)); print('LEAK folder', n)
    except OSError: pass
"""),
    Attack("set-user-id programs", "escape", "Find a program that raises privileges, or make one.", """\
import os, shutil, stat, subprocess
for top in ('/usr/bin', '/usr/lib', '/usr', '/bin', '/sbin', '/opt', '/etc', '/var', '/root'):
    for folder, _, names in os.walk(top):
        for name in names:
            try: info = os.stat(os.path.join(folder, name), follow_symlinks=False)
            except OSError: continue
            if stat.S_ISREG(info.st_mode) and info.st_mode & (stat.S_ISUID | stat.S_ISGID):
                print('LEAK', folder, name); raise SystemExit
try:
    shutil.copy('/usr/bin/id', 'own'); os.chown('own', 0, 0); os.chmod('own', 0o6755)
    print('LEAK', subprocess.run(['./own'], capture_output=True).stdout)
except OSError: pass
""", unguarded="user"),
    Attack("changes its user", "escape",
           "Take the user id of root, of the runner, of its judge, or of an account.", """\
import os
me = os.getuid()
for other in (0, me + 1, me - 1, me + 15, 1, 65534):
    for become in (lambda: os.setuid(other), lambda: os.setresuid(-1, other, -1), lambda: os.setgid(other),
                   lambda: os.setgroups([other]), lambda: os.chown('/tmp', other, other)):
        if other == me: continue
        pid = os.fork()
        if pid == 0:
            try: become(); os._exit(1)
            except (OSError, OverflowError): os._exit(0)
        if os.waitpid(pid, 0)[1]: print('LEAK', other)
"""),
    Attack("capabilities", "escape", "Hold capabilities, take them back, or raise them for what it executes.", """\
import ctypes, struct
libc = ctypes.CDLL(None)
libc.capset(struct.pack('Ii', 0x20080522, 0), struct.pack('6I', *[0xffffffff] * 6))
for n in range(41): libc.prctl(47, 2, n, 0, 0)
for line in open('/proc/self/status'):
    if line.startswith(('CapInh', 'CapPrm', 'CapEff', 'CapAmb')) and int(line.split()[1], 16): print('LEAK', line)
""", unguarded="root"),
    Attack("removes its restrictions", "escape",
           "Find the system-call filter or no-new-privileges missing, or remove them.", """\
import ctypes
libc = ctypes.CDLL(None)
libc.prctl(22, 0, 0, 0, 0); libc.prctl(38, 0, 0, 0, 0)
status = open('/proc/self/status').read()
if 'Seccomp:\\t2' not in status: print('LEAK no filter')
if 'NoNewPrivs:\\t1' not in status: print('LEAK new privileges')
""", unguarded="user"),
    Attack("link for the engine", "escape", "Make the engine read a file of the host through a link.",
           "import os; os.symlink('/etc/shadow', 'bait')", bait=True, unguarded="root"),
    Attack("terminals", "escape", "Inject input into a terminal.", ATTEMPT + """\
import fcntl, glob, termios
for path in ['/dev/tty', '/dev/console', '/dev/tty0', '/dev/tty1', '/dev/vcs', *glob.glob('/dev/pts/[0-9]*')]:
    try: file = open(path, 'wb', 0)
    except OSError: continue
    print('LEAK', path)
for fd in range(3):
    attempt(lambda: fcntl.ioctl(fd, termios.TIOCSTI, b'x'), fd)
"""),
)  # fmt: skip
