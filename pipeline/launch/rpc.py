"""JSON calls between the ranks of a run, over HTTP with a token: one server thread, one client.

Live records travel here, not by files.
"""

from __future__ import annotations

import hmac
import json
import threading
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx

Method = Callable[..., dict[str, Any]]


class RpcError(RuntimeError):
    """The other side could not be reached in time, or its method raised."""


class RpcServer:
    """Serves ``methods`` by name; a method takes keyword arguments and returns a JSON-able dict.

    Listens on ``host``; ``known_as``, where given, is the name under which others reach it.
    """

    def __init__(
        self, methods: Mapping[str, Method], token: str, host: str = "127.0.0.1", known_as: str | None = None
    ) -> None:
        self._http = _Server((host, 0), _handler(methods, token))
        self.url = f"http://{known_as or host}:{self._http.server_port}"
        threading.Thread(target=self._http.serve_forever, name="rpc", daemon=True).start()

    def stop(self) -> None:
        self._http.shutdown()
        self._http.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 1024  # every node of a job connects at the same moment


def _handler(methods: Mapping[str, Method], token: str) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        timeout = 60  # of a silent connection, so that a stranger holds no thread for ever
        wbufsize = -1  # head and body leave together: as two packets the second waits 40 ms for the first one's receipt

        def do_POST(self) -> None:
            if not hmac.compare_digest(self.headers.get("authorization", "").encode(), f"Bearer {token}".encode()):
                self.close_connection = True  # its body stays unread
                return self._reply(401, {"error": "wrong token"})
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            method = methods.get(self.path.strip("/"))
            if method is None:
                return self._reply(404, {"error": f"no method {self.path}"})
            try:
                self._reply(200, method(**json.loads(body)))
            except Exception as error:  # whatever a method raises belongs to its caller
                self._reply(500, {"error": f"{type(error).__name__}: {error}"})

        def _reply(self, status: int, answer: dict[str, Any]) -> None:
            payload = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(payload)))
            self.end_headers()
            self.wfile.write(payload)

        def log_message(self, format: str, *args: Any) -> None:
            """Requests are not news."""

    return Handler


class RpcClient:
    """Calls the methods of an `RpcServer`. Thread-safe."""

    def __init__(self, url: str, token: str) -> None:
        headers = {"authorization": f"Bearer {token}"}
        # It is plain HTTP: verify=False saves the 20 ms in which certificates would be loaded.
        self._client = httpx.Client(base_url=url, headers=headers, trust_env=False, verify=False)

    def call(self, method: str, timeout_s: float = 30.0, **arguments: Any) -> dict[str, Any]:
        """Raises RpcError when there is no answer within ``timeout_s`` or the method failed."""
        try:
            answer = self._client.post(f"/{method}", json=arguments, timeout=timeout_s)
        except httpx.HTTPError as error:
            raise RpcError(
                f"no answer to {method} from {self._client.base_url} within {timeout_s:g} s: {error!r}"
            ) from error
        if answer.status_code != 200:
            raise RpcError(f"{method}: {answer.json().get('error', answer.text)}")
        return answer.json()

    def close(self) -> None:
        self._client.close()
