"""Google's Gemini API (generateContent): parse requests, and build responses and events."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, model_validator
from pydantic.alias_generators import to_camel, to_snake

from forge_env.gateway.request import (
    MOST_MESSAGES,
    MOST_STOPS,
    MOST_TOOLS,
    Answer,
    Arguments,
    ImageSource,
    ModelRequest,
    Part,
    Wire,
    arguments_object,
    compact,
    known_type,
    new_id,
    read,
    said,
    shallow,
    tool_of,
    without_repeats,
)
from forge_env.http.limits import RefusedRequestError
from forge_env.tools.turns import call_of
from forge_env.types import Message, ToolCall, ToolSpec

MOST_CANDIDATES = 64
AT_GOOGLE = (
    "google_search",
    "google_search_retrieval",
    "google_maps",
    "enterprise_web_search",
    "url_context",
    "code_execution",
    "file_search",
    "retrieval",
    "mcp_servers",
)
"""Types of tools that run on Google's servers."""
_FINISH = {"length": "MAX_TOKENS", "content_filter": "SAFETY"}
_STATUS = {401: "UNAUTHENTICATED", 403: "PERMISSION_DENIED", 404: "NOT_FOUND", 429: "RESOURCE_EXHAUSTED"}
_TYPES = ("OBJECT", "ARRAY", "STRING", "NUMBER", "INTEGER", "BOOLEAN", "NULL")
_Name = Annotated[str, Field(min_length=1)]
_ITEM = BeforeValidator(lambda value: [value] if isinstance(value, dict) else value)
"""A list of one item may be sent as the item."""


class _Wire(Wire):
    model_config = ConfigDict(extra="ignore", alias_generator=to_camel, populate_by_name=True)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, data: Any) -> Any:
        """Treat a null as a field that isn't set."""
        return {key: value for key, value in data.items() if value is not None} if isinstance(data, dict) else data


class _Call(_Wire):
    id: str | None = None
    name: str
    args: Arguments = "{}"


class _Result(_Wire):
    id: str | None = None
    name: str
    response: Any = None


class _Data(_Wire):
    mime_type: str = ""
    data: str = ""
    file_uri: str = ""


class _Part(_Wire):
    text: str | None = None
    thought: bool = False
    function_call: _Call | None = None
    function_response: _Result | None = None
    inline_data: _Data | None = None
    file_data: _Data | None = None
    thought_signature: str | None = None
    model_config = ConfigDict(extra="allow", alias_generator=to_camel, populate_by_name=True)

    def plain(self) -> Part:
        """The part as content of a message; a part of another type keeps the name of its field."""
        if image := self.inline_data or self.file_data:
            if image.mime_type.startswith("image/"):
                source = ImageSource(url=image.file_uri, media_type=image.mime_type, data=image.data)
                return Part(type="image", source=source)
            return Part(type=f"{'inlineData' if self.inline_data else 'fileData'} {image.mime_type[:64]}")
        other = next(iter(self.model_extra or ()), "")
        return Part(type=other, text=None if other and self.text is None else self.text or "")


class _Content(_Wire):
    role: Literal["user", "model", "function", "system"] = "user"
    parts: Annotated[list[_Part], Field(max_length=MOST_MESSAGES, fail_fast=True), _ITEM] = []


class _Function(_Wire):
    name: _Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    parameters_json_schema: dict[str, Any] | None = None


class _Tool(_Wire):
    function_declarations: list[_Function] = Field([], max_length=MOST_TOOLS, fail_fast=True)
    model_config = ConfigDict(extra="allow", alias_generator=to_camel, populate_by_name=True)


class _Calling(_Wire):
    mode: str = "AUTO"


class _ToolConfig(_Wire):
    function_calling_config: _Calling = _Calling()


class _Generation(_Wire):
    stop_sequences: list[str] = Field([], max_length=MOST_STOPS, fail_fast=True)
    max_output_tokens: int | None = Field(None, ge=1)
    candidate_count: int | None = Field(None, ge=1, le=MOST_CANDIDATES)
    response_modalities: list[Literal["TEXT", "text"]] | None = Field(None, max_length=1, fail_fast=True)


class GeminiRequest(_Wire):
    """Body of a generateContent request."""

    contents: list[_Content] = Field(min_length=1, max_length=MOST_MESSAGES, fail_fast=True)
    system_instruction: _Content | None = None
    tools: list[_Tool] | None = Field(None, max_length=MOST_TOOLS, fail_fast=True)
    tool_config: _ToolConfig = _ToolConfig()
    generation_config: _Generation = _Generation()
    cached_content: str | None = None


