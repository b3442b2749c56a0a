"""The session API of `yoke proxy`: open, look at, read back and close sessions. Model traffic never comes here."""

from __future__ import annotations

import asyncio
import dataclasses
import hmac
import itertools
import logging
import os
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from pipeline.capture.app import new_key
from pipeline.capture.export import SCHEMAS, Exporter, ExportError
from pipeline.capture.metrics import ProxyMetrics
from pipeline.capture.registry import Entry, Registry
from pipeline.capture.session import file_name
from pipeline.capture.shard_process import CaptureError
from pipeline.capture.supervisor import ShardSupervisor
from pipeline.config import SessionPolicy, UserError
from pipeline.records import PolicyVersion

ARROW = "application/vnd.apache.arrow.stream"
PIECE = 2**20  # bytes of an exported file that are sent at once
BODY_CAP = 2**20  # bytes of a request to this API
SESSION_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
POLICY_FIELDS = {field.name: field.type for field in dataclasses.fields(SessionPolicy)}
TYPES = {"float": (float, int), "int": (int,), "str": (str,), "bool": (bool,), "bool | None": (bool, type(None))}

log = logging.getLogger(__name__)


class Front:
    """The handlers. ``ports`` are the shards' own, in order."""

    def __init__(
        self,
        supervisor: ShardSupervisor,
        directory: Path,
        ports: Sequence[int],
        defaults: SessionPolicy,
        model: str,
        admin_key: str | None = None,
    ) -> None:
        self._supervisor, self._directory, self._ports = supervisor, directory, ports
        self._defaults, self._model, self._admin_key = defaults, model, admin_key
        self._registry = Registry(directory)
        self._exporter = Exporter()
        self._numbers = itertools.count()
        self._metrics = ProxyMetrics(supervisor.figures, self._counts)
        self._expired = 0
        self._ends: dict[str, asyncio.Task[None]] = {}
        self.draining = False
        self.app = Starlette(routes=self._routes(), exception_handlers={HTTPException: _complain})

    def _routes(self) -> list[Route]:
        one = "/sessions/{session_id}"
        return [
            Route("/health", self._health),
            Route("/sessions", self._guarded(self._create), methods=["POST"]),
            Route("/sessions", self._guarded(self._list), methods=["GET"]),
            Route(one, self._guarded(self._show), methods=["GET"]),
            Route(one, self._guarded(self._delete), methods=["DELETE"]),
            Route(f"{one}/close", self._guarded(self._close), methods=["POST"]),
            Route(f"{one}/{{kind}}", self._guarded(self._export), methods=["GET"]),
            Route("/metrics", self._guarded(self._show_metrics)),
            Route("/policy_version", self._guarded(self._set_version), methods=["PUT"]),
        ]

    async def restore(self) -> None:
        """Take up the sessions that were open when an earlier proxy with this directory ended."""
        entries = [entry for entry in self._registry.entries.values() if entry.is_open]
        await asyncio.gather(*(self._reopen(entry) for entry in entries))

    def expire(self, session_ids: Sequence[str]) -> None:
        """Close sessions that were idle for too long. May be told of the same ones again."""
        for session_id in session_ids:
            entry = self._registry.entries.get(session_id)
            if entry is not None and entry.is_open and session_id not in self._ends:
                task = self._ends[session_id] = asyncio.create_task(self._expire(entry))
                task.add_done_callback(partial(self._ended, session_id))

    def _ended(self, session_id: str, task: asyncio.Task[None]) -> None:
        del self._ends[session_id]

    async def _expire(self, entry: Entry) -> None:
        try:
            await self._end(entry, "idle")
            self._expired += 1
        except CaptureError as error:
            log.warning("an idle session could not be closed: %s", error)

    def _counts(self) -> dict[str, int]:
        states = Counter(entry.is_open for entry in self._registry.entries.values())
        return {"open": states[True], "closed": states[False], "expired": self._expired}

    def close(self) -> None:
        """End what this object started."""
        self._exporter.close()

    def _guarded(self, handler: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        """The handler behind the admin key, with failures of the shards, the disk or the exporter as 503."""

        async def guarded(request: Request) -> Response:
            self._authorise(request)
            try:
                return await handler(request)
            except (CaptureError, ExportError, OSError) as error:
                log.warning("%s %s: %s", request.method, request.url.path, error)
                raise HTTPException(503, str(error)) from error

        return guarded

    def _authorise(self, request: Request) -> None:
        if self._admin_key is None:
            return
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(key.strip().encode(), self._admin_key.encode()):
            raise HTTPException(401, "this needs the admin key: Authorization: Bearer KEY")

    async def _health(self, request: Request) -> Response:
        stats = self._supervisor.stats()
        state = {"status": "draining" if self.draining else "ok", "shards_alive": stats["shards_alive"]}
        return JSONResponse(state)

    async def _create(self, request: Request) -> Response:
        if self.draining:
            raise HTTPException(503, "the proxy is shutting down")
        wish = await _object(request)
        shard = self._supervisor.least_loaded()
        entry = Entry(
            session_id=_session_id(wish) or new_key(shard),
            shard=shard,
            opened=time.time(),
            model_name=str(wish.pop("model_name", None) or self._model),
            metadata=_metadata(wish),
            policy=dataclasses.asdict(_policy(wish, self._defaults)),
        )
        if entry.session_id in self._registry.entries:
            raise HTTPException(409, f"there is a session {entry.session_id!r} already")
        self._registry.save(entry)
        try:
            await self._open(entry)
        except BaseException:
            self._registry.remove(entry)
            raise
        return JSONResponse(self._address(entry, request), 201)

    async def _open(self, entry: Entry) -> None:
        policy = SessionPolicy(**entry.policy)
        await self._supervisor.open_session(entry.session_id, policy, None, entry.model_name, shard=entry.shard)

    async def _reopen(self, entry: Entry) -> None:
        if self._trace(entry).exists():  # it was being closed
            await self._supervisor.finish_session(entry.session_id, entry.shard)
            self._closed(entry, "restart", {})
        else:
            await self._open(entry)

    def _address(self, entry: Entry, request: Request) -> dict[str, Any]:
        host = request.url.hostname or "127.0.0.1"
        url = f"http://{f'[{host}]' if ':' in host else host}:{self._ports[entry.shard]}"
        return {"session_id": entry.session_id, "api_key": entry.session_id, "base_url": url, "shard": entry.shard}

    async def _list(self, request: Request) -> Response:
        entries = list(self._registry.entries.values())
        figures = await self._supervisor.describe([entry.session_id for entry in entries if entry.is_open])
        return JSONResponse({"sessions": [_view(entry, figures) for entry in entries]})

    async def _show(self, request: Request) -> Response:
        entry = self._entry(request)
        figures = await self._supervisor.describe([entry.session_id])
        return JSONResponse(_view(entry, figures) | self._address(entry, request))

    async def _close(self, request: Request) -> Response:
        entry = self._entry(request)
        await self._end(entry, "asked")
        return JSONResponse(_view(entry, {}))

    async def _delete(self, request: Request) -> Response:
        entry = self._entry(request)
        await self._end(entry, "asked")
        self._registry.remove(entry)
        self._trace(entry).unlink(missing_ok=True)
        return Response(status_code=204)

    async def _end(self, entry: Entry, reason: str) -> None:
        """Close a session that is open; its trace stays."""
        if entry.is_open:
            figures = await self._supervisor.describe([entry.session_id])
            await self._supervisor.end_session(entry.session_id)
            self._closed(entry, reason, figures.get(entry.session_id, {}) | {"in_flight": 0})

    def _closed(self, entry: Entry, reason: str, figures: dict[str, Any]) -> None:
        entry.closed, entry.reason, entry.figures = time.time(), reason, figures
        self._registry.save(entry)

    async def _export(self, request: Request) -> Response:
        entry, kind = self._entry(request), request.path_params["kind"]
        if kind not in SCHEMAS:
            raise HTTPException(404, f"no such route: a session has {' and '.join(SCHEMAS)}")
        source = await self._supervisor.snapshot(entry.session_id) if entry.is_open else self._trace(entry)
        out = self._directory / f"{next(self._numbers)}.arrow"
        try:
            await self._exporter.write(kind, source, out)
        finally:
            if source != self._trace(entry):
                source.unlink(missing_ok=True)
        file = out.open("rb")
        out.unlink()  # the reader may leave at any time
        return StreamingResponse(_pieces(file), 200, {"content-length": str(os.fstat(file.fileno()).st_size)}, ARROW)

    async def _show_metrics(self, request: Request) -> Response:
        return Response(self._metrics.text(), media_type=CONTENT_TYPE_LATEST)

    async def _set_version(self, request: Request) -> Response:
        version = (await _object(request)).get("version")
        try:
            parsed = PolicyVersion.parse(str(version))
        except ValueError as error:
            raise HTTPException(400, f"version: {version!r} is not of the form ATTEMPT.N, such as 0.3") from error
        await self._supervisor.set_policy_version(parsed)
        return JSONResponse({"version": str(parsed)})

    def _entry(self, request: Request) -> Entry:
        entry = self._registry.entries.get(request.path_params["session_id"])
        if entry is None:
            raise HTTPException(404, "no such session")
        return entry

    def _trace(self, entry: Entry) -> Path:
        return self._directory / file_name(entry.session_id)


async def _pieces(file: BinaryIO) -> AsyncIterator[bytes]:
    """A file in pieces, fewer and larger than a FileResponse's: each costs a hop to a thread."""
    with file:
        while piece := await asyncio.to_thread(file.read, PIECE):
            yield piece


async def _complain(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return JSONResponse({"error": error.detail}, error.status_code)


async def _object(request: Request) -> dict[str, Any]:
    """The body as a JSON object; no body is an empty one."""
    data = bytearray()
    async for piece in request.stream():
        data += piece
        if len(data) > BODY_CAP:
            raise HTTPException(413, f"the body is larger than {BODY_CAP} bytes")
    try:
        return msgspec.json.decode(data or b"{}", type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise HTTPException(400, f"the body is no JSON object: {error}") from error


def _session_id(wish: dict[str, Any]) -> str | None:
    asked = wish.pop("session_id", None)
    if asked is not None and not (isinstance(asked, str) and SESSION_ID.fullmatch(asked)):
        raise HTTPException(400, "session_id must be 1 to 128 characters of A-Z a-z 0-9 . _ -")
    return asked


def _metadata(wish: dict[str, Any]) -> dict[str, Any]:
    metadata = wish.pop("metadata", None) or {}
    if not isinstance(metadata, dict):
        raise HTTPException(400, "metadata must be an object")
    return metadata


def _policy(wish: Mapping[str, Any], defaults: SessionPolicy) -> SessionPolicy:
    """The defaults with what was asked for."""
    for name, value in wish.items():
        if name not in POLICY_FIELDS:
            raise HTTPException(400, f"unknown field {name!r}; known: {', '.join(sorted(POLICY_FIELDS))}")
        _check(name, value)
    try:
        return replace(defaults, **wish)
    except UserError as error:
        raise HTTPException(400, str(error)) from error


def _check(name: str, value: Any) -> None:
    """Raises HTTPException unless the value has its field's type."""
    kinds = TYPES[str(POLICY_FIELDS[name])]
    if type(value) not in kinds:
        wanted = " or ".join("null" if kind is type(None) else kind.__name__ for kind in kinds)
        raise HTTPException(400, f"{name} must be {wanted}, not {value!r}")


def _view(entry: Entry, figures: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """A session as the API shows it."""
    shown = msgspec.to_builtins(entry)
    own = figures.get(entry.session_id) or shown["figures"]
    del shown["figures"]
    return shown | own | {"state": "open" if entry.is_open else "closed"}
