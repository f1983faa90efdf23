"""Messages: as a pydantic model to whoever uses them, at a third of its size."""

from __future__ import annotations

import json
import pickle
import sys

import pytest
from pydantic import BaseModel, ValidationError

from forge_env.tools.schema import as_text
from forge_env.types import FunctionCall, Message, ToolCall

CALL = ToolCall(id="call_0", function=FunctionCall(name="add", arguments='{"a": 1}'))
MESSAGE = Message(role="assistant", content="two", tool_calls=[CALL])
DATA = {
    "role": "assistant",
    "content": "two",
    "tool_calls": [{"id": "call_0", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}],
    "tool_call_id": None,
    "name": None,
    "reasoning_content": None,
}


def test_a_message_reads_what_it_writes() -> None:
    assert MESSAGE.model_dump() == DATA
    assert Message.model_validate(DATA) == MESSAGE == Message(**DATA)  # type: ignore[arg-type]
    assert json.loads(MESSAGE.model_dump_json()) == json.loads(as_text(MESSAGE, "show")) == DATA
    assert MESSAGE.to_openai() == {name: value for name, value in DATA.items() if value is not None}
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
