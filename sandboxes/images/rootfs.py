"""A root filesystem made from this machine's own Python and shell tools: no registry, no download, no root.

The interpreter is moved to /usr/bin with its standard library in /usr/lib, every shared library beside libc, so
that no path of the machine is left inside. Both engines use it: as an image, and as a folder to pivot into.
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
"""Libraries that wheels and libc open by name: ldd does not list them."""
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
"""Where a layer of packages has its programs."""


def interpreter() -> Path:
    """The real interpreter behind the running one (virtual environments resolved)."""
    return Path(getattr(sys, "_base_executable", sys.executable)).resolve()


def site_folder() -> str:
    """Where the interpreter looks for packages, once it is in /usr: relative to the root."""
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    debian = "deb_system" in sysconfig.get_scheme_names()
    return f"usr/local/lib/{version}/dist-packages" if debian else f"usr/lib/{version}/site-packages"


def fingerprint() -> str:
    """Changes whenever the root filesystem would: interpreter, tools, or this module."""
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
        (root / folder).chmod(mode)  # a container engine gives a tmpfs the mode of the folder below it
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
    """Copy a file's bytes; of its attributes only whether it can be executed."""
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
        if library.name.startswith("ld-"):  # the loader is found under the very path the programs name
            place = root / "usr" / str(library).lstrip("/")
        else:
            place = root / str(_libc().parent.resolve()).lstrip("/") / library.name
        if not place.exists():
            place.parent.mkdir(parents=True, exist_ok=True)
            copy(str(library.resolve()), str(place))


_LINKED = re.compile(r"^\t(?:.* => )?(/.*) \(0x[0-9a-f]+\)$", re.MULTILINE)
"""A line of `ldd`: `libz.so.1 => /path/of/libz.so.1 (0x7f...)`, or the loader's path alone."""


def _linked(binary: Path) -> Iterator[Path]:
    with open(binary, "rb") as file:
        if file.read(4) != b"\x7fELF":
            return
    listing = subprocess.run(["ldd", str(binary)], capture_output=True, text=True, check=False).stdout
    for path in _LINKED.findall(listing):
        yield Path(path)


@cache
def _libc() -> Path:
    """libc: its folder is one that every loader searches."""
    found = [library for library in _linked(Path("/bin/sh").resolve()) if library.name.startswith("libc.so")]
    if not found:
        raise SandboxUnavailableError("no dynamically linked C library", fix="set FORGE_ENV_BASE_IMAGE to a base image")
    return found[0]


def _find_tool(name: str) -> Path | None:
    for folder in ("/usr/bin", "/bin", "/usr/sbin", "/sbin"):
        path = Path(folder, name)
        if path.exists():
            return path.resolve()
    return None


def _compile(root: Path) -> None:
    """Byte-compile the library: a read-only root could not keep what the first import compiles."""
    for library in (root / "usr/lib").glob("python3*"):
        shown = "/" + str(library.relative_to(root))
        compileall.compile_dir(str(library), ddir=shown, quiet=2, maxlevels=20)
