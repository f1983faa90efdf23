"""The container's own system-call profile: an allow-list, tighter than Docker's default.

It covers everything in the container, the runner too, and needs no privilege, so it also holds should the filter
that each program gets (`sandboxes.runner.seccomp`) ever be missing. Against Docker's default it leaves out
System V and POSIX IPC, io_uring, kernel AIO, ptrace and its relatives, memory policy, file handles, fanotify,
clock adjustment, personality, secret memory, 32-bit and x32 calls, and all socket families but
unix and internet. Clone may make no namespaces; clone3, whose flags a filter can't see, does not exist.
"""

from __future__ import annotations

import hashlib
import json
from functools import lru_cache
from pathlib import Path
from typing import Any

from forge_env.files import write_whole
from sandboxes.images.cache import cache_folder

_NAMESPACE_FLAGS = 0x7E020000
_ENOSYS = 38
_FAMILIES = (1, 2, 10)

ALLOWED = {
    "files": """
        access chdir chmod chown close close_range copy_file_range creat dup dup2 dup3 faccessat faccessat2 fadvise64
        fallocate fchdir fchmod fchmodat fchmodat2 fchown fchownat fcntl fdatasync fgetxattr flistxattr flock
        fremovexattr fsetxattr fstat fstatfs fsync ftruncate futimesat getcwd getdents getdents64 getxattr
        inotify_add_watch inotify_init inotify_init1 inotify_rm_watch ioctl lchown lgetxattr link linkat listxattr
        llistxattr lremovexattr lseek lsetxattr lstat mkdir mkdirat mknod mknodat newfstatat open openat openat2
        pread64 preadv preadv2 pwrite64 pwritev pwritev2 read readahead readlink readlinkat readv removexattr rename
        renameat renameat2 rmdir sendfile setxattr splice stat statfs statx symlink symlinkat sync sync_file_range
        syncfs tee truncate umask unlink unlinkat utime utimensat utimes vmsplice write writev
    """,
    "memory": """
        brk madvise membarrier memfd_create mincore mlock mlock2 mlockall mmap mprotect mremap msync munlock
        munlockall munmap pkey_alloc pkey_free pkey_mprotect remap_file_pages
    """,
    "processes": """
        arch_prctl execve execveat exit exit_group fork getcpu getpgid getpgrp getpid getppid getpriority getrlimit
        getrusage getsid gettid kill pidfd_open pidfd_send_signal prctl prlimit64 process_mrelease restart_syscall rseq
        sched_get_priority_max sched_get_priority_min sched_getaffinity sched_getattr sched_getparam
        sched_getscheduler sched_rr_get_interval sched_setaffinity sched_yield seccomp set_robust_list
        get_robust_list set_thread_area get_thread_area set_tid_address setpgid setpriority setrlimit setsid tgkill
        times tkill vfork wait4 waitid
    """,
    "identity": """
        capget capset getegid geteuid getgid getgroups getresgid getresuid getuid setfsgid setfsuid setgid setgroups
        setregid setresgid setresuid setreuid setuid
    """,
    "signals and waiting": """
        alarm epoll_create epoll_create1 epoll_ctl epoll_pwait epoll_pwait2 epoll_wait eventfd eventfd2 futex
        futex_requeue futex_wait futex_waitv futex_wake getitimer pause pipe pipe2 poll ppoll pselect6 rt_sigaction
        rt_sigpending rt_sigprocmask rt_sigqueueinfo rt_sigreturn rt_sigsuspend rt_sigtimedwait rt_tgsigqueueinfo
        select setitimer sigaltstack signalfd signalfd4
    """,
    "time and system": """
        clock_getres clock_gettime clock_nanosleep getrandom gettimeofday nanosleep sysinfo time timer_create
        timer_delete timer_getoverrun timer_gettime timer_settime timerfd_create timerfd_gettime timerfd_settime uname
    """,
    "the runner's own confinement": "landlock_create_ruleset landlock_add_rule landlock_restrict_self",
    "sockets": """
        accept accept4 bind connect getpeername getsockname getsockopt listen recvfrom recvmmsg recvmsg sendmmsg
        sendmsg sendto setsockopt shutdown socketpair
    """,
}


@lru_cache(maxsize=1)
def profile() -> str:
    """The profile as Docker's API takes it: JSON text."""
    rules: list[dict[str, Any]] = [
        {"names": sorted(name for names in ALLOWED.values() for name in names.split()), "action": "SCMP_ACT_ALLOW"},
        {
            "names": ["clone"],
            "action": "SCMP_ACT_ALLOW",
            "args": [{"index": 0, "value": _NAMESPACE_FLAGS, "valueTwo": 0, "op": "SCMP_CMP_MASKED_EQ"}],
        },
        {"names": ["clone3"], "action": "SCMP_ACT_ERRNO", "errnoRet": _ENOSYS},
    ]
    rules += [
        {"names": ["socket"], "action": "SCMP_ACT_ALLOW", "args": [{"index": 0, "value": family, "op": "SCMP_CMP_EQ"}]}
        for family in _FAMILIES
    ]
    return json.dumps(
        {
            "defaultAction": "SCMP_ACT_ERRNO",
            "architectures": ["SCMP_ARCH_X86_64", "SCMP_ARCH_AARCH64"],
            "syscalls": rules,
        }
    )


def profile_file() -> Path:
    """The profile as a file of the cache folder, for a Podman service on this machine."""
    text = profile()
    path = cache_folder() / f"seccomp-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"
    if not path.exists():
        write_whole(path, text)
    return path
