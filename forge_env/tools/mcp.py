"""Tools of MCP servers, through the official SDK (`pip install mcp`).

    class Files(fe.ToolEnvironment):
        async def setup(self, task):
            self.server = await McpServer.connect("https://tools.example/mcp")
            self.server.add_tools_to(self)

        async def cleanup(self):
            await self.server.close()

Every connection is a separate session, so a server behind a URL keeps episodes apart: it is asked for a protocol with
sessions (MCP 2025-11-25) first, and for 2026-07-28 if it has none. A server that runs as a local program has one
session, so every episode starts a new process, unless `connect(..., shared=True)` declares that the server keeps no
state between calls. The process runs outside any sandbox: give agents only programs that you trust with the machine.
Its standard error is logged.

If the server's list of tools changes, the agent's tools change too, and the answer of its current call says so: the
prompt, which models have read by then, stays as it is.

Errors answered by the server go to the model; a lost server raises `InfrastructureError`.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import os
import re
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Set
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TextIO

from forge_env import redaction
from forge_env.errors import InfrastructureError, ToolError, UsageError, root_cause
from forge_env.sharing import Shared
from forge_env.tools.schema import LONGEST_NAME, UNSAFE, CallScope, Tool
from forge_env.types import ToolSpec

if TYPE_CHECKING:
    from forge_env.environment.tool_environment import ToolEnvironment

log = logging.getLogger(__name__)
LONGEST_LINE = 10_000
"""Maximum bytes of a logged line; longer lines are split."""
TOOLS_CHANGED = "notifications/tools/list_changed"
CONNECTION_CLOSED = -32000
"""Error code of the SDK for a lost server; servers may use the same code for other errors."""


class McpServer:
    """An episode's connection to one MCP server, possibly shared with other episodes."""

    def __init__(self, connection: Connection, holding: AsyncExitStack, prefix: str = "") -> None:
        self._connection = connection
        self._holding = holding
        self._prefix = prefix
        self._names: dict[str, str] = {}
        self._specs: dict[str, ToolSpec] = {}
        self._offered = False
        self.tools: list[McpTool] = []
        self._read()

    def _read(self, others: Set[str] = frozenset()) -> None:
        """Read the connection's tools; `others` are the names of tools that aren't the server's."""
        self._specs = self._connection.tools
        free = {name: safe for name, safe in self._names.items() if safe not in others}
        self._names = safe_names(self._specs, self._prefix, free, others)
        self.tools = [
            McpTool(self, name, spec.model_copy(update={"name": self._names[name]}))
            for name, spec in self._specs.items()
        ]

    @classmethod
    async def connect(
        cls, target: Any, *, shared: bool = False, prefix: str = "", timeout_s: float = 30.0
    ) -> McpServer:
        """Connect and list the tools.

        Args:
            target: URL of a streamable HTTP server, `mcp.StdioServerParameters`, or a server object in this process.
            shared: whether all episodes of the event loop share one connection and, for a local program, one process.
                Only for servers that keep no state between calls: the episodes then share a session.
            prefix: beginning of the names of its tools, to tell them from another server's.
            timeout_s: wall-clock limit for connecting in seconds.

        Raises:
            InfrastructureError: the server can't be reached.
        """
        redaction.learn(getattr(target, "env", None), "env")
        redaction.learn_arguments(getattr(target, "args", []))
        redaction.learn(target, "url")
        key = _Target(repr(target), timeout_s, target, sessions=not shared)
        holding = AsyncExitStack()
        connection = await holding.enter_async_context(_SHARED.use(key) if shared else _connected(key))
        if connection.gone and shared:  # another episode lost the connection
            _SHARED.forget(key)
            await holding.aclose()
            connection = await holding.enter_async_context(_SHARED.use(key))
        return cls(connection, holding, prefix)

    def add_tools_to(self, env: ToolEnvironment) -> None:
        """Offer all tools of the server to the agent, also those that it gets later."""
        self._offered = True
        for tool in self.tools:
            env.add_tool(tool)

    def update(self, env: ToolEnvironment) -> str:
        """Update the tools of an environment that offers all; return a description of the change for the agent."""
        if not self._offered or self._connection.tools is self._specs:
            return ""
        before = {tool.spec.name: tool.spec for tool in self.tools}
        self._read({spec.name for spec in env.tools} - set(before))
        after = {tool.spec.name: tool for tool in self.tools}
        removed = [name for name in before if name not in after]
        new = [tool for name, tool in after.items() if tool.spec != before.get(name)]
        for name in [*removed, *(tool.spec.name for tool in new if tool.spec.name in before)]:
            env._remove_tool(name)
        for tool in new:
            env.add_tool(tool)
        lines = [f"No longer available: {', '.join(removed)}"] if removed else []
        lines += [f"Available from now on: {tool.spec.model_dump_json()}" for tool in new]
        return "\n\nThe tools have changed.\n" + "\n".join(lines) if lines else ""

    async def call(self, name: str, arguments: dict[str, Any]) -> str:
        """Call one tool. `ToolError`: the server refused the call, or the tool failed."""
        return await self._connection.call(name, arguments)

    async def close(self) -> None:
        """Disconnect; further calls have no effect."""
        await self._holding.aclose()


