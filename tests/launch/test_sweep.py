"""Sweeps: the points behind the words of `yoke train -m`, what is refused, and what starting them does."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from pipeline.cli import compose_config, main, parse_overrides
from pipeline.config import Config, UserError
from pipeline.launch import jobs, local, preflight, slurm, status, sweep
from pipeline.launch.run_directory import RunDirectory
from pipeline.launch.squeue import QueuedJob
from pipeline.launch.sweep_points import NAME_LENGTH, TAG_LENGTH, Point, plan
from pipeline.report.store import write_text

BASE = ["+experiment=smoke", "tasks.test_size=1"]
TWO = "algorithm.aggregation=group_mean,token_mean"
NAMES = ["aggregation-group_mean", "aggregation-token_mean"]


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the commands run. Settings are checked, but not what is installed on this machine."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(preflight, "_check_harnesses", lambda config: None)
    return tmp_path


def points(*words: str) -> tuple[Path, list[Point]]:
    return plan(parse_overrides([*BASE, *words]), compose_config)


def names(*words: str) -> list[str]:
    return [point.name for point in points(*words)[1]]


def yoke(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["train", "-m", *BASE, "sweep.name=s", *words])
    assert isinstance(ended.value.code, int)
    return ended.value.code


# --- points


def test_the_product_in_hydras_order_with_everything_else_shared() -> None:
    root, found = points(TWO, "mix=single,four", "seed=7")
    assert [point.overrides for point in found] == [
        ("algorithm.aggregation=group_mean", "mix=single"),
        ("algorithm.aggregation=group_mean", "mix=four"),
        ("algorithm.aggregation=token_mean", "mix=single"),
        ("algorithm.aggregation=token_mean", "mix=four"),
    ]
    last = found[-1].config
    assert (last.algorithm.aggregation, len(last.mix.harnesses), last.seed) == ("token_mean", 4, 7)
    assert Path(last.run_dir) == root / "aggregation-token_mean+mix-four"
    assert root.parent == Path("runs").absolute() and root.name.startswith("sweep-aggregation-mix-")


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("seed=range(1,4)", ["seed-1", "seed-2", "seed-3"]),
        ("mix=glob([t*,f*])", ["mix-four", "mix-ten"]),
        ("seed=choice(3,1)", ["seed-3", "seed-1"]),
        ("seed=sort(3,1)", ["seed-1", "seed-3"]),
        ("mix.harnesses=[pi],[pi,codex]", ["harnesses-pi", "harnesses-pi-codex"]),
        ("training.learning_rate=1e-4,3e-4", ["learning_rate-0.0001", "learning_rate-0.0003"]),
        ("model.path='a b','/c/d'", ["path-a-b", "path-c-d"]),
        ("+experiment=smoke,quickstart", ["experiment-smoke", "experiment-quickstart"]),
    ],
)
def test_what_hydra_expands_and_how_the_runs_are_called(
    word: str, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "_check_model", lambda config: None)
    found = plan(parse_overrides([word, *([] if "experiment" in word else BASE)]), compose_config)[1]
    assert [point.name for point in found] == expected


def test_keys_that_end_alike_are_written_out() -> None:
    assert names("harness.retries=1,2", "evaluation.retries=3")[0] == "retries-1"
    assert names("harness.retries=1,2", "evaluation.retries=3,4")[0] == "harness.retries-1+evaluation.retries-3"


def test_long_values_end_in_a_digest_and_stay_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "_check_model", lambda config: None)
    one, two = names(f"model.path=/a/{'x' * 200}1,/a/{'x' * 200}2")
    assert one != two and len(one) == len(two) == NAME_LENGTH
    assert all(len(tag) <= TAG_LENGTH for tag in points(f"model.path=/a/{'x' * 200},/b")[1][0].config.logging.tags)


def test_one_group_and_tags_by_what_is_swept() -> None:
    root, found = points(TWO, "+mix.weights.pi=1,2", "logging.tags=[mine]")
    logging = found[0].config.logging
    assert logging.tags == ["mine", "algorithm.aggregation=group_mean", "mix.weights.pi=1"]
    assert logging.group == root.name.removeprefix("sweep-")
    assert points(TWO, "logging.group=ours")[1][0].config.logging.group == "ours"
    run = found[0].run
    run.new_attempt()
    run.save_config(compose_config([*BASE, "algorithm.aggregation=group_mean", "+mix.weights.pi=1"]))
    assert run.other_settings(found[0].config) == [], "tags and group make no other experiment"


def test_the_same_experiment_gets_the_same_directory_however_it_runs() -> None:
    one = points(TWO)[0]
    assert points(TWO, "cluster.timeout_min=5", "concurrency=2", "engine.shards=1", "fresh=true")[0] == one
    assert points(TWO, "seed=5")[0] != one
    assert points(TWO, "sweep.name=mine", "sweep.root=elsewhere")[0] == Path("elsewhere/sweep-mine").absolute()


# --- what is refused


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["run_dir=here", "seed=1,2"], "run_dir cannot be given with -m: a sweep makes its own run directories"),
        (["run_dir=here,there"], "run_dir cannot be given with -m"),
        (["cluster=local,slurm"], "cluster cannot be swept"),
        (["cluster.nodes=1,2"], "cluster cannot be swept"),
        (["++cluster.nodes=1,2"], "cluster cannot be swept"),
        (["sweep.name=a,b"], "sweep cannot be swept"),
        (["fresh=true,false"], "fresh cannot be swept"),
        (["logging.wandb=offline,disabled"], "logging cannot be swept"),
        (["seed=1"], "-m needs a key with several values"),
        ([], "-m needs a key with several values"),
        (["seed=range(3,1)"], "seed=range(3,1) gives no value"),
        (["mix=glob(no*)"], "mix=glob(no*) gives no value"),
        (["seed=interval(0,1)"], "a range without steps"),
        (["seed=1,1"], "would share the run directory seed-1"),
        (["model.path='a b',a-b"], "model.path='a b' and model.path=a-b would share the run directory path-a-b"),
        (["seed=1,2", "seed=3"], "seed is given twice"),
        (["mix=single,four", "mix.harnesses=[pi]"], "mix=single and mix=four are the same settings"),
        (["mix=single,four", "mix.harnesses=[pi]", "fresh=true"], "are the same settings"),
        (["seed=1,2", "sweep.name=a/b"], "sweep.name=a/b: letters"),
        (["algorithm.aggregation=group_mean,magic", "seed=1,2"], "point algorithm.aggregation=magic seed=1: "),
        (["algorithm.agregation=group_mean,token_mean"], "point algorithm.agregation=group_mean: "),
        (["seed=1,two"], "point seed=two: "),
        (["mix=single,five"], "point mix=five: "),
        (["seed=[1"], "no viable alternative"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_one_line_for_the_first_wrong_point_and_nothing_written(
    words: list[str], said: str, place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "train", lambda config: pytest.fail("nothing may start"))
    with pytest.raises(SystemExit) as ended:
        main(["train", "--multirun", *BASE, *words])
    told = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2 and len(told) == 1 and told[0].startswith("yoke: ") and said in told[0]
    assert list(place.iterdir()) == []


def test_a_sweep_and_only_a_sweep_takes_several_values(capsys: pytest.CaptureFixture[str]) -> None:
    for words, said in [
        (["train", *BASE, "seed=1,2"], "`yoke train -m` sweeps over them"),
        (["report", "-m", "seed=1,2"], "yoke report does not sweep; -m is for: train"),
        (["train", "-m", "--cfg", "seed=1,2"], "leave -m out"),
    ]:
        with pytest.raises(SystemExit) as ended:
            main(words)
        assert ended.value.code == 2 and said in capsys.readouterr().err


def test_other_settings_under_the_same_name_are_told_before_anything_starts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    started = []
    monkeypatch.setattr(jobs, "train", lambda config: started.append(config.seed) or 0)
    monkeypatch.setattr(sweep, "_report", lambda root: None)
    assert yoke(TWO) == 0
    point = points(TWO, "sweep.name=s")[1][1]
    point.run.new_attempt()
    point.run.save_config(point.config)
    assert yoke(TWO, "seed=5") == 2
    told = capsys.readouterr().err
    assert "point algorithm.aggregation=token_mean" in told and "(seed)" in told and "sweep.name" in told
    assert started == [0, 0]
    assert yoke(TWO, "seed=5", "fresh=true") == 0 and started == [0, 0, 5, 5]


def test_a_directory_of_something_else_is_spared(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "runs" / "sweep-s").mkdir(parents=True)
    (place / "runs" / "sweep-s" / "mine.txt").write_text("")
    assert yoke(TWO) == 2
    assert "holds other things than a sweep" in capsys.readouterr().err


# --- submitting


class FakeSlurm:
    """Takes jobs, and knows which are in the queue."""

    def __init__(self) -> None:
        self.jobs: dict[str, str] = {}  # job id → state
        self.of: dict[str, str] = {}  # run's name → its newest job id
        self.refuses = ""

    def submit(self, config: Config, run: RunDirectory) -> str:
        if self.refuses and self.refuses in run.root.name:
            raise UserError("sbatch refused the job: no such partition")
        job = str(100 + len(self.jobs))
        self.jobs[job], self.of[run.root.name] = "PENDING", job
        write_text(run.root / "submission.json", json.dumps({"job_id": job, "time": time.time()}))
        return job

    def queued(self, run: RunDirectory) -> tuple[str, str] | None:
        job = self.of.get(run.root.name)
        return (job, self.jobs[job]) if job and self.jobs[job] else None

    def find_jobs(self, ids: Sequence[str], deadline_s: float) -> dict[str, QueuedJob]:
        return {job: QueuedJob(job, self.jobs[job], "n1", "1", "", "None", "") for job in ids if self.jobs[job]}


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    fake = FakeSlurm()
    monkeypatch.setattr(slurm, "submit", fake.submit)
    monkeypatch.setattr(jobs, "queued", fake.queued)
    monkeypatch.setattr(status, "find_jobs", fake.find_jobs)
    monkeypatch.setattr(local, "follow", lambda config, run: pytest.fail("nothing may run here"))
    return fake


def finish(run: RunDirectory) -> None:
    run.new_attempt().publish("done", {"wall_s": {"train": 60.0}, "rollouts": 12, "set_aside": {}})


def test_every_point_is_submitted_and_the_prompt_comes_back(
    cluster: FakeSlurm, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert yoke(TWO, "cluster=slurm") == 0
    assert cluster.of == {NAMES[0]: "100", NAMES[1]: "101"}
    record = json.loads((place / "runs" / "sweep-s" / "sweep.json").read_text())
    assert [point["name"] for point in record["points"]] == NAMES
    assert record["points"][1]["overrides"] == ["algorithm.aggregation=token_mean"]
    table = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [NAMES[0], "queued", "100"] in table and [NAMES[1], "queued", "101"] in table
    saved = RunDirectory(place / "runs" / "sweep-s" / NAMES[1]).saved_config()
    assert saved.logging.group == "s" and saved.algorithm.aggregation == "token_mean"


def test_given_again_it_leaves_what_is_finished_or_on_its_way(cluster: FakeSlurm, place: Path) -> None:
    words = ["algorithm.aggregation=group_mean,token_mean,rollout_mean,constant", "cluster=slurm", "evaluation=none"]
    assert yoke(*words) == 0
    runs = [RunDirectory(place / "runs" / "sweep-s" / f"aggregation-{name}") for name in words[0][22:].split(",")]
    finish(runs[0])
    cluster.jobs["100"] = ""  # done and gone
    cluster.jobs["101"] = "RUNNING"
    runs[2].new_attempt().publish("failed", {"rank": "trainer", "text": "boom", "user_error": False})
    cluster.jobs["102"] = ""  # failed and gone; 103 waits
    assert yoke(*words) == 0
    assert sorted(cluster.jobs) == ["100", "101", "102", "103", "104"]
    assert cluster.of[runs[2].root.name] == "104", "only the failed one is submitted again"


def test_a_sweep_grows_under_its_name(cluster: FakeSlurm, place: Path) -> None:
    assert yoke("seed=1,2", "cluster=slurm") == 0
    assert yoke("seed=2,3", "cluster=slurm") == 0
    record = json.loads((place / "runs" / "sweep-s" / "sweep.json").read_text())
    assert [point["name"] for point in record["points"]] == ["seed-1", "seed-2", "seed-3"]
    assert len(cluster.jobs) == 3


def test_a_refused_point_does_not_stop_the_others(cluster: FakeSlurm, capsys: pytest.CaptureFixture[str]) -> None:
    cluster.refuses = "group_mean"
    assert yoke(TWO, "cluster=slurm") == 1
    assert list(cluster.of) == [NAMES[1]]
    assert f"{NAMES[0]}: sbatch refused the job: no such partition" in capsys.readouterr().err


def test_fresh_spares_a_run_that_is_going_on(cluster: FakeSlurm, capsys: pytest.CaptureFixture[str]) -> None:
    yoke(TWO, "cluster=slurm")
    assert yoke(TWO, "cluster=slurm", "fresh=true") == 2
    assert "is queued: `yoke stop` it" in capsys.readouterr().err and len(cluster.jobs) == 2
    cluster.jobs = dict.fromkeys(cluster.jobs, "")
    assert yoke(TWO, "cluster=slurm", "fresh=true") == 0 and len(cluster.jobs) == 4


def test_a_dry_run_lists_the_points_and_plans_the_first(
    cluster: FakeSlurm, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert yoke(TWO, "cluster=slurm", "dry_run=true") == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in NAMES) and "2 points" in shown
    assert shown.count("#SBATCH --job-name") == 1 and f"yoke-{NAMES[0]}" in shown
    assert not cluster.jobs and not (place / "runs").exists()


def test_a_job_that_was_requeued_goes_on_with_the_point_it_was_at(
    cluster: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    yoke(TWO, "cluster=slurm")
    cluster.jobs = {"100": "RUNNING", "101": "RUNNING"}
    seen = []
    monkeypatch.setattr(jobs, "train", lambda config: seen.append(Path(config.run_dir).name) or 0)
    monkeypatch.setattr(sweep, "_report", lambda root: None)
    monkeypatch.setattr(sweep, "own_job", lambda: "101")
    assert yoke(TWO, "cluster=allocation") == 0
    assert seen == [NAMES[1]]
    cluster.jobs["100"] = ""
    assert yoke(TWO, "cluster=allocation", "fresh=true") == 0, "its own start does not stand in its way"


# --- on this machine


def test_here_one_after_the_other_and_a_failure_stops_nothing(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    codes = {"group_mean": 1, "token_mean": 0, "rollout_mean": 3}
    seen, reported = [], []

    def train(config: Config) -> int:
        seen.append(config.algorithm.aggregation)
        if config.algorithm.aggregation == "constant":
            raise RuntimeError("boom")
        return codes[config.algorithm.aggregation]

    monkeypatch.setattr(jobs, "train", train)
    monkeypatch.setattr(sweep, "_report", reported.append)
    assert yoke("algorithm.aggregation=group_mean,constant,token_mean") == 1
    assert seen == ["group_mean", "constant", "token_mean"]
    assert reported == [place / "runs" / "sweep-s"]
    assert "aggregation-constant: boom" in capsys.readouterr().err
    assert yoke("algorithm.aggregation=token_mean,rollout_mean") == 3, "an incomplete evaluation has its own code"
