"""Ready-made tools for environments with a sandbox; each takes one line in the class.

    class Tally(fe.SandboxEnvironment):
        bash = fe.tools.bash()
        python = fe.tools.python()
        editor = fe.tools.files()
        submit = fe.tools.submit()

Each call returns a function marked by `@fe.tool`. In a class it is an ordinary method, which subclasses can override
or remove (`bash = None`). Everything runs in the episode's sandbox, within the limits of the environment's config;
mistakes of the agent are answered with an error message.
"""

from __future__ import annotations

import errno
import posixpath
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal, TypeAlias

from forge_env.environment.sandbox_environment import SandboxEnvironment
from forge_env.environment.tool_environment import ToolEnvironment
from forge_env.errors import SandboxFileError, ToolError
from forge_env.sandbox import WORK, Limits
from forge_env.tools.decorator import tool
from forge_env.tools.schema import shorten

ReadyTool: TypeAlias = Callable[..., Any]
"""A method of an environment that is a tool."""
QUEUE_S = 30.0
"""Seconds added to a program's limit for the whole call, because the calls of one message run one after the other."""
MOST_ENTRIES = 500
"""Maximum number of listed entries of a folder."""
AROUND = 4
"""Lines shown before and after an edit."""


def bash(
    *,
    name: str = "bash",
    description: str | None = None,
    stateful: bool = False,
    timeout_s: float | None = None,
    output_chars: int | None = None,
    max_calls: int | None = None,
) -> ReadyTool:
    """A tool that runs shell commands: `bash(command)`.

    Args:
        name: name of the tool.
        description: description for the agent; default: a built-in one.
        stateful: whether variables, functions, the current folder and background processes persist until the episode
            ends; otherwise only files do, and nothing that the agent started runs while its work is judged.
        timeout_s: wall-clock limit of one command in seconds; default: the environment's `wall_s`.
        output_chars: maximum length of an answer, shortened in the middle; at most `max_tool_output_chars`.
        max_calls: maximum number of calls in one episode.

    Examples:
        >>> import forge_env as fe
        >>> class Work(fe.SandboxEnvironment):
        ...     rubric = fe.Rubric(fe.rewards.ExactMatch())
        ...     bash = fe.tools.bash(stateful=True, timeout_s=5)
        >>> [tool.name for tool in Work().tools]
        ['bash']
    """
    if stateful:
        lives = "Variables, the current folder and background processes live on from one command to the next."
    else:
        lives = "Each command starts in the work folder; files stay, variables and background processes don't."

    async def run_command(env: SandboxEnvironment, command: str) -> str:
        """Run a shell command and return its output.

        Args:
            command: what bash runs, such as "ls -l".
        """
        answer = await env.run_bash(command, stateful=stateful, limits=_limits(env, timeout_s))
        return _short(answer, output_chars)

    text = description or f"Run a shell command in the work folder and return its output.\n\n{lives}"
    return _offered(run_command, name, text, timeout_s, max_calls)


def python(
    *,
    name: str = "python",
    description: str | None = None,
    stateful: bool = True,
    timeout_s: float | None = None,
    output_chars: int | None = None,
    max_calls: int | None = None,
) -> ReadyTool:
    """A tool that runs Python: `python(code)`.

    Args:
        name: name of the tool.
        description: description for the agent; default: a built-in one.
        stateful: whether names persist from one call to the next and the value of a last expression is shown, as in a
            notebook; otherwise every call runs a separate program.
        timeout_s: wall-clock limit of one call in seconds; default: the environment's `wall_s`.
        output_chars: maximum length of an answer, shortened in the middle; at most `max_tool_output_chars`.
        max_calls: maximum number of calls in one episode.

    Examples:
        >>> import forge_env as fe
        >>> class Work(fe.SandboxEnvironment):
        ...     rubric = fe.Rubric(fe.rewards.ExactMatch())
        ...     python = fe.tools.python(max_calls=10)
        >>> [tool.name for tool in Work().tools]
        ['python']
    """
    if stateful:
        lives = "Names live on from one call to the next, and the value of a last expression is shown."
    else:
        lives = "Each call is a program of its own: print what you want to see; files stay."

    async def run_code(env: SandboxEnvironment, code: str) -> str:
        """Run Python code and return its output.

        Args:
            code: the code, such as "print(6 * 7)".
        """
        answer = await env.run_python(code, stateful=stateful, limits=_limits(env, timeout_s))
        return _short(answer, output_chars)

    text = description or f"Run Python code in the work folder and return its output.\n\n{lives}"
    return _offered(run_code, name, text, timeout_s, max_calls)