@dataclass(frozen=True)
class _Target:
    """Key of a shared server: targets with equal text and timeout are the same server."""

    name: str
    timeout_s: float
    target: Any = field(compare=False)
    sessions: bool
    """Whether the server should keep a session, if it can."""


class Connection:
    """A client of the SDK, held by a separate task, because the SDK ties a client to the task that opened it."""

    def __init__(self, target: Any, *, sessions: bool) -> None:
        self._target = target
        self._sessions = sessions
        self._client: Any = None
        self._changed = False
        self._closing = asyncio.Event()
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.tools: dict[str, ToolSpec] = {}
        """Tools by their name on the server; a new object once they have changed."""
        self.gone = False
        self.stderr = StderrLog(_name_of(target))
        self.keeper = asyncio.create_task(self._keep())

    async def call(self, name: str, arguments: dict[str, Any]) -> str:
        """Call one tool; see `McpServer.call`."""
        from mcp import MCPError

        if self.keeper.done() or self.gone:
            raise self._lost()
        calling = asyncio.ensure_future(self._client.call_tool(name, arguments))
        try:
            await asyncio.wait([calling, self.keeper], return_when=asyncio.FIRST_COMPLETED)
            if not calling.done():
                raise self._lost()
            result = calling.result()
        except MCPError as error:
            if error.code == CONNECTION_CLOSED and not await self._answers():
                raise self._lost() from error
            raise ToolError(str(error)) from error
        except OSError as error:
            raise InfrastructureError(f"the MCP server failed: {error}") from error
        finally:
            calling.cancel()
        await self._refresh()
        text = shown(result)
        if result.is_error:
            raise ToolError(text or f"{name} failed")
        return text

    async def _refresh(self) -> None:
        """List the tools again if the server has announced a change; if that fails, the next call tries again."""
        from mcp import MCPError

        if not self._changed:
            return
        self._changed = False
        try:
            tools = await _list_tools(self._client)
        except (MCPError, OSError) as error:
            self._changed = True
            log.warning("MCP server %s can't list its changed tools: %s", self.stderr.name, error)
            return
        if tools != self.tools:
            self.tools = tools

    def _lost(self) -> InfrastructureError:
        self.gone = True
        return InfrastructureError(f"the MCP server is gone{self.stderr.told()}")

    async def _answers(self) -> bool:
        from mcp import MCPError

        try:
            await self._client.list_tools()
        except (MCPError, OSError):
            return False
        return True

    async def close(self) -> None:
        """Disconnect, and end a local program."""
        self._closing.set()
        await asyncio.wait([self.keeper])

    async def _keep(self) -> None:
        try:
            from mcp import StdioServerParameters
            from mcp.client.stdio import stdio_client
        except ImportError:
            self.ready.set_exception(UsageError("MCP tools need the `mcp` package", fix="pip install mcp"))
            return
        try:
            async with AsyncExitStack() as stack:
                target = self._target
                if isinstance(target, StdioServerParameters):
                    target = stdio_client(target, errlog=await stack.enter_async_context(self.stderr.open()))
                self._client = await self._open(target, stack)
                await self._listen(stack)
                self.tools = await _list_tools(self._client)
                self.ready.set_result(None)
                await self._closing.wait()
        except Exception as error:  # task boundary: raised to the caller of `connect`, later errors are logged
            self.gone, why = True, root_cause(error)
            if self.ready.done():
                log.warning("the connection to MCP server %s failed: %s", self.stderr.name, why, exc_info=error)
                return
            lost = InfrastructureError(f"can't connect to the MCP server: {why}{self.stderr.told()}")
            lost.__cause__ = error
            self.ready.set_exception(lost)

    async def _open(self, target: Any, stack: AsyncExitStack) -> Any:
        """Connect with the newest protocol, or the newest with sessions if those are needed and the server has them."""
        from mcp import Client, MCPError

        async def heard(message: Any) -> None:
            self._changed |= getattr(message, "method", "") == TOOLS_CHANGED

        if self._sessions and isinstance(target, str):
            try:
                client = Client(target, mode="legacy", message_handler=heard, cache=None)
                return await stack.enter_async_context(client)
            except (MCPError, ExceptionGroup) as error:
                if not isinstance(root_cause(error), MCPError):
                    raise
        return await stack.enter_async_context(Client(target, message_handler=heard, cache=None))

    async def _listen(self, stack: AsyncExitStack) -> None:
        """Watch for changes of the list of tools until the stack is closed; older protocols announce them unasked."""
        from mcp import MCPError
        from mcp.client.subscriptions import ListenNotSupportedError, SubscriptionLost

        offers = self._client.server_capabilities.tools
        if offers is None or not offers.list_changed:
            return
        try:
            events = await stack.enter_async_context(self._client.listen(tools_list_changed=True))
        except (ListenNotSupportedError, MCPError, SubscriptionLost):
            return

        async def watch() -> None:
            with suppress(SubscriptionLost):
                async for _ in events:
                    self._changed = True

        watching = asyncio.create_task(watch())
        stack.callback(watching.cancel)


