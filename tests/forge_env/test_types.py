"""Messages: as a pydantic model to whoever uses them, at a third of its size."""

from __future__ import annotations

import json
import pickle
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

import forge_env as fe
from forge_env.errors import UsageError
from forge_env.tools.schema import as_text
from forge_env.types import FunctionCall, Message, ToolCall, image

CALL = ToolCall(id="call_0", function=FunctionCall(name="add", arguments='{"a": 1}'))
MESSAGE = Message(role="assistant", content="two", tool_calls=[CALL])
DATA = {
    "role": "assistant",
    "content": "two",
    "tool_calls": [{"id": "call_0", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}],
    "tool_call_id": None,
    "name": None,
    "reasoning_content": None,
    "stop_reason": "stop",
    "images": (),
}


def test_a_message_reads_what_it_writes() -> None:
    assert MESSAGE.model_dump() == DATA
    assert Message.model_validate(DATA) == MESSAGE == Message(**DATA)
    assert json.loads(MESSAGE.model_dump_json()) == json.loads(as_text(MESSAGE, "show")) == {**DATA, "images": []}
    told = {name: value for name, value in DATA.items() if value not in (None, ()) and name != "stop_reason"}
    assert MESSAGE.to_openai() == told
    assert pickle.loads(pickle.dumps(MESSAGE)) == MESSAGE


def test_a_copy_is_another_message() -> None:
    shallow, deep = MESSAGE.model_copy(update={"content": "three"}), MESSAGE.model_copy(deep=True)
    deep.tool_calls[0].function.name = "sub"
    assert (shallow.content, MESSAGE.content, CALL.function.name) == ("three", "two", "add")


@pytest.mark.parametrize(
    "wrong", [{"role": "nobody"}, {"content": "x"}, {"role": "user", "more": 1}, {**DATA, "name": 1}]
)
def test_what_is_no_message_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        Message.model_validate(wrong)


def test_a_field_of_a_model_may_be_a_message() -> None:
    class Holder(BaseModel):
        messages: list[Message]

    assert Holder.model_validate({"messages": [DATA]}).messages == [MESSAGE]


def test_a_message_has_no_dictionary() -> None:
    assert all(not hasattr(each, "__dict__") for each in (MESSAGE, CALL, CALL.function))
    assert sys.getsizeof(MESSAGE) < 128


PIXEL = b"\x89PNG\r\n\x1a\n" + bytes(8)


def test_images_stand_after_the_text(tmp_path: Path) -> None:
    (tmp_path / "pixel").write_bytes(PIXEL)
    shown = image(tmp_path / "pixel")
    assert shown == image(PIXEL) == "data:image/png;base64,iVBORw0KGgoAAAAAAAAAAA=="
    message = Message(role="user", content="What is it?", images=(shown, "https://example.org/b.webp"))
    parts = message.to_openai()["content"]
    assert [part["type"] for part in parts] == ["text", "image_url", "image_url"]
    assert parts[1]["image_url"] == {"url": shown}
    assert Message.from_openai(message.to_openai()) == message
    assert Message.from_openai(MESSAGE.to_openai()) == MESSAGE
    silent = Message(role="user", images=(shown,))
    assert silent.parts == [{"type": "image_url", "image_url": {"url": shown}}]


@pytest.mark.parametrize(
    ("start", "kind"), [(b"\xff\xd8\xff", "jpeg"), (b"GIF89a", "gif"), (b"RIFF\0\0\0\0WEBPVP8 ", "webp")]
)
def test_an_image_is_known_by_how_it_begins(start: bytes, kind: str) -> None:
    assert image(start).startswith(f"data:image/{kind};base64,")


def test_what_is_not_an_image_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="these bytes are not an image"):
        image(b"hello")
    with pytest.raises(UsageError, match=r"can't read the image .*none: No such file"):
        image(tmp_path / "none")


@pytest.mark.parametrize(
    ("name", "ours"), [("input", "prompt="), ("target", 'data={"answer": ...}'), ("metadata", "data=")]
)
def test_a_field_of_another_frameworks_task_is_named(name: str, ours: str) -> None:
    fields: dict[str, Any] = {"id": "0", "prompt": "?", name: "?"}
    with pytest.raises(ValueError, match=re.escape(f"a task has no `{name}`: write {ours}")):
        fe.Task(**fields)
