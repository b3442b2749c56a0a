"""Push the trainer's weights into a running engine: by file, over gloo, or over NCCL.

All three pause the engine with its calls kept in flight, replace the weights, drop the prefix cache and resume.
The engine's side of ``file`` and ``gloo`` is ``vllm_plugin.py``; that of ``nccl`` is vLLM's own.
"""

from __future__ import annotations

import datetime
import os
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import httpx

from pipeline.engine.device import transfer_kind
from pipeline.records import PolicyVersion

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroupGloo

HOST = "127.0.0.1"
GLOO_GROUP_NAME = "yoke-weights"
PHASES = ("gather", "pause", "transfer", "load", "resume")  # of a push, in this order
Weights: TypeAlias = "list[tuple[str, Tensor]]"
T = TypeVar("T")


class TransferError(RuntimeError):
    """A phase of a weight sync failed or did not end in time; the message names the phase.

    ``engine_usable`` is True if the engine was resumed with its old weights. Otherwise it must be restarted.
    """

    def __init__(self, phase: str, reason: str, engine_usable: bool = False) -> None:
        super().__init__(f"weight transfer, phase {phase}: {reason}")
        self.phase = phase
        self.reason = reason
        self.engine_usable = engine_usable


@dataclass(frozen=True)
class SyncTimings:
    """Seconds of each phase of one push.

    ``gather``: the trainer puts its weights together, and writes the file of a file transfer. ``pause``: the engine
    stops. ``transfer``: weights travel, and are loaded as they come. ``load``: the engine takes them into use and
    forgets old prefixes. ``resume``.
    """

    phases: Mapping[str, float]

    @property
    def total_s(self) -> float:
        return sum(self.phases.values())

    @property
    def still_s(self) -> float:
        """How long the engine stood still."""
        return self.total_s - self.phases["gather"]

    def gathered(self, seconds: float) -> SyncTimings:
        """The same push, with what the trainer spent before it."""
        return SyncTimings({**self.phases, "gather": self.phases["gather"] + seconds})


def make_transfer(kind: str, engine_url: str, scratch: Path, timeout_s: float) -> Transfer:
    """The transfer named ``kind``: file, gloo, nccl or auto. ``timeout_s`` bounds each phase of a push.

    ``scratch`` is a directory on the node that trainer and engine both see. Raises UserError for an unknown kind.
    """
    kinds: dict[str, type[Transfer]] = {"file": FileTransfer, "gloo": GlooTransfer, "nccl": NcclTransfer}
    return kinds[transfer_kind(kind)](engine_url, Path(scratch), timeout_s)


def set_version(engine_url: str, version: PolicyVersion, timeout_s: float = 10.0) -> None:
    """Name the weights that a freshly started engine serves. Raises TransferError."""
    with _client(engine_url, timeout_s) as client:
        _request(client, "POST", "update_weight_version", json={"new_version": str(version)})


def unique_tensors(named_tensors: Iterable[tuple[str, Tensor]]) -> Weights:
    """Each tensor once, detached. A tied ``lm_head.weight`` is the embedding again, and vLLM ties it itself."""
    names: set[str] = set()
    places: set[tuple[int, tuple[int, ...]]] = set()
    weights: Weights = []
    for name, tensor in named_tensors:
        place = (tensor.data_ptr(), tuple(tensor.shape))
        if name in names or (tensor.numel() and place in places):
            continue
        names.add(name)
        places.add(place)
        weights.append((name, tensor.detach()))
    return weights


