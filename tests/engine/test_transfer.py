"""The order of a weight sync and what happens when a phase fails, against a scripted engine."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from pipeline.config import UserError
from pipeline.engine.transfer import PHASES, TransferError, make_transfer, set_version, unique_tensors
from pipeline.records import PolicyVersion


class ScriptedEngine(ThreadingHTTPServer):
    """Answers every route with 200, except those in ``faults``: a status, or seconds of silence (a float)."""

    daemon_threads = True

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.faults: dict[str, int | float] = {}
        super().__init__(("127.0.0.1", 0), Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    @property
    def routes(self) -> list[str]:
        return [route for route, _ in self.calls]


class Handler(BaseHTTPRequestHandler):
    server: ScriptedEngine

    def do_GET(self) -> None:
        self.answer(200, {"world_size": 1})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        route = self.path.lstrip("/")
        self.server.calls.append((route, json.loads(body) if body else None))
        fault = self.server.faults.get(route.split("?")[0], 200)
        if isinstance(fault, float):
            time.sleep(fault)
            fault = 200
        self.answer(fault, {"said": "so"})

    def answer(self, status: int, content: dict[str, Any]) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def engine() -> Iterator[ScriptedEngine]:
    server = ScriptedEngine()
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


SLOW_S = 0.2
WEIGHTS = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}
VERSION = PolicyVersion(1, 7)


def test_phases_come_in_order_and_the_callback_before_the_resume(engine: ScriptedEngine, tmp_path: Path) -> None:
    transfer = make_transfer("file", engine.url, tmp_path, 5)
    transfer.push(WEIGHTS.items(), VERSION, before_resume=lambda: engine.calls.append(("callback", None)))
    assert engine.routes == [
        "pause?mode=keep",
        "start_weight_update",
        "update_weights",
        "finish_weight_update",
        "reset_prefix_cache",
        "callback",
        "resume",
    ]
    assert engine.calls[3][1] == {"weight_version": "1.7"}


@pytest.mark.parametrize(
    ("route", "phase"),
    [
        ("pause", "pause"),
        ("update_weights", "transfer"),
        ("finish_weight_update", "load"),
        ("reset_prefix_cache", "load"),
        ("resume", "resume"),
    ],
)
def test_each_phase_is_timed_by_itself(engine: ScriptedEngine, tmp_path: Path, route: str, phase: str) -> None:
    """The one that is slow is the one that takes long, by far more than a busy machine adds to the others."""
    engine.faults[route] = SLOW_S
    timings = make_transfer("file", engine.url, tmp_path, 60).push(WEIGHTS.items(), VERSION)
    assert tuple(timings.phases) == PHASES
    assert timings.phases[phase] >= SLOW_S and timings.still_s >= SLOW_S
    assert min(timings.phases.values()) > 0 and sum(timings.phases.values()) == pytest.approx(timings.total_s)
    gathered = timings.gathered(100.0)
    assert gathered.total_s == pytest.approx(timings.total_s + 100.0)
    assert gathered.still_s == pytest.approx(timings.still_s), "the engine serves meanwhile"


def test_file_holds_the_weights_and_only_the_last_one_stays(engine: ScriptedEngine, tmp_path: Path) -> None:
    transfer = make_transfer("file", engine.url, tmp_path / "w", 5)
    for n in (1, 2):
        transfer.push(WEIGHTS.items(), PolicyVersion(0, n))
        path = Path(engine.calls[-4][1]["update_info"]["path"])
        assert list((tmp_path / "w").iterdir()) == [path]
        stored = load_file(path)
        assert stored.keys() == WEIGHTS.keys()
        assert all(torch.equal(stored[name], WEIGHTS[name]) for name in WEIGHTS)
    transfer.close()
    assert not list((tmp_path / "w").iterdir())


def test_a_failed_pause_leaves_the_engine_running(engine: ScriptedEngine, tmp_path: Path) -> None:
    engine.faults["pause"] = 500
    with pytest.raises(TransferError, match=r"phase pause: .* answered 500") as caught:
        make_transfer("file", engine.url, tmp_path, 5).push(WEIGHTS.items(), VERSION)
    assert caught.value.engine_usable
    assert engine.routes == ["pause?mode=keep", "resume"]


@pytest.mark.parametrize("phase", ["start_weight_update", "update_weights", "finish_weight_update", "resume"])
def test_a_later_failure_asks_for_a_restart(engine: ScriptedEngine, tmp_path: Path, phase: str) -> None:
    engine.faults[phase] = 500
    with pytest.raises(TransferError, match=f"phase {phase}: ") as caught:
        make_transfer("file", engine.url, tmp_path, 5).push(WEIGHTS.items(), VERSION)
    assert not caught.value.engine_usable
    assert engine.routes[-1] == phase


def test_a_silent_phase_is_named_with_its_limit(engine: ScriptedEngine, tmp_path: Path) -> None:
    engine.faults["finish_weight_update"] = 8.0
    with pytest.raises(TransferError, match=r"phase finish_weight_update: .* did not answer in 2 s"):
        make_transfer("file", engine.url, tmp_path, 2).push(WEIGHTS.items(), VERSION)


def test_a_lost_engine_is_a_transfer_error(tmp_path: Path) -> None:
    with pytest.raises(TransferError, match="phase update_weight_version"):
        set_version("http://127.0.0.1:9", VERSION)


def test_a_callback_that_fails_leaves_the_engine_paused(engine: ScriptedEngine, tmp_path: Path) -> None:
    def fail() -> None:
        raise TimeoutError("shard 0 did not acknowledge")

    with pytest.raises(TimeoutError, match="shard 0"):
        make_transfer("file", engine.url, tmp_path, 5).push(WEIGHTS.items(), VERSION, before_resume=fail)
    assert engine.routes[-1] == "reset_prefix_cache"


def test_gloo_gives_up_at_once_when_the_engine_refuses(engine: ScriptedEngine, tmp_path: Path) -> None:
    engine.faults["init_weight_transfer_engine"] = 400
    began = time.monotonic()
    with pytest.raises(TransferError, match=r"phase init_weight_transfer_engine: .* answered 400"):
        make_transfer("gloo", engine.url, tmp_path, 5).connect()
    assert time.monotonic() - began < 4


def test_gloo_does_not_wait_forever_for_an_engine_that_never_joins(engine: ScriptedEngine, tmp_path: Path) -> None:
    with pytest.raises(TransferError, match="phase init_weight_transfer_engine"):
        make_transfer("gloo", engine.url, tmp_path, 1).connect()


def test_a_tied_head_is_sent_once_and_equal_but_separate_tensors_twice() -> None:
    embedding = torch.ones(3, 2, requires_grad=True)
    named = [("embed", embedding), ("lm_head.weight", embedding), ("copy", embedding.clone()), ("embed", embedding)]
    assert [name for name, _ in unique_tensors(named)] == ["embed", "copy"]
    assert not any(tensor.requires_grad for _, tensor in unique_tensors(named))


def test_temporary_tensors_are_not_mistaken_for_duplicates() -> None:
    gathered = ((f"layer{i}", torch.full((64, 64), float(i))) for i in range(50))
    weights = unique_tensors(gathered)
    assert [float(tensor[0, 0]) for _, tensor in weights] == list(range(50))


def test_unknown_kind_is_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="weight_transfer=pigeon"):
        make_transfer("pigeon", "http://127.0.0.1:9", tmp_path, 1)
