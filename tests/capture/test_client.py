"""The keep-alive client against a server that closes connections when it likes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from pipeline.capture.client import ConnectionFailed, HttpClient, ReplyTimeout

WHOLE = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\no\r\n1\r\nk\r\n0\r\n\r\n"


async def serve(replies: list[bytes]) -> tuple[HttpClient, Callable[[], int], asyncio.Server]:
    """A server that answers each request with the next of ``replies``; an empty one closes the connection."""
    connections = 0

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        while replies and await reader.readline():
            while await reader.readline() != b"\r\n":
                pass
            reply = replies.pop(0)
            writer.write(reply)
            if reply not in (WHOLE, CHUNKED):
                break
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    return HttpClient("127.0.0.1", server.sockets[0].getsockname()[1]), lambda: connections, server


def test_connections_are_reused_and_chunks_joined() -> None:
    async def run() -> None:
        client, connections, server = await serve([WHOLE, CHUNKED, WHOLE])
        async with server:
            bodies = [(await client.request("GET", "/", (), 5)).body for _ in range(3)]
            assert bodies == [b"ok"] * 3 and connections() == 1
            client.close()

    asyncio.run(run())


def test_only_an_idle_death_is_retried() -> None:
    async def run() -> None:
        client, connections, server = await serve([WHOLE, (), WHOLE, WHOLE[:-1], b""])
        async with server:
            for _ in range(2):  # the second finds its connection closed before any reply byte
                assert (await client.request("GET", "/", (), 5)).body == b"ok"
            assert connections() == 2
            for _ in range(2):  # a reply cut short; a fresh connection that closes
                with pytest.raises(ConnectionFailed):
                    await client.request("GET", "/", (), 5)
            assert connections() == 3

    asyncio.run(run())


def test_no_server_and_a_silent_server() -> None:
    async def run() -> None:
        with pytest.raises(ConnectionFailed, match="cannot connect"):
            await HttpClient("127.0.0.1", 9).request("GET", "/", (), 5)
        server = await asyncio.start_server(lambda reader, writer: asyncio.sleep(5), "127.0.0.1", 0)
        client = HttpClient("127.0.0.1", server.sockets[0].getsockname()[1])
        with pytest.raises(ReplyTimeout, match="GET /slow within 0 s"):
            await client.request("GET", "/slow", (), 0.1)
        server.close()

    asyncio.run(run())
