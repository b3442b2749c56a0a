"""Messages between supervisor and shard: JSON objects with file descriptors over a Unix socket pair.

The pair is SOCK_SEQPACKET, so that the kernel keeps each message whole and its descriptors with it.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

MESSAGE_CAP = 2**17  # bytes; traces travel as files
FDS_CAP = 4
UPSTREAMS = ("engine", "text")  # token ids, or plain Chat Completions
UPSTREAM_KEY = "YOKE_UPSTREAM_KEY"  # environment: the API key of a text upstream


def pair() -> tuple[socket.socket, socket.socket]:
    """Two connected ends."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


class Channel:
    """One end. ``on_message(message, fds)`` owns the descriptors; ``on_end`` is called once, when the peer is gone."""

    def __init__(
        self,
        end: socket.socket,
        on_message: Callable[[dict[str, Any], list[int]], None],
        on_end: Callable[[], None],
    ) -> None:
        end.setblocking(False)
        self._socket: socket.socket | None = end
        self._on_message, self._on_end = on_message, on_end
        self._queue: deque[tuple[bytes, Sequence[int]]] = deque()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(end, self._readable)

    def send(self, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
        """Queue a message; the descriptors must stay open until it is sent, which is at once unless the peer lags."""
        self._queue.append((json.dumps(message).encode(), fds))
        self._flush()

    def close(self) -> None:
        """Close this end; ``on_end`` is not called."""
        if self._socket is not None:
            self._loop.remove_reader(self._socket)
            self._loop.remove_writer(self._socket)
            self._socket.close()
            self._socket = None

    def _flush(self) -> None:
        while self._queue and self._socket is not None:
            data, fds = self._queue[0]
            try:
                socket.send_fds(self._socket, [data], list(fds))
            except BlockingIOError:
                self._loop.add_writer(self._socket, self._flush)
                return
            except OSError:
                self._end()
                return
            self._queue.popleft()
        if self._socket is not None:
            self._loop.remove_writer(self._socket)

    def _readable(self) -> None:
        while self._socket is not None:
            try:
                data, fds, _, _ = socket.recv_fds(self._socket, MESSAGE_CAP, FDS_CAP)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._end()
                return
            self._on_message(json.loads(data), fds)

    def _end(self) -> None:
        self.close()
        self._on_end()
