"""Restrict Monarch's sockets on this machine to the user who runs it.

Monarch's processes listen at abstract Unix sockets. These have no permissions, every user of the machine can read their
names in /proc/net/unix, and anyone who connects can run code. No setting covers the host's internal sockets
(docs/decisions/private-sockets.md), so two libc calls of Monarch's library are redirected:

- `bind` replaces an abstract socket by one in a folder that only this user can enter. Monarch reads a socket's address
  back from the kernel before it sends it to other processes, so those connect to the path.
- `mkdir` removes all permissions of group and others, whatever the umask, since actor processes put their sockets in
  such folders.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import re
import shutil
import socket
import stat
import struct
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from enum import IntEnum
from functools import cache
from pathlib import Path
from typing import Any

from forge_env.errors import ForgeError
from forge_env.files import monarch_logs
from trainers.compat.monarch import PACKAGE

LONGEST = 82
"""Maximum bytes of a folder's path: with Monarch's name of 24 bytes it must fit into the kernel's 107."""
ABSTRACT = struct.Struct("=Hx")
"""Prefix of an abstract address: the address family and a zero byte."""

RTLD_DI_LINKMAP = 2
DYNAMIC = struct.Struct("=qQ")
RELOCATION = struct.Struct("=QQq")
SYMBOL_SIZE = 24
"""Bytes of a symbol table entry. `DYNAMIC`, `RELOCATION` and this are the layouts of 64-bit ELF files (elf.h)."""
PROT_WRITE = 2
PROTECTIONS = {"r": 1, "w": PROT_WRITE, "x": 4}

_libc = ctypes.CDLL(None, use_errno=True)
_BIND = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_uint32, use_errno=True)
_MKDIR = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p, ctypes.c_uint32, use_errno=True)
_bind, _mkdir = _BIND(("bind", _libc)), _MKDIR(("mkdir", _libc))


class Tag(IntEnum):
    """Tags of an ELF file's dynamic section."""

    NULL = 0
    PLTRELSZ = 2
    STRTAB = 5
    SYMTAB = 6
    RELA = 7
    RELASZ = 8
    JMPREL = 23
    RELACOUNT = 0x6FFFFFF9


class _LinkMap(ctypes.Structure):
    """The first fields of `struct link_map` in link.h."""

    _fields_ = [("address", ctypes.c_size_t), ("name", ctypes.c_char_p), ("dynamic", ctypes.c_size_t)]


@cache
def keep_private() -> None:
    """Redirect Monarch's `bind` and `mkdir` in this process; call this before Monarch is started."""
    import monarch._rust_bindings

    _redirect(monarch._rust_bindings.__file__, {"bind": _private_bind, "mkdir": _private_mkdir})


@_BIND
def _private_bind(descriptor: int, address: int, size: int) -> int:
    data = ctypes.string_at(address, size)
    if size > ABSTRACT.size and data.startswith(ABSTRACT.pack(socket.AF_UNIX)):
        path = os.fsencode(private_folder()) + b"/" + data[ABSTRACT.size :]
        data = struct.pack(f"=H{len(path) + 1}s", socket.AF_UNIX, path)
    return int(_bind(descriptor, data, len(data)))


@_MKDIR
def _private_mkdir(path: bytes, mode: int) -> int:
    return int(_mkdir(path, mode & stat.S_IRWXU))


@cache
def private_folder() -> Path:
    """Folder of this process's sockets: the run's temporary folder, or a new one that is removed at exit.

    If the process is killed, the next command removes the new folder.
    """
    shared = Path(tempfile.gettempdir())
    status = shared.stat()
    private = status.st_uid == os.geteuid() and not stat.S_IMODE(status.st_mode) & (stat.S_IRWXG | stat.S_IRWXO)
    if private and len(os.fsencode(shared)) <= LONGEST:
        return shared
    from forge_env.run.scratch import locked_folder  # takes half a second

    folder, _ = locked_folder()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def own_log_folder() -> None:
    """Create the folder, at a fixed path, in which Monarch opens its log at import; make an existing one private.

    If another user owned the folder, the log could be a link to any file of this user.
    """
    folder = monarch_logs()
    if folder is None:
        return
    with suppress(OSError):  # it exists, or Monarch can't create it either
        folder.mkdir(mode=stat.S_IRWXU)
    if not os.path.lexists(folder):
        return
    owners = {folder.lstat().st_uid}
    with suppress(OSError):  # not a folder: Monarch then writes no log
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            owners.add(os.fstat(descriptor).st_uid)
            if owners == {os.geteuid()}:
                os.fchmod(descriptor, stat.S_IRWXU)
        finally:
            os.close(descriptor)
    if owners != {os.geteuid()}:
        raise ForgeError(
            f"Monarch would log to {folder}, which belongs to another user of this machine",
            fix="ask an administrator to remove it: its owner could redirect the log into your files",
        )


