"""What the training does about evaluating its checkpoints: export every k-th one, submit its evaluation, log results.

On Slurm a job array of its own evaluates each export, on other nodes, and the run takes the results over when it finds
them; elsewhere `yoke train` evaluates the exports after the training. Nothing here ends a run: what fails is an alarm.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from queue import SimpleQueue

from pipeline.config import Config
from pipeline.launch import evaluation_jobs
from pipeline.launch.evaluation import exports_needed, labels, late_results, not_evaluated, prune_exports, records
from pipeline.launch.run_directory import RunDirectory
from pipeline.report.metrics import MetricsLog, read_metrics
from pipeline.stages.weights import exported, update_of
from pipeline.training.checkpoint import CheckpointError, newest, partial_path
from pipeline.training.export import settle

END_S = 30.0  # that the end of a run waits for a submission

Values = Mapping[str, float]
Note = Callable[[str, str, bool], None]  # (checkpoint, what is to be said, whether it is an alarm)


class CheckpointEvaluations:
    """On global rank 0. Its methods are for the trainer's thread; Slurm and the results are waited for in another."""

    def __init__(
        self,
        config: Config,
        run: RunDirectory,
        export: Callable[[Path], None],
        log: Callable[[int, Values], None],
        note: Note,
    ) -> None:
        """``export``: collective over the trainers; ``log``: of the metrics, for results that came in late."""
        self.config, self.run = config, run
        self._export, self._log, self._note = export, log, note
        self._results: SimpleQueue[tuple[int, Values]] = SimpleQueue()
        self._worker: threading.Thread | None = None

    def saved(self, update: int) -> None:
        """To be called after every checkpoint, with the number of updates that it holds."""
        self._log_results()
        if not self._is_due(update):
            return
        name = self._export_newest(update)
        if name is None:
            return
        if self._worker is not None:
            self._worker.join(END_S)
        self._worker = threading.Thread(target=self._look_after, args=(name,), name="evaluations", daemon=True)
        self._worker.start()

    def close(self) -> None:
        """Let a submission end, and log what was found."""
        if self._worker is not None:
            self._worker.join(END_S)
        self._log_results()

    def _is_due(self, update: int) -> bool:
        """Whether an update's weights are exported: to be evaluated, or because training.keep_every says so."""
        closing = self.config.evaluation.after and update == self.config.training.updates
        wanted = (self._evaluated_every, self.config.training.keep_every)
        return update > 0 and any(every > 0 and update % every == 0 for every in wanted) and not closing

    @property
    def _evaluated_every(self) -> int:
        return self.config.evaluation.every * self.config.training.checkpoint_every

    def _export_newest(self, update: int) -> str | None:
        """The name of the checkpoint that was exported; None when that was done before, or failed."""
        checkpoint = newest(self.run.checkpoints)
        if checkpoint is None or any(update_of(name) == update for name in exported(self.run.models)):
            return None
        draft = partial_path(self.run.models / checkpoint.name)
        try:
            self._export(draft)
            settle(draft, self.run.models / checkpoint.name)
        except (CheckpointError, OSError) as error:
            self._note(checkpoint.name, f"not exported, so not evaluated: {error}", True)
            return None
        return checkpoint.name

    def _look_after(self, name: str) -> None:
        """In a thread: submit, make room, look for results."""
        try:
            evaluated = self._evaluated_every > 0 and (update_of(name) or 0) % self._evaluated_every == 0
            needed = self._submit(name) if evaluated and self.config.cluster.name != "local" else self.needed()
            keep = self.config.evaluation.keep_exports
            prune_exports(self.run, keep, needed | {name}, self.config.training.keep_every)
            for result in late_results(self.config, self.run, read_metrics(self.run.root)):
                self._results.put(result)
        except Exception as error:  # whatever it is, it must not cost the run
            self._note(name, f"ALARM: {type(error).__name__}: {error}", True)

    def needed(self) -> set[str]:
        """The exports that wait for an evaluation: by jobs in Slurm's queue (all, while it does not say), or, without
        Slurm, after the training.
        """
        if self.config.cluster.name == "local":
            return not_evaluated(self.run, self.config.mix.harnesses) if self.config.evaluation.every else set()
        try:
            return exports_needed(self.run, evaluation_jobs.queue(self.run).arrays)
        except (RuntimeError, OSError):
            return set(exported(self.run.models))

    def _submit(self, name: str) -> set[str]:
        """Returns the exports that jobs in the queue need; all of them while Slurm does not say."""
        small = f" stage.tasks={count}" if (count := self.config.evaluation.small_tasks) else ""
        again = f"yoke evaluate run_dir={self.run.root} stage.checkpoint={name}{small} does it"
        try:
            queue = evaluation_jobs.queue(self.run)
            needed = exports_needed(self.run, queue.arrays)
            if queue.waiting >= self.config.evaluation.max_jobs:
                self._note(name, f"not evaluated: {queue.waiting} evaluation jobs wait already; {again}", False)
            else:
                self._note(name, evaluation_jobs.submit_from_run(self.run, name), False)
        except (RuntimeError, OSError) as error:
            self._note(name, f"ALARM: the evaluation of {name} was not submitted ({error}); {again}", True)
            return set(exported(self.run.models))
        return needed

    def _log_results(self) -> None:
        while not self._results.empty():
            self._log(*self._results.get())


def log_checkpoint(metrics: MetricsLog, run: RunDirectory, update: int, values: Values) -> None:
    """Log an evaluation at the update of its checkpoint, however much later it came, with some of its rollouts."""
    metrics.log(update, values)
    label = next((label for label in labels(run) if update_of(label) == update), None)
    if label is not None:
        metrics.rollouts(update, label, lambda: records(run, label))
