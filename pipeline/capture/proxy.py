"""`yoke proxy`: the shards, the session API in front of them, and how both start and end."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import ipaddress
import json
import logging
import os
import signal
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import uvicorn

from pipeline.capture.continuity import SelfTest
from pipeline.capture.control import UPSTREAM_KEY, UPSTREAMS
from pipeline.capture.dialects.base import ApiError
from pipeline.capture.front import Front
from pipeline.capture.listener import BACKLOG
from pipeline.capture.registry import Registry
from pipeline.capture.shard_process import CaptureError
from pipeline.capture.supervisor import ShardSupervisor
from pipeline.capture.text import api_base, trusts_environment
from pipeline.capture.upstream import Engine
from pipeline.config import Config, ProxyConfig, UserError

ADMIN_KEY = "YOKE_ADMIN_KEY"  # environment: see conf/proxy
LEFT_OVER = ("*.snapshot", "*.arrow", "*.tmp")  # what a killed proxy was writing for a reader
GREET_S = 3.0
POLL_S = 0.05
END_S = 5.0
PORT_S = 10.0  # that a port of an earlier run is waited for
LOCALHOST = ("localhost", "ip6-localhost")

log = logging.getLogger(__name__)


def run(config: Config) -> int:
    """Serve until a signal. Raises UserError for settings that cannot work."""
    proxy = config.proxy
    check(proxy)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    if proxy.selftest:
        return asyncio.run(selftest(proxy))
    with _listen(proxy.host, proxy.port, "proxy.port") as front:
        place = _place(proxy, port_of(front))
        with _locked(place), _shard_listeners(proxy, place) as listeners:
            return asyncio.run(serve(proxy, front, listeners, place))


def check(proxy: ProxyConfig) -> None:
    """Raises UserError for settings that cannot work."""
    if not proxy.llm_url:
        raise UserError("proxy.llm_url is not given: yoke proxy --llm-url http://host:8000")
    if not proxy.llm_url.startswith("http://") and not (proxy.mode == "text" and proxy.llm_url.startswith("https://")):
        raise UserError(f"proxy.llm_url={proxy.llm_url}: http://host:port is wanted (text mode takes https too)")
    if proxy.mode == "text" and (proxy.selftest or proxy.render_fields):
        raise UserError("proxy.mode=text has no render endpoint: neither proxy.selftest nor proxy.render_fields apply")
    if proxy.mode not in UPSTREAMS:
        raise UserError(f"proxy.mode={proxy.mode}: one of {', '.join(UPSTREAMS)}")
    if not 1 <= proxy.shards <= 256:
        raise UserError(f"proxy.shards={proxy.shards}: 1 to 256 are possible")
    if not _admin_key(proxy) and not is_loopback(proxy.host):
        raise UserError(
            f"proxy.host={proxy.host} can be reached from outside: give --admin-key, or {ADMIN_KEY} in the environment"
        )


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host in LOCALHOST


async def selftest(proxy: ProxyConfig) -> int:
    """Print as JSON what continuity makes of the engine's chat template. Exit code 1: it would be served text-in."""
    engine = Engine(
        str(proxy.llm_url), await _model(proxy), proxy.request_timeout_s, proxy.outage_s, proxy.render_fields
    )
    try:
        found = await SelfTest(engine).run()
    except ApiError as error:
        raise UserError(f"proxy.llm_url={proxy.llm_url}: {error.message}") from error
    print(json.dumps(found.report(), indent=2))
    return 1 if found.problem else 0


async def serve(proxy: ProxyConfig, listener: socket.socket, shards: list[socket.socket], place: Path) -> int:
    """Run shards and session API until a signal; the exit code."""
    model = await _model(proxy)
    supervisor = ShardSupervisor(
        str(proxy.llm_url), proxy.shards, place, model, proxy.request_timeout_s, proxy.outage_s, proxy.mode,
        listeners=shards, render_fields=proxy.render_fields, named_weights=False, read_s=proxy.read_s,
    )  # fmt: skip
    signals = _Signals()
    try:
        await supervisor.start()
        front = Front(supervisor, place, [port_of(shard) for shard in shards], proxy.sampling, model, _admin_key(proxy))
        await front.restore()
        supervisor.on_expired = front.expire
        async with _serving(front, listener):
            print(f"yoke proxy: ready on {_url(proxy.host, listener)}", flush=True)
            await signals.first.wait()
            front.draining = True
            await _drain(supervisor, proxy.drain_s, signals)
        front.close()
    finally:
        await supervisor.stop()
    return signals.exit_code


@dataclass
class _Signals:
    """SIGTERM and SIGINT: the first is a wish to end, the second an order."""

    exit_code: int = 0

    def __post_init__(self) -> None:
        self.first, self.second = asyncio.Event(), asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._heard, number)

    def _heard(self, number: int) -> None:
        if self.first.is_set():
            self.exit_code = 128 + number
            self.second.set()
        self.first.set()


