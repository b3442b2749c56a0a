"""How a run stands, put together from what its files, its coordinator and Slurm's queue tell: the object that
`yoke status --json` prints (docs/status.md). No input or output here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from pipeline.launch.squeue import QueuedJob

FRESH_S = 60.0  # a snapshot of this age still shows that its run is alive
ERRORS_SHOWN = 6
PHASE = "perf/weight_sync/"
OPEN = ("running", "unknown")
ENDED = ("done", "stopped", "failed")
Facts = Mapping[str, Any]


def combine(
    name: str, facts: Facts, live: Facts | None, jobs: Mapping[str, QueuedJob] | None, now: float
) -> dict[str, Any]:
    """``live``: the coordinator's own words, None when it does not answer. ``jobs``: the run's job, if Slurm knows it;
    None when Slurm does not answer or was not asked.
    """
    job = describe_job(facts, jobs)
    state, reason = judge(facts, job, live is not None, now)
    on = state == "running"
    told = live or facts["snapshot"] or {}
    return {
        "run": name,
        "time": now,
        "state": state,
        "reason": reason,
        "job": job,
        "requeues": _requeues(facts, job),
        "attempts": _attempts(facts, state),
        "attempts_total": facts["attempts_total"],
        "figures": {"from": "coordinator" if live else "status.json" if told else None, "time": told.get("time")},
        "phase": told.get("phase") if on else None,
        "updates": _updates(facts, told, state, now),
        **_metrics(facts["metrics"]),
        "rollouts": told.get("rollouts") if on else None,
        "counts": told.get("counts"),
        "nodes": _nodes(facts, told) if on else [],
        "checkpoint": _checkpoint(facts, told, on),
        "disk": facts["disk"],
        "set_aside": told.get("set_aside", {}),
        "errors": _errors(facts, told),
    }


# --- in which state it is


def describe_job(facts: Facts, jobs: Mapping[str, QueuedJob] | None) -> dict[str, Any] | None:
    """The Slurm job or the process of the run; None before there was any."""
    job_id = slurm_job(facts)
    newest = facts["attempts"][-1]["job"] if facts["attempts"] else {}
    if job_id is not None:
        known = (jobs or {}).get(job_id)
        shown = (
            {name: getattr(known, name) for name in ("state", "nodes", "count", "left", "reason", "start")}
            if known
            else {}
        )
        return {"kind": "slurm", "id": job_id, "asked": jobs is not None, "waits": bool(known and known.waits)} | {
            "on": bool(known and known.is_on),
            **{name: shown.get(name) or None for name in ("state", "nodes", "count", "left", "reason", "start")},
        }
    if "pid" in newest:
        return {"kind": "local", "pid": newest["pid"], "host": newest.get("host"), "alive": newest["alive"]}
    return None


def slurm_job(facts: Facts) -> str | None:
    """The id of the run's newest Slurm job; None for a run of one machine."""
    submission = facts["submission"] or {}
    attempt: Facts = facts["attempts"][-1] if facts["attempts"] else {"job": {}, "started": 0.0}
    if "job_id" in submission and submission.get("time", 0.0) >= (attempt["started"] or 0.0):
        return str(submission["job_id"])
    return str(attempt["job"]["slurm"]) if "slurm" in attempt["job"] else None


def judge(facts: Facts, job: Facts | None, answers: bool, now: float) -> tuple[str, str | None]:
    """(state, why). ``answers``: the coordinator of the newest attempt does."""
    ended = _ended(facts)
    if job is None:
        return ended or ("not started", None)
    if job["kind"] == "slurm" and job["waits"]:
        return "queued", job["reason"]
    if job["kind"] == "slurm" and job["on"]:
        return ("running", None) if job["state"] == "RUNNING" else ("running", f"Slurm: {job['state']}")
    if answers or (job["kind"] == "local" and job["alive"]):
        return "running", None
    if not _can_tell(job):
        return _guess(facts, ended, now)
    return ended or _lost(job)


def _can_tell(job: Facts) -> bool:
    """Whether it is known of the job that it does not run."""
    return bool(job["asked"]) if job["kind"] == "slurm" else job["alive"] is not None


def _guess(facts: Facts, ended: tuple[str, str | None] | None, now: float) -> tuple[str, str | None]:
    """Neither the coordinator nor Slurm, or the machine that the run is on, can be asked."""
    if ended is not None and _trained(facts)[-1]["ending"] in ("done", "stopped"):
        return ended  # it is not put back into the queue
    age = now - facts["snapshot"]["time"] if facts["snapshot"] else None
    if ended is None and age is not None and age < FRESH_S:
        return "running", f"by its status.json, {age:.0f} s old"
    return "unknown", "neither its coordinator nor its job could be asked"


def _trained(facts: Facts) -> list[Facts]:
    return [attempt for attempt in facts["attempts"] if attempt["ending"] != "stage done"]


def _ended(facts: Facts) -> tuple[str, str | None] | None:
    """How the newest attempt that trained ended, if it left word."""
    trained = _trained(facts)
    if any(attempt["ending"] == "done" for attempt in trained):
        return "done", None
    if not trained or trained[-1]["ending"] is None:
        return None
    return ("failed" if trained[-1]["ending"] == "failed" else "stopped"), trained[-1]["why"]


