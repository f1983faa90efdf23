"""A root filesystem copied from this machine's own Python and shell tools. Needs no registry, download or root rights.

The interpreter is copied to /usr/bin, its standard library to /usr/lib, and all shared libraries beside libc, so that
no path of the machine is left inside. The Docker engine uses it as an image, the local engine as a folder to pivot to.
"""

from __future__ import annotations

import compileall
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from forge_env.errors import SandboxUnavailableError

TOOLS = """
    awk base64 basename bash cat chmod chown cmp comm cp cut dash date dd df diff dirname du echo env expr false
    find fold grep egrep fgrep gunzip gzip head hostname id install join kill ln ls md5sum mkdir mkfifo mktemp mv nl
    nproc od paste patch printf ps pwd readlink realpath rev rm rmdir sed seq sha256sum sleep sort split stat
    strings tac tail tar tee test timeout touch tr true tsort tty uname uniq unzip wc which whoami xargs xxd yes
    zcat zip
""".split()  # noqa: SIM905  a list literal would fill two screens
_DLOPENED = (
    "libgcc_s.so.1", "libstdc++.so.6", "librt.so.1", "libpthread.so.0", "libdl.so.2", "libutil.so.1", "libresolv.so.2",
    "libnss_files.so.2", "libnss_dns.so.2",
)  # fmt: skip
"""Libraries that wheels and libc load by name, which ldd does not list."""
_LEFT_OUT = {
    "__pycache__", "test", "tests", "idlelib", "lib2to3", "tkinter", "turtledemo", "ensurepip", "site-packages",
    "dist-packages",
}  # fmt: skip
_MTIME = 0
_ETC = {
    "passwd": "root:x:0:0:root:/root:/usr/sbin/nologin\nsandbox:x:1000:1000:sandbox:/work:/bin/sh\n"
    "nobody:x:65534:65534:nobody:/work:/usr/sbin/nologin\n",
    "group": "root:x:0:\nsandbox:x:1000:\nnogroup:x:65534:\n",
    "hosts": "127.0.0.1 localhost\n::1 localhost\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
}
_FOLDERS = (
    "dev/shm", "etc", "opt/forge_env", "proc", "root", "run", "sys", "tmp", "usr/bin", "usr/lib", "usr/sbin",
    "usr/local/bin", "var/tmp", "work", "work-judge",
)  # fmt: skip
SCRIPTS = "usr/local/bin"
"""Folder for the programs of a package layer, relative to the root."""


def interpreter() -> Path:
    """Path of the interpreter behind the running one, with virtual environments resolved."""
    return Path(getattr(sys, "_base_executable", sys.executable)).resolve()


def site_folder() -> str:
    """The interpreter's package folder once it is in /usr, relative to the root."""
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    debian = "deb_system" in sysconfig.get_scheme_names()
    return f"usr/local/lib/{version}/dist-packages" if debian else f"usr/lib/{version}/site-packages"


def fingerprint() -> str:
    """Hash that changes whenever the root filesystem would: with the interpreter, the tools, or this module."""
    digest = hashlib.sha256(Path(__file__).read_bytes())
    for path in (interpreter(), *filter(None, map(_find_tool, TOOLS))):
        info = path.stat()
        digest.update(f"{path} {info.st_size} {info.st_mtime_ns}\n".encode())
    digest.update(f"{sys.version} {platform.machine()}".encode())
    return digest.hexdigest()[:16]


