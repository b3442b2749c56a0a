"""Every step of REPRODUCE.md on the quick start's model: `make reproduce-small`, or `python -m tools.reproduce`.

It drives the `yoke` command as a reader of the page would, holds what comes out to what the page says, and can be given
again: steps that are done are skipped (`steps.json`), what was broken off goes on.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib import metadata
from math import sqrt
from pathlib import Path
from typing import IO, Any

from packaging.markers import Marker

from pipeline.cli import ASSETS
from pipeline.harness.base import get_harness, harness_root
from pipeline.launch.processes import is_alive
from pipeline.report.store import write_json
from pipeline.tasks.generate import generate_tasks

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "requirements" / "cpu.txt"
MODEL, TASKS = "model.safetensors", "quick start tasks"
PINS = {  # sha256
    MODEL: "9818f3a28d4fe5419640b2acab7605f750bae44e1064a5c8f663265456afffb7",
    TASKS: "0d513bc9f0b229fdcaf431a8857ae528c695b1b2e500737368cb3415ed65235a",
}
QUICKSTART = "+experiment=quickstart"
SPLITS = {"train": 96, "test": 100}  # tasks of conf/experiment/quickstart.yaml
SMOKE = ("+experiment=smoke", "training.updates=2", "training.checkpoint_every=1", "evaluation.before=false")
NOTHING_TRAINED = ("evaluation.before=false", "evaluation.after=false")  # else its report is not whole
PILOT_UPDATES = 12
IMPORT = "imported"  # label of a checkpoint that was taken over
# Held-out pass@1 of the quick start over seeds 0, 1 and 2: mean and standard deviation (docs/quickstart.md).
EXPECTED = {"before": (0.457, 0.038), "after": (0.878, 0.020)}
SIGMAS = 4.0  # a check that is made on every CI run must not fail by chance
COMMAND_S = 1500.0
KILL_S = 600.0  # until the first checkpoint of the smoke run
POLL_S = 0.05
OWN = ("logs", "smoke", "imported")  # in --root, besides steps.json
TAIL = 15  # lines of a log that are shown when a command failed


class StepFailed(Exception):
    """What a step found otherwise than it should be."""


@dataclass(frozen=True)
class Plan:
    """Where things lie and how much is done."""

    root: Path
    pilot: Path  # the run directory of the quick start; its training is used if it is done
    harnesses: tuple[str, ...]  # of the smoke run; the quick start's model knows Pi alone
    quick: bool  # evaluates the smoke run's few tasks instead of the pilot's
    words: tuple[str, ...]  # more settings of the pilot

    @property
    def smoke(self) -> Path:
        return self.root / "smoke"

    @property
    def imported(self) -> Path:
        return self.root / "imported"

    @property
    def measured(self) -> Path:
        """The run whose checkpoints are evaluated by `yoke evaluate`."""
        return self.smoke if self.quick else self.pilot

    @property
    def pilot_settings(self) -> tuple[str, ...]:
        return (QUICKSTART, *self.words)

    @property
    def smoke_settings(self) -> tuple[str, ...]:
        return (*SMOKE, f"mix.harnesses=[{','.join(self.harnesses)}]")

    @property
    def measured_settings(self) -> tuple[str, ...]:
        return self.smoke_settings if self.quick else self.pilot_settings


@dataclass
class Bench:
    """Runs the commands of one step and keeps what they print."""

    plan: Plan
    log: Path

    def yoke(self, *words: str) -> str:
        """What `yoke` with these words prints. Raises StepFailed when it ends with another code than 0."""
        with self.log.open("a+") as log:
            began = self._note(log, words)
            self._run(words, stdout=log, stderr=log)
            log.seek(began)
            return log.read()

    def yoke_json(self, *words: str) -> Any:
        """What `yoke` with these words prints on stdout, read as JSON. Raises StepFailed as yoke."""
        with self.log.open("a") as log:
            self._note(log, words)
            return json.loads(self._run(words, stdout=subprocess.PIPE, stderr=log))

    def _run(self, words: Sequence[str], **streams: Any) -> str:
        done = subprocess.run(command(*words), text=True, cwd=ROOT, timeout=COMMAND_S, **streams)
        if done.returncode:
            raise StepFailed(f"`yoke {' '.join(words)}` ended with {done.returncode}\n{last_lines(self.log)}")
        return done.stdout or ""

    @staticmethod
    def _note(log: IO[str], words: Sequence[str]) -> int:
        """Write down which command is run; returns where in the log its output begins."""
        log.write(f"$ yoke {' '.join(words)}\n")
        log.flush()
        return log.tell()


Step = tuple[str, Callable[[Bench], str]]  # the heading in REPRODUCE.md; what does it and says in a line what came out


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "pipeline", *words]


# --- the steps


def pins(bench: Bench) -> str:
    """Libraries as locked, harnesses as pinned, model and tasks as hashed."""
    if strange := list(other_versions(LOCK.read_text())):
        raise StepFailed(
            f"{len(strange)} packages are not as locked: {', '.join(strange[:5])}; `make install` mends it"
        )
    for what, found in hashes().items():
        if found != PINS[what]:
            raise StepFailed(f"{what}: sha256 is {found}, REPRODUCE.md says {PINS[what]}")
    return f"{len(locked(LOCK.read_text()))} packages as locked, model and tasks as hashed"


def prepare(bench: Bench) -> str:
    """Harnesses installed; every task solved by its oracle and by nothing else."""
    harnesses = sorted({"pi", *bench.plan.harnesses})
    bench.yoke("harness", "install", *harnesses)
    for name in harnesses:
        get_harness(name).check_installed(harness_root(None))
    said = bench.yoke("check", *bench.plan.pilot_settings)
    checked = re.search(r"(\d+) tasks are", said)
    if not checked:
        raise StepFailed(f"`yoke check` said nothing of tasks: {said}")
    versions = ", ".join(f"{name} {get_harness(name).version}" for name in harnesses)
    return f"{versions}; {checked[1]} tasks: the oracle scores 1, doing nothing scores 0"


def preflight(bench: Bench) -> str:
    """Every check. A quick one leaves those of the engine to the start of the smoke run, which makes them too."""
    skip = ["preflight.skip=[engine,parser,thinking,continuity,logprobs,trainer]"] if bench.plan.quick else []
    found = bench.yoke_json("preflight", *bench.plan.pilot_settings, *skip, "--json")
    made = [check["name"] for check in found["checks"] if check["result"] == "ok"]
    if not found["ok"] or len(made) < (8 if skip else 14):
        raise StepFailed(f"only these checks passed: {', '.join(made)}")
    return f"{len(made)} of {len(found['checks'])} checks made, all passed"


def smoke(bench: Bench) -> str:
    """Two updates, killed after the first: everything of the run at once, as a power cut would."""
    run_dir = bench.plan.smoke
    with bench.log.open("a") as log:
        running = subprocess.Popen(
            command("train", f"run_dir={run_dir}", *bench.plan.smoke_settings, "fresh=true"),
            stdout=log,
            stderr=log,
            cwd=ROOT,
        )
    try:
        deadline = time.monotonic() + KILL_S
        while not checkpoints(run_dir):
            if running.poll() is not None or time.monotonic() > deadline:
                raise StepFailed(f"no checkpoint after {KILL_S:g} s\n{last_lines(bench.log)}")
            time.sleep(POLL_S)
    finally:
        killed = kill_all([running.pid, *controllers(run_dir)])
        running.wait()
    return f"update {newest_update(run_dir)} saved; then {killed} processes killed"


def resume(bench: Bench) -> str:
    """The same command goes on; every group ends once; the checkpoint is loaded into a fresh engine and evaluated."""
    run_dir = bench.plan.smoke
    bench.yoke("train", f"run_dir={run_dir}", *bench.plan.smoke_settings)
    state = json.loads((checkpoints(run_dir)[-1] / "state.json").read_text())["state"]["flow"]
    scheduled = {f"g{index:06d}" for index in range(state["next_index"])}
    attempts = len(list((run_dir / "attempts").iterdir()))
    if state["update"] != 2 or set(state["ended"]) != scheduled or attempts < 2:
        raise StepFailed(
            f"update {state['update']} of 2, {len(state['ended'])} of {len(scheduled)} groups ended, {attempts} starts"
        )
    reloaded = held_to_own(bench, run_dir, "newest", "after")
    return f"start {attempts} went on to update 2, each of {len(scheduled)} groups ended once; {reloaded}"


def pilot(bench: Bench) -> str:
    """The quick start's own run: trained here, or found done."""
    run_dir = bench.plan.pilot
    said = bench.yoke("train", f"run_dir={run_dir}", *bench.plan.pilot_settings)
    figures = results(run_dir)
    found = " (it was done)" if "is done; fresh=true" in said else ""
    rise = f"{figures['updates']} updates{found}, pass@1 {percent(figures['before'])} → {percent(figures['after'])}"
    return rise if bench.plan.quick else f"{rise}; {held_to_own(bench, run_dir, 'newest', 'after')}"


