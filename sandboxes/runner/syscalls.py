"""The table of system calls that programs may use, on every engine.

Both filters are generated from it: the BPF program for every program (`seccomp.py`), and the profile of Docker
containers (`sandboxes.docker.seccomp`). Each call belongs to one of three groups:

- `ALLOWED`, some only with certain arguments (`CONDITIONS`);
- `REFUSED`: EPERM;
- `MISSING`, and all unlisted calls, such as those of newer kernels: ENOSYS, upon which libraries fall back.

Values are the numbers on x86_64 and aarch64, -1 if the architecture lacks the call; they equal libseccomp's and, from
453 on, the kernel's own tables (Linux 6.18). Standard library only: the runner uses it inside sandboxes.
"""

from __future__ import annotations

import errno
from dataclasses import dataclass

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""AUDIT_ARCH value by machine, in the order of the numbers below."""

ALLOWED: dict[str, tuple[int, int]] = {
    # files
    "access": (21, -1), "chdir": (80, 49), "chmod": (90, -1), "chown": (92, -1), "close": (3, 57),
    "close_range": (436, 436), "copy_file_range": (326, 285), "creat": (85, -1), "dup": (32, 23), "dup2": (33, -1),
    "dup3": (292, 24), "faccessat": (269, 48), "faccessat2": (439, 439), "fadvise64": (221, 223),
    "fallocate": (285, 47), "fchdir": (81, 50), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452),
    "fchown": (93, 55), "fchownat": (260, 54), "fcntl": (72, 25), "fdatasync": (75, 83), "fgetxattr": (193, 10),
    "flistxattr": (196, 13), "flock": (73, 32), "fremovexattr": (199, 16), "fsetxattr": (190, 7), "fstat": (5, 80),
    "fstatfs": (138, 44), "fsync": (74, 82), "ftruncate": (77, 46), "futimesat": (261, -1), "getcwd": (79, 17),
    "getdents": (78, -1), "getdents64": (217, 61), "getxattr": (191, 8), "inotify_add_watch": (254, 27),
    "inotify_init": (253, -1), "inotify_init1": (294, 26), "inotify_rm_watch": (255, 28), "lchown": (94, -1),
    "lgetxattr": (192, 9), "link": (86, -1), "linkat": (265, 37), "listxattr": (194, 11), "llistxattr": (195, 12),
    "lremovexattr": (198, 15), "lseek": (8, 62), "lsetxattr": (189, 6), "lstat": (6, -1), "mkdir": (83, -1),
    "mkdirat": (258, 34), "mknod": (133, -1), "mknodat": (259, 33), "newfstatat": (262, 79), "open": (2, -1),
    "openat": (257, 56), "openat2": (437, 437), "pread64": (17, 67), "preadv": (295, 69), "preadv2": (327, 286),
    "pwrite64": (18, 68), "pwritev": (296, 70), "pwritev2": (328, 287), "read": (0, 63), "readahead": (187, 213),
    "readlink": (89, -1), "readlinkat": (267, 78), "readv": (19, 65), "removexattr": (197, 14), "rename": (82, -1),
    "renameat": (264, 38), "renameat2": (316, 276), "rmdir": (84, -1), "sendfile": (40, 71), "setxattr": (188, 5),
    "splice": (275, 76), "stat": (4, -1), "statfs": (137, 43), "statx": (332, 291), "symlink": (88, -1),
    "symlinkat": (266, 36), "sync_file_range": (277, 84), "tee": (276, 77), "truncate": (76, 45), "umask": (95, 166),
    "unlink": (87, -1), "unlinkat": (263, 35), "utime": (132, -1), "utimensat": (280, 88), "utimes": (235, -1),
    "vmsplice": (278, 75), "write": (1, 64), "writev": (20, 66), "ioctl": (16, 29),
    # memory
    "brk": (12, 214), "madvise": (28, 233), "membarrier": (324, 283), "mincore": (27, 232), "mlock": (149, 228),
    "mlock2": (325, 284), "mlockall": (151, 230), "mmap": (9, 222), "mprotect": (10, 226), "mremap": (25, 216),
    "msync": (26, 227), "munlock": (150, 229), "munlockall": (152, 231), "munmap": (11, 215), "pkey_alloc": (330, 289),
    "pkey_free": (331, 290), "pkey_mprotect": (329, 288), "remap_file_pages": (216, 234),
    # processes
    "arch_prctl": (158, -1), "clone": (56, 220), "execve": (59, 221), "execveat": (322, 281), "exit": (60, 93),
    "exit_group": (231, 94), "fork": (57, -1), "get_robust_list": (274, 100), "get_thread_area": (211, -1),
    "getcpu": (309, 168), "getpgid": (121, 155), "getpgrp": (111, -1), "getpid": (39, 172), "getppid": (110, 173),
    "getpriority": (140, 141), "getrlimit": (97, 163), "getrusage": (98, 165), "getsid": (124, 156),
    "gettid": (186, 178), "kill": (62, 129), "pidfd_open": (434, 434), "pidfd_send_signal": (424, 424),
    "prctl": (157, 167), "prlimit64": (302, 261), "restart_syscall": (219, 128), "rseq": (334, 293),
    "sched_get_priority_max": (146, 125), "sched_get_priority_min": (147, 126), "sched_getaffinity": (204, 123),
    "sched_getattr": (315, 275), "sched_getparam": (143, 121), "sched_getscheduler": (145, 120),
    "sched_rr_get_interval": (148, 127), "sched_setaffinity": (203, 122), "sched_yield": (24, 124),
    "seccomp": (317, 277), "set_robust_list": (273, 99), "set_thread_area": (205, -1), "set_tid_address": (218, 96),
    "setpgid": (109, 154), "setpriority": (141, 140), "setrlimit": (160, 164), "setsid": (112, 157),
    "tgkill": (234, 131), "times": (100, 153), "tkill": (200, 130), "vfork": (58, -1), "wait4": (61, 260),
    "waitid": (247, 95),
    # identity
    "capget": (125, 90), "capset": (126, 91), "getegid": (108, 177), "geteuid": (107, 175), "getgid": (104, 176),
    "getgroups": (115, 158), "getresgid": (120, 150), "getresuid": (118, 148), "getuid": (102, 174),
    "setfsgid": (123, 152), "setfsuid": (122, 151), "setgid": (106, 144), "setgroups": (116, 159),
    "setregid": (114, 143), "setresgid": (119, 149), "setresuid": (117, 147), "setreuid": (113, 145),
    "setuid": (105, 146),
    # signals and waiting
    "alarm": (37, -1), "epoll_create": (213, -1), "epoll_create1": (291, 20), "epoll_ctl": (233, 21),
    "epoll_pwait": (281, 22), "epoll_pwait2": (441, 441), "epoll_wait": (232, -1), "eventfd": (284, -1),
    "eventfd2": (290, 19), "futex": (202, 98), "futex_waitv": (449, 449), "getitimer": (36, 102), "pause": (34, -1),
    "pipe": (22, -1), "pipe2": (293, 59), "poll": (7, -1), "ppoll": (271, 73), "pselect6": (270, 72),
    "rt_sigaction": (13, 134), "rt_sigpending": (127, 136), "rt_sigprocmask": (14, 135), "rt_sigqueueinfo": (129, 138),
    "rt_sigreturn": (15, 139), "rt_sigsuspend": (130, 133), "rt_sigtimedwait": (128, 137),
    "rt_tgsigqueueinfo": (297, 240), "select": (23, -1), "setitimer": (38, 103), "sigaltstack": (131, 132),
    "signalfd": (282, -1), "signalfd4": (289, 74),
    # time and system
    "clock_getres": (229, 114), "clock_gettime": (228, 113), "clock_nanosleep": (230, 115), "getrandom": (318, 278),
    "gettimeofday": (96, 169), "nanosleep": (35, 101), "sysinfo": (99, 179), "time": (201, -1),
    "timer_create": (222, 107), "timer_delete": (226, 111), "timer_getoverrun": (225, 109),
    "timer_gettime": (224, 108), "timer_settime": (223, 110), "timerfd_create": (283, 85),
    "timerfd_gettime": (287, 87), "timerfd_settime": (286, 86), "uname": (63, 160),
    # sandboxing oneself (the runner does it too)
    "landlock_create_ruleset": (444, 444), "landlock_add_rule": (445, 445), "landlock_restrict_self": (446, 446),
    # sockets
    "accept": (43, 202), "accept4": (288, 242), "bind": (49, 200), "connect": (42, 203), "getpeername": (52, 205),
    "getsockname": (51, 204), "getsockopt": (55, 209), "listen": (50, 201), "recvfrom": (45, 207),
    "recvmmsg": (299, 243), "recvmsg": (47, 212), "sendmmsg": (307, 269), "sendmsg": (46, 211), "sendto": (44, 206),
    "setsockopt": (54, 208), "shutdown": (48, 210), "socket": (41, 198), "socketpair": (53, 199),
}  # fmt: skip

REFUSED: dict[str, tuple[int, int]] = {
    # other processes
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "process_madvise": (440, 440), "process_mrelease": (448, 448), "pidfd_getfd": (438, 438),
    "perf_event_open": (298, 241),
    # mounts and namespaces
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "open_tree": (428, 428),
    "open_tree_attr": (467, 467), "move_mount": (429, 429), "fsopen": (430, 430), "fsconfig": (431, 431),
    "fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442), "unshare": (272, 97),
    "setns": (308, 268), "listmount": (458, 458), "statmount": (457, 457), "listns": (470, 470),
    # access to files without their paths
    "open_by_handle_at": (304, 265), "name_to_handle_at": (303, 264), "fanotify_init": (300, 262),
    "fanotify_mark": (301, 263), "lookup_dcookie": (212, 18),
    # kernel features with a history of escapes
    "keyctl": (250, 219), "add_key": (248, 217), "request_key": (249, 218), "bpf": (321, 280),
    "userfaultfd": (323, 282), "io_uring_setup": (425, 425), "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427), "memfd_secret": (447, 447), "modify_ldt": (154, -1), "personality": (135, 92),
    "vserver": (236, -1), "nfsservctl": (180, 42), "uselib": (134, -1), "lsm_get_self_attr": (459, 459),
    "lsm_set_self_attr": (460, 460), "lsm_list_modules": (461, 461),
    # objects that outlive the program or count against limits of the whole machine
    "shmget": (29, 194), "shmat": (30, 196), "shmctl": (31, 195), "shmdt": (67, 197), "semget": (64, 190),
    "semop": (65, 193), "semctl": (66, 191), "semtimedop": (220, 192), "msgget": (68, 186), "msgsnd": (69, 189),
    "msgrcv": (70, 188), "msgctl": (71, 187), "mq_open": (240, 180), "mq_unlink": (241, 181),
    "mq_timedsend": (242, 182), "mq_timedreceive": (243, 183), "mq_notify": (244, 184), "mq_getsetattr": (245, 185),
    "io_setup": (206, 0), "io_destroy": (207, 1), "io_submit": (209, 2), "io_cancel": (210, 3),
    "io_getevents": (208, 4), "io_pgetevents": (333, 292),
    # administration of the machine
    "init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106), "create_module": (174, -1),
    "query_module": (178, -1), "get_kernel_syms": (177, -1), "kexec_load": (246, 104), "kexec_file_load": (320, 294),
    "reboot": (169, 142), "swapon": (167, 224), "swapoff": (168, 225), "acct": (163, 89), "sethostname": (170, 161),
    "setdomainname": (171, 162), "settimeofday": (164, 170), "clock_settime": (227, 112), "clock_adjtime": (305, 266),
    "adjtimex": (159, 171), "iopl": (172, -1), "ioperm": (173, -1), "syslog": (103, 116), "vhangup": (153, 58),
    "quotactl": (179, 60), "quotactl_fd": (443, 443), "sysfs": (139, -1), "ustat": (136, -1), "_sysctl": (156, -1),
    "sync": (162, 81), "syncfs": (306, 267),
    # CPU, I/O and memory placement
    "sched_setparam": (142, 118), "sched_setscheduler": (144, 119), "sched_setattr": (314, 274),
    "ioprio_set": (251, 30), "ioprio_get": (252, 31), "mbind": (237, 235), "set_mempolicy": (238, 237),
    "get_mempolicy": (239, 236), "migrate_pages": (256, 238), "move_pages": (279, 239),
    "set_mempolicy_home_node": (450, 450),
}  # fmt: skip

MISSING: dict[str, tuple[int, int]] = {
    # its flags are in memory, which a filter can't read
    "clone3": (435, 435),
    # memory files, which no file-size or address-space limit covers
    "memfd_create": (319, 279),
    # newer variants of calls, not needed by programs
    "cachestat": (451, 451), "map_shadow_stack": (453, 453), "futex_wake": (454, 454), "futex_wait": (455, 455),
    "futex_requeue": (456, 456), "mseal": (462, 462), "setxattrat": (463, 463), "getxattrat": (464, 464),
    "listxattrat": (465, 465), "removexattrat": (466, 466), "file_getattr": (468, 468), "file_setattr": (469, 469),
    # internal to the kernel, or in no current kernel
    "uprobe": (336, -1), "uretprobe": (335, -1), "afs_syscall": (183, -1), "epoll_ctl_old": (214, -1),
    "epoll_wait_old": (215, -1), "getpmsg": (181, -1), "putpmsg": (182, -1), "security": (185, -1),
    "tuxcall": (184, -1),
}  # fmt: skip


@dataclass(frozen=True)
class Condition:
    """A condition on one argument: `value & mask` is among `values` or, if `excluded`, is not among them.

    The kernel reads all these arguments as 32 bits, so the upper half of a register is ignored.
    """

    argument: int
    values: tuple[int, ...]
    error: int = errno.EPERM
    mask: int = 0xFFFFFFFF
    excluded: bool = False

    def holds(self, value: int) -> bool:
        """Whether the argument may have this value."""
        return (value & self.mask in self.values) is not self.excluded


_NEW_NAMESPACES = 0x7E020000
"""CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET."""
_UNIX_OR_INTERNET = (
    Condition(0, (1, 2, 10), errno.EAFNOSUPPORT),  # AF_UNIX, AF_INET, AF_INET6
    Condition(1, (1, 2, 3, 5), mask=0xF),  # SOCK_STREAM, DGRAM, RAW (for which programs lack the capability), SEQPACKET
    Condition(2, (0, 1, 6, 17, 58), errno.EPROTONOSUPPORT),  # default, ICMP (AF_UNIX has it too), TCP, UDP, ICMPv6
)
"""Other families, types or protocols would make the kernel load the module that implements them."""
_TIOCSTI, _TIOCLINUX, _TIOCSETD = 0x5412, 0x541C, 0x5423
_PR_SCHED_CORE = 62

CONDITIONS: dict[str, tuple[Condition, ...]] = {
    "clone": (Condition(0, (0,), mask=_NEW_NAMESPACES),),
    "socket": _UNIX_OR_INTERNET,
    "socketpair": _UNIX_OR_INTERNET,
    # 0 is the caller itself; other processes of this user are the runner's
    "setpriority": (Condition(0, (0,)), Condition(1, (0,))),
    "prlimit64": (Condition(0, (0,)),),
    "sched_setaffinity": (Condition(0, (0,)),),
    # typing into a terminal, pasting into a console, loading a line discipline
    "ioctl": (Condition(1, (_TIOCSTI, _TIOCLINUX, _TIOCSETD), excluded=True),),
    # keeping the sibling hyperthread idle unless it runs this program
    "prctl": (Condition(0, (_PR_SCHED_CORE,), excluded=True),),
}
