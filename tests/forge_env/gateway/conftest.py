"""A gateway, and a model behind it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from forge_env.gateway.request import ModelRequest
from forge_env.gateway.server import Gateway
from forge_env.types import Message


@pytest.fixture
async def gateway() -> AsyncIterator[Gateway]:
    async with Gateway() as gateway:
        yield gateway


class Model:
    """Gives these answers in turn and records the requests."""

    def __init__(self, *answers: Message | str | Exception) -> None:
        self.answers = list(answers)
        self.asked: list[ModelRequest] = []

    async def __call__(self, request: ModelRequest) -> Message:
        self.asked.append(request)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return Message(role="assistant", content=answer) if isinstance(answer, str) else answer
