"""Escapes through system calls: creating namespaces, controlling other processes, or with a history of escapes.

A refused call fails with EPERM, EACCES or ENOSYS. Any other result, even an error, shows that the call was executed.
"""

from __future__ import annotations

from forge_env.sandbox_audit.attacks.attack import Attack, Unguarded

_REACH = """\
import ctypes, os, platform
libc = ctypes.CDLL(None, use_errno=True)
ARM = platform.machine() == 'aarch64'
buffer = ctypes.create_string_buffer(4096)
def call(x86, arm, *args):
    ctypes.set_errno(0)
    words = [ctypes.c_long(word) if isinstance(word, int) else word for word in args]
    result = libc.syscall(ctypes.c_long(arm if ARM else x86), *words)
    return result, ctypes.get_errno()
def reach(what, x86, arm, *args):
    if (arm if ARM else x86) >= 0:
        result, error = call(x86, arm, *args)
        if result >= 0 or error not in (1, 13, 38): print('LEAK', what, result, error)
"""


def _calls(name: str, tries: str, code: str, unguarded: Unguarded = "root") -> Attack:
    return Attack(name, "escape", tries, _REACH + code, unguarded=unguarded)


CALLS = (
    _calls("new namespaces", "Make namespaces, in which it would be root.", """\
for bit in (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000):
    reach(f'unshare {bit:x}', 272, 97, bit)
    pid, _ = call(56, 220, bit | 17, 0, 0, 0, 0)
    if pid == 0: os._exit(0)
    if pid > 0: print(f'LEAK clone {bit:x}')
reach('unshare time', 272, 97, 0x80)
arguments = (ctypes.c_uint64 * 11)(0x10000000, 0, 0, 0, 17)
pid, _ = call(435, 435, ctypes.byref(arguments), 88)
if pid == 0: os._exit(0)
if pid > 0: print('LEAK clone3')
"""),
    _calls("other namespaces", "Join the namespaces of the init, of its parent, or its own anew.", """\
for owner in ('1', 'self', str(os.getppid())):
    for kind in ('user', 'mnt', 'pid', 'net', 'ipc', 'uts', 'cgroup'):
        try: fd = os.open(f'/proc/{owner}/ns/{kind}', os.O_RDONLY)
        except OSError: continue
        reach(f'setns {owner} {kind}', 308, 268, fd, 0)
"""),
    _calls("mounts", "Mount, bind, remount writable and unmount.", """\
reach('mount', 165, 40, b'none', b'/nowhere', b'tmpfs', 0, 0)
reach('bind', 165, 40, b'/nowhere', b'/tmp', 0, 0x1000, 0)
reach('remount', 165, 40, b'none', b'/nowhere', 0, 0x20, 0)
reach('umount', 166, 39, b'/nowhere', 2)
reach('pivot_root', 155, 41, b'/nowhere', b'/nowhere')
"""),
    _calls("new mount calls", "Mount with the newer family of calls, which older filters miss.", """\
reach('fsopen', 430, 430, b'tmpfs', 0)
reach('open_tree', 428, 428, -100, b'/', 1)
reach('move_mount', 429, 429, -1, b'', -1, b'', 0)
reach('fspick', 433, 433, -100, b'/nowhere', 0)
reach('mount_setattr', 442, 442, -1, b'', 0x1000, 0, 0)
reach('open_tree_attr', 467, 467, -100, b'/', 1, 0, 0)
"""),
    _calls("ptrace", "Trace its own child, its parent and the init.", """\
pid = os.fork()
if pid == 0: os._exit(1 if libc.ptrace(0, 0, 0, 0) == 0 else 0)
if os.waitpid(pid, 0)[1]: print('LEAK traced')
reach('seize itself', 101, 117, 0x4206, os.getpid(), 0, 0)
""", unguarded="user"),
    _calls("memory across processes", "Read and write the memory of other processes without tracing them.", """\
vector = (ctypes.c_uint64 * 2)(ctypes.addressof(buffer), 8)
for pid in (os.getppid(), 1):
    reach('process_vm_readv', 310, 270, pid, ctypes.byref(vector), 1, ctypes.byref(vector), 1, 0)
    reach('process_vm_writev', 311, 271, pid, ctypes.byref(vector), 0, ctypes.byref(vector), 0, 0)
    reach('kcmp', 312, 272, pid, os.getpid(), 0, 0, 0)
"""),
    _calls("descriptors of others", "Copy descriptors out of other processes, advise their memory away.", """\
for pid in (os.getppid(), 1):
    try: fd = os.pidfd_open(pid)
    except OSError: continue
    reach('pidfd_getfd', 438, 438, fd, 0, 0)
    reach('process_madvise', 440, 440, fd, 0, 0, 20, 0)
"""),
    _calls("signals to all", "Send a signal to any process but its parents and children.", """\
import signal
mine = {1, os.getpid(), os.getppid()}
for pid in range(2, 40000):
    if pid not in mine:
        try: os.kill(pid, 0); print('LEAK', pid)
        except OSError: pass
""", unguarded="user"),
    _calls("keyrings", "Leave secrets in, or read them from, the kernel's keyrings, which know no namespaces.", """\
reach('add_key', 248, 217, b'user', b'probe', b'x', 1, -2)
reach('keyctl', 250, 219, 0, -3, 1)
reach('request_key', 249, 218, b'user', b'probe', 0, 0)
try:
    if os.path.getsize('/proc/keys') or open('/proc/keys').read().strip(): print('LEAK keys')
except OSError: pass
""", unguarded="user"),
    _calls("io_uring", "Work through io_uring, past the filter.",
           "reach('io_uring', 425, 425, 1, buffer)\n", unguarded=""),
    _calls("bpf", "Load programs and maps into the kernel.", """\
attribute = (ctypes.c_uint32 * 18)(2, 4, 4, 1)
reach('bpf', 321, 280, 0, ctypes.byref(attribute), 72)
"""),
    _calls("userfaultfd", "Stop the kernel in the middle of a copy.", """\
reach('userfaultfd', 323, 282, 1)
reach('userfaultfd', 323, 282, 0)
""", unguarded="user"),
    _calls("performance counters", "Watch the machine, and its secrets, through performance counters.", """\
attribute = (ctypes.c_uint32 * 32)(1, 128)
reach('perf', 298, 241, ctypes.byref(attribute), 0, -1, -1, 0)
"""),
    _calls("kernel modules", "Load or remove kernel code, start another kernel.", """\
reach('finit_module', 313, 273, -1, b'', 0)
reach('init_module', 175, 105, buffer, 1, b'')
reach('delete_module', 176, 106, b'no such module', 0o4000)
reach('kexec', 246, 104, 0, 1000, 0, 0xffff)
reach('reboot', 169, 142, 0, 0, 0, 0)
"""),
    _calls("clocks", "Set the clock, so that limits and judges misread the time.", """\
bad = (ctypes.c_int64 * 2)(-1, -1)
reach('clock_settime', 227, 112, 0, ctypes.byref(bad))
reach('settimeofday', 164, 170, ctypes.byref(bad), 0)
reach('adjtimex', 159, 171, buffer)
reach('clock_adjtime', 305, 266, 0, buffer)
""", unguarded="user"),
    _calls("names of the host", "Rename the machine.", """\
reach('sethostname', 170, 161, b'x', -1)
reach('setdomainname', 171, 162, b'x', -1)
"""),
    _calls("administration", "Switch accounting, swap and quotas, read the kernel's log.", """\
reach('acct', 163, 89, b'/nowhere')
reach('swapon', 167, 224, b'/nowhere', 0)
reach('swapoff', 168, 225, b'/nowhere')
reach('quotactl', 179, 60, 0x800001 << 8, b'/nowhere', 0, buffer)
reach('syslog', 103, 116, 3, buffer, 4096)
"""),
    _calls("old corners", "Use rarely needed calls: segment tables, ports, execution domains, 32-bit calls.", """\
reach('modify_ldt', 154, -1, 0, buffer, 16)
reach('ioperm', 173, -1, 0, 0, 0)
reach('iopl', 172, -1, 0)
reach('personality', 135, 92, 0x40000)
reach('uselib', 134, -1, b'/nowhere')
reach('x32 getpid', 0x40000000 | 39, -1)
""", unguarded="user"),
    _calls("kernel AIO", "Take the contexts of asynchronous I/O that the machine has for all its users.", """\
contexts = [ctypes.c_ulong(0) for _ in range(4)]
for context in contexts: reach('io_setup', 206, 0, 1, ctypes.byref(context))
""", unguarded="user"),
    _calls("unlisted calls", "Make old and new calls that a list of forbidden ones may lack.", """\
reach('ioprio_get', 252, 31, 1, 0)
reach('get_mempolicy', 239, 236, 0, 0, 0, 0, 0)
reach('sync', 162, 81)
reach('sysfs', 139, -1, 3)
reach('ustat', 136, -1, 0, buffer)
reach('process_mrelease', 448, 448, -1, 0)
request = (ctypes.c_uint64 * 4)(32, 1, 0, 0)
for name, number in (('statmount', 457), ('listmount', 458), ('listns', 470)):
    reach(name, number, number, ctypes.byref(request), buffer, 4096, 0)
size = ctypes.c_uint32(4096)
reach('lsm_get_self_attr', 459, 459, 100, buffer, ctypes.byref(size), 0)
reach('lsm_set_self_attr', 460, 460, 100, buffer, 4096, 0)
reach('lsm_list_modules', 461, 461, buffer, ctypes.byref(size), 0)
for number in range(463, 600): reach(str(number), number, number, 0, 0, 0, 0, 0, 0)
""", unguarded="user"),
    _calls("32-bit calls", "Call the kernel through the 32-bit entry, whose numbers a filter may not know.", """\
import mmap
if not ARM:
    page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    page.write(bytes.fromhex('53b814000000cd805bc3'))  # getpid by int 0x80
    function = ctypes.CFUNCTYPE(ctypes.c_long)(ctypes.addressof(ctypes.c_char.from_buffer(page)))
    if function() == os.getpid(): print('LEAK')
""", unguarded=""),
    _calls("more than its share", "Raise its priority, become a real-time process, place memory and pages.", """\
reach('setpriority', 141, 140, 0, 0, -20)
reach('sched_setscheduler', 144, 119, 0, 1, ctypes.byref(ctypes.c_int(1)))
reach('ioprio_set', 251, 30, 1, 0, 1 << 13)
reach('set_mempolicy', 238, 237, 0, 0, 0)
reach('move_pages', 279, 239, 0, 0, 0, 0, 0, 0)
try: print('LEAK' if os.nice(-1) < 0 else '')
except OSError: pass
"""),
    _calls("raises its limits", "Lift its own limits, and change those of others.", """\
import resource
for number in range(16):
    soft, hard = resource.getrlimit(number)
    for wanted in (hard + 1, resource.RLIM_INFINITY):
        if hard in (resource.RLIM_INFINITY, 0) and number not in (resource.RLIMIT_CORE, resource.RLIMIT_NPROC): continue
        try: resource.setrlimit(number, (soft, wanted)); print('LEAK', number, hard)
        except (OSError, ValueError, OverflowError): pass
    if hard == resource.RLIM_INFINITY and number in (0, 1, 6, 7, 9): print('LEAK unlimited', number)
""", unguarded="user"),
    _calls("files by handle", "Open files of the host by handle, past every path, and watch them all.", """\
class Handle(ctypes.Structure): _fields_ = [('size', ctypes.c_uint), ('type', ctypes.c_int), ('id', ctypes.c_uint64)]
reach('open_by_handle_at', 304, 265, os.open('/', os.O_RDONLY), ctypes.byref(Handle(8, 1, 2)), 0)
reach('fanotify_init', 300, 262, 0, 0)
reach('lookup_dcookie', 212, 18, 0, buffer, 64)
"""),
    _calls("memory without a name", "Get memory that no limit counts.", """\
reach('memfd_create', 319, 279, b'x', 0)
reach('memfd_secret', 447, 447, 0)
reach('shmget', 29, 194, 0, 4096, 0o1600)
""", unguarded="user"),
    _calls("its own filter", "Add a permissive filter, or one that it answers itself, on top of its filter.", """\
class Filter(ctypes.Structure): _fields_ = [('length', ctypes.c_ushort), ('code', ctypes.c_void_p)]
allow = ctypes.create_string_buffer(bytes.fromhex('060000000000ff7f'))
for flags in (0, 8):
    call(317, 277, 1, flags, ctypes.byref(Filter(1, ctypes.addressof(allow))))
reach('unshare', 272, 97, 0x10000000)
"""),
)  # fmt: skip
