"""How the ranks of one start of the job find each other: which attempt it is, who the trainers are, and under which
name a node is reached. The attempt's directory is the meeting place; what lives on travels by socket.
"""

from __future__ import annotations

import os
import socket
import time
from datetime import timedelta

import submitit

from pipeline.config import ClusterConfig, UserError
from pipeline.launch.run_directory import RENDEZVOUS_S, Attempt, RunDirectory

POLL_S = 0.3
ANYWHERE = "0.0.0.0"
LOOPBACK = "127.0.0.1"


def restart_count() -> int:
    """How often Slurm has started this job again."""
    return int(os.environ.get("SLURM_RESTART_COUNT") or 0)


def agree_on_attempt(run: RunDirectory, environment: submitit.JobEnvironment) -> Attempt:
    """The attempt of this start of the Slurm job: global rank 0 claims it, the others wait for its word.

    Raises TimeoutError when rank 0 leaves no word within RENDEZVOUS_S.
    """
    start = {"slurm": environment.job_id, "restart": restart_count()}
    if environment.global_rank == 0:
        attempt = run.new_attempt()
        attempt.publish("job", {**start, "nodes": list(environment.hostnames)})
        return attempt
    deadline = time.monotonic() + RENDEZVOUS_S
    while time.monotonic() < deadline:
        for number in reversed(run.attempt_numbers()[-1:]):
            job = run.attempt(number).read("job") or {}
            if {name: job.get(name) for name in start} == start:
                return run.attempt(number)
        time.sleep(POLL_S)
    raise TimeoutError(f"rank 0 of job {start['slurm']} claimed no attempt in {run.attempts} within {RENDEZVOUS_S:g} s")


def own_host(cluster: ClusterConfig) -> str:
    """The name under which other nodes reach this one; this machine's loopback while there are no others.

    Raises UserError when no name of this node is known to its resolver.
    """
    if cluster.nodes == 1:
        return LOOPBACK
    names = [cluster.host] if cluster.host else [socket.gethostname(), os.environ.get("SLURMD_NODENAME", "")]
    for name in filter(None, names):
        try:
            socket.getaddrinfo(name, None, socket.AF_INET)
        except OSError:
            continue
        return name
    raise UserError(f"no address is known for {' or '.join(filter(None, names))}: set cluster.host")


def join_trainers(attempt: Attempt, cluster: ClusterConfig, node: int) -> None:
    """Make the trainer ranks of all nodes one process group; node 0 keeps the store. Nothing to do on one node.

    Raises TimeoutError when node 0 leaves no word within RENDEZVOUS_S.
    """
    if cluster.nodes == 1:
        return
    import torch
    import torch.distributed as dist

    limit = timedelta(seconds=RENDEZVOUS_S)
    if node == 0:
        store = dist.TCPStore(own_host(cluster), 0, cluster.nodes, True, limit, wait_for_workers=False)
        attempt.publish("trainers", {"host": own_host(cluster), "port": store.port})
    else:
        place = _await_trainers(attempt)
        store = dist.TCPStore(place["host"], place["port"], cluster.nodes, False, limit)
    os.environ |= {"RANK": str(node), "WORLD_SIZE": str(cluster.nodes), "LOCAL_RANK": "0"}  # DeepSpeed looks there
    if cluster.interface:
        os.environ |= {"GLOO_SOCKET_IFNAME": cluster.interface, "NCCL_SOCKET_IFNAME": cluster.interface}
    from pipeline.training.distributed import join_group

    join_group(torch.cuda.is_available(), store, node, cluster.nodes)


def _await_trainers(attempt: Attempt) -> dict[str, int | str]:
    deadline = time.monotonic() + RENDEZVOUS_S
    while time.monotonic() < deadline:
        if place := attempt.read("trainers"):
            return place
        if failed := attempt.read("failed"):
            raise RuntimeError(f"the {failed['rank']} rank failed: {failed['text']}")
        time.sleep(POLL_S)
    raise TimeoutError(f"the first trainer rank left no word in {attempt.root} within {RENDEZVOUS_S:g} s")
