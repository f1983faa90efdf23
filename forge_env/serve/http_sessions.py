"""Sessions of clients that have no connection: each request names its session, and an idle one ends by itself."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from forge_env.serve.sessions import Session, Sessions
from forge_env.serve.wire import WireError


class HttpSessions:
    """The sessions of a server that belong to no connection."""

    def __init__(self, sessions: Sessions) -> None:
        self.sessions = sessions
        self._turns: dict[str, asyncio.Lock] = {}
        self._idle: dict[str, asyncio.Task[None]] = {}

    async def open(self) -> Session:
        """A new session. `WireError`: there is no room, or the environment can't be made."""
        session = await self.sessions.open()
        self._turns[session.id] = asyncio.Lock()
        session.let_go = lambda: self._forget(session.id)  # a connection goes on with it
        self._wait(session)
        return session

    def find(self, session_id: str) -> Session:
        """The session of this id. `WireError` when there is none (any more)."""
        session = self.sessions.get(session_id) if session_id in self._turns else None
        if session is None:
            raise WireError("SESSION_ERROR", f"there is no session {session_id[:64]!r} (any more): reset first")
        return session

    async def use(self, session: Session, answer: Coroutine[Any, Any, dict[str, Any]]) -> dict[str, Any]:
        """Make an answer; requests of one session take turns."""
        async with self._turns.get(session.id) or asyncio.Lock():
            if session.id not in self._turns:
                answer.close()
                raise WireError("SESSION_ERROR", "the session was closed")
            self._stop_waiting(session.id)
            try:
                return await session.work(answer)
            finally:
                if session.id in self._turns:
                    self._wait(session)

    async def close(self, session_id: str) -> None:
        """End a session. `WireError` when there is none."""
        session = self.find(session_id)
        self._forget(session_id)
        await self.sessions.close(session)

    def stop(self) -> None:
        """At the server's end, which closes the sessions themselves."""
        for session_id in list(self._turns):
            self._forget(session_id)

    def _forget(self, session_id: str) -> None:
        self._turns.pop(session_id, None)
        self._stop_waiting(session_id)

    def _wait(self, session: Session) -> None:
        self._stop_waiting(session.id)
        self._idle[session.id] = asyncio.create_task(self._end_idle(session))

    def _stop_waiting(self, session_id: str) -> None:
        if (idle := self._idle.pop(session_id, None)) is not None:
            idle.cancel()

    async def _end_idle(self, session: Session) -> None:
        await asyncio.sleep(self.sessions.limits.idle_s)
        self._idle.pop(session.id, None)  # it is this task: nothing must cancel it now
        self._turns.pop(session.id, None)
        await self.sessions.close(session)
