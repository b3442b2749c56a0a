"""One vLLM server as a child process: its command line, its start, its health and its end.

Blocking calls; from asyncio use ``asyncio.to_thread``. Who restarts it, and how often, is the launcher's business.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from pathlib import Path
from typing import Protocol

import httpx

import pipeline
from pipeline.config import EngineConfig, ModelConfig, UserError
from pipeline.engine.device import CHECKPOINT_BACKEND, engine_devices, on_gpu, transfer_kind

SERVED_MODEL_NAME = "policy"
HOST = "127.0.0.1"
LOG_TAIL_LINES = 20
STOP_GRACE_S = 10.0


class EngineError(RuntimeError):
    """The engine died or did not answer in time. The message carries the last lines of its log."""


class Server(Protocol):
    """What serves the policy, as an engine rank sees it."""

    url: str
    log_path: Path

    def start(self, model_dir: Path | str, seed: int = 0) -> None: ...
    def wait_ready(self, deadline_s: float | None = None) -> None: ...
    def warm_up(self, timeout_s: float | None = None) -> None: ...
    def alive(self) -> bool: ...
    def stop(self) -> None: ...
    def close(self) -> None: ...


class EngineServer:
    """A vLLM server in its own process group that ends with this process, even if this process is killed.

    ``start`` may be called again after ``stop`` or a death: the port, and so ``url``, stays the same.
    ``run_scratch`` is node-local: vLLM's caches go there.
    """

    def __init__(
        self,
        config: EngineConfig,
        model: ModelConfig,
        log_path: Path,
        run_scratch: Path,
        node: int = 0,
        devices: str | None = None,
    ) -> None:
        """Reserve the port. ``devices``: the GPUs that it has for itself, as CUDA_VISIBLE_DEVICES names them.

        Raises UserError if ``engine.port`` is taken or ``engine.weight_transfer`` unknown.
        """
        self.config = config
        self.model = model
        self.log_path = Path(log_path)
        self.run_scratch = Path(run_scratch)
        self.gpu = on_gpu()
        self._devices = devices
        self.transfer = transfer_kind(config.weight_transfer)
        self._reservation = reserve_port(config.port)
        self.port: int = self._reservation.getsockname()[1]
        self._core = config.cores[node % len(config.cores)] if config.cores else None
        self.url = f"http://{HOST}:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, model_dir: Path | str, seed: int = 0) -> None:
        """Start serving the checkpoint in ``model_dir``; returns at once, see ``wait_ready``.

        ``seed`` fixes the stream that unseeded calls are sampled from: give each engine and each start its own.
        """
        self.stop()
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        self.run_scratch.mkdir(parents=True, exist_ok=True)
        guard = [sys.executable, "-m", "pipeline.engine.guard"]
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                guard + self.command(model_dir, seed),
                env=self.environment(),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        if self._core is not None and not self.gpu:
            os.sched_setaffinity(self._process.pid, {self._core})  # what it starts inherits this

    def command(self, model_dir: Path | str, seed: int = 0) -> list[str]:
        """vLLM's command line. The ``vllm serve`` entry is not used: vLLM's CPU build ships it broken."""
        backend = "nccl" if self.transfer == "nccl" else CHECKPOINT_BACKEND
        flags: dict[str, object] = {
            "--model": model_dir,
            "--served-model-name": SERVED_MODEL_NAME,
            "--host": HOST,
            "--port": self.port,
            "--seed": seed,
            "--dtype": self.model.dtype,
            "--max-model-len": self.model.max_model_len,
            "--max-num-seqs": self.config.max_num_seqs,
            "--logprobs-mode": "processed_logprobs",
            "--tool-call-parser": self.model.tool_parser,
            "--worker-extension-cls": "pipeline.engine.vllm_plugin.WorkerExtension",
            "--weight-transfer-config": json.dumps({"backend": backend}),
        }
        switches = [
            "--return-tokens-as-token-ids",
            "--enable-auto-tool-choice",
            "--enable-scale-out",
            "--enable-prompt-tokens-details",
            "--disable-uvicorn-access-log",
        ]
        if not self.gpu:
            switches.append("--enforce-eager")
            if self.config.single_process:
                flags["--distributed-executor-backend"] = "uni"
        entry = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
        return entry + [str(part) for pair in flags.items() for part in pair] + switches + list(self.config.extra_args)

    def environment(self) -> dict[str, str]:
        """This process's environment plus what vLLM reads from there."""
        package_root = str(Path(pipeline.__file__).parents[1])
        env = dict(os.environ)
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [package_root, env.get("PYTHONPATH")]))
        env |= {
            "VLLM_SERVER_DEV_MODE": "1",  # opens the weight-update routes
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_CACHE_ROOT": str(self._cache_root()),
        }
        if self.gpu:
            visible = os.environ.get("CUDA_VISIBLE_DEVICES")
            env["CUDA_VISIBLE_DEVICES"] = self._devices or engine_devices(visible)
        else:
            env |= {
                "VLLM_CPU_KVCACHE_SPACE": _gib(self.config.kv_cache_gib),
                "OMP_NUM_THREADS": str(self.config.omp_threads),
                # vLLM would pin every CPU engine of a host to core 0
                "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                "VLLM_ENABLE_V1_MULTIPROCESSING": "0" if self.config.single_process else "1",
                # the engine core as a fork of the API server: importing everything again takes longer than all else
                "VLLM_WORKER_MULTIPROC_METHOD": "fork" if self.config.single_process else "spawn",
            }
        return env

    def _cache_root(self) -> Path:
        """A cache that later starts find again (vLLM's look at the model's class takes a third of a start)."""
        shared = Path("~/.cache/yoke/vllm").expanduser()
        try:
            shared.mkdir(parents=True, exist_ok=True)
        except OSError:
            return self.run_scratch / "vllm"
        return shared if os.access(shared, os.W_OK) else self.run_scratch / "vllm"

    def wait_ready(self, deadline_s: float | None = None) -> None:
        """Block until vLLM answers /health, at most ``deadline_s`` seconds (default: ``engine.start_timeout_s``).

        Raises EngineError if it dies or the time is up.
        """
        limit_s = self.config.start_timeout_s if deadline_s is None else deadline_s
        end = time.monotonic() + limit_s
        while not self.healthy():
            if not self.alive():
                raise EngineError(f"the engine died while starting; {self._log_hint()}")
            if time.monotonic() > end:
                raise EngineError(f"the engine did not answer {self.url}/health in {limit_s:.0f} s; {self._log_hint()}")
            time.sleep(0.2)

    def warm_up(self, timeout_s: float | None = None) -> None:
        """Make one short request, since vLLM's first takes many seconds. Raises EngineError if it fails."""
        body = {
            "model": SERVED_MODEL_NAME,
            "token_ids": [0, 1, 2],
            "sampling_params": {"max_tokens": 2, "logprobs": 0, "ignore_eos": True},
        }
        limit_s = timeout_s or self.config.start_timeout_s
        try:
            with httpx.Client(timeout=limit_s, trust_env=False) as client:
                client.post(f"{self.url}/inference/v1/generate", json=body).raise_for_status()
        except httpx.HTTPError as error:
            raise EngineError(f"the engine's warm-up request failed ({error}); {self._log_hint()}") from error

    def healthy(self, timeout_s: float = 5.0) -> bool:
        """True if /health answers 200 now."""
        try:
            with httpx.Client(timeout=timeout_s, trust_env=False) as client:
                return client.get(f"{self.url}/health").status_code == 200
        except httpx.HTTPError:
            return False

    def alive(self) -> bool:
        """True while the process runs; it may still be starting, or hang (see ``healthy``)."""
        return self._process is not None and self._process.poll() is None

    def stop(self) -> None:
        """End the whole process group: SIGTERM, then SIGKILL after STOP_GRACE_S. Harmless if nothing runs."""
        process, self._process = self._process, None
        if process is None:
            return
        for number, grace_s in ((signal.SIGTERM, STOP_GRACE_S), (signal.SIGKILL, STOP_GRACE_S)):
            if process.poll() is not None:
                break
            os.killpg(process.pid, number)
            try:
                process.wait(grace_s)
            except subprocess.TimeoutExpired:
                continue
        if process.stdin is not None:
            process.stdin.close()

    def close(self) -> None:
        """Stop and give the port back."""
        self.stop()
        self._reservation.close()

    def log_tail(self, lines: int = LOG_TAIL_LINES) -> str:
        """The last lines of vLLM's log."""
        if not self.log_path.exists():
            return "(no log)"
        with self.log_path.open(errors="replace") as log:
            return "".join(deque(log, maxlen=lines)).rstrip()

    def _log_hint(self) -> str:
        return f"last lines of {self.log_path}:\n{self.log_tail()}"


def reserve_port(port: int) -> socket.socket:
    """Bind ``port`` of the loopback interface (0: a free one) without listening, so that nobody is given it by chance.

    vLLM may still bind it and listen. Raises UserError if something listens there already.
    """
    reservation = socket.socket()
    reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        reservation.bind((HOST, port))
    except OSError as error:
        reservation.close()
        raise UserError(
            f"engine.port={port} cannot be used ({error.strerror}): choose another, or 0 for a free one"
        ) from error
    return reservation


def _gib(size: float) -> str:
    """vLLM reads whole GiB."""
    return str(max(1, round(size)))
