"""What a run would do, in words, from its settings alone."""

from __future__ import annotations

from pipeline.config import Config
from pipeline.launch.run_directory import RunDirectory


def plan(config: Config, run: RunDirectory) -> str:
    """One line a topic; nothing is started or written."""
    rows = {"run": _run(config, run), **_machines(config), **_work(config), **_results(config, run)}
    width = max(map(len, rows))
    return "\n".join(f"{topic:<{width}}  {said}" for topic, said in rows.items())


def _run(config: Config, run: RunDirectory) -> str:
    started = len(run.attempt_numbers())
    return f"{run.root}, " + (f"goes on after {started} attempts" if started else "new")


def _machines(config: Config) -> dict[str, str]:
    cluster = config.cluster
    nodes, gpus = cluster.nodes, cluster.gpus_per_node
    if cluster.name == "local":
        return {"machine": f"this one, {gpus or 'no'} GPUs", "ranks": _ranks(1)}
    warning = f"{cluster.signal_s} s before it, and before a preemption, the run saves and is requeued"
    return {
        "nodes": f"{nodes}, each with {gpus} GPUs" + (f", partition {cluster.partition}" if cluster.partition else ""),
        "ranks": _ranks(nodes),
        "time limit": f"{cluster.timeout_min} min a start; {warning}",
        "restarts": f"at most {cluster.max_requeues} beyond the first start",
    }


def _ranks(nodes: int) -> str:
    where = "" if nodes == 1 else " a node"
    return (
        f"{2 * nodes}: a trainer{where} (advantage, update; the first also schedules) "
        f"and an engine{where} (vLLM, proxy, rollouts, verification)"
    )


def _work(config: Config) -> dict[str, str]:
    algorithm, training, nodes = config.algorithm, config.training, config.cluster.nodes
    rollouts = algorithm.groups_per_update * algorithm.group_size
    times = [
        word for word, wanted in (("before", config.evaluation.before), ("after", config.evaluation.after)) if wanted
    ]
    held_out = config.evaluation.rollouts_per_task * len(config.mix.harnesses)
    return {
        "model": config.model.path,
        "harnesses": ", ".join(config.mix.harnesses),
        "rollouts": f"{config.concurrency * nodes} at once ({config.concurrency} a node)",
        "updates": f"{training.updates}, each of {algorithm.groups_per_update} groups of {algorithm.group_size} "
        f"= {rollouts} rollouts",
        "checkpoints": f"every {training.checkpoint_every} updates, the newest {training.keep_checkpoints} are kept",
        "evaluations": f"{' and '.join(times)} training, {held_out} rollouts a held-out task" if times else "none",
    }


def _results(config: Config, run: RunDirectory) -> dict[str, str]:
    return {
        "logs": f"{run.attempts}/NNNN/logs",
        "results": str(run.report),
        "W&B": config.logging.wandb
        if config.logging.wandb == "disabled"
        else f"{config.logging.wandb}, project {config.logging.project}",
    }
