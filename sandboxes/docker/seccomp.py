"""The container's system-call profile, generated from the same table as every program's own filter.

It applies to every process in the container, including the runner, and needs no privilege, so it still holds if the
programs' filter (`sandboxes.runner.seccomp`) is ever missing. It can't express "all values but these": calls with such
a condition (`ioctl`, `prctl`) are allowed here with any argument. If both filters refuse a call, the program sees the
error of its own filter.
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
"""System calls that only the runner may make: its supervisor passes standard input as a memory file."""


@lru_cache(maxsize=1)
def profile() -> str:
    """The profile as JSON text, as Docker's API takes it."""
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
            "defaultErrnoRet": errno.ENOSYS,  # ignored by Docker before version 23, which returns EPERM
            "architectures": ["SCMP_ARCH_X86_64", "SCMP_ARCH_AARCH64"],
            "syscalls": rules,
        }
    )


def _comparisons(check: Condition) -> list[dict[str, Any]]:
    """One comparison for each allowed value of the argument."""
    return [
        {"index": check.argument, "value": check.mask, "valueTwo": value, "op": "SCMP_CMP_MASKED_EQ"}
        for value in check.values
    ]


def profile_file() -> Path:
    """The profile as a file in the cache folder, for a Podman service on this machine."""
    text = profile()
    path = cache_folder() / f"seccomp-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"
    if not path.exists():
        write_whole(path, text)
    return path
