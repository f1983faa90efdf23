"""Handlers of a child's request, by kind. Each ends the process."""

from __future__ import annotations

import ast
import atexit
import errno
import linecache
import os
import shutil
import stat
import sys
import traceback
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    import signal as _signal
else:
    import _signal  # avoids importing enum

from . import judge, solution, testing, values
from .wire import write_all

if TYPE_CHECKING:
    from .child import Request

IO_ERROR = 74
"""Exit status of a failed file request; stderr begins with the errno."""
NOT_EXECUTABLE, NOT_FOUND = 126, 127
RUN_FOLDER = ".run-"
"""Prefix of folders for a single run of tests."""
SHELL_LOOP = (
    "trap : INT; while IFS= read -r -d '' __line <&{fd}; do "
    'eval "$__line" {fd}<&- </dev/null; printf "%d\\0" "$?" >&{fd}; done'
)


def run(request: Request, work: str) -> NoReturn:
    """Serve the request and end the process."""
    kind = request.header["kind"]
    if folder := request.header.get("folder"):
        _enter_new_folder(folder, work, {path.partition("/")[0] for path in request.files})
    try:
        _write_files(request.files)
        if reach := _FILE_REQUESTS.get(kind):
            reach(request)
            os._exit(0)
    except OSError as error:
        os.write(2, f"{error.errno} {error.strerror}"[: testing.MAX_MESSAGE].encode("utf-8", "replace"))
        os._exit(IO_ERROR)
    if kind in ("argv", "process"):
        _run_argv(request)
    if kind == "shell":
        _run_shell(request)
    _be_like_python()
    if kind == "counted":
        judge.run_beside(request)
    sys.path.insert(0, work)
    if kind == "calls":
        _run_calls(request)
    if kind == "session":
        _run_session(request)
    if kind == "serve":
        solution.serve(request.code, request.channel)
    if kind == "tests":
        judge.run_tests(request)
        finish(0)
    _run_python(request.code)


def _enter_new_folder(folder: str, work: str, written: set[str]) -> None:
    """Enter a new folder with links to everything in the work folder except the names in `written`."""
    others = [name for name in os.listdir(work) if name not in written and not name.startswith(RUN_FOLDER)]
    os.mkdir(folder)
    os.chdir(folder)
    for name in others:
        os.symlink(os.path.join(work, name), name)


def _be_like_python() -> None:
    """Set up what a starting interpreter does and the zygote that this process was forked from did not."""
    _signal.signal(_signal.SIGPIPE, _signal.SIG_IGN)
    sys.executable = sys.executable or shutil.which("python3") or ""


def _run_argv(request: Request) -> NoReturn:
    argv = request.header["argv"]
    if request.header.get("here"):
        _run_script(*argv)
    try:
        os.execvp(argv[0], argv)
    except FileNotFoundError:
        os.write(2, f"{argv[0]}: not found\n".encode())
        os._exit(NOT_FOUND)
    except OSError as error:
        os.write(2, f"{argv[0]}: {error.strerror}\n".encode())
        os._exit(NOT_EXECUTABLE)


def _run_script(python: str, *argv: str) -> None:
    """Run a Python file in this process, with its preloaded modules. Returns only if the file can't be read."""
    try:
        with open(argv[0], encoding="utf-8") as file:
            code = file.read()
    except (OSError, ValueError):
        return  # let the interpreter report the error
    sys.argv, sys.executable = [*argv], shutil.which(python) or ""
    _be_like_python()
    sys.path.insert(0, os.path.dirname(os.path.abspath(argv[0])))
    namespace = _new_module("__main__", __builtins__=__builtins__, __file__=argv[0])
    finish(_execute(code, argv[0], namespace) or 0)


def _new_module(module: str, **attributes: Any) -> dict[str, Any]:
    """Make an empty module importable, and return its namespace."""
    sys.modules[module] = types.ModuleType(module)
    sys.modules[module].__dict__.update(attributes)
    return sys.modules[module].__dict__


def _run_shell(request: Request) -> NoReturn:
    """Run bash, which reads NUL-terminated commands from the channel and writes each one's status back."""
    os.set_inheritable(request.channel, True)
    loop = SHELL_LOOP.format(fd=request.channel)
    try:
        os.execvp("bash", ["bash", "--noprofile", "--norc", "-c", loop])
    except OSError as error:
        os.write(2, f"bash: {error.strerror}\n".encode())
        os._exit(NOT_FOUND)


def _run_session(request: Request) -> NoReturn:
    """Run a Python session: NUL-terminated sources in, statuses out. The last expression's value is printed."""
    namespace = _new_module("__main__")
    pending = b""
    while True:
        source, separator, rest = pending.partition(b"\0")
        if not separator:
            chunk = os.read(request.channel, 1 << 16)
            if not chunk:
                finish(0)
            pending += chunk
            continue
        pending = rest
        status = _run_cell(source.decode("utf-8", "surrogatepass"), namespace)
        sys.stdout.flush()
        write_all(request.channel, b"%d\0" % status)


def _run_cell(source: str, namespace: dict[str, Any]) -> int:
    name = "<cell>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    try:
        tree = ast.parse(source, name)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, name, "exec", dont_inherit=True), namespace)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), name, "eval", dont_inherit=True), namespace)
            if value is not None:
                print(repr(value))
    except SystemExit as error:
        finish(_exit_status(error))
    except BaseException:  # noqa: BLE001  printed; the session continues
        _show(*sys.exc_info())
        return 1
    return 0


