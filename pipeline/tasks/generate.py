"""Seeded Harbor tasks for the quick start: write one word of a list of four to answer.txt.

Small enough for a model of a million parameters, real enough to need a tool call. A list belongs to the training or
to the test split by a hash of its words, so the splits are disjoint for every seed and size.
"""

from __future__ import annotations

import hashlib
import random
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from pipeline.config import UserError

WORDS: tuple[str, ...] = tuple(
    """
    apple river stone cloud tiger lemon chair piano bread candle garden silver orange planet window bridge forest
    pencil rocket hammer basket castle dragon engine falcon guitar helmet island jacket kettle ladder marble napkin
    oyster pepper quartz rabbit saddle teapot urchin velvet walnut yogurt zebra anchor button copper desert eagle
    feather glacier harbor insect jungle kitten lantern meadow needle ocean parrot quiver ribbon shadow temple
    violin wagon acorn beaver cactus donkey ember fossil goblet hornet igloo jigsaw koala lizard magnet nickel olive
    pebble quill raven sponge turtle umber vessel willow yarn zipper
    """.split()
)
ORDINALS: tuple[str, ...] = ("first", "second", "third", "last")
SPLITS: tuple[str, ...] = ("train", "test")
TEST_SHARE = 5  # one list in five is a test list

_TASK_TOML = """\
schema_version = "1.4"

[task]
name = "yoke/{name}"
description = "Write one word of a list to answer.txt"

[metadata]
split = "{split}"
seed = {seed}

[verifier]
timeout_sec = 30.0

[agent]
timeout_sec = 120.0

[environment]
build_timeout_sec = 600.0
cpus = 1
memory_mb = 2048
network_mode = "no-network"
"""
_DOCKERFILE = "FROM debian:bookworm-slim\nWORKDIR /workspace\n"
_SOLVE = "#!/bin/sh\necho {answer} > answer.txt\n"
_TEST = """\
#!/bin/sh
# Reward 1 if answer.txt holds the expected word and nothing else.
mkdir -p /logs/verifier
if [ "$(cat /workspace/answer.txt 2>/dev/null)" = "{answer}" ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
"""


@dataclass(frozen=True)
class WordTask:
    """Pick ``words[ordinal]``; ``ordinal`` indexes ORDINALS, whose last stands for the last word."""

    words: tuple[str, ...]
    ordinal: int

    @property
    def instruction(self) -> str:
        return f"Write the {ORDINALS[self.ordinal]} word of this list to answer.txt: {' '.join(self.words)}"

    @property
    def answer(self) -> str:
        return self.words[self.ordinal]


def split_of(words: tuple[str, ...]) -> str:
    """The split that owns this set of words, in whatever order: "train" or "test"."""
    digest = hashlib.sha256(" ".join(sorted(words)).encode()).digest()
    return "test" if digest[0] % TEST_SHARE == 0 else "train"


def draw_task(rng: random.Random, split: str) -> WordTask:
    """Draw one task of ``split``; draws are independent, so a list can come twice."""
    while True:
        words = tuple(rng.sample(WORDS, len(ORDINALS)))
        if split_of(words) == split:
            return WordTask(words, rng.randrange(len(ORDINALS)))


def draw_tasks(split: str, size: int, seed: int) -> list[WordTask]:
    """``size`` tasks with pairwise different word sets."""
    rng = random.Random(f"{split}/{seed}")
    tasks: dict[frozenset[str], WordTask] = {}
    while len(tasks) < size:
        task = draw_task(rng, split)
        tasks.setdefault(frozenset(task.words), task)
    return list(tasks.values())


def generate_tasks(root: Path, split: str, size: int, seed: int) -> Path:
    """Write ``size`` task directories under ``root`` and return their parent; an existing one is returned as it is.

    The parent appears by one rename, so it is whole or absent. Raises UserError for an unknown split or a bad size.
    """
    if split not in SPLITS:
        raise UserError(f"unknown split {split!r} of the generated tasks: use one of {', '.join(SPLITS)}")
    if size < 1:
        raise UserError(f"tasks.{split}_size={size}: at least one task is needed")
    target = root / f"{split}-{size}-seed{seed}"
    if target.is_dir():
        return target
    root.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=root))
    try:
        for index, task in enumerate(draw_tasks(split, size, seed)):
            _write_task(scratch / f"{split}-{index:04d}", task, split, seed)
        scratch.chmod(0o755)
        _publish(scratch, target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def _publish(scratch: Path, target: Path) -> None:
    try:
        scratch.rename(target)
    except OSError:
        if not target.is_dir():  # a second process that published the same tasks first is fine
            raise


def _write_task(path: Path, task: WordTask, split: str, seed: int) -> None:
    files = {
        "task.toml": _TASK_TOML.format(name=path.name, split=split, seed=seed),
        "instruction.md": task.instruction,
        "environment/Dockerfile": _DOCKERFILE,
        "solution/solve.sh": _SOLVE.format(answer=task.answer),
        "tests/test.sh": _TEST.format(answer=task.answer),
    }
    for name, text in files.items():
        file = path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        if file.suffix == ".sh":
            file.chmod(0o755)
