"""The protocol of a connection that became a WebSocket; a shard imports this at its first one, and so starts faster."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import uvicorn
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from uvicorn.server import ServerState
from websockets.frames import CloseCode

from pipeline.capture.listener import Connection, Watched

WAITING = 16  # messages may wait; reading never rests, so that a leave behind them is seen


class Socket(Watched, WebSocketsSansIOProtocol):
    """uvicorn's WebSocket protocol, watched; it takes over from the Connection on which the upgrade was asked for."""

    def __init__(self, config: uvicorn.Config, server_state: ServerState, app_state: dict[str, Any]) -> None:
        asked: Connection = app_state["connection"]
        super().__init__(config, server_state, {"connection": self}, asked.loop)
        self.app = asked.app
        self._origin = asked._origin

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.handshake_exc is not None and not self.handshake_initiated:  # a head too long for the protocol
            self.transport.write(b"".join(self.conn.data_to_send()))
            self.transport.close()

    def send_receive_event_to_app(self) -> None:
        super().send_receive_event_to_app()
        if self.read_paused:
            self.read_paused = False
            self.transport.resume_reading()
        if self.queue.qsize() > WAITING and not self.close_sent:
            self.conn.send_close(CloseCode.POLICY_VIOLATION, f"more than {WAITING} messages wait")
            self.handle_parser_exception()  # ends the connection with the reason that was just given

    async def write_texts(self, texts: Iterable[bytes]) -> None:
        """Send messages in one write, once those before are sent; to a client that left, nothing."""
        await self.writable.wait()  # of a deaf client until it is dropped
        if self.transport.is_closing():
            return
        for text in texts:
            self.conn.send_text(text)
        self.transport.write(b"".join(self.conn.data_to_send()))
