"""`yoke proxy` from outside: the session API and the shards' shared listeners, with real processes and sockets."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pyarrow as pa
import pytest
from engine_threads import engine_thread
from front_helpers import ROOT, Running, running

from pipeline.capture import control
from pipeline.capture import proxy as proxy_command
from pipeline.capture.export import SCHEMAS
from pipeline.capture.metrics import EVENTS
from pipeline.cli import main
from pipeline.config import SessionPolicy, UserError
from pipeline.engine.scripted import FakeEngine, Scripted, render

USER = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def engine() -> Iterator[FakeEngine]:
    with engine_thread() as engine:
        yield engine


@pytest.fixture(scope="module")
def proxy(engine: FakeEngine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(engine.url, tmp_path_factory.mktemp("front") / "proxy") as proxy:
        yield proxy


def test_a_session_is_opened_used_read_back_closed_and_deleted(proxy: Running, engine: FakeEngine) -> None:
    harness = proxy.create(max_tokens=50, temperature=0.5, metadata={"task": 7})
    assert harness.id == harness.key and harness.key.startswith(f"yk{harness.shard}-")
    engine.script += [Scripted("one"), Scripted("two")]
    answer = harness.ask().json()["choices"][0]["message"]
    harness.ask(messages=[*USER, answer, {"role": "user", "content": "more"}])
    assert engine.generated[-1]["sampling_params"]["temperature"] == 0.5
    assert engine.generated[-1]["sampling_params"]["max_tokens"] == 50
    shown = harness.show()
    assert (shown["state"], shown["calls"], shown["delivered"], shown["in_flight"]) == ("open", 2, 2, 0)
    assert shown["metadata"] == {"task": 7} and shown["sampled_tokens"] == 8

    snapshot = harness.table().to_pylist()
    assert [call["parent"] for call in snapshot] == [None, 0]
    assert snapshot[0]["prompt_ids"] == render(USER)
    assert snapshot[0]["versions"] == [{"version": "0.0", "start": 0, "end": 4}]
    assert harness.close()["state"] == "closed"
    assert harness.ask().status_code == 401
    assert harness.table().to_pylist() == snapshot
    (row,) = harness.table("rows").to_pylist()
    assert sum(row["loss_mask"]) == 8 and row["input_ids"][: len(render(USER))] == render(USER)
    assert harness.show()["calls"] == 2

    assert proxy.api.delete(f"/sessions/{harness.id}").status_code == 204
    assert proxy.api.get(f"/sessions/{harness.id}").status_code == 404
    assert proxy.api.get(f"/sessions/{harness.id}/calls").status_code == 404


def test_a_key_is_known_on_its_shard_only(proxy: Running) -> None:
    one, two = proxy.create(), proxy.create()
    assert one.shard != two.shard, "the second goes where there is room"
    misdirected = one.ask(url=two.url)
    assert misdirected.status_code == 421 and one.url in misdirected.json()["error"]["message"]
    assert one.ask(key=f"yk{one.shard}-000000000000000000000000").status_code == 401
    assert one.ask(key="anything").status_code == 401
    assert httpx.post(f"{one.url}/v1/chat/completions", content=b"{").status_code == 401, "before the body is parsed"
    assert httpx.get(f"{one.url}/sessions").status_code == 401, "no control on a shard's port"


def test_bad_wishes_are_refused(proxy: Running) -> None:
    post = proxy.api.post
    name = proxy.create(session_id="mine").id
    assert name == "mine"
    assert post("/sessions", json={"session_id": "mine"}).status_code == 409
    for body in (
        {"max_token": 5}, {"max_tokens": "many"}, {"max_tokens": 0}, {"max_calls": True}, {"temperature": -1},
        {"metadata": 3}, {"thoughts": "lose"}, {"thinking": 1}, {"ttl_s": "x"},
    ):  # fmt: skip
        reply = post("/sessions", json=body)
        assert reply.status_code == 400 and next(iter(body)) in reply.json()["error"], body
    assert post("/sessions", json={"session_id": "a b"}).status_code == 400
    assert post("/sessions", content=b"[").status_code == 400
    assert proxy.api.get("/sessions/none").status_code == 404
    assert proxy.api.get("/sessions/mine/what").status_code == 404
    assert proxy.api.put("/policy_version", json={"version": "new"}).status_code == 400
    assert proxy.api.put("/sessions", json={}).status_code == 405


def test_later_calls_are_salted_with_the_policy_version(proxy: Running, engine: FakeEngine) -> None:
    harness = proxy.create()
    assert proxy.api.put("/policy_version", json={"version": "0.3"}).status_code == 200
    harness.ask()
    assert engine.generated[-1]["cache_salt"] == "0.3"
    assert harness.table()["versions"].to_pylist()[0][0]["version"] == "0.3"
    proxy.api.put("/policy_version", json={"version": "0.0"})


def test_policy_fields_reach_the_engine(proxy: Running, engine: FakeEngine) -> None:
    harness = proxy.create(temperature=0, max_calls=1, thoughts="keep", thinking=False, continuity=False)
    assert harness.show()["policy"]["thoughts"] == "keep"
    assert harness.ask().status_code == 200
    assert engine.rendered[-1]["chat_template_kwargs"] == {"enable_thinking": False}
    assert harness.ask("more").headers["x-yoke-budget"] == "calls"
    assert harness.table()["call_id"].to_pylist() == [0]
    assert harness.show()["counters"]["over_budget"] == 1


def test_an_idle_session_is_closed_and_its_trace_kept(proxy: Running, engine: FakeEngine) -> None:
    idle, busy = proxy.create(ttl_s=0.5), proxy.create(ttl_s=0.5)
    idle.ask()
    engine.script.append(Scripted("at last", delay_s=4))
    assert busy.ask().status_code == 200, "a call keeps a session alive, however long it takes"
    assert idle.show()["state"] == "closed" and idle.show()["reason"] == "idle"
    assert idle.ask().status_code == 401 and idle.table().num_rows == 1
    assert metric(proxy, "yoke_sessions_expired_total") >= 1


def test_metrics_tell_what_happened(proxy: Running, engine: FakeEngine) -> None:
    before = proxy.api.get("/metrics").text
    harness = proxy.create()
    for number in range(3):
        harness.ask(f"unrelated {number}")
    httpx.post(f"{harness.url}/v1/messages", json={}, headers={"x-api-key": "wrong"})
    _until(
        lambda: (
            metric(proxy, 'yoke_turns_total{dialect="chat"}') >= value(before, 'yoke_turns_total{dialect="chat"}') + 3
        )
    )
    for name in ("yoke_calls_total", 'yoke_forks_total{cause="root"}', 'yoke_errors_total{status="401"}'):
        _until(lambda name=name: metric(proxy, name) > value(before, name))
    text = proxy.api.get("/metrics").text
    assert value(text, "yoke_added_latency_seconds_count") >= 3
    assert value(text, 'yoke_added_latency_seconds_bucket{le="+Inf"}') == value(
        text, "yoke_added_latency_seconds_count"
    )
    assert value(text, f'yoke_shard_journal_bytes{{shard="{harness.shard}"}}') > 0
    assert [value(text, f'yoke_shard_pid{{shard="{i}"}}') for i in (0, 1)] == [proxy.shard_pid(0), proxy.shard_pid(1)]
    assert value(text, "yoke_loop_lag_seconds_count") > 0


def metric(proxy: Running, name: str) -> float:
    return value(proxy.api.get("/metrics").text, name)


def value(text: str, name: str) -> float:
    return next((float(line.split()[-1]) for line in text.splitlines() if line.rpartition(" ")[0] == name), 0.0)


def test_a_dead_or_hung_shard_costs_no_session(proxy: Running, engine: FakeEngine) -> None:
    harness = proxy.create()
    answer = harness.ask().json()["choices"][0]["message"]
    calls = metric(proxy, "yoke_calls_total")
    for signal_number in (signal.SIGKILL, signal.SIGSTOP):
        old = proxy.shard_pid(harness.shard)
        assert old is not None
        os.kill(old, signal_number)
        _until(lambda: proxy.shard_pid(harness.shard) not in (None, old), 25)  # noqa: B023
        history = [*USER, answer, {"role": "user", "content": str(signal_number)}]
        assert harness.ask(messages=history).status_code == 200
    assert harness.table()["parent"].to_pylist() == [None, 0, 0]
    assert metric(proxy, "yoke_calls_total") >= calls, "counts do not fall with a process"
    assert metric(proxy, f'yoke_shard_restarts_total{{shard="{harness.shard}"}}') == 2


def test_a_restart_with_the_same_directory_takes_the_sessions_up(
    engine: FakeEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "proxy"
    with running(engine.url, place) as proxy:
        harnesses = [proxy.create() for _ in range(4)]
        closed = proxy.create()
        closed.ask()
        closed.close()
        answers = [harness.ask().json()["choices"][0]["message"] for harness in harnesses]
        assert harnesses[0].table().num_rows == 1
        children = proxy.children()
        assert len(children) == 3, "two shards and the exporter"
        proxy.process.kill()
        proxy.process.wait(10)
        _until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in children))
    with running(engine.url, place) as proxy:
        listed = proxy.api.get("/sessions").json()["sessions"]
        assert sorted(session["state"] for session in listed) == ["closed"] + ["open"] * 4
        for harness, answer in zip(harnesses, answers, strict=True):
            harness._api = proxy.api
            assert harness.ask(messages=[*USER, answer, *USER]).status_code == 200
            assert harness.table()["parent"].to_pylist() == [None, 0]
        closed._api = proxy.api
        assert closed.table().num_rows == 1
        assert proxy.api.post("/sessions", json={"session_id": closed.id}).status_code == 409
        proxy.end()
    with pytest.raises(SystemExit, match="2"):
        main(["proxy", "--llm-url", engine.url, "--port", "0", "--dir", str(place), "--shards", "1"])
    assert "open sessions of 2 shards" in capsys.readouterr().err


def test_a_port_that_open_sessions_know_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any program's outgoing connection may hold it for a moment."""
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = proxy_command.port_of(holder)
        with proxy_command._again("127.0.0.1", port, needed=False) as other:
            assert proxy_command.port_of(other) != port, "nobody knows it"
        freeing = threading.Timer(0.3, holder.close)
        freeing.start()
        with proxy_command._again("127.0.0.1", port, needed=True) as again:
            assert proxy_command.port_of(again) == port
            monkeypatch.setattr(proxy_command, "PORT_S", 0.2)
            with pytest.raises(UserError, match="cannot listen"), proxy_command._again("127.0.0.1", port, needed=True):
                pass


