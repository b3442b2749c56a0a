"""What a recipe says of a harness, and the registry. A recipe is data: one small file a harness, no code in it.

In the sandbox every harness lies at /opt/harness/<name> and Node at /opt/node, wherever they are installed on the host:
some put such paths into their prompts, and a prompt must be the same on every machine.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import re
import shutil
import string
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from pipeline.config import UserError, yoke_home
from pipeline.harness.packages import NODE_INSIDE, Mount, Packaging

ENTRY_POINTS = "yoke.harnesses"  # other packages' recipes: name = "package.module:RECIPE"
DIALECTS = ("chat", "responses", "anthropic", "gemini")
LAUNCH_WORDS = ("base_url", "key", "model", "prompt", "context_tokens", "max_tokens", "prefix", "node", "runners")
TEMPLATES = {  # of a recipe: by field, the words that it may have
    **dict.fromkeys(("argv", "env", "home_files", "stdin"), LAUNCH_WORDS),
    "shell": ("command",),
    "write": ("path", "content"),
    "finish": (),
    "subagent": ("prompt",),
}
RUNNERS = Path(__file__).parent / "runners"  # small programs for harnesses that are libraries
RUNNERS_INSIDE = "/opt/runners"
BUILT_IN = {
    "claude-code": "pipeline.harness.claude_code:RECIPE",
    "claude-code-bare": "pipeline.harness.claude_code:BARE",
    "codex": "pipeline.harness.codex:RECIPE",
    "gemini-cli": "pipeline.harness.gemini_cli:RECIPE",
    "mini-swe-agent": "pipeline.harness.mini_swe_agent:RECIPE",
    "mistral-vibe": "pipeline.harness.mistral_vibe:RECIPE",
    "opencode": "pipeline.harness.opencode:RECIPE",
    "openhands": "pipeline.harness.openhands:RECIPE",
    "pi": "pipeline.harness.pi:RECIPE",
    "terminus-2": "pipeline.harness.terminus_2:RECIPE",
    "qwen-code": "pipeline.harness.qwen_code:RECIPE",
}
_registered: dict[str, str] = {}  # by `register`


def harness_root(configured: str | None = None) -> Path:
    """Where harnesses are installed: as configured, else $YOKE_HOME/harnesses, else ~/.cache/yoke/harnesses."""
    return Path(configured).expanduser().absolute() if configured else yoke_home() / "harnesses"


@dataclass(frozen=True)
class Endpoint:
    """The model as a harness is told of it. ``base_url`` is ``http://host:port``."""

    base_url: str
    key: str
    model: str
    context_tokens: int = 200_000  # what a prompt and its answer may hold together
    max_tokens: int = 8192  # of one answer


@dataclass(frozen=True)
class HarnessLaunch:
    """What the sandbox needs to start a harness: the fields of the same names of a sandbox's spec."""

    argv: tuple[str, ...]
    env: dict[str, str]
    home_files: dict[str, str]
    read_only: tuple[Path, ...]
    mounts: tuple[Mount, ...]
    stdin: str | None


@dataclass(frozen=True)
class Action:
    """What a scripted model answers to make this harness do something: a tool call, or ``text``.

    Strings in ``arguments`` and ``text`` are templates with the words that the recipe's field names.
    """

    tool: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    text: str = ""
    namespace: str = ""  # of the tool, where the harness groups its tools

    def filled(self, **words: str) -> Action:
        """With its templates filled in; text that is JSON gets its words escaped."""
        escaped = {key: json.dumps(word)[1:-1] for key, word in words.items()}
        text = _filled(self.text, escaped if self.text.startswith("{") else words)
        return Action(self.tool, _filled(self.arguments, words), text, self.namespace)


