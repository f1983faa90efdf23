"""One conversation with an endpoint: what is sent of it, and what is known of the answer under way."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

from forge_env.errors import ContextLengthExceeded, GeneratorError, UsageError
from forge_env.policies.endpoint_bounds import blames_bound, bound, largest, says_full, with_bound, without_bound
from forge_env.policies.endpoint_errors import EndpointError, EndpointTimeoutError, RequestRefusedError
from forge_env.policies.endpoint_text_tools import as_plain_chat, parse_calls
from forge_env.policy import Reply
from forge_env.types import Message, Observation, ToolSpec

if TYPE_CHECKING:
    from forge_env.policies.endpoint import EndpointPolicy


class EndpointSession:
    """One conversation: the messages, and the last turn's tokens where the endpoint gives them."""

    def __init__(self, policy: EndpointPolicy, tools: list[ToolSpec], seed: int | None) -> None:
        self._policy = policy
        self._tools = tools
        self._body = policy.request(tools, seed)
        self._as_text = policy.options.tools == "text"
        self._messages: list[Message] = []
        self._sent: list[dict[str, Any]] = []
        self._tokens: list[int] = []
        self._turn = 0
        self._left: int | None = None  # tokens, of a limit that isn't the options' own
        self._unbounded = False
        self._opened = time.perf_counter()
        self._asked: float | None = None
        self._failure: EndpointError | None = None

    async def reply(self, observation: Observation) -> Reply:
        """The model's answer; see `EndpointPolicy.ask`."""
        self._add(observation)
        messages = as_plain_chat(self._messages, self._tools) if self._as_text else self._sent
        self._asked, self._failure = time.perf_counter(), None
        reply = await self._ask({**self._body, "messages": messages})
        self._asked = self._failure = None
        if self._as_text:
            reply.message = parse_calls(reply.message, turn=self._turn)
        reply.forked = bool(self._tokens) and reply.prompt_ids[: len(self._tokens)] != self._tokens
        self._tokens = reply.prompt_ids + reply.token_ids
        self._add([reply.message])
        self._turn += 1
        return reply

    async def _ask(self, body: dict[str, Any]) -> Reply:
        """Ask with the bound on the reply, and without where the endpoint refuses what may be due to it."""
        policy, own = self._policy, bound(body)
        most = min((tokens for tokens in (own, self._left) if tokens is not None), default=None)
        if most is None:
            return await policy.ask(body, self._failed)
        if self._unbounded or (own is None and policy.largest is not None and most >= policy.largest):
            return await policy.ask(without_bound(body), self._failed)
        try:
            return await policy.ask(with_bound(body, most), self._failed)
        except (ContextLengthExceeded, RequestRefusedError) as error:
            if (isinstance(error, EndpointError) and error.fatal) or not blames_bound(error.message):
                raise
            refusal = error.message
        self._failure = None
        reply = await policy.ask(without_bound(body), self._failed)  # raises again where the conversation is full
        if (told := largest(refusal)) is not None:
            policy.largest = told
        if most == own and (own >= told if told is not None else not says_full(refusal)):
            raise UsageError(
                f"the endpoint refuses replies of up to {own} tokens: {refusal}",
                fix="lower --max-tokens, or leave it out: a reply may then be as long as the context allows",
            )
        self._unbounded = True  # the conversation only grows: asking with a bound would be refused on every turn
        return reply

    def limit_reply(self, tokens: int) -> None:
        """Let no further reply be longer, whatever the options allow, as far as the endpoint takes such a bound."""
        self._left = tokens

    def _failed(self, error: EndpointError) -> None:
        self._failure = error

    def unanswered(self) -> GeneratorError | None:
        """Why a time limit that has just ended the episode is the endpoint's doing, or None: it is the model's.

        It is the endpoint's where the request under way had failed and was to be repeated, and where its answer took
        longer, without coming, than everything before it: turns that are slow but answered leave less for the last.
        """
        if self._failure is not None or self._asked is None:
            return self._failure
        silent = time.perf_counter() - self._asked
        if silent < self._asked - self._opened:
            return None
        self._policy.errors[EndpointTimeoutError.__name__] += 1
        return EndpointTimeoutError(f"no complete answer after {silent:.3g} s, when a time limit ended the sample")

    def _add(self, messages: Observation) -> None:
        if self._as_text:
            self._messages += messages
        else:
            self._sent += [_wire(message) for message in messages]


def _wire(message: Message) -> dict[str, Any]:
    """A message as endpoints take it: several refuse reasoning, and names in tool messages."""
    data: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        data["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.function.name, "arguments": _arguments(call.function.arguments)},
            }
            for call in message.tool_calls
        ]
    if message.tool_call_id is not None:
        data["tool_call_id"] = message.tool_call_id
    if message.name is not None and message.role != "tool":
        data["name"] = message.name
    return data


def _arguments(text: str) -> str:
    """Arguments for the history. Servers parse them and refuse the whole request where that fails: then wrap them."""
    try:
        readable = isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        readable = False
    return text if readable else json.dumps({"arguments": text})