def evaluation(bench: Bench) -> str:
    """Base first, then the newest checkpoint, each from disk into a fresh engine. A quick one has no base."""
    both = (("base", "before"), ("newest", "after"))
    return "; ".join(held_to_own(bench, bench.plan.measured, *pair) for pair in both[bench.plan.quick :])


def check_evaluator(bench: Bench) -> str:
    """An exported checkpoint, imported as a stranger's: the same weights, and the same pass@1."""
    plan = bench.plan
    name = checkpoints(plan.measured)[-1].name
    export, place = plan.measured / "models" / name, plan.imported
    settings = (*plan.measured_settings, *NOTHING_TRAINED)
    bench.yoke("import", f"model={export}", f"label={IMPORT}", f"run_dir={place}", *settings)
    weights = {digest(path / MODEL) for path in (export, place / "models" / IMPORT)}
    if len(weights) != 1:
        raise StepFailed(f"{place / 'models' / IMPORT} holds other weights than {export}")
    bench.yoke("evaluate", f"run_dir={place}", f"stage.checkpoint={IMPORT}")
    found = evaluated(bench.yoke_json("report", str(place), "--json"), IMPORT)
    own = evaluated(results(plan.measured), name)
    require_same(found, own, "imported", name)
    cohorts = [cohort(run_dir, label) for run_dir, label in ((plan.measured, name), (place, IMPORT))]
    if cohorts[0] != cohorts[1]:
        raise StepFailed(f"the two evaluations are of other tasks or graders: {cohorts}")
    return f"the same weights, tasks and graders; {found[0]:.1%} of {found[1]} (its own evaluation {own[0]:.1%})"