def _write_files(files: dict[str, bytes]) -> None:
    for name, data in files.items():
        if folder := os.path.dirname(name):
            os.makedirs(folder, exist_ok=True)
        descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK, 0o644)
        with open(descriptor, "wb") as file:
            file.write(data)


def _read_file(request: Request) -> None:
    descriptor = os.open(request.header["path"], os.O_RDONLY | os.O_NONBLOCK)
    info = os.fstat(descriptor)
    if not stat.S_ISREG(info.st_mode):
        raise OSError(errno.EISDIR if stat.S_ISDIR(info.st_mode) else errno.EINVAL, "not a regular file")
    if info.st_size > request.header["max_bytes"]:
        raise OSError(errno.EFBIG, f"{info.st_size} bytes")
    with open(descriptor, "rb") as file:
        write_all(request.channel, file.read(request.header["max_bytes"]))


def _read_folder(request: Request) -> None:
    """Send the path and content of every regular file below a folder. Links are not followed."""
    from . import archives  # not needed by other requests

    top = request.header["path"]
    room = request.header["max_bytes"]
    if not stat.S_ISDIR(os.stat(top).st_mode):
        raise OSError(errno.ENOTDIR, "not a folder")
    for path, file in archives.files(top):
        data = file.read(room + 1)
        shown = os.path.relpath(path, top).encode("utf-8", "replace")
        room -= len(data) + len(shown) + 2 * values.LENGTH.size
        if room < 0:
            raise OSError(errno.EFBIG, f"more than {request.header['max_bytes']} bytes")
        for part in (shown, data):
            write_all(request.channel, values.LENGTH.pack(len(part)))
            write_all(request.channel, part)


def _pack(request: Request) -> None:
    from . import archives  # not needed by other requests

    header = request.header
    with open(request.channel, "wb", closefd=False) as out:
        archives.pack(header["paths"], out, leave_out=header["leave_out"], max_bytes=header["max_bytes"])


def _unpack(request: Request) -> None:
    from . import archives, folders  # not needed by other requests

    for path in request.header["paths"]:
        folders.clear(path)
    archives.unpack(0)


_FILE_REQUESTS: dict[str, Callable[[Request], None]] = {
    "write": lambda request: None,
    "read": _read_file,
    "folder": _read_folder,
    "pack": _pack,
    "unpack": _unpack,
}


def _run_python(code: str) -> NoReturn:
    """Execute `code` as a fresh `__main__`, like `python main.py`."""
    finish(_execute(code, "main.py", _new_module("__main__", __builtins__=__builtins__)) or 0)


def _run_calls(request: Request) -> NoReturn:
    """Execute the code, then send the value of every expression over the channel."""
    namespace = _new_module(solution.SOLUTION)
    status = _execute(request.code, "solution.py", namespace)
    if status is not None:
        finish(status)
    for expression in request.header["calls"]:
        try:
            frame = values.pack_frame({"v": values.encode(eval(expression, namespace))})
        except BaseException as error:  # noqa: BLE001  any exception of a call, including SystemExit, is its outcome
            frame = values.pack_frame(_describe(error))
        write_all(request.channel, frame)
    finish(0)


def _describe(error: BaseException) -> dict[str, Any]:
    kind = TypeError if isinstance(error, values.NotPlainDataError) else type(error)
    return {"e": str(kind.__name__)[:200], "m": testing.text_of(error)}


def _execute(code: str, name: str, namespace: dict[str, Any]) -> int | None:
    """Run source text. Returns None if it ran to its end, otherwise a real interpreter's exit status."""
    linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
    try:
        exec(compile(code, name, "exec", dont_inherit=True), namespace)
    except SystemExit as error:
        return _exit_status(error)
    except BaseException:  # noqa: BLE001  printed as the interpreter would
        _show(*sys.exc_info())
        return 1
    return None


def _exit_status(error: SystemExit) -> int:
    if error.code is None:
        return 0
    if isinstance(error.code, int):
        return error.code & 0xFF
    print(error.code, file=sys.stderr)
    return 1


def _show(kind: Any, error: Any, trace: Any) -> None:
    """Print a traceback without the runner's own frame, through the program's excepthook if it has one."""
    trace = trace.tb_next if trace is not None else None
    try:
        if sys.excepthook is sys.__excepthook__:
            traceback.print_exception(kind, error, trace)
        else:
            sys.excepthook(kind, error, trace)
    except BaseException as second:  # noqa: BLE001  a hostile __str__ or excepthook, or out of memory
        os.write(2, f"{kind.__name__} (its traceback raised {type(second).__name__})\n".encode("utf-8", "replace"))


def finish(status: int) -> NoReturn:
    """Exit as an interpreter does: join threads, run exit handlers and flush; then end at once."""
    try:
        threading = sys.modules.get("threading")
        if threading is not None:
            threading._shutdown()
        atexit._run_exitfuncs()
    except SystemExit as error:
        status = _exit_status(error)
    except BaseException:  # noqa: BLE001  printed as the interpreter would
        _show(*sys.exc_info())
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:  # noqa: BLE001  stdout is closed or replaced by the program
        status = status or 120
    os._exit(status)
