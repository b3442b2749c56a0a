"""A stand-in for W&B's server, just enough for `wandb sync`: it keeps the lines of history that each run was sent."""

from __future__ import annotations

import gzip
import json
import re
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class WandbServer:
    """``history[run id]``: rows in the order of their arrival; ``runs``: ids in the order of their first mention."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.history: dict[str, list[dict[str, Any]]] = defaultdict(list)
        self.runs: list[str] = []

    def answer(self, path: str, body: bytes) -> Any:
        if path.endswith("/graphql"):
            query = json.loads(body)
            named = re.search(r"(?:query|mutation)\s+(\w+)", query["query"])
            data = self._graphql(named[1] if named else "", query.get("variables") or {})
            return {"data": data} if data else {"errors": [{"message": "this stand-in knows no such thing"}]}
        if stream := re.fullmatch(r"/files/[^/]+/[^/]+/([^/]+)/file_stream", path):
            told = (json.loads(body).get("files") or {}).get("wandb-history.jsonl", {"content": []})
            self.history[stream[1]] += map(json.loads, told["content"])
            return {"exitcode": None, "limits": {}}
        return {}

    def _graphql(self, name: str, values: dict[str, Any]) -> dict[str, Any]:
        if name == "UpsertBucket":
            return {"upsertBucket": self._upsert(values["name"])}
        if name == "RunResumeStatus":
            return {"model": None}
        if name == "Viewer":
            return {"viewer": {"id": "v", "entity": "me", "username": "me", "flags": "{}", "teams": {"edges": []}}}
        if name == "CreateRunFiles":
            files = [{"name": file, "uploadUrl": f"{self.url}/upload"} for file in values["files"]]
            return {"createRunFiles": {"runID": "r", "uploadHeaders": [], "files": files}}
        return {}

    def _upsert(self, run: str) -> dict[str, Any]:
        new = run not in self.runs
        if new:
            self.runs.append(run)
        project = {"id": "p", "name": "yoke", "entity": {"id": "e", "name": "me"}}
        lines = len(self.history[run])
        bucket = {"id": "r", "name": run, "displayName": run, "config": "{}", "historyLineCount": lines}
        return {"bucket": {**bucket, "project": project, "description": None, "sweepName": None}, "inserted": new}


@contextmanager
def wandb_server() -> Iterator[WandbServer]:
    """On this machine's loopback, until the end of the block."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            told = server.answer(self.path, body) if self.command == "POST" else {}
            answer = json.dumps(told).encode()
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        do_PUT = do_POST
        do_GET = do_POST

        def log_message(self, *_: object) -> None:
            pass

    listener = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    listener.daemon_threads = True
    server = WandbServer(f"http://127.0.0.1:{listener.server_port}")
    thread = threading.Thread(target=listener.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        listener.shutdown()
        listener.server_close()
