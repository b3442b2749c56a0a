"""Claims, fences and saved settings of a run directory."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from omegaconf import DictConfig, OmegaConf

from pipeline.cli import compose_config
from pipeline.config import UserError
from pipeline.launch.rpc import RpcClient, RpcError, RpcServer
from pipeline.launch.run_directory import FencedOff, RunDirectory


def test_two_launchers_never_claim_one_attempt(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    with ThreadPoolExecutor(16) as pool:
        numbers = list(pool.map(lambda _: run.new_attempt().number, range(64)))
    assert sorted(numbers) == list(range(1, 65))


def test_a_ghost_is_fenced_off(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    first = run.new_attempt()
    first.check_fence()
    run.new_attempt().check_fence()
    with pytest.raises(FencedOff):
        first.check_fence()


def test_other_settings_are_refused_and_named(tmp_path: Path) -> None:
    config = compose_config([f"run_dir={tmp_path / 'run'}"])
    run = RunDirectory(tmp_path / "run")
    run.save_config(replace(config, seed=7))
    run.save_config(config)  # nothing was made with the first settings
    run.new_attempt()
    run.save_config(replace(config, concurrency=9, fresh=True))  # how it runs may change between attempts
    with pytest.raises(UserError, match=r"algorithm\.group_size, seed"):
        run.save_config(replace(config, seed=7, algorithm=replace(config.algorithm, group_size=3)))


def test_a_run_of_an_earlier_version_is_still_ours(tmp_path: Path) -> None:
    config = compose_config([f"run_dir={tmp_path / 'run'}"])
    run = RunDirectory(tmp_path / "run")
    run.save_config(config)
    run.new_attempt()
    saved = OmegaConf.load(run.config)
    assert isinstance(saved, DictConfig)
    del saved["warm_start"], saved["sandbox"]["tmp_mb"]
    run.config.write_text(OmegaConf.to_yaml(saved))
    assert run.is_ours() and run.saved_config() == config
    run.save_config(config)
    with pytest.raises(UserError, match=r"settings \(sandbox\.tmp_mb\)"):
        run.save_config(replace(config, sandbox=replace(config.sandbox, tmp_mb=1)))


def test_rpc_answers_refuses_and_gives_up_in_time() -> None:
    def fail() -> dict[str, int]:
        raise ValueError("no")

    server = RpcServer({"add": lambda a, b: {"sum": a + b}, "fail": fail}, "secret")
    try:
        client = RpcClient(server.url, "secret")
        assert client.call("add", a=1, b=2) == {"sum": 3}
        with pytest.raises(RpcError, match="ValueError: no"):
            client.call("fail")
        with pytest.raises(RpcError, match="wrong token"):
            RpcClient(server.url, "guess").call("add", a=1, b=2)
    finally:
        server.stop()
    with pytest.raises(RpcError, match="within 1 s"):
        RpcClient(server.url, "secret").call("add", 1.0, a=1, b=2)
