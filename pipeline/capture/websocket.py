"""The Responses API over WebSocket: a connection's turns one after the other, each like a streamed POST.

A connection remembers the latest response of each of its lanes (``stream_id``), so that a client may send only what is
new; the lanes share one queue. The frames themselves are left to ``capture.upgrade``.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from pipeline.capture.canonical import Item
from pipeline.capture.delivery import Delivery
from pipeline.capture.dialects.base import Answer, ApiError, ChatRequest, Dialect, Fault, agent_of, require
from pipeline.capture.dialects.fields import Fields, honoured
from pipeline.capture.dialects.responses import FIELDS, Responses
from pipeline.capture.exchange import BODY_CAP, EVENTS, Exchange, Header, Message, Receive, Send
from pipeline.capture.listener import KEEP_ALIVE_S
from pipeline.capture.session import Session
from pipeline.capture.turn import Turns

if TYPE_CHECKING:
    from pipeline.capture.upgrade import Socket

LANES = 16  # that a connection remembers, as far as BODY_CAP bytes in all allow
DATA = b"data: "
ENVELOPE = {
    **dict.fromkeys(("type", "stream_id", "previous_response_id"), honoured(str)),
    "generate": honoured(bool),
    "client_metadata": honoured(dict[str, Any]),  # Codex: what the headers of a POST would say
}
Enter = Callable[[], Session]
Admit = Callable[[Session], None]


class UnknownResponse(ApiError):
    """A request continues a response that the connection does not remember."""

    def __init__(self, response_id: str) -> None:
        super().__init__(Fault.INVALID, f"response '{response_id}' not found: send the whole history in input")


class Continued(Responses):
    """Responses as one connection speaks it. It has a memory, so this dialect does hold state."""

    fields = FIELDS | ENVELOPE

    def __init__(self) -> None:
        self.lane = ""  # of the present request
        self._lanes: dict[str, tuple[str, list[Item], int]] = {}  # response id, conversation, size; the latest is last

    def items(self, given: Fields) -> list[Item]:
        self.lane = given.get("stream_id", "")
        require(given.get("type") == "response.create", "type: must be response.create")
        given.values.setdefault("input", msgspec.Raw(b"[]"))
        present = super().items(given)
        first = [item for item in present if item.kind == "system"]
        history = [*self._past(given.get("previous_response_id")), *present[len(first) :]]
        if _size(history) > BODY_CAP:
            raise ApiError(Fault.TOO_LARGE, f"the conversation is larger than {BODY_CAP} bytes")
        if given.get("generate") is False and not history:
            return first or [Item("system", b'""')]  # there are only tools to prepare
        return [*first, *history]

    def request(self, given: Fields, path: str, query: str) -> ChatRequest:
        request = super().request(given, path, query)
        request.stream = True
        request.extra |= {name: given.get(name) for name in ("generate", "previous_response_id", "client_metadata")}
        return request

    def error(self, error: ApiError) -> dict[str, Any]:
        body = super().error(error)
        if isinstance(error, UnknownResponse):
            body["error"] |= {"code": "previous_response_not_found", "param": "previous_response_id"}
        return body

    def remember(self, request: ChatRequest, answer: Answer, output: list[dict[str, Any]]) -> None:
        """Make a response the latest of its lane."""
        items = [Item("", bytes(item.raw)) for item in request.items if item.kind != "system"]
        items += [Item("", msgspec.json.encode(item)) for item in output]
        self._lanes.pop(self.lane, None)
        self._lanes[self.lane] = (f"resp_{answer.id}", items, _size(items))
        while len(self._lanes) > 1 and (len(self._lanes) > LANES or self._held() > BODY_CAP):
            del self._lanes[next(iter(self._lanes))]

    def _held(self) -> int:
        return sum(size for _, _, size in self._lanes.values())

    def _past(self, response_id: str | None) -> list[Item]:
        if response_id is None:
            return []
        for known, items, _ in self._lanes.values():
            if known == response_id:
                return items
        raise UnknownResponse(response_id)


def _size(items: list[Item]) -> int:
    return sum(memoryview(item.raw).nbytes for item in items)


class Frames(Exchange):
    """A WebSocket: until it is accepted a request like any other, then each event goes out as a text frame."""

    def __init__(self, scope: Message, receive: Receive, send: Send) -> None:
        async def refuse(message: Message) -> None:
            await send(message | {"type": f"websocket.{message['type']}"})

        super().__init__({"method": "WEBSOCKET", **scope}, receive, refuse)
        self.dialect = Continued()
        self._socket: Socket = scope["state"]["connection"]
        self._tell = send
        self._open = False

    async def accept(self) -> None:
        """Upgrade the connection."""
        await self._receive()  # the request to connect
        await self._tell({"type": "websocket.accept"})
        self._open = True

    async def message(self) -> str | bytes | None:
        """The next message, text or binary; None when the client left, or kept still for so long that it has to."""
        try:
            async with asyncio.timeout(KEEP_ALIVE_S):
                message = await self._receive()
        except TimeoutError:
            await self._tell({"type": "websocket.close", "code": 1001})
            return None
        left = message["type"] == "websocket.disconnect"
        return None if left else message.get("text") or message.get("bytes") or ""

    async def whole(self, status: int, kind: bytes, data: bytes, *headers: Header) -> None:
        """Send a whole reply: events."""
        if self._open:
            await self._write([line[len(DATA) :] for line in data.split(b"\n") if line.startswith(DATA)])
            return
        await self.start(status, kind, *headers)
        await self.write(data)

    async def fail(self, dialect: Dialect, error: ApiError) -> None:
        """Send an error; after the upgrade, what would be the status and the headers stand in the frame."""
        if not self._open:
            await super().fail(dialect, error)
            return
        headers = {"headers": {"retry-after": str(error.retry_after)}} if error.retry_after else {}
        frame = {"type": "error", "status": dialect.status(error)} | self.dialect.error(error) | headers
        await self._write([msgspec.json.encode(frame)])

    async def _write(self, texts: list[bytes]) -> None:
        lane = b'{"stream_id":%b,' % msgspec.json.encode(self.dialect.lane) if self.dialect.lane else b"{"
        await self._socket.write_texts(lane + text[1:] for text in texts)


class FrameDelivery(Delivery):
    """A delivery in frames: no headers go first, the protocol pings, and the answer is kept."""

    said: Answer

    def _begin(self) -> None:
        pass

    async def _send(self, answer: Answer, *headers: Header) -> None:
        self.said = answer
        await super()._send(answer, *headers)


class Conversation:
    """The turns of one connection. ``enter`` finds its session, ``admit`` refuses a call; both raise ApiError."""

    def __init__(self, turns: Turns, enter: Enter, admit: Admit, frames: Frames) -> None:
        self._turns, self._enter, self._admit = turns, enter, admit
        self._frames, self._dialect = frames, frames.dialect

    async def run(self) -> None:
        """Answer until the client leaves. Raises ClientLeft when it does so during a call."""
        await self._frames.accept()
        while (message := await self._frames.message()) is not None:
            await asyncio.sleep(0)  # other connections get their turn, however many messages wait here
            try:
                await self._turn(message)
            except ApiError as error:
                self._turns.totals[f"status_{self._dialect.status(error)}"] += 1
                await self._frames.fail(self._dialect, error)

    async def _turn(self, message: str | bytes) -> None:
        self._dialect.lane = ""
        session = self._enter()
        require(isinstance(message, str), "a binary frame; each message is JSON text")
        request = self._dialect.parse(str(message).encode(), session.memo)
        metadata = request.extra["client_metadata"] or {}
        request.agent = agent_of(self._frames.headers | {k: v for k, v in metadata.items() if isinstance(v, str)})
        if request.extra["generate"] is False:
            await self._warm(request)
            return
        self._admit(session)
        delivery = FrameDelivery(self._turns, session, request, self._frames)
        await delivery.run()
        self._dialect.remember(request, delivery.said, self._dialect.answer(request, delivery.said)["output"])

    async def _warm(self, request: ChatRequest) -> None:
        """Take in the items of a request that wants no output; no call is made."""
        nothing = Answer(f"warm-{secrets.token_hex(8)}", "", "", (), "stop", 0, 0, 0, int(time.time()))
        self._dialect.remember(request, nothing, [])
        await self._frames.whole(200, EVENTS, self._dialect.warmed(request, nothing))