def full_run(bench: Bench) -> str:
    """What a job of the cluster would do: the plan and the batch script, with nothing submitted."""
    place = bench.plan.root / "full"
    words = (f"run_dir={place}", "cluster=slurm", "cluster.gpus_per_node=2", "dry_run=true", QUICKSTART)
    said = bench.yoke("train", *words)
    missing = [word for word in ("2 GPUs", "#SBATCH --requeue", "srun ") if word not in said]
    if missing or place.exists():
        raise StepFailed(f"the plan lacks {missing}" if missing else f"{place} was written by a dry run")
    return "plan and batch script of a node with two GPUs; nothing submitted"


def report(bench: Bench) -> str:
    """The page of each run, and both side by side."""
    runs = [bench.plan.pilot, bench.plan.smoke]
    for run_dir in runs:
        bench.yoke("report", str(run_dir))
    bench.yoke("report", *map(str, runs))
    pages = [runs[0] / "report" / name for name in ("index.html", "compare.html", "table.md", "curve.png")]
    if empty := [page.name for page in pages if not page.is_file() or page.stat().st_size < 100]:
        raise StepFailed(f"missing or empty: {', '.join(empty)}")
    return f"{pages[0]} and {pages[1].name}"


def expected(bench: Bench) -> str:
    """The pilot's figures against those of three seeds. A shorter pilot must rise, and not above them."""
    figures = results(bench.plan.pilot)
    before, after = ((figures[side]["pass@1"], figures[side]["n"]) for side in ("before", "after"))
    if figures["provisional"]:
        raise StepFailed("not every held-out rollout is graded: the same command tries the rest again")
    hold(before, "before")
    if figures["updates"] == PILOT_UPDATES:
        hold(after, "after")
    elif after[0] <= before[0]:
        raise StepFailed(f"pass@1 did not rise: {before[0]:.1%} → {after[0]:.1%}")
    return f"{before[0]:.1%} → {after[0]:.1%} after {figures['updates']} updates; {said_of(EXPECTED)} over three seeds"