def files(
    *,
    name: str = "str_replace_based_edit_tool",
    description: str | None = None,
    output_chars: int | None = None,
    max_calls: int | None = None,
) -> ReadyTool:
    """A tool that shows and edits text files of the work folder, with the commands and arguments that models know.

    `view` (a file with line numbers, or a folder's entries), `create`, `str_replace` (of text that occurs once) and
    `insert` (after a line). Name the attribute `editor`: `files` is the initial content of the work folder.

    Args:
        name: name of the tool.
        description: description for the agent; default: a built-in one.
        output_chars: maximum length of an answer, shortened in the middle; at most `max_tool_output_chars`.
        max_calls: maximum number of calls in one episode.

    Examples:
        >>> import forge_env as fe
        >>> class Work(fe.SandboxEnvironment):
        ...     rubric = fe.Rubric(fe.rewards.ExactMatch())
        ...     editor = fe.tools.files()
        >>> [tool.name for tool in Work().tools]
        ['str_replace_based_edit_tool']
    """

    async def edit(
        env: SandboxEnvironment,
        command: Literal["view", "create", "str_replace", "insert"],
        path: str,
        view_range: list[int] | None = None,
        file_text: str | None = None,
        old_str: str | None = None,
        new_str: str | None = None,
        insert_line: int | None = None,
        insert_text: str | None = None,
    ) -> str:
        """View and edit text files of the work folder.

        Args:
            command: what to do.
            path: a file or folder, relative to the work folder, such as "src/main.py".
            view_range: first and last line to view, from 1; -1 as the last is the end.
            file_text: for `create`: the whole content; a file that exists is replaced.
            old_str: for `str_replace`: text that occurs exactly once, white space included.
            new_str: for `str_replace`: what takes its place; nothing when left out.
            insert_line: for `insert`: the line after which the text goes, 0 for the beginning.
            insert_text: for `insert`: the text.
        """
        path = _inside(path)
        if command == "view":
            answer = await _view(env, path, view_range)
        elif command == "create":
            text = _needed(command, "file_text", file_text)
            await env.sandbox.write_text(path, text)
            answer = f"Wrote {path}: {len(_lines(text))} lines."
        elif command == "str_replace":
            answer = await _replace(env, path, _needed(command, "old_str", old_str), new_str or "")
        else:
            line = _needed(command, "insert_line", insert_line)
            answer = await _insert(env, path, line, _needed(command, "insert_text", insert_text))
        return _short(answer, output_chars)

    return _offered(edit, name, description, None, max_calls)


def submit(*, name: str = "submit", description: str | None = None, with_answer: bool = True) -> ReadyTool:
    """A tool that ends the episode: `submit(answer)`, or `submit()` if the files are the answer.

    It needs no sandbox. State in the system prompt that the agent has to call it.

    Args:
        name: name of the tool.
        description: description for the agent; default: a built-in one.
        with_answer: whether the agent gives an answer, which reward functions get as `completion`.

    Examples:
        >>> import forge_env as fe
        >>> class Work(fe.SandboxEnvironment):
        ...     rubric = fe.Rubric(fe.rewards.ExactMatch())
        ...     submit = fe.tools.submit()
        >>> [tool.name for tool in Work().tools]
        ['submit']
    """

    def submit_answer(env: ToolEnvironment, answer: str) -> str:
        """Hand in your answer. This ends the task.

        Args:
            answer: the answer alone.
        """
        ToolEnvironment.submit(env, answer)  # `env.submit` may be this tool
        return "Submitted."

    def submit_work(env: ToolEnvironment) -> str:
        """Hand in your work as it is. This ends the task."""
        ToolEnvironment.submit(env)
        return "Submitted."

    function = submit_answer if with_answer else submit_work
    return tool(name=name, description=description, thread=False)(function)


def _offered(
    function: ReadyTool, name: str, description: str | None, timeout_s: float | None, max_calls: int | None
) -> ReadyTool:
    longest = None if timeout_s is None else timeout_s + QUEUE_S
    return tool(name=name, description=description, timeout_s=longest, max_calls=max_calls)(function)


def _limits(env: SandboxEnvironment, timeout_s: float | None) -> Limits:
    """The environment's limits, with a tool's time limit as wall time, and at least as much CPU time."""
    limits = env.limits
    return limits if timeout_s is None else replace(limits, wall_s=timeout_s, cpu_s=max(limits.cpu_s, timeout_s))


def _short(text: str, output_chars: int | None) -> str:
    return text if output_chars is None else shorten(text, output_chars)