@asynccontextmanager
async def _connected(to: _Target) -> AsyncIterator[Connection]:
    connection = Connection(to.target, sessions=to.sessions)
    try:
        async with asyncio.timeout(to.timeout_s):
            await asyncio.shield(connection.ready)
    except BaseException as error:  # also if cancelled: no server may be left running
        connection.keeper.cancel()
        await asyncio.wait([connection.keeper])
        if isinstance(error, TimeoutError):
            note = connection.stderr.told()
            raise InfrastructureError(f"no MCP server answered within {to.timeout_s:g} s{note}") from error
        raise
    try:
        yield connection
    finally:
        await connection.close()


_SHARED: Shared[_Target, Connection] = Shared(_connected)


class StderrLog(asyncio.Protocol):
    """Logs a local server's standard error line by line."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._rest = b""
        self._last = ""
        self._ended = asyncio.Event()

    @asynccontextmanager
    async def open(self) -> AsyncIterator[TextIO]:
        """Open the file for the server's standard error; remaining output is logged on exit."""
        reading, writing = os.pipe()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: self, os.fdopen(reading, "rb", 0))
        try:
            with os.fdopen(writing, "w") as file:
                yield file
            with suppress(TimeoutError):  # a program started by the server may still hold the pipe open
                async with asyncio.timeout(1):
                    await self._ended.wait()
        finally:
            transport.close()

    def told(self) -> str:
        """The last line, as a suffix for error messages."""
        return f"; last output: {self._last}" if self._last else ""

    def data_received(self, data: bytes) -> None:
        """Log the lines that are complete, or too long to wait for their end."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > LONGEST_LINE:
            lines, self._rest = [*lines, self._rest], b""
        for line in lines:
            self._log(line)

    def connection_lost(self, exc: Exception | None) -> None:
        """Log the last line."""
        self._log(self._rest)
        self._ended.set()

    def _log(self, line: bytes) -> None:
        if text := line.decode(errors="replace").strip():
            self._last = redaction.redact(text)[:300]
            log.info("MCP server %s: %s", self.name, text[:LONGEST_LINE])


def _name_of(target: Any) -> str:
    """Name of a server in the log."""
    if isinstance(target, str):
        return target
    words = [str(getattr(target, "command", type(target).__name__)), *getattr(target, "args", [])]
    return redaction.redact(" ".join(words))[:80]


def shown(result: Any) -> str:
    """A tool's result as text; other content is named by its type. Structured content follows if the text lacks it."""
    blocks = [_block(block) for block in result.content]
    text = "\n".join(blocks)
    if (structured := result.structured_content) is not None and not all(
        _holds(text, value) for value in _values(structured)
    ):
        blocks.append(json.dumps(structured, ensure_ascii=False))
    return "\n".join(blocks)