STEPS: tuple[Step, ...] = (
    ("Pins", pins),
    ("Prepare", prepare),
    ("Preflight", preflight),
    ("Smoke", smoke),
    ("Resume", resume),
    ("Pilot", pilot),
    ("Check the evaluator", check_evaluator),
    ("Full run", full_run),
    ("Evaluation", evaluation),
    ("Report", report),
    ("Expected numbers", expected),
)


# --- what they look at


def results(run_dir: Path) -> dict[str, Any]:
    """The results.json that a run left."""
    found: dict[str, Any] = json.loads((run_dir / "report" / "results.json").read_text())
    return found


def cohort(run_dir: Path, label: str) -> dict[str, str]:
    """The hashes of an evaluation's tasks and graders."""
    found = json.loads((run_dir / "evaluation" / label / "cohort.json").read_text())
    return {key: found[key] for key in ("sha256", "graders_sha256")}


def held_to_own(bench: Bench, run_dir: Path, checkpoint: str, side: str) -> str:
    """Evaluate a checkpoint by itself, and hold it to what the run measured with the same weights while it trained."""
    bench.yoke("evaluate", f"run_dir={run_dir}", f"stage.checkpoint={checkpoint}")
    label = checkpoint if checkpoint == "base" else checkpoints(run_dir)[-1].name
    figures = bench.yoke_json("report", str(run_dir), "--json")
    found, own = evaluated(figures, label), (figures[side]["pass@1"], figures[side]["n"])
    require_same(found, own, f"{checkpoint} evaluated by itself", f"`{side}`")
    return f"{checkpoint} by itself {found[0]:.1%} of {found[1]} (`{side}` was {own[0]:.1%})"


def locked(text: str) -> dict[str, str]:
    """Package → version of the lines of a lock that hold for this Python."""
    lines = re.findall(r"^([\w.-]+)==([^\s;]+)(?: ; (.*?))? \\$", text, re.M)
    return {name: version for name, version, marker in lines if not marker or Marker(marker).evaluate()}


def other_versions(text: str) -> Iterator[str]:
    """What is installed otherwise than the lock says. A build's name behind a plus (2.13.0+cpu) does not count."""
    for name, version in locked(text).items():
        try:
            found = metadata.version(name).partition("+")[0]
        except metadata.PackageNotFoundError:
            found = "missing"
        if found != version.partition("+")[0]:
            yield f"{name} {found} instead of {version}"


def hashes() -> dict[str, str]:
    """sha256 of what PINS names."""
    with tempfile.TemporaryDirectory() as scratch:
        for split, size in SPLITS.items():
            generate_tasks(Path(scratch), split, size, 0)
        tasks = digest(Path(scratch))
    return {MODEL: digest(ASSETS / "quickstart-model" / MODEL), TASKS: tasks}


