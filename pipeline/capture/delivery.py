"""One turn's answer on its way to the client.

Silence rules: what can fail runs before the headers; they wait for the answer for up to ``HEADERS_AFTER_S``, so that
native status codes stay possible, and then a stream starts with pings. A client that leaves aborts its call.
"""

from __future__ import annotations

import asyncio
import logging
import time

import msgspec

from pipeline.capture.budget import LAST_ANSWERS, BudgetSpent, last_answer
from pipeline.capture.dialects.base import Answer, ApiError, ChatRequest, Fault
from pipeline.capture.exchange import EVENTS, JSON, ClientLeft, Exchange, Header
from pipeline.capture.journal import Node
from pipeline.capture.session import Session
from pipeline.capture.turn import Turns

HEADERS_AFTER_S = 20.0
PING_EVERY_S = 10.0
STREAM_HEADERS = ((b"cache-control", b"no-cache"),)
BUDGET_HEADER = b"x-yoke-budget"

log = logging.getLogger(__name__)


class Delivery:
    """Answers one request in the task that calls ``run``."""

    def __init__(self, turns: Turns, session: Session, request: ChatRequest, exchange: Exchange) -> None:
        self._turns, self._session, self._request, self._exchange = turns, session, request, exchange
        self._dialect = request.dialect
        self._kind = EVENTS if request.extra.get("sse", True) else JSON
        self._streaming = False
        self._pings: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Answer, and note whether the answer was delivered. Raises ApiError while the status can still tell it."""
        task = asyncio.current_task()
        assert task is not None
        self._session.turns.add(task)
        try:
            await self._run(task)
        except ClientLeft:
            raise
        except Exception as error:
            fault = error if isinstance(error, ApiError) else self._broken(error)
            if not self._streaming:
                raise fault from error
            await self._exchange.write(self._last_words(fault))
        finally:
            self._session.turns.discard(task)
            self._session.touched = time.monotonic()

    def _last_words(self, fault: ApiError) -> bytes:
        """An error in a reply that has begun: an event, or (Gemini without ``alt=sse``) the only item of the array."""
        if self._kind is EVENTS:
            return self._dialect.stream_error(fault)
        return msgspec.json.encode([self._dialect.error(fault)])

    def _broken(self, error: Exception) -> ApiError:
        """What a harness is told of a fault of our own."""
        log.error("a turn failed", exc_info=error)
        self._turns.totals["internal_errors"] += 1
        if isinstance(error, OSError):  # the journal cannot be written, so this cannot be either
            self._session.counters["journal_failures"] += 1
        return ApiError(Fault.INTERNAL, "the capture proxy failed; see its log")

    async def _run(self, task: asyncio.Task[object]) -> None:
        try:
            node = await self._answer(task)
        except BudgetSpent as spent:
            if self._session.counters["over_budget"] > LAST_ANSWERS:
                raise
            words = last_answer(self._session.suffix, int(time.time()))
            await self._send(words, (BUDGET_HEADER, spent.budget.encode()))
            return
        await self._send(node.answer)
        self._turns.totals[f"turns_{self._dialect.name}"] += 1
        if await self._exchange.connection.drained():
            self._note(node)
        else:
            self._turns.totals["undelivered"] += 1

    def _note(self, node: Node) -> None:
        """The answer is out, so nothing can be told any more when the journal fails."""
        try:
            self._turns.delivered(self._session, node)
        except OSError as error:
            self._broken(error)

    async def _answer(self, task: asyncio.Task[object]) -> Node:
        """The call. While it lasts, a client that leaves cancels it. Raises ApiError or ClientLeft."""
        connection = self._exchange.connection
        connection.on_lost = task.cancel
        self._session.answering.add(task)
        patience = asyncio.get_running_loop().call_later(HEADERS_AFTER_S, self._begin) if self._request.stream else None
        try:
            if connection.lost:
                raise ClientLeft
            self._request.origin = await connection.origin()
            return await self._turns.answer(self._session, self._request)
        except asyncio.CancelledError:
            task.uncancel()
            if connection.lost:
                raise ClientLeft from None
            raise ApiError(Fault.UNAVAILABLE, "the session is closing") from None
        finally:
            connection.on_lost = None
            self._session.answering.discard(task)
            if patience is not None:
                patience.cancel()
            if self._pings is not None:
                self._pings.cancel()
                await asyncio.wait([self._pings])

    def _begin(self) -> None:
        """The answer takes long: headers and pings from now on."""
        self._pings = asyncio.create_task(self._keep_alive())

    async def _keep_alive(self) -> None:
        await self._exchange.start(200, self._kind, *STREAM_HEADERS)
        self._streaming = True
        while True:
            if self._dialect.ping:
                await self._exchange.write(self._dialect.ping, more=True)
            await asyncio.sleep(PING_EVERY_S)

    async def _send(self, answer: Answer, *headers: Header) -> None:
        if not self._request.stream:
            await self._exchange.reply(200, self._dialect.answer(self._request, answer), *headers)
            return
        data = self._dialect.events(self._request, answer)
        if self._streaming:
            await self._exchange.write(data)
        else:
            await self._exchange.whole(200, self._kind, data, *STREAM_HEADERS, *headers)