class Transfer(ABC):
    """One engine's weight transfer: ``connect`` after each start of the engine, then ``push`` after each update."""

    def __init__(self, engine_url: str, scratch: Path, timeout_s: float) -> None:
        self.engine_url = engine_url
        self.scratch = scratch
        self.timeout_s = timeout_s
        self._http = _client(engine_url, timeout_s)
        self._finish_s = 0.0  # of the latest push, in the engine's last step

    @abstractmethod
    def connect(self) -> None:
        """Meet the engine. Raises TransferError."""

    def push(
        self,
        named_tensors: Iterable[tuple[str, Tensor]],
        version: PolicyVersion,
        before_resume: Callable[[], None] | None = None,
    ) -> SyncTimings:
        """Replace the engine's weights by ``named_tensors`` (checkpoint names) and call them ``version``.

        Calls in flight survive: the pause drops all keys and values, and after the resume vLLM computes those of the
        tokens so far with the new weights. So each token has the logprob of the version that its span names. That new
        calls do not meet old prefixes should not hang on this alone: ``before_resume`` is for putting them on a new
        ``cache_salt``. What it raises is passed on, with the engine still paused. Raises TransferError.
        """
        began = time.monotonic()
        weights = unique_tensors(named_tensors)
        self._prepare(weights, version)
        paused = time.monotonic()
        self._pause()
        started = time.monotonic()
        self._replace(weights, version)
        finished = time.monotonic()
        self._post("reset_prefix_cache")
        if before_resume is not None:
            before_resume()
        loaded = time.monotonic()
        self._post("resume")
        resumed = time.monotonic()
        moments = pairwise((began, paused, started, finished - self._finish_s, loaded, resumed))
        return SyncTimings({name: end - begin for name, (begin, end) in zip(PHASES, moments, strict=True)})

    def close(self) -> None:
        """Give connections and files back. The engine is left alone."""
        self._http.close()

    def _prepare(self, weights: Weights, version: PolicyVersion) -> None:  # noqa: B027 (a hook)
        """What can be done before the engine stands still."""

    def _replace(self, weights: Weights, version: PolicyVersion) -> None:
        self._post("start_weight_update")
        self._update(weights, version)
        self._finish(str(version))

    def _finish(self, version: str) -> None:
        """The engine takes what came into use."""
        begun = time.monotonic()
        self._post("finish_weight_update", json={"weight_version": version})
        self._finish_s = time.monotonic() - begun

    def _update(self, weights: Weights, version: PolicyVersion) -> None:
        """Make the engine load ``weights``. A transfer that overrides ``_replace`` has no use for it."""
        raise NotImplementedError

    def _pause(self) -> None:
        """Up to here the engine is as it was, so a failure resumes it; any later failure leaves it unusable."""
        try:
            self._post("pause", params={"mode": "keep"})
        except TransferError as error:
            try:
                self._post("resume")
            except TransferError:
                raise error from None
            raise TransferError(error.phase, error.reason, engine_usable=True) from error

    def _post(self, phase: str, **request: Any) -> None:
        _request(self._http, "POST", phase, **request)

    def _post_alongside(self, work: Callable[[], T], phase: str, **request: Any) -> T:
        """POST while ``work`` runs in a thread, as each waits for the other; a refused request raises at once."""
        pool = ThreadPoolExecutor(max_workers=1)
        try:
            result = pool.submit(work)
            self._post(phase, **request)
            return result.result(self.timeout_s)
        except TimeoutError as error:
            raise TransferError(phase, f"the trainer's side did not end in {self.timeout_s:g} s") from error
        except RuntimeError as error:
            raise _named(error, phase) from error
        finally:
            pool.shutdown(wait=False)

    def _world_size(self) -> int:
        """Workers of the engine."""
        return int(_request(self._http, "GET", "get_world_size").json()["world_size"])


class FileTransfer(Transfer):
    """Through a safetensors file in ``scratch``, which holds the last one only."""

    def connect(self) -> None:
        self._post("init_weight_transfer_engine", json={"init_info": {}})

    def close(self) -> None:
        self._remove_files(keep=None)
        super().close()

    def _prepare(self, weights: Weights, version: PolicyVersion) -> None:
        from safetensors.torch import save_file

        path = self._path(version)
        self.scratch.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".tmp")
        save_file({name: tensor.cpu().contiguous() for name, tensor in weights}, unfinished)
        os.replace(unfinished, path)

    def _update(self, weights: Weights, version: PolicyVersion) -> None:
        path = self._path(version)
        self._post("update_weights", json={"update_info": {"path": str(path)}})
        self._remove_files(keep=path)

    def _path(self, version: PolicyVersion) -> Path:
        return self.scratch.resolve() / f"weights-{version}.safetensors"

    def _remove_files(self, keep: Path | None) -> None:
        for path in self.scratch.resolve().glob("weights-*"):
            if path != keep:
                path.unlink(missing_ok=True)


