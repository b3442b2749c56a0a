"""`yoke evaluate` of a model at a URL: its settings and label, and a real harness in front of a scripted API."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from evaluation_helpers import NAMES, fake_engine, made, settings
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from pipeline.cli import compose_over_saved
from pipeline.config import Config, UserError
from pipeline.harness.base import harness_root
from pipeline.harness.install import installed
from pipeline.launch import jobs
from pipeline.launch.evaluation import EvaluationJob, labels, late_results, pin, pinned, plan, records
from pipeline.launch.evaluation_jobs import evaluation_cluster
from pipeline.launch.reporting import report_run
from pipeline.launch.run_directory import RunDirectory
from pipeline.records import Outcome
from pipeline.stages.teachers import TeacherServer
from pipeline.tasks.teacher import Teacher

URL = "https://api.example.com/v1"
KEY = "correct-horse-battery-staple"
needs_pi = pytest.mark.skipif(not installed("pi", harness_root()), reason="Pi is not installed")


def hosted(config: Config, **stage: Any) -> Config:
    api = {"api_url": URL, "api_model": "Some/Model-7B"} | stage
    return replace(config, stage=replace(config.stage, **api))


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return settings(tmp_path / "run")


def test_a_hosted_model_has_a_label_of_its_own_that_means_one_url(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_engine(monkeypatch)
    run = made(config)
    (job,) = plan(hosted(config), run)
    assert job == EvaluationJob("Some-Model-7B", f"Some/Model-7B at {URL}", ("pi", "codex"))
    pin(config, run, job)
    assert plan(hosted(config, api_url=f"{URL}/"), run) == [job], "the same place"
    for other in ({"api_url": "https://elsewhere/v1"}, {"api_model": "Some-Model-7B"}):
        with pytest.raises(UserError, match=r"label=Some-Model-7B is of Some/Model-7B at https://api.*another label"):
            plan(hosted(config, **other), run)
        assert plan(hosted(config, label="theirs", **other), run)[0].label == "theirs"
    with pytest.raises(UserError, match="is of Some/Model-7B at"):
        plan(replace(config, stage=replace(config.stage, label="Some-Model-7B")), run)


@pytest.mark.parametrize(
    ("stage", "complaint"),
    [
        ({"api_model": None}, r"stage.api_url=https://api.example.com/v1 needs stage.api_model=NAME"),
        ({"api_url": None}, "belong to stage.api_url"),
        ({"api_url": "api.example.com"}, "stage.api_url=api.example.com is no http"),
        ({"api_url": "https://me:pass@h/v1"}, "stage.api_url must hold no password or key .*stage.api_key_env"),
        ({"api_url": "https://h/v1?key=1"}, "stage.api_url must hold no password or key"),
        ({"api_key_env": "NOT_THERE"}, "stage.api_key_env=NOT_THERE: the environment has no such variable"),
        ({"checkpoint": "base"}, "stage.checkpoint=base and stage.api_url=https.*: give one of them"),
        ({"label": NAMES[0]}, "not one of a checkpoint's"),
        ({"api_model": "base"}, "not one of a checkpoint's"),
        ({"api_model": "/"}, "a plain name"),
        ({"label": "../x"}, "a plain name"),
        ({"label": "before"}, "choose another label"),
    ],
)
def test_what_cannot_work_is_told_at_once(
    config: Config, monkeypatch: pytest.MonkeyPatch, stage: dict[str, Any], complaint: str
) -> None:
    fake_engine(monkeypatch)
    run = made(config)
    with pytest.raises(UserError, match=complaint):
        plan(hosted(config, **stage), run)
    assert not (run.root / "evaluation").exists()


def test_jobs_for_an_api_ask_for_no_gpu(config: Config) -> None:
    four = replace(config, cluster=replace(config.cluster, gpus_per_node=4))
    assert evaluation_cluster(four).gpus_per_node == 1
    assert evaluation_cluster(hosted(four)).gpus_per_node == 0
    pool = replace(four, evaluation=replace(four.evaluation, replicas=3))
    assert evaluation_cluster(pool).gpus_per_node == 3


class Api(TeacherServer):
    """The scripted teacher behind a key and a rate limit: every ``refuses``-th request is told to come back."""

    def __init__(self, refuses: int = 0) -> None:
        super().__init__(Teacher(lazy=0.0, verify=0.0))
        self.refuses, self.asked = refuses, 0

    async def _chat(self, request: Request) -> Response:
        body = await request.json()
        if request.headers.get("authorization") != f"Bearer {KEY}":
            return JSONResponse({"error": {"message": "who are you?"}}, 401)
        self.asked += 1
        if self.refuses and self.asked % self.refuses == 0:
            return JSONResponse({"error": {"message": "slow down"}}, 429, {"retry-after": "1"})
        assert body["model"] == "Some/Model-7B"
        if body["messages"] == [{"role": "user", "content": "Hello"}]:
            return JSONResponse({"choices": [{"message": {"role": "assistant", "content": "hi"}}]})
        return await super()._chat(request)


@contextmanager
def serving(api: Api) -> Iterator[str]:
    """Its URL, while the test blocks."""
    url: list[str] = []
    up, end = threading.Event(), threading.Event()

    async def serve() -> None:
        async with api.serving() as place:
            url.append(f"{place}/v1")
            up.set()
            await asyncio.to_thread(end.wait)

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert up.wait(60)
    try:
        yield url[0]
    finally:
        end.set()
        thread.join(60)


def words(root: Path, url: str, *more: str) -> list[str]:
    """`yoke evaluate` without a run that training made."""
    return [
        *(f"run_dir={root}", "tasks.test_size=2", "tasks.train_size=1", "tasks.check=false", "mix.harnesses=[pi]"),
        *("evaluation.rollouts_per_task=1", "evaluation.retries=0", "harness.retries=0", "logging.progress=false"),
        *("engine.shards=1", f"stage.api_url={url}", "stage.api_model=Some/Model-7B", "stage.api_key_env=MY_KEY"),
        *("logging.wandb=disabled", *more),
    ]


@pytest.mark.slow
@needs_pi
def test_a_real_harness_is_graded_against_an_api_that_has_a_rate_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MY_KEY", KEY)
    root, label = tmp_path / "api", "Some-Model-7B"
    run = RunDirectory(root)
    with serving(Api(refuses=3)) as url:
        config = compose_over_saved(words(root, url))
        assert jobs.evaluate(config) == 0
    assert f"evaluation {label}: pass@1 100.0% of 2 graded" in capsys.readouterr().out
    found = records(run, label)
    assert [record.outcome for record in found] == [Outcome.SOLVED] * 2
    assert sum(record.info.get("outages", 0) for record in found), "some calls had to come back"
    assert all(not record.rows and not record.sampled_tokens for record in found)
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and KEY.encode() in path.read_bytes()]
    assert pinned(run, label) == f"Some/Model-7B at {url}"
    assert labels(run) == [label] and late_results(config, run, []) == []
    report_run(config, run)
    assert label in (run.report / "table.md").read_text()


def test_a_key_that_the_api_refuses_takes_no_label(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_engine(monkeypatch)
    monkeypatch.setattr("pipeline.launch.preflight._check_harnesses", lambda *_: None)
    monkeypatch.setenv("MY_KEY", "wrong")
    with serving(Api()) as url, pytest.raises(UserError, match=r"refuses the key in MY_KEY \(status 401\)"):
        jobs.evaluate(compose_over_saved(words(tmp_path / "api", url)))
    assert not (tmp_path / "api" / "evaluation").exists()
