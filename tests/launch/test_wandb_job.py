"""`yoke wandb`: a run's W&B run from its directory alone, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import wandb
from evaluation_helpers import made, settings
from test_report_page import rollout
from wandb_files import history, offline_files, run_record, table_of

from pipeline.config import Config, UserError
from pipeline.launch import wandb_job
from pipeline.launch.run_directory import RunDirectory
from pipeline.report.store import append_jsonl, write_group


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return settings(tmp_path / "run")


@pytest.mark.slow
def test_a_run_is_made_again_from_its_directory(config: Config, capsys: pytest.CaptureFixture[str]) -> None:
    run = made(config, ())
    append_jsonl(run.metrics, {"update": 0, "time": 1.0, "eval/pass@1": 0.5})
    for reward in (0.1, 0.3):  # the update that was repeated counts as last logged
        append_jsonl(run.metrics, {"update": 1, "time": 3.0, "reward": reward})
    write_group(run.evaluation("before") / "g000000.parquet", [rollout("a", "pi", True)])
    assert wandb_job.run(config, ["again", str(run.root)]) == 0
    wandb.teardown()  # as the command's end: W&B's service writes the file's end after the run's
    (path,) = offline_files(run.root)
    assert capsys.readouterr().out.endswith(f": wandb sync {path.parent}\n")
    logged = history(path)
    assert [row for row in logged if "reward" in row] == [{"update": 1, "reward": 0.3}]
    assert [row["update"] for row in logged if "eval/pass@1" in row] == [0]
    assert [row[1] for row in table_of(path, "rollouts/before")["data"]] == ["a"]
    path.with_name(path.name + ".synced").touch()
    (other,) = wandb_job.again(run)
    wandb.teardown()
    (second,) = other.glob("*.wandb")
    assert history(second)[:2] == logged[:2], "all of it, and as another W&B run than the one that was synced"
    assert run_record(second).run_id != run_record(path).run_id


@pytest.mark.parametrize(
    "words", [[], ["again"], ["workspace"], ["other", "x"], ["workspace", "project"], ["workspace", "a/b/c"]]
)
def test_wrong_words_are_answered_with_the_right_ones(config: Config, words: list[str]) -> None:
    with pytest.raises(UserError, match="yoke wandb again RUN"):
        wandb_job.run(config, words)


def test_a_directory_without_a_run_or_metrics_is_refused(config: Config, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no run in"):
        wandb_job.run(config, ["again", str(tmp_path / "nowhere")])
    run = made(config, ())
    with pytest.raises(UserError, match="has no metrics yet"):
        wandb_job.run(config, ["again", str(run.root)])
    assert not (run.root / "wandb").exists()


def test_a_living_run_is_left_alone(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    run: RunDirectory = made(config, ())
    append_jsonl(run.metrics, {"update": 1, "time": 3.0, "reward": 0.5})
    monkeypatch.setattr(wandb_job, "may_be_alive", lambda _: True)
    with pytest.raises(UserError, match="logs to W&B itself"):
        wandb_job.run(config, ["again", str(run.root)])


def test_a_workspace_needs_an_account_to_be_sent(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", "/nowhere")
    with pytest.raises(UserError, match="needs an account"):
        wandb_job.run(config, ["workspace", "me/yoke"])
