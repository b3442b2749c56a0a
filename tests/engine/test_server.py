"""Starting the engine: ports, command line, early death."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from pipeline.config import EngineConfig, ModelConfig, UserError
from pipeline.engine import device
from pipeline.engine.server import HOST, EngineError, EngineServer, reserve_port


def make_server(tmp_path: Path, **config: object) -> EngineServer:
    model = ModelConfig(path=str(tmp_path / "model"))
    return EngineServer(EngineConfig(**config), model, tmp_path / "logs" / "engine.log", tmp_path / "scratch")


def test_a_taken_port_is_a_user_error_that_names_it(tmp_path: Path) -> None:
    with socket.socket() as holder:
        holder.bind((HOST, 0))
        holder.listen()
        port = holder.getsockname()[1]
        with pytest.raises(UserError, match=f"engine.port={port} "):
            make_server(tmp_path, port=port)


def test_port_zero_finds_free_ports_and_vllm_can_still_listen_there(tmp_path: Path) -> None:
    first, second = make_server(tmp_path), make_server(tmp_path)
    assert first.port != second.port
    with socket.socket() as like_vllm:
        like_vllm.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        like_vllm.bind((HOST, first.port))
        like_vllm.listen()
        with socket.create_connection((HOST, first.port), timeout=5) as client:
            accepted, _ = like_vllm.accept()
            accepted.close()
            assert client.recv(1) == b""
    for server in (first, second):
        server.close()
    reserve_port(first.port).close()


def test_unknown_transfer_is_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="carrier-pigeon: choose one of auto, file, gloo, nccl"):
        make_server(tmp_path, weight_transfer="carrier-pigeon")


def test_cpu_and_gpu_command_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.engine.server.on_gpu", lambda: False)
    server = make_server(tmp_path, weight_transfer="gloo", extra_args=["--swap", "1"])
    command, environment = server.command("m", seed=5), server.environment()
    server.close()
    assert "--enforce-eager" in command
    assert command[command.index("--distributed-executor-backend") + 1] == "uni"
    assert command[command.index("--seed") + 1] == "5"
    assert command[-2:] == ["--swap", "1"]
    assert environment["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert environment["OMP_NUM_THREADS"] == "1"

    monkeypatch.setattr("pipeline.engine.server.on_gpu", lambda: True)
    monkeypatch.setattr(device, "on_gpu", lambda: True)
    server = make_server(tmp_path)
    command, environment = server.command("m"), server.environment()
    server.close()
    assert '{"backend": "nccl"}' in command
    assert "--enforce-eager" not in command
    assert "--distributed-executor-backend" not in command
    assert "VLLM_CPU_KVCACHE_SPACE" not in environment


@pytest.mark.parametrize(
    ("visible", "own", "seen"), [("0,1", None, "1,0"), ("0,1", "0", "0"), ("0,1,2,3", "2,3", "2,3")]
)
def test_an_engine_sees_the_gpus_that_it_has_for_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, visible: str, own: str | None, seen: str
) -> None:
    monkeypatch.setattr("pipeline.engine.server.on_gpu", lambda: True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    model = ModelConfig(path="m")
    server = EngineServer(EngineConfig(weight_transfer="file"), model, tmp_path / "log", tmp_path, devices=own)
    assert server.environment()["CUDA_VISIBLE_DEVICES"] == seen
    server.close()


@pytest.mark.slow
def test_early_death_shows_the_log(tmp_path: Path) -> None:
    server = make_server(tmp_path)
    server.start(tmp_path / "no-such-model")
    try:
        with pytest.raises(EngineError, match="died while starting") as caught:
            server.wait_ready(200)
    finally:
        server.close()
    assert str(server.log_path) in str(caught.value)
    assert "no-such-model" in str(caught.value)


def test_a_start_that_takes_too_long_says_what_was_awaited(tmp_path: Path) -> None:
    class Sleeper(EngineServer):
        def command(self, model_dir: Path | str, seed: int = 0) -> list[str]:
            return ["sh", "-c", "echo loading weights; sleep 60"]

    server = Sleeper(EngineConfig(), ModelConfig(path="unused"), tmp_path / "log", tmp_path / "scratch")
    server.start(tmp_path)
    try:
        with pytest.raises(EngineError, match=f"{server.url}/health in 1 s.*") as caught:
            server.wait_ready(1)
    finally:
        server.close()
    assert "loading weights" in str(caught.value)
