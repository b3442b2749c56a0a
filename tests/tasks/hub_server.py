"""A hub of the test's own on the loopback: one data set, at one commit, as much of the API as a download asks for."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit


@contextmanager
def serve(root: Path, name: str, revision: str, fails: set[str] | None = None) -> Iterator[tuple[str, list[str]]]:
    """(its address, the paths of files that were asked for so far); files in ``fails`` get an error."""
    asked: list[str] = []

    class Hub(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self._answer(body=False)

        def do_GET(self) -> None:
            self._answer(body=True)

        def _answer(self, body: bool) -> None:
            path = unquote(urlsplit(self.path).path)
            files = f"/datasets/{name}/resolve/{revision}/"
            if path.startswith(f"/api/datasets/{name}/revision/{revision}"):
                siblings = [{"rfilename": str(file.relative_to(root))} for file in root.rglob("*") if file.is_file()]
                self._send(json.dumps({"id": name, "sha": revision, "siblings": siblings}).encode(), "application/json")
            elif path.startswith(files) and (root / path[len(files) :]).is_file():
                file = path[len(files) :]
                if body:
                    asked.append(file)
                if fails and file in fails:
                    self.send_error(403)
                else:
                    self._send((root / file).read_bytes(), "text/plain", body)
            else:
                self.send_error(404)

        def _send(self, data: bytes, kind: str, body: bool = True) -> None:
            self.send_response(200)
            headers: dict[str, Any] = {"Content-Type": kind, "Content-Length": len(data)}
            headers |= {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', "X-Repo-Commit": revision}
            for key, value in headers.items():
                self.send_header(key, str(value))
            self.end_headers()
            if body:
                self.wfile.write(data)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        server.server_close()