def test_sigterm_lets_calls_in_flight_finish_and_a_second_one_does_not(engine: FakeEngine, tmp_path: Path) -> None:
    for patient in (True, False):
        with running(engine.url, tmp_path / f"proxy-{patient}", "--shards", "1") as proxy:
            harness = proxy.create()
            engine.script.append(Scripted("late", delay_s=1.5 if patient else 20))
            waiting = subprocess.Popen([sys.executable, "-c", ASK, harness.url, harness.key], stdout=subprocess.PIPE)
            _until(lambda: engine.running == 1)
            proxy.process.send_signal(signal.SIGTERM)
            _until(lambda: proxy.api.get("/health").json()["status"] == "draining")
            assert proxy.api.post("/sessions", json={}).status_code == 503
            late = harness.ask("too late")
            assert late.status_code == 503 and late.headers["retry-after"] == "5"
            code = proxy.process.wait(10) if patient else proxy.end()
            assert code == (0 if patient else 143)
            assert (b"late" in waiting.communicate(timeout=10)[0]) is patient


ASK = """
import httpx, sys
url, key = sys.argv[1:]
body = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
print(httpx.post(url + "/v1/chat/completions", json=body, headers={"authorization": "Bearer " + key}, timeout=30).text)
"""


def test_the_admin_key_guards_everything_but_health(engine: FakeEngine, tmp_path: Path) -> None:
    with running(
        engine.url, tmp_path / "proxy", "--shards", "1", "--host", "0.0.0.0", YOKE_ADMIN_KEY="hidden"
    ) as proxy:
        assert proxy.api.get("/health").status_code == 200
        for method, path in (
            ("POST", "/sessions"),
            ("GET", "/sessions"),
            ("PUT", "/policy_version"),
            ("GET", "/metrics"),
        ):
            assert proxy.api.request(method, path).status_code == 401
        assert proxy.api.get("/sessions", headers={"authorization": "Bearer wrong"}).status_code == 401
        proxy.api.headers["authorization"] = "Bearer hidden"
        harness = proxy.create()
        assert httpx.URL(harness.url).host == "0.0.0.0", "the name that the caller used"
        assert harness.ask().status_code == 200


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([], "proxy.llm_url is not given"),
        (["--llm-url", "ftp://x"], "proxy.llm_url=ftp://x"),
        (["--llm-url", "http://127.0.0.1:1"], "no model list"),
        (["--llm-url", "ENGINE", "--model", "other"], "the upstream serves policy"),
        (["--llm-url", "ENGINE", "--host", "0.0.0.0"], "give --admin-key"),
        (["--llm-url", "ENGINE", "--shards", "0"], "proxy.shards=0"),
        (["--llm-url", "ENGINE", "--mode", "magic"], "proxy.mode=magic"),
        (["--llm-url", "ENGINE", "--colour", "red"], "colour"),
        (["--llm-url", "ENGINE", "--port"], "--port needs a value"),
        (["--llm-url", "ENGINE", "--port", "many"], "many"),
        (["--llm-url", "ENGINE", "--port", "PORT"], "cannot listen"),
    ],
)
def test_wrong_settings_end_in_one_line(
    engine: FakeEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], words: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(SystemExit) as ended:
        meant = {"ENGINE": engine.url, "PORT": str(taken.getsockname()[1])}
        port = [] if "--port" in flags else ["--port", "0"]
        main(["proxy", "--dir", str(tmp_path / "p"), *port, *(meant.get(flag, flag) for flag in flags)])
    assert ended.value.code == 2
    said = capsys.readouterr()
    assert words in said.err and said.err.count("\n") == 1 and said.out == ""