def _holds(text: str, value: str | float) -> bool:
    """Whether a text contains a JSON value: a number as a whole word, a string plainly or escaped."""
    written = json.dumps(value)
    if isinstance(value, str):
        return value in text or written[1:-1] in text
    return re.search(rf"(?<![\w.-]){re.escape(written)}(?!\w|\.\d)", text) is not None


def _values(data: Any) -> Iterator[str | float]:
    """Numbers and texts in JSON data."""
    if isinstance(data, Mapping | list):
        for each in data.values() if isinstance(data, Mapping) else data:
            yield from _values(each)
    elif data is not None:
        yield data


def _block(block: Any) -> str:
    if block.type == "text":
        return str(block.text)
    if block.type == "resource_link":
        about = [text for text in (block.title or block.name, block.description) if text]
        return f"[{': '.join(about)}]({block.uri})"
    if block.type == "resource":
        resource = block.resource
        text = getattr(resource, "text", None)
        return str(text) if text is not None else f"[{resource.mime_type or 'binary file'}: {resource.uri}]"
    return f"[{block.type}: {getattr(block, 'mime_type', None) or 'not text'}]"


def safe_names(
    names: Iterable[str],
    prefix: str = "",
    before: Mapping[str, str] = MappingProxyType({}),
    others: Set[str] = frozenset(),
) -> dict[str, str]:
    """Map a server's tool names to unique names that endpoints accept: up to 64 letters, digits, `_` and `-`.

    Names in the earlier result `before` keep their meaning; `others` are in use elsewhere.
    """
    safe = dict(before)
    taken = {*safe.values(), *others}
    new = [name for name in names if name not in safe]
    for name in sorted(new, key=lambda name: UNSAFE.search(name) is not None or len(prefix + name) > LONGEST_NAME):
        start = UNSAFE.sub("_", prefix + name)[:LONGEST_NAME] or "tool"
        if start[0] in "-0123456789":  # some endpoints demand a letter or _
            start = f"_{start}"[:LONGEST_NAME]
        numbers = (f"{start[: LONGEST_NAME - len(str(number)) - 1]}_{number}" for number in itertools.count(2))
        safe[name] = next(each for each in itertools.chain([start], numbers) if each not in taken)
        taken.add(safe[name])
    return safe


async def _list_tools(client: Any) -> dict[str, ToolSpec]:
    specs: dict[str, ToolSpec] = {}
    cursor: str | None = None
    while True:
        page = await client.list_tools(cursor=cursor)
        for tool in page.tools:
            given = {name: value for name, value in tool.input_schema.items() if value is not None}
            parameters = {"type": "object", "properties": {}, **given}
            specs[tool.name] = ToolSpec(name=tool.name, description=tool.description or "", parameters=parameters)
        cursor = page.next_cursor
        if cursor is None:
            return specs


class McpTool(Tool):
    """One tool of a server; the server validates the arguments."""

    def __init__(self, server: McpServer, name: str, spec: ToolSpec) -> None:
        self._server = server
        self._name = name
        self.timeout_s = self.max_calls = None
        self.in_thread = False
        self.is_async = True
        self.spec = spec

    def parse(self, arguments: str) -> dict[str, Any]:
        """Parse the model's JSON object, and check that the required members are present."""
        data = self.read(arguments)
        if missing := [name for name in self.spec.parameters.get("required", []) if name not in data]:
            raise ToolError(f"wrong arguments: {missing[0]}: missing. {self.usage()}")
        return data

    async def invoke(self, arguments: dict[str, Any], scope: CallScope) -> str:
        """Call the tool on the server; if that changed the tools, the answer says so."""
        try:
            text = await self._server.call(self._name, arguments)
        except ToolError as error:
            raise ToolError(f"{error}{self._server.update(scope.owner)}") from error
        return text + self._server.update(scope.owner)