def digest(place: Path) -> str:
    """sha256 of a file, or of the names and contents of all files of a folder."""
    if place.is_file():
        return hashlib.sha256(place.read_bytes()).hexdigest()
    whole = hashlib.sha256()
    for path in sorted(path for path in place.rglob("*") if path.is_file()):
        whole.update(f"{path.relative_to(place)}\0{digest(path)}\n".encode())
    return whole.hexdigest()


def checkpoints(run_dir: Path) -> list[Path]:
    """Whole checkpoints of a run, oldest first."""
    place = run_dir / "checkpoints"
    return sorted(path for path in place.glob("[!.]*") if (path / "state.json").exists()) if place.is_dir() else []


def newest_update(run_dir: Path) -> int:
    return int(checkpoints(run_dir)[-1].name.rpartition("-")[2])


def controllers(run_dir: Path) -> list[int]:
    """Living processes that the attempts of a run live and die with."""
    jobs = [json.loads(path.read_text()) for path in run_dir.glob("attempts/*/job.json")]
    return [int(job["pid"]) for job in jobs if is_alive(job)]


def kill_all(roots: Iterable[int]) -> int:
    """SIGKILL to these processes and everything below them, those that start others first. Returns how many."""
    doomed = list(dict.fromkeys(pid for root in roots for pid in (root, *descendants(root))))
    for pid in doomed:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return len(doomed)


def descendants(root: int) -> list[int]:
    """Parents before their children."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, ProcessLookupError):
            parent = int(entry.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(entry.parent.name))
    found = children.get(root, [])
    for pid in found:
        found.extend(children.get(pid, []))
    return found


Figure = tuple[float, int]  # pass@1 and the number of graded rollouts


def evaluated(results: dict[str, Any], label: str) -> Figure:
    """A checkpoint's evaluation in results.json."""
    found = next((entry for entry in results["checkpoints"] if entry["label"] == label), None)
    if found is None or found["graded"] < found["planned"]:
        raise StepFailed(f"the evaluation {label} is not whole: {found}")
    return float(found["pass@1"]), int(found["graded"])


def noise(first: Figure, second: Figure) -> float:
    """SIGMAS standard deviations of the difference of two pass rates of the same weights, and one rollout."""
    n, m = first[1], second[1]
    rate = (first[0] * n + second[0] * m) / (n + m)
    return SIGMAS * sqrt(rate * (1 - rate) * (1 / n + 1 / m)) + 1 / min(n, m)


def require_same(found: Figure, known: Figure, what: str, other: str) -> None:
    """Raises StepFailed when two evaluations of the same weights differ by more than noise."""
    if abs(found[0] - known[0]) > noise(found, known):
        raise StepFailed(
            f"{what}: {found[0]:.1%} of {found[1]}; {other}: {known[0]:.1%} of {known[1]}; "
            f"noise is {noise(found, known):.1%} at most"
        )


def hold(found: Figure, side: str) -> None:
    """Raises StepFailed when a pass rate lies outside what three seeds gave, scatter and noise added."""
    mean, deviation = EXPECTED[side]
    bound = SIGMAS * sqrt(deviation**2 + mean * (1 - mean) / found[1])
    if abs(found[0] - mean) > bound:
        raise StepFailed(f"{side}: {found[0]:.1%} of {found[1]}, expected {mean:.1%} ± {bound:.1%}")


def said_of(numbers: dict[str, tuple[float, float]]) -> str:
    """As REPRODUCE.md has it."""
    return ", ".join(f"{side} {mean:.1%} ± {deviation:.1%}" for side, (mean, deviation) in numbers.items())


def percent(figures: dict[str, Any] | None) -> str:
    return "–" if figures is None else f"{figures['pass@1']:.1%}"


def last_lines(log: Path) -> str:
    """The end of a log, and where it lies."""
    lines = log.read_text(errors="replace").splitlines()[-TAIL:]
    return "\n".join([f"  {line[:200]}" for line in lines] + [f"  whole log: {log}"])