def _needed(command: str, name: str, value: Any) -> Any:
    if value is None:
        raise ToolError(f"`{name}` is missing: {command} needs it")
    return value


def _inside(path: str) -> str:
    """Path relative to the work folder; agents often write absolute paths."""
    clean = posixpath.normpath(path) if path else "."
    return "." if clean == WORK else clean.removeprefix(f"{WORK}/")


async def _view(env: SandboxEnvironment, path: str, lines: list[int] | None) -> str:
    try:
        text = await _text(env, path)
    except SandboxFileError as error:
        if error.errno != errno.EISDIR:
            raise
        return await _folder(env, path)
    given = _lines(text)
    if not given:
        return f"{path} is empty."
    first, last = _range(lines, len(given))
    return _numbered(given, first, last)


async def _folder(env: SandboxEnvironment, path: str) -> str:
    """List a folder two levels deep, without hidden files."""
    command = ["find", f"./{path}", "-mindepth", "1", "-maxdepth", "2", "-name", ".*", "-prune"]
    result = await env.sandbox.exec([*command, "-o", "-printf", "%P%y\\n"], limits=env.limits)
    names = sorted(line[:-1] + "/" * line.endswith("d") for line in result.stdout.split("\n") if line)
    if not names:
        return f"{path}/ is empty." if result.ok else f"{path}/ can't be listed: {result.stderr.strip()}"
    more = [f"[{len(names) - MOST_ENTRIES} more]"] if len(names) > MOST_ENTRIES else []
    return "\n".join([f"{path}/ holds:", *names[:MOST_ENTRIES], *more])


async def _text(env: SandboxEnvironment, path: str) -> str:
    data = await env.sandbox.read_file(path)
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise ToolError(f"{path} is not UTF-8 text ({len(data)} bytes)") from None


def _range(lines: list[int] | None, count: int) -> tuple[int, int]:
    """Numbers of the first and last line to show, starting at 1."""
    if lines is None:
        return 1, count
    if len(lines) != 2:
        raise ToolError(f"view_range={lines} is not valid: give two line numbers, such as [1, 40]")
    first, last = lines
    last = count if last == -1 else min(last, count)
    if not 1 <= first <= last:
        raise ToolError(f"view_range={lines} is not valid: the file has {count} lines")
    return first, last


def _numbered(lines: list[str], first: int, last: int) -> str:
    return "\n".join(f"{number:6}\t{lines[number - 1]}" for number in range(first, last + 1))


async def _replace(env: SandboxEnvironment, path: str, old: str, new: str) -> str:
    text = await _text(env, path)
    if not old:
        raise ToolError("`old_str` is empty")
    starts = _occurrences(text, old)
    if not starts:
        raise ToolError(f"`old_str` does not occur in {path}; it must be exactly as in the file, white space included")
    if len(starts) > 1:
        where = ", ".join(str(text.count("\n", 0, start) + 1) for start in starts[:10])
        raise ToolError(f"`old_str` occurs {len(starts)} times in {path}, at lines {where}; make it longer")
    (start,) = starts
    edited = f"{text[:start]}{new}{text[start + len(old) :]}"
    await env.sandbox.write_text(path, edited)
    first = text.count("\n", 0, start) + 1
    return _edited(path, _lines(edited), first, first + new.count("\n"))


def _occurrences(text: str, part: str) -> list[int]:
    starts, start = [], text.find(part)
    while start >= 0:
        starts.append(start)
        start = text.find(part, start + 1)
    return starts


async def _insert(env: SandboxEnvironment, path: str, line: int, added: str) -> str:
    text = await _text(env, path)
    lines = _lines(text)
    if not 0 <= line <= len(lines):
        raise ToolError(f"insert_line={line} is not valid: {path} has {len(lines)} lines")
    new = _lines(added)
    await env.sandbox.write_text(path, "\n".join([*lines[:line], *new, *lines[line:], ""]))
    return _edited(path, [*lines[:line], *new, *lines[line:]], line + 1, line + len(new))


def _lines(text: str) -> list[str]:
    """Split text into lines without line ends (`splitlines` would also split at form feeds)."""
    return text.removesuffix("\n").split("\n") if text else []


def _edited(path: str, lines: list[str], first: int, last: int) -> str:
    """Answer to an edit: the changed lines with some context."""
    if not lines:
        return f"Edited {path}: it is empty now."
    return f"Edited {path}:\n{_numbered(lines, max(1, first - AROUND), min(len(lines), last + AROUND))}"