async def _drain(supervisor: ShardSupervisor, drain_s: float, signals: _Signals) -> None:
    """Refuse new calls, and wait until none is in flight, the time is up or a second signal comes."""
    with contextlib.suppress(TimeoutError, CaptureError):
        async with asyncio.timeout(drain_s):
            await supervisor.drain()
            while await supervisor.in_flight() and not signals.second.is_set():
                await asyncio.sleep(POLL_S)


@contextlib.asynccontextmanager
async def _serving(front: Front, listener: socket.socket) -> Any:
    config = uvicorn.Config(front.app, lifespan="off", log_config=None, access_log=False, backlog=BACKLOG)
    server = uvicorn.Server(config)
    task = asyncio.create_task(server._serve([listener]))  # serve() would take over the program's signals
    try:
        yield
    finally:
        server.should_exit = server.force_exit = True
        await asyncio.wait_for(task, END_S)


async def _model(proxy: ProxyConfig) -> str:
    """The model's name, given or asked for. Raises UserError when nobody tells it."""
    try:
        served = await _greet(proxy)
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError) as error:
        if proxy.model is None:
            raise UserError(
                f"proxy.llm_url={proxy.llm_url}: no model list ({error!r}); start the upstream first, or give --model"
            ) from error
        log.warning("no answer yet from %s (%r): calls will wait for it", proxy.llm_url, error)
        return proxy.model
    if proxy.model is None and len(served) != 1:
        raise UserError(f"proxy.model: the upstream serves {', '.join(served) or 'nothing'}; name one with --model")
    if proxy.model and proxy.mode == "engine" and proxy.model not in served:
        raise UserError(f"proxy.model={proxy.model}: the upstream serves {', '.join(served) or 'nothing'}")
    return proxy.model or served[0]


async def _greet(proxy: ProxyConfig) -> list[str]:
    """Names of the upstream's models."""
    url = str(proxy.llm_url)
    key = os.environ.get(UPSTREAM_KEY) if proxy.mode == "text" else None
    headers = {"authorization": f"Bearer {key}"} if key else {}
    async with httpx.AsyncClient(trust_env=trusts_environment(url), timeout=GREET_S) as client:
        reply = await client.get(f"{api_base(url)}/models", headers=headers)
    if reply.status_code in (401, 403) and proxy.mode == "text":
        raise UserError(f"proxy.llm_url={url} refuses the key in {UPSTREAM_KEY} (status {reply.status_code})")
    reply.raise_for_status()
    return [model["id"] for model in reply.json()["data"]]


def _admin_key(proxy: ProxyConfig) -> str | None:
    return proxy.admin_key or os.environ.get(ADMIN_KEY) or None


def _place(proxy: ProxyConfig, port: int) -> Path:
    place = Path(proxy.dir or f"runs/proxy-{port}").absolute()
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    return place


@contextlib.contextmanager
def _locked(place: Path) -> Iterator[None]:
    """Holds a directory for this process. Raises UserError when another proxy has it."""
    with (place / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(f"proxy.dir={place}: another yoke proxy runs there") from error
        for left in (path for pattern in LEFT_OVER for path in place.glob(pattern)):
            left.unlink()
        yield


@contextlib.contextmanager
def _shard_listeners(proxy: ProxyConfig, place: Path) -> Iterator[list[socket.socket]]:
    """A listening socket a shard, on the ports of an earlier run here, since its sessions' clients know them.

    Raises UserError when open sessions need ports or shards that are not to be had.
    """
    record = place / "ports.json"
    known: list[int] = json.loads(record.read_text()) if record.exists() else []
    needed = {entry.shard for entry in Registry(place).entries.values() if entry.is_open}
    if max(needed, default=0) >= proxy.shards:
        raise UserError(f"proxy.shards={proxy.shards}: {place} has open sessions of {max(needed) + 1} shards")
    ports = [*known, *[0] * proxy.shards][: proxy.shards]
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(_again(proxy.host, port, index in needed)) for index, port in enumerate(ports)]
        record.write_text(json.dumps([port_of(shard) for shard in sockets]))
        yield sockets


def _again(host: str, port: int, needed: bool) -> socket.socket:
    """A socket on an earlier port, or on a free one where nobody knows the earlier one.

    Some program's connection may have got that port meanwhile; where it is needed, this waits for it.
    """
    until = time.monotonic() + (PORT_S if needed else 0.0)
    while True:
        try:
            return _listen(host, port, "a shard's port of an earlier run")
        except UserError:
            if not needed:
                return _listen(host, 0, "a shard's port")
            if time.monotonic() >= until:
                raise
        time.sleep(POLL_S)


def _listen(host: str, port: int, what: str) -> socket.socket:
    """A listening socket. Raises UserError."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except (OSError, OverflowError) as error:
        raise UserError(f"{what}: cannot listen on {host}:{port} ({error})") from error


def port_of(listener: socket.socket) -> int:
    """The port of a listening socket."""
    return int(listener.getsockname()[1])


def _url(host: str, listener: socket.socket) -> str:
    return f"http://{f'[{host}]' if ':' in host else host}:{port_of(listener)}"
