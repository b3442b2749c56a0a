"""What a listener serves: a bare ASGI application with the dialects' routes, for one session or for all of a shard."""

from __future__ import annotations

import hmac
import logging
import re
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Mapping, Sequence

from pipeline.capture import dialects
from pipeline.capture.delivery import Delivery
from pipeline.capture.dialects.base import Action, ApiError, Dialect, Fault, Route, agent_of, api_key
from pipeline.capture.exchange import ClientLeft, Exchange, Message, Receive, Send
from pipeline.capture.session import Session
from pipeline.capture.turn import Turns
from pipeline.capture.websocket import Conversation, Frames

BUSY_RETRY_S = 1
RESTART_RETRY_S = 5
KEY = re.compile(r"yk(\d{1,4})-")

log = logging.getLogger(__name__)


class CaptureApp(ABC):
    """The ASGI application of a listener. Whose session a request is of is left to ``find``."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns

    @abstractmethod
    def find(self, key: str, exchange: Exchange) -> Session:
        """The session whose key this is. Raises ApiError."""

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        exchange = (Frames if scope["type"] == "websocket" else Exchange)(scope, receive, send)
        dialect, route = dialects.find(exchange.method, exchange.path)
        try:
            if isinstance(exchange, Frames) and route is not None:
                await self._converse(exchange)
            else:
                await self._serve(dialect, route, exchange)
        except ApiError as error:
            self._turns.totals[f"status_{dialect.status(error)}"] += 1
            await exchange.fail(dialect, error)
        except ClientLeft:
            self._turns.totals["left_early"] += 1

    async def _serve(self, dialect: Dialect, route: Route | None, exchange: Exchange) -> None:
        if route is not None and route.open:
            await exchange.reply(200, {})
            return
        session = self._session_of(exchange)
        if route is None:
            raise _no_route(exchange)
        await self._guarded(self._act(dialect, route.action, session, exchange))

    async def _guarded(self, work: Awaitable[None]) -> None:
        """Make an ApiError of what nobody expected."""
        try:
            await work
        except (ApiError, ClientLeft):
            raise
        except Exception as error:
            log.exception("a request failed")
            self._turns.totals["internal_errors"] += 1
            raise ApiError(Fault.INTERNAL, "the capture proxy failed; see its log") from error

    def _session_of(self, exchange: Exchange) -> Session:
        session = self.find(api_key(exchange.headers, exchange.query), exchange)
        session.touched = time.monotonic()
        return session

    async def _converse(self, frames: Frames) -> None:
        """Serve a WebSocket; each of its turns finds the session anew, which may have been closed meanwhile."""
        self._session_of(frames)
        conversation = Conversation(self._turns, lambda: self._session_of(frames), self._admit, frames)
        await self._guarded(conversation.run())

    async def _act(self, dialect: Dialect, action: Action, session: Session, exchange: Exchange) -> None:
        if action is Action.MODELS:
            await exchange.reply(200, dialect.models(session.policy.model_name))
            return
        if action is Action.TURN:
            self._admit(session)
        request = dialect.parse(await exchange.body(), session.memo, exchange.path, exchange.query)
        request.agent = agent_of(exchange.headers)
        if action is Action.COUNT_TOKENS:
            tokens = await self._turns.prompt_tokens(session, request)
            await exchange.reply(200, dialect.token_count(tokens))
        else:
            self._admit(session)  # again: others may have been admitted while the body arrived
            await Delivery(self._turns, session, request, exchange).run()

    def _admit(self, session: Session) -> None:
        """Raises ApiError when the session may not make another call right now."""
        most = session.policy.max_concurrent
        if most and len(session.turns) >= most:
            raise ApiError(Fault.RATE_LIMITED, f"this session may make {most} calls at once", BUSY_RETRY_S)
        if session.closing:
            raise ApiError(Fault.UNAVAILABLE, "the session is closing")
        if self._turns.draining:
            raise ApiError(Fault.UNAVAILABLE, "the capture proxy is shutting down", RESTART_RETRY_S)


class SessionApp(CaptureApp):
    """One session's listener: nobody else's key is known here."""

    def __init__(self, session: Session, turns: Turns) -> None:
        super().__init__(turns)
        self._session = session

    def find(self, key: str, exchange: Exchange) -> Session:
        if not hmac.compare_digest(key.encode(), self._session.id.encode()):
            raise ApiError(Fault.UNAUTHORIZED, "unknown API key")
        return self._session


class SharedApp(CaptureApp):
    """A shard's listener for all its sessions. ``ports`` are those of all shards, this one's among them."""

    def __init__(self, sessions: Mapping[str, Session], turns: Turns, index: int, ports: Sequence[int]) -> None:
        super().__init__(turns)
        self._sessions, self._index, self._ports = sessions, index, ports

    def find(self, key: str, exchange: Exchange) -> Session:
        session = self._sessions.get(key)
        if session is not None:
            return session
        shard = shard_of(key)
        if shard is None or shard == self._index or shard >= len(self._ports):
            raise ApiError(Fault.UNAUTHORIZED, "unknown API key")
        url = f"http://{exchange.host}:{self._ports[shard]}"
        raise ApiError(Fault.MISDIRECTED, f"this key belongs to another shard of the proxy: its base URL is {url}")


def _no_route(exchange: Exchange) -> ApiError:
    known = dialects.methods(exchange.path)
    if known:
        return ApiError(Fault.METHOD, f"{exchange.path} takes {' or '.join(known)}, not {exchange.method}")
    return ApiError(Fault.NOT_FOUND, f"no such route: {exchange.method} {exchange.path}")


def new_key(shard: int) -> str:
    """An API key, which is a session's id, that names its shard."""
    return f"yk{shard}-{secrets.token_hex(12)}"


def shard_of(key: str) -> int | None:
    """The shard that a key names."""
    found = KEY.match(key)
    return int(found[1]) if found else None