class GlooTransfer(Transfer):
    """Over a gloo group of the trainer (rank 0) and the engine's workers: one broadcast a tensor."""

    _group: ProcessGroupGloo | None = None

    def connect(self) -> None:
        import torch.distributed as dist

        limit = datetime.timedelta(seconds=self.timeout_s)
        world_size = 1 + self._world_size()
        store = dist.TCPStore(HOST, 0, world_size, True, limit, wait_for_workers=False)
        prefixed = dist.PrefixStore(GLOO_GROUP_NAME, store)
        init_info = {
            "master_address": HOST,
            "master_port": store.port,
            "group_name": GLOO_GROUP_NAME,
            "world_size": world_size,
            "timeout_s": self.timeout_s,
        }
        self._group = self._post_alongside(
            lambda: dist.ProcessGroupGloo(prefixed, 0, world_size, limit),
            "init_weight_transfer_engine",
            json={"init_info": init_info},
        )

    def close(self) -> None:
        self._group = None
        super().close()

    def _update(self, weights: Weights, version: PolicyVersion) -> None:
        if self._group is None:
            raise TransferError("update_weights", "connect() was never called")
        group = self._group

        def broadcast() -> None:
            for _, tensor in weights:
                group.broadcast(tensor.cpu().contiguous(), 0).wait()

        self._post_alongside(broadcast, "update_weights", json={"update_info": _description(weights)})


class NcclTransfer(Transfer):
    """Over NCCL, by vLLM's own engine and its trainer-side helper. Not run on a GPU yet."""

    _sender: Any = None

    def connect(self) -> None:
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo, NCCLTrainerWeightTransferEngine

        self._source = _NcclSource()
        self._client = _NcclClient(self._post, self._finish)
        place = NCCLTrainerInitInfo(
            rank=0, master_address=HOST, master_port=_free_port(), world_size=1 + self._world_size()
        )
        # A former communicator is dropped, not destroyed: its engine is gone, and NCCL would wait for it.
        self._sender = NCCLTrainerWeightTransferEngine.trainer_init(place, client=self._client, source=self._source)

    def close(self) -> None:
        if self._sender is not None:
            self._sender.shutdown()
        super().close()

    def _replace(self, weights: Weights, version: PolicyVersion) -> None:
        if self._sender is None:
            raise TransferError("update_weights", "connect() was never called")
        self._source.weights = weights
        self._client.version = version
        try:
            self._sender.send_weights()  # start, update and finish, through self._client
        except RuntimeError as error:
            raise _named(error, "update_weights") from error


class _NcclSource:
    """The weights of the current push, as vLLM's ``WeightSource``."""

    weights: Weights = []

    def metadata(self) -> list[Any]:
        from vllm.distributed.weight_transfer.base import ParamMeta

        return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self.weights]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return iter(self.weights)


class _NcclClient:
    """vLLM's ``VLLMWeightSyncClient``, with our deadlines, errors and version."""

    version: PolicyVersion | None = None

    def __init__(self, post: Callable[..., None], finish: Callable[[str], None]) -> None:
        self._post, self._finish = post, finish

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._post("init_weight_transfer_engine", json={"init_info": init_info})

    def start_weight_update(self) -> None:
        self._post("start_weight_update")

    def update_weights(self, update_info: Any) -> None:
        self._post("update_weights", json={"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._finish(weight_version or str(self.version))


def _description(weights: Weights) -> dict[str, list[Any]]:
    return {
        "names": [name for name, _ in weights],
        "dtype_names": [str(tensor.dtype).removeprefix("torch.") for _, tensor in weights],
        "shapes": [list(tensor.shape) for _, tensor in weights],
    }


def _client(engine_url: str, timeout_s: float) -> httpx.Client:
    return httpx.Client(base_url=engine_url, timeout=timeout_s, trust_env=False)


def _request(client: httpx.Client, method: str, phase: str, **request: Any) -> httpx.Response:
    """One request to the route named like the phase. Raises TransferError on a timeout, a lost engine or an error."""
    try:
        response = client.request(method, f"/{phase}", **request)
    except httpx.TimeoutException as error:
        raise TransferError(phase, f"{client.base_url} did not answer in {client.timeout.read:g} s") from error
    except httpx.HTTPError as error:
        raise TransferError(phase, f"{client.base_url}: {error}") from error
    if response.status_code != httpx.codes.OK:
        raise TransferError(phase, f"{client.base_url} answered {response.status_code}: {response.text[:500]}")
    return response


def _named(error: Exception, phase: str) -> TransferError:
    return error if isinstance(error, TransferError) else TransferError(phase, str(error))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port