def _redirect(library: str, functions: dict[str, Any]) -> None:
    """Replace functions that a loaded library imports."""
    for name, slots in _imports(library, functions).items():
        if not slots:
            raise PACKAGE.changed(
                f"{library} does not import {name}, so its sockets can't be kept from other users of this machine"
            )
        pointer = ctypes.cast(functions[name], ctypes.c_void_p).value
        for slot in slots:
            _write_pointer(slot, pointer or 0)


def _imports(library: str, names: dict[str, Any]) -> dict[str, list[int]]:
    """Return the addresses of a loaded library's pointers to the functions that it imports, by name."""
    link_map = ctypes.POINTER(_LinkMap)()
    handle = ctypes.c_void_p(ctypes.CDLL(library)._handle)
    if _libc.dlinfo(handle, RTLD_DI_LINKMAP, ctypes.byref(link_map)):
        raise OSError(f"dlinfo of {library}")
    base = link_map.contents.address
    dynamic = dict(_dynamic(link_map.contents.dynamic))
    symbols, texts = dynamic[Tag.SYMTAB], dynamic[Tag.STRTAB]
    relative = dynamic.get(Tag.RELACOUNT, 0) * RELOCATION.size  # these come first and have no symbol
    tables = [(dynamic[Tag.RELA] + relative, dynamic[Tag.RELASZ] - relative)]
    if Tag.JMPREL in dynamic:
        tables.append((dynamic[Tag.JMPREL], dynamic[Tag.PLTRELSZ]))
    slots: dict[str, list[int]] = {name: [] for name in names}
    for table, size in tables:
        for offset, info, _ in RELOCATION.iter_unpack(ctypes.string_at(table, size)):
            symbol = info >> 32
            text = ctypes.c_uint32.from_address(symbols + symbol * SYMBOL_SIZE).value
            name = ctypes.string_at(texts + text).decode()
            if symbol and name in slots:
                slots[name].append(base + offset)
    return slots


def _dynamic(address: int) -> Iterator[tuple[int, int]]:
    """Yield tags and values of a loaded library's dynamic section; glibc has already relocated offsets to addresses."""
    while (entry := DYNAMIC.unpack(ctypes.string_at(address, DYNAMIC.size)))[0] != Tag.NULL:
        yield entry
        address += DYNAMIC.size


def _write_pointer(slot: int, pointer: int) -> None:
    """Write a pointer to memory that the loader may have made read-only."""
    size = os.sysconf("SC_PAGESIZE")
    page, before = ctypes.c_void_p(slot - slot % size), _protection(slot)
    _protect(page, size, before | PROT_WRITE)
    ctypes.c_size_t.from_address(slot).value = pointer
    _protect(page, size, before)


def _protect(page: ctypes.c_void_p, size: int, protection: int) -> None:
    if _libc.mprotect(page, ctypes.c_size_t(size), protection):
        raise OSError(ctypes.get_errno(), "mprotect")


def _protection(address: int) -> int:
    """Protection of the memory at an address, as mprotect flags."""
    for line in Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines():
        first, last, flags = re.match(r"(\w+)-(\w+) (\S+)", line).groups()  # type: ignore[union-attr]
        if int(first, 16) <= address < int(last, 16):
            return sum(bit for flag, bit in PROTECTIONS.items() if flag in flags)
    raise OSError(f"nothing is mapped at {address:#x}")
