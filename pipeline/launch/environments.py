"""`yoke tasks build [--list]`: the environments of the tasks, turned into file systems that sandboxes can run on.

It needs a builder and, as a rule, a network; so it runs off the cluster or on a login node, into $YOKE_HOME/images.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from pathlib import Path

from pipeline.config import Config, UserError
from pipeline.launch.data import load_split
from pipeline.launch.run_directory import RunDirectory
from pipeline.report.bar import Bar
from pipeline.report.store import write_json
from pipeline.sandbox.builds import FILES, LAYER, SIF, UPPER, Build, find_build, publish, write_names
from pipeline.sandbox.images import folder, kept_as
from pipeline.sandbox.layer import remove_tree
from pipeline.sandbox.prepare import preparation
from pipeline.tasks.builders import Builder, BuildError, Job, choose_builder, make_own, working_directory
from pipeline.tasks.environments import Environment, several_containers
from pipeline.tasks.harbor import HarborTask

REPORT = "last-build.json"
LIST = "--list"
NO_ENVIRONMENT = "no environment of their own: they run on the system of the machine"
READY, MISSING = "built", "not built"
PREPARE_TRIES = 3  # what fetches from elsewhere fails now and then

Wanted = dict[Environment, list[HarborTask]]  # and the tasks that run in it


def build(config: Config, words: Sequence[str]) -> int:
    """Exit code 0 when every environment is there, 1 when one is not. Raises UserError."""
    if strange := [word for word in words if word != LIST]:
        raise UserError(f"yoke tasks build knows {LIST} and settings, not {strange[0]}")
    with tempfile.TemporaryDirectory(prefix="yoke-tasks-") as scratch:  # for tasks that are made up
        tasks = _tasks(config, RunDirectory(Path(scratch)))
        wanted, failures = _environments(tasks)
        if words:
            return _list(wanted, failures, tasks)
        missing = [environment.name for environment in wanted if find_build(environment.name) is None]
        failures |= _build_missing(config, {key: wanted[key] for key in wanted if key.name in missing})
        return _finish(wanted, missing, failures)


def _tasks(config: Config, run: RunDirectory) -> list[HarborTask]:
    splits = ("train", "test") if config.tasks.kind != "harbor" or config.tasks.test else ("train",)
    return [task for split in splits for task in load_split(config, run, split)]


def _environments(tasks: Sequence[HarborTask]) -> tuple[Wanted, dict[str, str]]:
    """The tasks of each environment; and why a task has none that can be built, by the task's name."""
    wanted: dict[str, tuple[Environment, list[HarborTask]]] = {}
    failures = {}
    for task in tasks:
        if task.environment and (file := several_containers(task.ref.path)):
            failures[task.ref.task_id] = f"environment/{file} asks for several containers; a sandbox is one"
        elif task.environment:
            wanted.setdefault(task.image, (task.environment, []))[1].append(task)
    return dict(wanted.values()), failures


def _list(wanted: Wanted, failures: Mapping[str, str], tasks: Sequence[HarborTask]) -> int:
    states = {environment: READY if find_build(environment.name) else MISSING for environment in wanted}
    for environment, users in wanted.items():
        above = f", above {environment.base.name}" if environment.base else ""
        print(f"{states[environment]}: {environment.name}{above} ({_named(users)})")
    if bare := [task for task in tasks if not task.image]:
        print(f"{NO_ENVIRONMENT}: {_named(bare)}")
    _tell(failures)
    return 1 if failures or MISSING in states.values() else 0


def _named(tasks: Sequence[HarborTask]) -> str:
    first = tasks[0].ref.task_id
    return first if len(tasks) == 1 else f"{first} and {len(tasks) - 1} more"


def _build_missing(config: Config, missing: Wanted) -> dict[str, str]:
    """First what others are prepared from. Returns why a task's was not built, by task. Raises UserError."""
    bare = _bare(missing)
    failures: dict[str, str] = {}
    if bare:
        builder, why = choose_builder(config.tasks.builder)
        print(f"{len(bare)} environments to build with {builder.name} ({why}), into {folder()}", flush=True)
        failures |= _all_of(config, "build", bare, lambda environment: _build(environment, builder, config))
    above = {key: users for key, users in missing.items() if key.base and find_build(key.base.name)}
    if above:
        print(f"{len(above)} environments to prepare by their tasks' health checks", flush=True)
        failures |= _all_of(config, "prepare", above, lambda environment: _prepare(environment, config))
    return failures


def _bare(missing: Wanted) -> Wanted:
    """What needs a builder: those without a base, and bases that are not there."""
    bare: dict[str, tuple[Environment, list[HarborTask]]] = {}
    for environment, users in missing.items():
        lowest = environment.base or environment
        if environment.base is None or find_build(lowest.name) is None:
            bare.setdefault(lowest.name, (lowest, []))[1].extend(users)
    return dict(bare.values())


def _all_of(config: Config, label: str, wanted: Wanted, make: Callable[[Environment], Build]) -> dict[str, str]:
    """Make them, several at a time. Returns why a task's was not, by task."""
    failures: dict[str, str] = {}
    with ThreadPoolExecutor(max(1, config.tasks.build_jobs)) as pool, Bar(label, len(wanted)) as bar:
        running: dict[Future[Build], list[HarborTask]] = {
            pool.submit(make, environment): users for environment, users in wanted.items()
        }
        for future in as_completed(running):
            users = running[future]
            try:
                future.result()
                bar.advance(1, _named(users))
            except (BuildError, UserError, OSError) as error:
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


def _prepare(environment: Environment, config: Config) -> Build:
    """Run what a task runs when its container starts, and keep what it changed as a layer above the base."""
    base = find_build(environment.base.name) if environment.base else None
    assert base is not None
    given = {name: os.environ[name] for name in environment.host_env if name in os.environ}
    with working_directory(folder(), environment.key) as work:
        layer = work / "result" / LAYER
        command, variables = preparation(base, environment.command, given | dict(environment.env), layer)
        if environment.command:
            _insist(Job(work, time.monotonic() + config.tasks.build_timeout_s), command, variables)
        for part in layer.iterdir():
            if part.name != UPPER:
                remove_tree(part)
        make_own(layer / UPPER)
        env = base.env | dict(environment.env)
        files = base.own_workspace or any((layer / UPPER / "workspace").glob("*"))
        done = publish(environment.name, layer, base.builder, env, base.workdir, files, base)
    work.with_name(f"{work.name}.log").unlink(missing_ok=True)
    return done


def _insist(job: Job, command: Sequence[str], variables: dict[str, str]) -> None:
    """Raises BuildError when the command has failed PREPARE_TRIES times."""
    for left in reversed(range(PREPARE_TRIES)):
        try:
            job.run(*command, env=variables)
            return
        except BuildError:
            if not left:
                raise


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


def _finish(wanted: Wanted, missing: Sequence[str], failures: Mapping[str, str]) -> int:
    names = [environment.name for environment in wanted]
    there = [name for name in names if find_build(name)]
    report = folder() / REPORT
    report.parent.mkdir(parents=True, exist_ok=True)
    write_json(report, {"environments": {name: name in there for name in names}, "failed": failures})
    new = sum(name in missing for name in there)
    print(f"{len(there)} of {len(names)} environments are built, {new} of them now; see {report}")
    _tell(failures)
    return 1 if failures else 0


def _tell(failures: Mapping[str, str]) -> None:
    if failures:
        print(f"{len(failures)} tasks cannot run in an environment of their own:")
    for task, reason in sorted(failures.items()):
        print(f"  {task}: {reason}")