@dataclass(frozen=True)
class HarnessRecipe:
    """One harness at one version.

    ``argv``, ``env``, ``home_files`` (path below HOME → text, or an object written as JSON) and ``stdin`` are templates
    with ``$base_url`` (without /v1), ``$key``, ``$model``, ``$prompt``, ``$context_tokens``, ``$max_tokens``,
    ``$prefix`` (of the installation, inside), ``$node`` and ``$runners``. In an object, a string that is the word of a
    number and nothing else becomes the number.
    """

    name: str
    version: str
    dialect: str  # the model API that it speaks: chat | responses | anthropic | gemini
    packaging: Packaging
    argv: tuple[str, ...]
    env: Mapping[str, str]
    home_files: Mapping[str, Any] = field(default_factory=dict)
    stdin: str | None = None
    programs: tuple[str, ...] = ()  # of the system, which no package brings
    installation: str = ""  # of another recipe that it shares; "" = its own
    warm_up: bool = False  # a trial run at installation fills $prefix/compile-cache (chat, gemini)
    exit_codes: Mapping[int, str] = field(default_factory=dict)  # what it means by them: call_budget, agent_crash …
    loop_guard: str = ""  # regular expression in its output when its own guard against loops ended the run
    tool_log: str = ""  # regular expression that its output holds once for each tool call
    limits: Mapping[str, str] = field(default_factory=dict)  # those that it honours: turns, retries … → how to set them
    # what a scripted model must answer; see Action
    shell: Action = Action()  # run $command
    write: Action | None = None  # put the line $content into the new file $path, where there is no shell
    finish: tuple[Action, ...] = (Action(text="Done."),)  # end the run; () when the first answer that acts ends it
    subagent: Action | None = None  # hand $prompt to a sub-agent
    compacts: bool = False  # it compacts its history when the context is nearly full

    @property
    def prefix(self) -> str:
        """Where the installation lies in the sandbox."""
        return f"/opt/harness/{self.installed_as}"

    @property
    def installed_as(self) -> str:
        """The name of its installation."""
        return self.installation or self.name

    @property
    def acts_by(self) -> Action:
        """What makes it act; Action() when the recipe does not say it."""
        return self.write or self.shell

    @property
    def by_text(self) -> bool:
        """Whether it takes actions out of an answer's text, and so makes no tool calls."""
        return bool(self.acts_by.text) and not self.acts_by.tool

    def launch(self, endpoint: Endpoint, prompt: str, root: Path) -> HarnessLaunch:
        """The command that gives ``prompt`` to the harness installed below ``root`` and points it at ``endpoint``.

        Raises UserError when there is no Node for it.
        """
        prefix = root / self.installed_as
        inside = {"prompt": prompt, "prefix": self.prefix, "node": NODE_INSIDE, "runners": RUNNERS_INSIDE}
        values = {**vars(endpoint), **inside}
        words = {name: str(value) for name, value in values.items()}
        files = {path: _filled(content, values) for path, content in self.home_files.items()}
        runners = ((RUNNERS, RUNNERS_INSIDE, False),) if any("$runners" in word for word in self.argv) else ()
        return HarnessLaunch(
            argv=tuple(_filled(word, words) for word in self.argv),
            env={name: _filled(value, words) for name, value in self.env.items()},
            home_files={path: c if isinstance(c, str) else json.dumps(c, indent=2) + "\n" for path, c in files.items()},
            read_only=(),
            mounts=((prefix, self.prefix, False), *runners, *self.packaging.runtime(prefix)),
            stdin=None if self.stdin is None else _filled(self.stdin, words),
        )

    def check_installed(self, root: Path) -> None:
        """Raises UserError, in one line that says what to do, unless the pinned version can run from ``root``."""
        found = self.packaging.version(root / self.installed_as)
        if found != self.version:
            there = "is not installed" if found is None else f"is needed, but {found} is installed,"
            raise UserError(f"{self.name} {self.version} {there} in {root}: yoke harness install {self.name}")
        self.packaging.runtime(root / self.installed_as)
        if missing := self._missing_programs():
            raise UserError(f"{self.name} cannot run here: {missing}")

    def missing(self) -> str | None:
        """What the machine lacks to install it and to run it then, in one line; None if nothing."""
        return self._missing_programs() or self.packaging.missing()

    def _missing_programs(self) -> str | None:
        absent = [program for program in self.programs if shutil.which(program) is None]
        if absent:
            return f"no {' and no '.join(absent)}, which no package brings: install it from your system's packages"
        return None


