"""Tokens of one request: as the endpoint tells them, else estimated, so that limits and budgets act in any case.

An estimate is a token for every four bytes of UTF-8, of the messages and tools sent and of what came back: about
right for English and code, within a factor of two for other scripts. It is marked as one wherever it is shown.
"""

from __future__ import annotations

import json
from typing import Any

from forge_env.policy import Reply
from forge_env.types import Message

BYTES_A_TOKEN = 4
MOST_TOKENS = 10**9
"""No request has more; a larger figure is taken for none."""


def told(value: Any) -> dict[str, int]:
    """`prompt`, `cached` (of the prompt) and `completion` tokens, as far as an answer's `usage` tells them credibly."""
    if not isinstance(value, dict):
        return {}
    details = value.get("prompt_tokens_details")
    found = {
        "prompt": value.get("prompt_tokens"),
        "completion": value.get("completion_tokens"),
        "cached": details.get("cached_tokens") if isinstance(details, dict) else None,
    }
    usage = {name: number for name, number in found.items() if type(number) is int and 0 <= number <= MOST_TOKENS}
    if "cached" in usage:
        usage["cached"] = min(usage["cached"], usage.get("prompt", 0))
    return usage


def fill_in(reply: Reply, body: dict[str, Any]) -> None:
    """Complete `reply.metadata["usage"]`; `estimated` is 1 in it where a figure is none of the endpoint's."""
    usage: dict[str, int] = reply.metadata["usage"]
    written = len(reply.token_ids) or _tokens(_words(reply.message))
    if usage.get("prompt") and (usage.get("completion") or ("completion" in usage and not written)):
        return
    sent = json.dumps([body.get("messages"), body.get("tools")], ensure_ascii=False, separators=(",", ":"))
    usage["prompt"] = usage.get("prompt") or len(reply.prompt_ids) or _tokens(sent)
    usage["completion"] = usage.get("completion") or written
    if not reply.token_ids:
        usage["estimated"] = 1


def _words(message: Message) -> str:
    calls = (call.function.name + call.function.arguments for call in message.tool_calls)
    return "".join([message.content, message.reasoning_content or "", *calls])


def _tokens(text: str) -> int:
    return -(-len(text.encode("utf-8", "replace")) // BYTES_A_TOKEN)
