"""The container's system-call profile, from the table that every program's own filter is made of.

It covers everything in the container, the runner too, and needs no privilege, so it also holds should the filter of
programs (`sandboxes.runner.seccomp`) ever be missing. It can't express "all values but these": calls with such a
condition (`ioctl`, `prctl`) are allowed here with any argument. If both filters refuse a call, the program sees the
error of its own.
"""

from __future__ import annotations

import errno
import hashlib
import itertools
import json
from functools import lru_cache
from pathlib import Path
from typing import Any

from forge_env.files import write_whole
from sandboxes.images.cache import cache_folder
from sandboxes.runner.syscalls import ALLOWED, CONDITIONS, MISSING, REFUSED, Condition

RUNNER = ("memfd_create",)
"""What only the runner may call: its supervisor hands on standard input as a file in memory."""


@lru_cache(maxsize=1)
def profile() -> str:
    """The profile as Docker's API takes it: JSON text."""
    conditions = {name: checks for name, checks in CONDITIONS.items() if not any(check.excluded for check in checks)}
    rules: list[dict[str, Any]] = [
        {"names": sorted({*ALLOWED, *RUNNER} - set(conditions)), "action": "SCMP_ACT_ALLOW"},
        {"names": sorted(REFUSED), "action": "SCMP_ACT_ERRNO", "errnoRet": errno.EPERM},
        {"names": sorted(set(MISSING) - set(RUNNER)), "action": "SCMP_ACT_ERRNO", "errnoRet": errno.ENOSYS},
    ]
    rules += [
        {"names": [name], "action": "SCMP_ACT_ALLOW", "args": list(arguments)}
        for name, checks in conditions.items()
        for arguments in itertools.product(*map(_comparisons, checks))
    ]
    return json.dumps(
        {
            "defaultAction": "SCMP_ACT_ERRNO",
            "defaultErrnoRet": errno.ENOSYS,  # Docker before version 23 ignores it: EPERM
            "architectures": ["SCMP_ARCH_X86_64", "SCMP_ARCH_AARCH64"],
            "syscalls": rules,
        }
    )


def _comparisons(check: Condition) -> list[dict[str, Any]]:
    """One comparison for each value that the argument may have."""
    return [
        {"index": check.argument, "value": check.mask, "valueTwo": value, "op": "SCMP_CMP_MASKED_EQ"}
        for value in check.values
    ]


def profile_file() -> Path:
    """The profile as a file of the cache folder, for a Podman service on this machine."""
    text = profile()
    path = cache_folder() / f"seccomp-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"
    if not path.exists():
        write_whole(path, text)
    return path
