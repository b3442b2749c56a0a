"""`yoke tasks build [--list]`: the environments of the tasks, turned into file systems that sandboxes can run on.

It needs a builder and, as a rule, a network; so it runs off the cluster or on a login node, into $YOKE_HOME/images.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from pathlib import Path

from pipeline.config import Config, UserError
from pipeline.launch.data import load_split
from pipeline.launch.run_directory import RunDirectory
from pipeline.report.bar import Bar
from pipeline.report.store import write_json
from pipeline.sandbox.builds import FILES, SIF, Build, find_build, publish, write_names
from pipeline.sandbox.images import folder, kept_as
from pipeline.tasks.builders import Builder, BuildError, Job, choose_builder, make_own, working_directory
from pipeline.tasks.environments import Environment, environment_of, several_containers
from pipeline.tasks.harbor import HarborTask

REPORT = "last-build.json"
LIST = "--list"
NO_ENVIRONMENT = "no environment of their own: they run on the system of the machine"
READY, MISSING = "built", "not built"


def build(config: Config, words: Sequence[str]) -> int:
    """Exit code 0 when every environment is there, 1 when one is not. Raises UserError."""
    if strange := [word for word in words if word != LIST]:
        raise UserError(f"yoke tasks build knows {LIST} and settings, not {strange[0]}")
    with tempfile.TemporaryDirectory(prefix="yoke-tasks-") as scratch:  # for tasks that are made up
        tasks = _tasks(config, RunDirectory(Path(scratch)))
        wanted, failures = _environments(tasks)
        if words:
            return _list(wanted, failures, tasks)
        missing = {name: users for name, users in wanted.items() if find_build(name) is None}
        if missing:
            failures |= _build_all(config, missing)
        return _finish(wanted, missing, failures)


def _tasks(config: Config, run: RunDirectory) -> list[HarborTask]:
    splits = ("train", "test") if config.tasks.kind != "harbor" or config.tasks.test else ("train",)
    return [task for split in splits for task in load_split(config, run, split)]


def _environments(tasks: Sequence[HarborTask]) -> tuple[dict[str, list[HarborTask]], dict[str, str]]:
    """The tasks of each environment, by its name; and why a task has none that can be built, by the task's."""
    wanted: dict[str, list[HarborTask]] = {}
    failures = {}
    for task in tasks:
        if task.image and (file := several_containers(task.ref.path)):
            failures[task.ref.task_id] = f"environment/{file} asks for several containers; a sandbox is one"
        elif task.image:
            wanted.setdefault(task.image, []).append(task)
    return wanted, failures


def _list(wanted: Mapping[str, list[HarborTask]], failures: Mapping[str, str], tasks: Sequence[HarborTask]) -> int:
    states = {name: READY if find_build(name) else MISSING for name in wanted}
    for name, users in wanted.items():
        print(f"{states[name]}: {name} ({_named(users)})")
    if bare := [task for task in tasks if not task.image]:
        print(f"{NO_ENVIRONMENT}: {_named(bare)}")
    _tell(failures)
    return 1 if failures or MISSING in states.values() else 0


def _named(tasks: Sequence[HarborTask]) -> str:
    first = tasks[0].ref.task_id
    return first if len(tasks) == 1 else f"{first} and {len(tasks) - 1} more"


def _build_all(config: Config, missing: Mapping[str, list[HarborTask]]) -> dict[str, str]:
    """Build them, several at a time. Returns why a task's environment was not, by task. Raises UserError."""
    builder, why = choose_builder(config.tasks.builder)
    print(f"{len(missing)} environments to build with {builder.name} ({why}), into {folder()}", flush=True)
    failures: dict[str, str] = {}
    with ThreadPoolExecutor(max(1, config.tasks.build_jobs)) as pool, Bar("build", len(missing)) as bar:
        running: dict[Future[Build], list[HarborTask]] = {
            pool.submit(_build, environment_of(users[0].ref.path, name), builder, config): users
            for name, users in missing.items()
        }
        for future in as_completed(running):
            users = running[future]
            try:
                future.result()
                bar.advance(1, _named(users))
            except (BuildError, OSError) as error:
                failures |= {task.ref.task_id: str(error) for task in users}
                bar.advance(1, f"{_named(users)}: NOT built")
    return failures


def _build(environment: Environment, builder: Builder, config: Config) -> Build:
    """Build one, check nothing of it: what it is, its manifest says."""
    with working_directory(folder(), environment.key) as work:
        job = Job(work, time.monotonic() + config.tasks.build_timeout_s, _local_base)
        built = builder.build(environment, job)
        make_own(built.root)
        result = work / "result"
        result.mkdir()
        root = built.root.rename(result / "root")
        packed = _packed(root, config, job)
        own_files = (root / "workspace").is_dir() and any((root / "workspace").iterdir())
        if packed != root:
            write_names(root, result / FILES, built.env.get("PATH", "").split(":"))
            shutil.rmtree(root)
        done = publish(environment.name, packed, built.builder, built.env, built.workdir, own_files)
    job.log.unlink(missing_ok=True)
    return done


def _packed(root: Path, config: Config, job: Job) -> Path:
    """One .sif file, where only Apptainer is to run it: large shared file systems are slow with many small files."""
    program = shutil.which("apptainer")
    if config.sandbox.kind != "apptainer" or program is None or shutil.which("mksquashfs") is None:
        return root
    target = root.with_name(SIF)
    job.run(program, "build", str(target), str(root))
    return target


def _local_base(image: str) -> Path | None:
    """The file system of an image that is here already: built before, or fetched."""
    if build := find_build(f"docker://{image}"):
        return build.path
    kept = kept_as(f"docker://{image}")
    return kept if kept.exists() else None


def _finish(wanted: Mapping[str, list[HarborTask]], missing: Mapping[str, object], failures: Mapping[str, str]) -> int:
    there = [name for name in wanted if find_build(name)]
    report = folder() / REPORT
    report.parent.mkdir(parents=True, exist_ok=True)
    write_json(report, {"environments": {name: (find_build(name) is not None) for name in wanted}, "failed": failures})
    new = sum(name in missing for name in there)
    print(f"{len(there)} of {len(wanted)} environments are built, {new} of them now; see {report}")
    _tell(failures)
    return 1 if failures else 0


def _tell(failures: Mapping[str, str]) -> None:
    if failures:
        print(f"{len(failures)} tasks cannot run in an environment of their own:")
    for task, reason in sorted(failures.items()):
        print(f"  {task}: {reason}")