def build(root: Path) -> None:
    """Fill the empty folder `root`."""
    if sys.platform != "linux":
        raise SandboxUnavailableError("sandboxes need Linux")
    for folder in (*_FOLDERS, site_folder()):
        (root / folder).mkdir(parents=True, exist_ok=True)
    for folder, mode in (
        ("tmp", 0o1777),
        ("var/tmp", 0o1777),
        ("dev/shm", 0o1777),
        ("work", 0o700),
        ("work-judge", 0o700),
    ):
        (root / folder).chmod(mode)  # container engines give a tmpfs the mode of the folder it is mounted on
    for link in ("bin", "lib", "lib64", "sbin"):
        (root / link).symlink_to(f"usr/{link}")
    (root / "usr/lib64").mkdir()
    for name, text in _ETC.items():
        (root / "etc" / name).write_text(text)
    _copy_python(root)
    for tool in TOOLS:
        if path := _find_tool(tool):
            _copy_program(path, root / "usr/bin" / tool, root)
    if not (root / "usr/bin/sh").exists():
        (root / "usr/bin/sh").symlink_to("dash" if (root / "usr/bin/dash").exists() else "bash")
    _compile(root)


def _copy_python(root: Path) -> None:
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    _copy_program(interpreter(), root / "usr/bin" / version, root)
    for name in ("python3", "python"):
        (root / "usr/bin" / name).symlink_to(version)
    target = root / "usr/lib" / version
    for source in dict.fromkeys((sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"))):
        shutil.copytree(source, target, symlinks=False, ignore=_ignore, dirs_exist_ok=True, copy_function=copy)
    for extension in target.rglob("*.so"):
        _copy_libraries(extension, root)
    for name in _DLOPENED:
        if (path := _libc().parent / name).exists():
            _copy_program(path, root / str(path).lstrip("/"), root)


def _ignore(folder: str, names: list[str]) -> set[str]:
    return {name for name in names if name in _LEFT_OUT or name.startswith("config-") or name.endswith((".pyc", ".a"))}


def copy(source: str, target: str) -> None:
    """Copy a file's content and whether it is executable; other attributes are set to fixed values."""
    shutil.copyfile(source, target)
    executable = os.access(source, os.X_OK)
    os.chmod(target, 0o755 if executable else 0o644)
    os.utime(target, (_MTIME, _MTIME))


def _copy_program(source: Path, target: Path, root: Path) -> None:
    """Copy a program or library together with the libraries it is linked to."""
    if target.exists():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    copy(str(source), str(target))
    _copy_libraries(source, root)


def _copy_libraries(binary: Path, root: Path) -> None:
    for library in _linked(binary):
        if library.name.startswith("ld-"):  # the loader must be at the path that programs name
            target = root / "usr" / str(library).lstrip("/")
        else:
            target = root / str(_libc().parent.resolve()).lstrip("/") / library.name
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            copy(str(library.resolve()), str(target))


_LINKED = re.compile(r"^\t(?:.* => )?(/.*) \(0x[0-9a-f]+\)$", re.MULTILINE)
"""Matches a line of `ldd`: `libz.so.1 => /path/of/libz.so.1 (0x7f...)`, or the loader's path alone."""


def _linked(binary: Path) -> Iterator[Path]:
    with open(binary, "rb") as file:
        if file.read(4) != b"\x7fELF":
            return
    listing = subprocess.run(["ldd", str(binary)], capture_output=True, text=True, check=False).stdout
    for path in _LINKED.findall(listing):
        yield Path(path)


@cache
def _libc() -> Path:
    """Path of libc, in a folder that every loader searches."""
    libraries = [library for library in _linked(Path("/bin/sh").resolve()) if library.name.startswith("libc.so")]
    if not libraries:
        raise SandboxUnavailableError("no dynamically linked C library", fix="set FORGE_ENV_BASE_IMAGE to a base image")
    return libraries[0]


def _find_tool(name: str) -> Path | None:
    for folder in ("/usr/bin", "/bin", "/usr/sbin", "/sbin"):
        path = Path(folder, name)
        if path.exists():
            return path.resolve()
    return None


def _compile(root: Path) -> None:
    """Byte-compile the library, since imports can't write compiled files to a read-only root."""
    for library in (root / "usr/lib").glob("python3*"):
        shown = "/" + str(library.relative_to(root))
        compileall.compile_dir(str(library), ddir=shown, quiet=2, maxlevels=20)