def read_gemini(data: object, model: str = "", *, stream: bool = False) -> ModelRequest:
    """Parse a request body."""
    body = read(GeminiRequest, data)
    if body.cached_content:
        raise RefusedRequestError("cachedContent: not supported; send all contents")
    other = [kind for tool in body.tools or [] for kind in tool.model_extra or ()]
    if computer := [kind for kind in other if kind in ("computerUse", "computer_use")]:
        raise RefusedRequestError(f"this model doesn't know the tool {computer[0]}: declare functions")
    functions = [each for tool in body.tools or [] for each in tool.function_declarations]
    if len(functions) > MOST_TOOLS:
        raise RefusedRequestError(f"the request has more than {MOST_TOOLS:,} functions")
    mode = body.tool_config.function_calling_config.mode.upper()
    system = [said("system", _plain(body.system_instruction.parts))] if body.system_instruction else []
    return ModelRequest(
        messages=[*system, *_messages(body.contents)],
        tools=[] if mode == "NONE" else without_repeats(map(_tool, functions)),
        stop=body.generation_config.stop_sequences,
        max_tokens=body.generation_config.max_output_tokens,
        count=body.generation_config.candidate_count or 1,
        model=model,
        stream=stream,
        left_out=[known_type(to_snake(kind), AT_GOOGLE) for kind in other],
    )


def _messages(contents: Iterable[_Content]) -> Iterator[Message]:
    waiting: dict[str, OrderedDict[str, None]] = defaultdict(OrderedDict)
    """Ids of each function's calls without a result: a result without an id answers the oldest."""
    for number, content in enumerate(contents):
        for result in (part.function_response for part in content.parts if part.function_response):
            calls = waiting[result.name]
            name = result.id or next(iter(calls), "")
            calls.pop(name, None)
            yield Message(role="tool", content=_result(result.response), tool_call_id=name)
        calls_of_turn: list[ToolCall] = []
        for call in (part.function_call for part in content.parts if part.function_call):
            name = call.id or f"call-{number}-{len(calls_of_turn)}"
            calls_of_turn.append(call_of(call.name, call.args, name))
            waiting[call.name][name] = None
        thoughts = "".join(part.text or "" for part in content.parts if part.thought)
        rest = [part for part in content.parts if not (part.thought or part.function_call or part.function_response)]
        if rest or calls_of_turn or thoughts or not content.parts:
            role: Literal["user", "assistant"] = "assistant" if content.role == "model" else "user"
            yield said(role, _plain(rest), tool_calls=calls_of_turn, reasoning_content=thoughts or None)


def _plain(parts: Iterable[_Part]) -> list[Part]:
    return [part.plain() for part in parts]


def _result(response: Any) -> str:
    """Text of a function's result; the API's convention is an object with `output` or `error`."""
    if isinstance(response, dict) and len(response) == 1:
        [(key, value)] = response.items()
        if key in ("output", "result", "error") and isinstance(value, str):
            return value
    return response if isinstance(response, str) else compact(response)


def _tool(function: _Function) -> ToolSpec:
    shallow(function.parameters, f"the parameters of the function {function.name[:64]!r}")
    parameters = function.parameters_json_schema or _json_schema(function.parameters)
    return tool_of(function.name, function.description, parameters)


def _json_schema(schema: Any) -> Any:
    """A JSON schema from one in Google's form, whose types are in capitals."""
    if isinstance(schema, dict):
        types = {"type": schema["type"].lower()} if schema.get("type") in _TYPES else {}
        return {key: _json_schema(value) for key, value in schema.items()} | types
    return [_json_schema(item) for item in schema] if isinstance(schema, list) else schema


def gemini_response(request: ModelRequest, answers: Sequence[Answer]) -> dict[str, Any]:
    """Response to a generateContent request."""
    candidates = [
        {
            "content": {"role": "model", "parts": list(_parts(answer.message))},
            "finishReason": _FINISH.get(answer.finish, "STOP"),
            "index": index,
        }
        for index, answer in enumerate(answers)
    ]
    prompt, completion = request.prompt_tokens, sum(answer.tokens for answer in answers)
    usage = {"promptTokenCount": prompt, "candidatesTokenCount": completion, "totalTokenCount": prompt + completion}
    return {
        "candidates": candidates,
        "usageMetadata": usage,
        "modelVersion": request.model,
        "responseId": new_id(""),
    }


def _parts(message: Message) -> Iterator[dict[str, Any]]:
    if message.reasoning_content:
        yield {"text": message.reasoning_content, "thought": True}
    if message.content or not message.tool_calls:
        yield {"text": message.content}
    for call in message.tool_calls:
        function = call.function
        yield {
            "functionCall": {"id": call.id, "name": function.name, "args": arguments_object(function.arguments)},
        }


def read_counted(data: Any) -> ModelRequest:
    """Parse the request that a countTokens body is about."""
    whole = data.get("generateContentRequest") if isinstance(data, dict) else None
    return read_gemini(whole or data)


def gemini_error(error: RefusedRequestError) -> dict[str, Any]:
    """Body of an error response in Google's format."""
    status = _STATUS.get(error.status, "INVALID_ARGUMENT" if error.status < 500 else "INTERNAL")
    return {"error": {"code": error.status, "message": error.message, "status": status}}
