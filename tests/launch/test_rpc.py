"""Calls between ranks: what goes over the wire, and how many can arrive at once."""

from __future__ import annotations

import json
import socket
import struct
import threading
from urllib.parse import urlsplit

from pipeline.launch.rpc import RpcClient, RpcServer

CALLS = 10
DATA_SEGS_IN = 152  # offset of tcpi_data_segs_in in Linux's struct tcp_info


def test_an_answer_is_one_packet() -> None:
    """As two packets the second would wait for the receipt of the first: 40 ms a call."""
    server = RpcServer({"echo": lambda **given: given}, "token")
    body = json.dumps({"engine": "node0"}).encode()
    head = f"POST /echo HTTP/1.1\r\nauthorization: Bearer token\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    address = urlsplit(server.url)
    try:
        with socket.create_connection((address.hostname, address.port), timeout=60) as connection:
            for _ in range(CALLS):
                connection.sendall(head + body)
                answer = b""
                while not answer.endswith(body):
                    answer += connection.recv(65536)
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    finally:
        server.stop()
    assert struct.unpack_from("I", info, DATA_SEGS_IN) == (CALLS,)


def test_many_engine_ranks_can_wait_at_once() -> None:
    """All that wait in a long poll hold a connection each; none is turned away, and none waits for another."""
    ranks = 128
    arrived = threading.Barrier(ranks + 1, timeout=120)

    def lease(engine: str) -> dict[str, str]:
        arrived.wait()
        return {"engine": engine}

    server = RpcServer({"lease": lease}, "token")
    clients = [RpcClient(server.url, "token") for _ in range(ranks)]
    answers: dict[int, str] = {}

    def ask(number: int) -> None:
        answers[number] = clients[number].call("lease", 120, engine=f"node{number}")["engine"]

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(ranks)]
    try:
        for thread in threads:
            thread.start()
        arrived.wait()
        for thread in threads:
            thread.join(120)
    finally:
        for client in clients:
            client.close()
        server.stop()
    assert answers == {number: f"node{number}" for number in range(ranks)}
