"""Commands in README.md, REPRODUCE.md and docs/: every `yoke …`, `make …` and `sbatch …` names what there is."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from pipeline.cli import JOBS, SWEEP_FLAGS, compose_config, flags_as_overrides, parse_overrides
from pipeline.config import UserError
from pipeline.harness.base import harness_names

ROOT = Path(__file__).resolve().parent.parent
HISTORY = ROOT / "docs" / "decisions.md"  # tells what was so on a day
PAGES = [path for path in sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]) if path != HISTORY]

FENCE = re.compile(r"^( *)```[^\n]*\n(.*?)^\1```", re.M | re.S)
SPAN = re.compile(r"(?<!`)`([^`]+)`(?!`)")
NEXT = re.compile(r"\s(?:&&|\|\||[|;&>]|\d>)\s?|\s{2,}\(")  # behind it another command begins, or words about it
COMMAND = re.compile(r"\s*(?:\$ )?(?:[A-Z_]+=\S+ +)*(?:\S*/)?(yoke|make|sbatch) +(?=[a-z+-])")
OPEN = re.compile(r"…|\.\.\.|^[A-Z_]+$|^\[")  # a word that the reader fills in, or may leave out
GIVEN = ("tasks.train=x", "tasks.test=x")  # what has no default, for commands that leave it out


def commands(text: str) -> Iterator[tuple[str, list[str]]]:
    """(program, words) of every command in the blocks and spans of code of a page, without comments."""
    blocks = [found[2].replace("\\\n", " ") for found in FENCE.finditer(text)]
    spans = [found[1].replace("\n", " ") for found in SPAN.finditer(FENCE.sub("", text))]
    for line in [line for block in blocks for line in block.splitlines()] + spans:
        for part in NEXT.split(line):
            if found := COMMAND.match(part):
                yield found[1], shlex.split(part[found.end() :].rstrip(' ")'), comments=True)


def wrong(words: list[str]) -> str:
    """What is wrong with the words after `yoke`; nothing if they are as they should be."""
    name, *rest = words
    if name.startswith("-") or name.endswith(":"):  # yoke --help; what a job says
        return ""
    if name not in JOBS:
        return f"there is no job {name}"
    job = JOBS[name]
    rest = [word for word in rest if word not in ("--cfg", "--help") and word.partition("=")[0] not in job.own]
    try:
        if job.group:
            rest = flags_as_overrides(rest, job.group)
        rest = [word for word in rest if not OPEN.search(word) or (job.group and "=" in word)]
        settings = [word for word in rest if "=" in word and not word.startswith("-")]
        others = [word for word in rest if word not in settings]
        for point in _points(settings) if any(word in SWEEP_FLAGS for word in others) else [tuple(settings)]:
            _compose(point)
    except UserError as error:
        return str(error)
    known = {*re.findall(r"--?[a-z]+|[a-z]+", job.words), *SWEEP_FLAGS}
    if strange := [word for word in others if word.startswith("-") and word not in known]:
        return f"yoke {name} has no {strange[0]}"
    own = any(word.startswith("harness.recipes=") for word in words)
    return "" if own or name != "harness" else _wrong_harness(others, known)


def _wrong_harness(words: list[str], known: set[str]) -> str:
    return next((f"there is no harness {word}" for word in words if word not in {*known, *harness_names()}), "")


def _points(settings: list[str]) -> Iterator[tuple[str, ...]]:
    """Of a sweep: settings so often that each value of each key comes once."""
    axes = []
    for override in parse_overrides(settings):
        key, _, value = (override.input_line or "").partition("=")
        swept = override.is_sweep_override()
        axes.append([f"{key}={one}" for one in (override.sweep_string_iterator() if swept else [value])])
    for index in range(max(map(len, axes), default=0)):
        yield tuple(axis[min(index, len(axis) - 1)] for axis in axes)


@cache
def _compose(settings: tuple[str, ...]) -> None:
    if any(not word.startswith("run_dir=") for word in settings):
        compose_config([*GIVEN, *settings])


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_every_yoke_command_is_one(page: Path) -> None:
    found = {tuple(words) for program, words in commands(page.read_text()) if program == "yoke" and words}
    assert {" ".join(words): why for words in sorted(found) if (why := wrong(list(words)))} == {}


def test_every_experiment_opens_with_commands_that_are_ones() -> None:
    for path in (ROOT / "conf" / "experiment").glob("*.yaml"):
        lines = [line.removeprefix("# ") for line in path.read_text().splitlines() if line.startswith("# yoke")]
        found = [words for _, words in commands("```\n" + "\n".join(lines) + "\n```\n")]
        assert found, f"{path.name} does not say how it is run"
        assert {" ".join(words): why for words in found if (why := wrong(words))} == {}, path.name


def test_every_make_target_and_script_is_there() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    for page in PAGES:
        for program, words in commands(page.read_text()):
            plain = [word for word in words if re.fullmatch(r"[a-z][\w./-]*", word)]
            if program == "make":
                assert set(plain) <= targets, f"{page.name}: make {' '.join(words)}"
            if program == "sbatch":
                scripts = [word for word in plain if word.endswith(".sbatch")]
                assert all((ROOT / script).is_file() for script in scripts), f"{page.name}: {words}"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("yoke trian +experiment=smoke", "there is no job trian"),
        ("yoke train +experiment=smok", "there is no experiment/smok"),
        ("yoke train -m +experiment=smoke seed=0,1 mix=single,four", ""),
        ("yoke train -m +experiment=smoke mix=single,fuor", "there is no mix/fuor"),
        ("yoke train mix.harness=[pi]", "there is no setting mix.harness"),
        ("yoke train training.updates=many", "many"),
        ("yoke status RUN --wach", "yoke status has no --wach"),
        ("yoke harness instal pi", "there is no harness instal"),
        ("yoke harness install pie", "there is no harness pie"),
        ("yoke proxy --llm-ulr http://host", "there is no setting proxy.llm_ulr"),
        ("make install && .venv/bin/yoke harnes list", "there is no job harnes"),
    ],
)
def test_a_rotten_command_is_found(line: str, said: str) -> None:
    *_, (_, words) = commands(f"text\n\n```\n$ {line}   # a comment\n```\n")
    found = wrong(words)
    assert said in found and bool(said) == bool(found)


def test_commands_are_found_in_blocks_and_spans() -> None:
    block = "```\nA=1 .venv/bin/yoke train seed=1 \\\n    mix=four # all\nyoke: no\n```\n"
    page = f"Type `yoke stop RUN`, not `yoke`.\n\n{block}"
    assert list(commands(page)) == [("yoke", ["train", "seed=1", "mix=four"]), ("yoke", ["stop", "RUN"])]
