"""Client of the Agent Client Protocol, run in the sandbox: start an agent, give it a task, and permit what it asks for.

    python3 acp_client.py PROMPT AGENT [ARGUMENT...]

The agent reads and writes JSON-RPC on its standard input and output. Its messages are printed. The exit code is 0 if
it ends its turn by itself, and 1 otherwise. Standard library of Python 3.9 alone: the sandbox's image provides it.
"""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

Message = dict[str, Any]
ALLOW = ("allow_always", "allow_once")


def acp_argv(prompt: str, command: Sequence[str]) -> list[str]:
    """The command that runs an agent of the protocol, for `ProgramEnvironment.argv`. Its image needs Python."""
    return ["python3", "-c", inspect.getsource(sys.modules[__name__]), prompt, *command]


class Agent:
    """A started agent."""

    def __init__(self, command: list[str]) -> None:
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._requests = 0

    def _send(self, **message: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
        self._process.stdin.flush()

    def call(self, method: str, **params: Any) -> Message:
        """Send a request and return its result; answer the agent's own requests meanwhile. `SystemExit`: an error."""
        self._requests += 1
        self._send(id=self._requests, method=method, params=params)
        assert self._process.stdout is not None
        for line in self._process.stdout:
            try:
                message = json.loads(line)
            except ValueError:
                print(line, end="", file=sys.stderr)
                continue
            if "method" in message:
                self._answer(message)
            elif message.get("id") == self._requests:
                if "error" in message:
                    raise SystemExit(f"{method}: {json.dumps(message['error'])}")
                return message.get("result") or {}
        raise SystemExit(f"{method}: the agent ended with exit code {self._process.wait()}")

    def _answer(self, message: Message) -> None:
        """Print a message of the agent, or answer its request: grant permissions, refuse everything else."""
        params = message.get("params") or {}
        if "id" not in message:
            update = params.get("update") or {}
            if update.get("sessionUpdate") == "agent_message_chunk":
                print(update["content"].get("text", ""), end="", flush=True)
        elif message["method"] == "session/request_permission":
            chosen = sorted(
                (option for option in params.get("options", []) if option.get("kind") in ALLOW),
                key=lambda option: ALLOW.index(option["kind"]),
            )
            outcome = {"outcome": "cancelled"}
            if chosen:
                outcome = {"outcome": "selected", "optionId": chosen[0]["optionId"]}
            self._send(id=message["id"], result={"outcome": outcome})
        else:
            error = {"code": -32601, "message": f"this client has no {message['method']}"}
            self._send(id=message["id"], error=error)

    def close(self) -> None:
        """End the agent."""
        self._process.kill()
        self._process.wait()


def main() -> int:
    """Give the agent its task."""
    prompt, *command = sys.argv[1:]
    agent = Agent(command)
    try:
        none = {"fs": {"readTextFile": False, "writeTextFile": False}, "terminal": False}
        info = {"name": "forge-env", "version": "1"}
        agent.call("initialize", protocolVersion=1, clientCapabilities=none, clientInfo=info)
        session = agent.call("session/new", cwd=os.getcwd(), mcpServers=[])["sessionId"]
        ended = agent.call("session/prompt", sessionId=session, prompt=[{"type": "text", "text": prompt}])
    finally:
        agent.close()
    print()
    if ended.get("stopReason") != "end_turn":
        print(f"the agent stopped: {ended.get('stopReason')}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