def _lost(job: Facts) -> tuple[str, str]:
    if job["kind"] == "local":
        return "failed", "it ended without a word: its processes are gone"
    if job["state"] == "CANCELLED":
        return "stopped", f"job {job['id']} was cancelled"
    slurm = f"says {job['state']}" if job["state"] else "does not know it any more"
    return "failed", f"job {job['id']} ended without a word: Slurm {slurm}"


def _attempts(facts: Facts, state: str) -> list[dict[str, Any]]:
    """An attempt that left no word is the running one, as far as that can be told, or was lost."""
    shown = []
    may_run = state in OPEN and facts["attempts"] and _is_of_job(facts)
    current = facts["attempts"][-1] if may_run else None
    for attempt in facts["attempts"]:
        ending, why = attempt["ending"], attempt["why"]
        if ending is None and attempt is current:
            ending = state
        elif ending is None:
            ending, why = "lost", "it left no word: killed, or its node was lost"
        job = attempt["job"]
        shown.append(
            {name: attempt[name] for name in ("number", "started", "ended")}
            | {"ending": ending, "why": why, "slurm": job.get("slurm"), "restart": job.get("restart")}
            | {"nodes": job.get("nodes")}
        )
    return shown


def _is_of_job(facts: Facts) -> bool:
    """Whether the newest attempt is of the run's newest job, which may not have come so far."""
    job_id = slurm_job(facts)
    return job_id is None or str(facts["attempts"][-1]["job"].get("slurm")) == job_id


def _requeues(facts: Facts, job: Facts | None) -> dict[str, int | None] | None:
    """How often this job was started again, of how often it may be."""
    if job is None or job["kind"] != "slurm":
        return None
    restarts = [a["job"]["restart"] for a in facts["attempts"] if str(a["job"].get("slurm")) == job["id"]]
    bound = (facts["submission"] or {}).get("max_requeues", facts["settings"]["max_requeues"])
    return {"used": max(restarts, default=0), "max": bound}


# --- how far it is


def _updates(facts: Facts, told: Facts, state: str, now: float) -> dict[str, Any]:
    """``done`` of a run that is not on: what its newest checkpoint holds, which is where it goes on."""
    kept = facts["checkpoint"]["update"] if facts["checkpoint"] else 0
    told_updates = told.get("updates", {})
    planned = facts["settings"]["planned"] or told_updates.get("planned") or 0
    done = max(kept, told_updates.get("done", 0)) if state == "running" else kept
    pace = fmean(seconds for _, seconds in facts["metrics"]["steps"]) if facts["metrics"]["steps"] else None
    return {
        "done": done,
        "planned": planned,
        "seconds_each": pace,
        "eta_s": _eta(facts, planned - done, pace, state, now),
    }


def _eta(facts: Facts, left: int, pace: float | None, state: str, now: float) -> float | None:
    """Seconds until the last update at the pace of the latest ones; None when it is not on its way."""
    if pace is None or state != "running" or left < 0:
        return None
    since = now - facts["metrics"]["last"]["time"] if facts["metrics"]["last"] else 0.0
    return max(0.0, pace * left - min(max(0.0, since), pace))


def _metrics(metrics: Facts) -> dict[str, Any]:
    """What the newest update measured."""
    last = metrics["last"] or {}
    harnesses = sorted(name.removesuffix("/pass_rate") for name in last if name.endswith("/pass_rate"))
    return {
        "reward": {
            "update": last.get("update"),
            "reward": last.get("reward"),
            "pass_rate": last.get("pass_rate"),
            "harnesses": {
                name: {"reward": last.get(f"{name}/reward"), "pass_rate": last.get(f"{name}/pass_rate")}
                for name in harnesses
            },
        },
        "staleness": {name: last.get(f"sample/staleness_{name}") for name in ("min", "mean", "max")},
        "weight_sync_s": last.get("perf/weight_sync_s"),
        "weight_sync_phases": {
            name.removeprefix(PHASE).removesuffix("_s"): last[name] for name in last if name.startswith(PHASE)
        },
        "rollout_wait_s": last.get("perf/rollout_wait_s"),
        "evaluations": metrics["evaluations"],
    }


def _nodes(facts: Facts, told: Facts) -> list[dict[str, Any]]:
    return [{**node, "shards": facts["settings"]["shards"]} for node in told.get("nodes", [])]


def _checkpoint(facts: Facts, told: Facts, on: bool) -> dict[str, Any]:
    """The newest one, and at which update the next one is due."""
    newest = facts["checkpoint"] or {"name": None, "update": None, "time": None}
    every, planned = facts["settings"]["checkpoint_every"], facts["settings"]["planned"]
    due = None
    if on and every and planned:
        done = told.get("updates", {}).get("done", newest["update"] or 0)
        due = min(planned, (done // every + 1) * every) if done < planned else planned
    return {"newest": newest["name"], "update": newest["update"], "time": newest["time"], "next_update": due}


def _errors(facts: Facts, told: Facts) -> list[dict[str, Any]]:
    """The latest ones, oldest first: alarms, why attempts failed, and what the logs end with."""
    failed = [
        {"time": attempt["ended"], "text": f"attempt {attempt['number']}: {attempt['why']}"}
        for attempt in facts["attempts"]
        if attempt["ending"] == "failed"
    ]
    alarms: Sequence[Facts] = told.get("errors") or facts["alarms"]
    found = [*alarms, *failed, *facts["last_words"]]
    return sorted(map(dict, found), key=lambda error: error["time"] or 0.0)[-ERRORS_SHOWN:]