# --- one after the other


@dataclass
class Progress:
    """What is done, in steps.json. A step that failed, and those behind it, are done again."""

    place: Path
    plan: Plan
    done: dict[str, dict[str, Any]] = field(default_factory=dict)

    def load(self) -> None:
        """Raises StepFailed when the steps were made with another plan."""
        if not self.place.exists():
            return
        saved = json.loads(self.place.read_text())
        if saved["plan"] != self._plan():
            raise StepFailed(f"{self.place} is of another plan; --fresh starts over, or choose another --root")
        self.done = saved["done"]

    def mark(self, name: str, said: str, seconds: float) -> None:
        self.done[name] = {"said": said, "seconds": round(seconds, 1)}
        write_json(self.place, {"plan": self._plan(), "done": self.done})

    def _plan(self) -> dict[str, Any]:
        plan: dict[str, Any] = json.loads(json.dumps(asdict(self.plan), default=str))
        return plan


def reproduce(plan: Plan, steps: Sequence[Step] = STEPS) -> int:
    """All steps that are not done. Returns 0, or 1 as soon as one failed."""
    progress = Progress(plan.root / "steps.json", plan)
    progress.load()
    for number, (name, action) in enumerate(steps, 1):
        title = f"[{number:2}/{len(steps)}] {name:<19}"
        if name in progress.done and action is not pins:
            say(f"{title} done before: {progress.done[name]['said']}")
            continue
        log = plan.root / "logs" / f"{name.lower().replace(' ', '-')}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        began = time.monotonic()
        try:
            said = action(Bench(plan, log))
        except (StepFailed, subprocess.TimeoutExpired) as error:
            say(f"{title} FAILED after {time.monotonic() - began:.0f} s: {error}")
            say("the same command begins with this step again")
            return 1
        progress.mark(name, said, time.monotonic() - began)
        say(f"{title} ok, {time.monotonic() - began:4.0f} s: {said}")
    say(table(progress.done))
    return 0


def table(done: dict[str, dict[str, Any]]) -> str:
    """What was done, as Markdown."""
    rows = [f"| {name} | {step['seconds']:.0f} | {step['said']} |" for name, step in done.items()]
    whole = sum(step["seconds"] for step in done.values())
    return "\n".join(["", "| step | s | what came out |", "|---|---:|---|", *rows, f"| all | {whole:.0f} | |"])


def say(text: str) -> None:
    print(text, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tools.reproduce", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--root", type=Path, default=Path("runs/reproduce"), help="where its runs go")
    parser.add_argument("--pilot", type=Path, default=Path("runs/quickstart"), help="the quick start's run directory")
    parser.add_argument("--harnesses", default="pi,mini-swe-agent", help="of the smoke run")
    parser.add_argument("--quick", action="store_true", help="evaluate the smoke run's few tasks only")
    parser.add_argument("--fresh", action="store_true", help="do every step again; a pilot that is done stays")
    parser.add_argument("words", nargs="*", metavar="key=value", help="more settings of the pilot")
    given = parser.parse_args(arguments)
    root = given.root.absolute()
    plan = Plan(root, given.pilot.absolute(), tuple(given.harnesses.split(",")), given.quick, tuple(given.words))
    try:
        if given.fresh:
            start_over(plan)
        return reproduce(plan)
    except StepFailed as error:
        print(f"reproduce: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("reproduce: interrupted; the same command goes on", file=sys.stderr)
        return 130


def start_over(plan: Plan) -> None:
    """Delete what an earlier call left. Raises StepFailed when the folder holds other things."""
    if not plan.root.exists():
        return
    if not (plan.root / "steps.json").exists() and any(path.name not in OWN for path in plan.root.iterdir()):
        raise StepFailed(
            f"{plan.root} holds other things than these steps: delete it yourself or choose another --root"
        )
    shutil.rmtree(plan.root)


if __name__ == "__main__":
    sys.exit(main())