def _filled(value: Any, words: Mapping[str, str | int]) -> Any:
    """``value`` with every string in it filled in, at any depth; a number's word alone becomes the number."""
    if isinstance(value, str):
        number = words.get(value.removeprefix("$")) if value.startswith("$") else None
        return number if isinstance(number, int) else string.Template(value).substitute(words)
    if isinstance(value, Mapping):
        return {_filled(key, words): _filled(item, words) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_filled(item, words) for item in value]
    return value


def harness_names() -> list[str]:
    """Every harness that can be asked for, registered ones and those of other installed packages included."""
    return sorted({*BUILT_IN, *_registered, *_of_others()})


def get_harness(name: str) -> HarnessRecipe:
    """The recipe of ``name``. Raises UserError, listing the known names."""
    return load_with_module(name)[1]


def load_with_module(name: str) -> tuple[ModuleType, HarnessRecipe]:
    """The recipe of ``name`` and the module that it lies in. Raises UserError, listing the known names."""
    return _load(_place(name))


def locks_of(name: str) -> Path | None:
    """The directory of the lock of ``name``, ``locks/<name>`` beside its recipe; None where there is none."""
    module, recipe = load_with_module(name)
    folder = lock_place(module, recipe)
    return folder if folder.is_dir() else None


def lock_place(module: ModuleType, recipe: HarnessRecipe) -> Path:
    """Where the lock of ``recipe`` belongs."""
    assert module.__file__ is not None
    return Path(module.__file__).parent / "locks" / recipe.installed_as


def register(places: Iterable[str]) -> None:
    """Add recipes by place: ``path/to/file.py`` or ``package.module``, each with ``:NAME`` if not RECIPE.

    Raises UserError when there is no recipe.
    """
    for place in places:
        recipe = _load(place)[1]
        _registered[recipe.name] = place


def _place(name: str) -> str:
    place = {**_of_others(), **_registered, **BUILT_IN}.get(name)
    if place is None:
        raise UserError(f"unknown harness {name!r}; known: {', '.join(harness_names())}")
    return place


def _load(place: str) -> tuple[ModuleType, HarnessRecipe]:
    source, _, attribute = place.partition(":")
    try:
        module = _module_of_file(Path(source)) if source.endswith(".py") else importlib.import_module(source)
        recipe = getattr(module, attribute or "RECIPE")
    except (ImportError, OSError, AttributeError, SyntaxError) as error:
        raise UserError(f"no harness recipe at {place}: {error}") from None
    except Exception as error:  # whatever a user's file raises
        line = traceback.extract_tb(error.__traceback__)[-1].lineno
        raise UserError(f"no harness recipe at {place}: line {line}: {type(error).__name__}: {error}") from None
    if not isinstance(recipe, HarnessRecipe):
        raise UserError(f"{place} is no HarnessRecipe")
    _check(recipe, place)
    return module, recipe


def _check(recipe: HarnessRecipe, place: str) -> None:
    """Raises UserError for a dialect that there is not, and for a template or an expression that does not read."""
    if recipe.dialect not in DIALECTS:
        raise UserError(f"{place}: dialect {recipe.dialect!r} is none of {', '.join(DIALECTS)}")
    for name, words in TEMPLATES.items():
        try:
            _filled(_plain(getattr(recipe, name)), dict.fromkeys(words, ""))
        except KeyError as error:
            known = ", ".join(f"${word}" for word in words) or "none"
            raise UserError(f"{place}: {name} has ${error.args[0]}; what it may have: {known}") from None
        except ValueError:
            raise UserError(f"{place}: {name}: a dollar sign that begins no word is written $$") from None
    for name in ("loop_guard", "tool_log"):
        try:
            re.compile(getattr(recipe, name))
        except re.error as error:
            raise UserError(f"{place}: {name} is no regular expression: {error}") from None


def _plain(value: Any) -> Any:
    """A field of a recipe with its actions as what is filled in of them."""
    if isinstance(value, Action):
        return [value.text, value.arguments]
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


def _module_of_file(path: Path) -> ModuleType:
    path = path.expanduser().absolute()
    spec = importlib.util.spec_from_file_location(f"yoke_harness_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _of_others() -> dict[str, str]:
    return {entry.name: entry.value for entry in importlib.metadata.entry_points(group=ENTRY_POINTS)}