def test_a_directory_serves_one_proxy(engine: FakeEngine, proxy: Running, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["proxy", "--llm-url", engine.url, "--port", "0", "--dir", str(proxy.log.with_suffix(""))])
    assert "another yoke proxy runs there" in capsys.readouterr().err


def test_no_process_of_the_proxy_imports_what_is_slow(proxy: Running) -> None:
    """Each process maps the libraries that it imported; /proc tells them without asking the process."""
    proxy.create().table()
    children = proxy.children()
    assert len(children) == 3, "two shards and the exporter"
    shards = {proxy.shard_pid(0), proxy.shard_pid(1)}
    for pid in (proxy.process.pid, *children):
        maps = Path(f"/proc/{pid}/maps").read_text()
        for heavy in ("torch", "vllm", "tokenizers", *(["numpy", "pyarrow", "websockets"] if pid in shards else [])):
            assert f"site-packages/{heavy}" not in maps, f"{Path(f'/proc/{pid}/cmdline').read_text()} has {heavy}"


class _Teacher(BaseHTTPRequestHandler):
    """A hosted Chat Completions API that wants a key."""

    def do_GET(self) -> None:
        self._reply({"data": [{"id": "teacher"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        message = {"role": "assistant", "content": f"{body['model']} heard {body['messages'][-1]['content']}"}
        self._reply({"choices": [{"message": message, "finish_reason": "stop"}]})

    def _reply(self, payload: object) -> None:
        known = self.headers["authorization"] == "Bearer secret"
        data = json.dumps(payload).encode() if known else b"{}"
        self.send_response(200 if known else 401)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Stay quiet."""


def test_text_mode_keeps_requests_and_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Teacher) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/v1"
        with running(url, tmp_path / "proxy", "--mode", "text", "--shards", "1", YOKE_UPSTREAM_KEY="secret") as proxy:
            harness = proxy.create()
            assert harness.ask("hello").json()["choices"][0]["message"]["content"] == "teacher heard hello"
            (call,) = harness.table().to_pylist()
            assert json.loads(call["request"])["messages"] == USER
            assert json.loads(call["answer"])["content"] == "teacher heard hello"
            assert call["prompt_ids"] == [] and not call["trainable"]
            assert harness.table("rows").num_rows == 0
        with pytest.raises(SystemExit, match="2"):
            main(["proxy", "--mode", "text", "--llm-url", url, "--port", "0", "--dir", str(tmp_path / "other")])
        assert "refuses the key" in capsys.readouterr().err
        server.shutdown()


DOCS = (ROOT / "docs" / "capture.md").read_text()


def test_the_examples_of_the_docs_work(proxy: Running, tmp_path: Path) -> None:
    harness = proxy.create()
    environment = os.environ | {"BASE_URL": harness.url, "KEY": harness.key}
    blocks = [block for block in re.findall(r"^```\w*\n(.*?)^```$", DOCS, re.S | re.M) if "curl" in block]
    assert len(blocks) == 2
    outputs = []
    for command in re.findall(r"curl (?:\\\n|.)*", "".join(blocks)):
        command = command.replace("http://127.0.0.1:18701", proxy.url).replace("curl -s", "curl -sS --fail")
        done = subprocess.run(
            command, shell=True, env=environment, capture_output=True, text=True, cwd=tmp_path, timeout=30
        )
        assert done.returncode == 0, f"{command}: {done.stderr}"
        outputs.append(done.stdout)
    opened, answer, *_ = map(json.loads, outputs[:2])
    assert set(opened) == {"session_id", "api_key", "base_url", "shard"}
    assert answer["choices"][0]["message"]["content"] == "ok"
    assert pa.ipc.open_stream((tmp_path / "rows.arrow").read_bytes()).read_all().num_rows == 1
    assert proxy.api.get(f"/sessions/{harness.id}").status_code == 404


def test_the_docs_name_every_field_column_and_metric(proxy: Running) -> None:
    metrics = re.findall(r"# TYPE (\w+) ", proxy.api.get("/metrics").text)
    names = [field.name for field in dataclasses.fields(SessionPolicy)]
    names += [name for schema in SCHEMAS.values() for name in schema.names]
    assert len(metrics) > 10
    missing = [name for name in [*names, *EVENTS, *metrics] if not re.search(rf"`{name}[`{{]", DOCS)]
    assert missing == []


def test_a_shard_is_ready_soon(tmp_path: Path) -> None:
    """By its own processor time, which other programs do not lengthen."""
    with contextlib.ExitStack() as stack:
        ours, theirs = map(stack.enter_context, control.pair())
        command = [sys.executable, "-m", "pipeline.capture.shard", "--engine", "http://127.0.0.1:9", "--model", "m"]
        command += ["--journal", str(tmp_path / "journal"), "--control", str(theirs.fileno())]
        process = subprocess.Popen(command, pass_fds=(theirs.fileno(),), stderr=subprocess.DEVNULL, cwd=ROOT)
        stack.callback(process.wait, 10)
        stack.callback(process.kill)
        ours.settimeout(30)
        assert b'"ready": true' in ours.recv(1000)
        ticks = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[11:13]
        assert sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK") < 1.0


def _until(condition: object, seconds: float = 10) -> None:
    assert callable(condition)
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)
