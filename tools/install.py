#!/usr/bin/env python3
"""Set up Yoke's environment: `make install`, or `python3 tools/install.py [--venv DIR] [--torch WAY]`.

Standard library only, because it runs before anything is installed. It makes the environment, then installs torch (by
the first of three ways that works), everything else from requirements/cpu.txt, and Yoke itself from this folder. Needs
no root.
"""

from __future__ import annotations

import argparse
import configparser
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "requirements" / "cpu.txt"
BUILD_LOCK = ROOT / "requirements" / "build.txt"
INPUTS = (LOCK, BUILD_LOCK, ROOT / "setup.cfg", ROOT / "pyproject.toml", Path(__file__).resolve())
UV = "0.13.9"
PYTHONS = ((3, 11), (3, 12))
STAMP = "yoke-install.json"
FREE_GB = 8  # the environment takes 3 GB, or 6 with the default build of torch; downloads lie beside it for a while
PROBE_S = 15
INSTALL_S = 3600
WAYS = ("find-links", "cpu-index", "default")


class InstallError(Exception):
    """What went wrong and what to do about it, in one line for the person at the terminal."""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv", help="where the environment goes")
    parser.add_argument("--torch", choices=("auto", *WAYS), default="auto", help="how torch is installed")
    options = parser.parse_args()
    try:
        install(Path(os.path.abspath(options.venv)), options.torch)
    except InstallError as error:
        print(f"install: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("install: interrupted; the same command starts over", file=sys.stderr)
        return 130
    return 0


def install(venv: Path, way: str) -> None:
    """Bring ``venv`` to the state that the lock describes; does nothing when it is already there."""
    started = time.monotonic()
    if up_to_date(venv):
        say(f"{venv} is up to date")
        return
    check_disk(venv)
    state = prepare(venv)
    make_environment(venv)
    environ = uv_environ(venv)
    install_torch(venv, environ, WAYS if way == "auto" else (way,))
    say(f"everything else from {LOCK.relative_to(ROOT)}")
    again = ["--reinstall"] if state == "repair" else []
    locked = ["--no-deps", "--require-hashes", "--build-constraints", str(BUILD_LOCK), "--requirements", str(LOCK)]
    pip_install(venv, environ, *again, *locked)
    pip_install(venv, environ, "--no-deps", "--no-build-isolation", "--editable", str(ROOT))
    version = check_imports(venv)
    write_stamp(venv, {"state": "done", "at": str(venv), "inputs": fingerprint(), "torch": version})
    say(f"done in {time.monotonic() - started:.0f} s (torch {version})")


# What is there already


def up_to_date(venv: Path) -> bool:
    """Whether a finished install from the very same inputs stands at this very place."""
    stamp = read_stamp(venv)
    same = stamp.get("at") == str(venv) and stamp.get("inputs") == fingerprint()
    works = (venv / "bin" / "yoke").exists() and python_version(venv) in PYTHONS
    return same and works and stamp.get("state") == "done"


def prepare(venv: Path) -> str:
    """Clear away a half-made or moved environment, and leave a note for the next run in case this one breaks off.

    Returns what is to be done: "make" a new one, "update" a finished one, "repair" one whose update broke off, or
    "adopt" one that was made by hand, which is never removed.
    """
    stamp, works = read_stamp(venv), python_version(venv) in PYTHONS
    if not stamp and venv.exists() and any(venv.iterdir()):
        if not works:
            raise InstallError(
                f"{venv} is no Python 3.11 or 3.12 environment: remove it, or set VENV= to another place"
            )
        say(f"{venv} was made by hand: completing it in place")
        return "adopt"
    if works and stamp.get("at") == str(venv):
        write_stamp(venv, {"state": "update", "at": str(venv)})
        return "update" if stamp["state"] == "done" else "repair"
    if stamp:
        say(f"{venv} is unfinished or was moved: making it anew")
        shutil.rmtree(venv)
    write_stamp(venv, {"state": "make"})
    return "make"


def fingerprint() -> str:
    """A hash of every file that decides what gets installed."""
    digest = hashlib.sha256(str(ROOT).encode())
    for path in INPUTS:
        digest.update(path.read_bytes())
    return digest.hexdigest()


def read_stamp(venv: Path) -> dict[str, str]:
    try:
        return dict(json.loads((venv / STAMP).read_text()))
    except FileNotFoundError:
        return {}
    except ValueError:
        return {"state": "unreadable"}


def write_stamp(venv: Path, stamp: dict[str, str]) -> None:
    venv.mkdir(parents=True, exist_ok=True)
    draft = venv / f"{STAMP}.new"
    draft.write_text(json.dumps(stamp) + "\n")
    draft.replace(venv / STAMP)


def check_disk(venv: Path) -> None:
    place = next(folder for folder in (venv, *venv.parents) if folder.exists())
    free = shutil.disk_usage(place).free / 1e9
    if free < FREE_GB and not (venv / "bin").exists():
        raise InstallError(f"{place} has {free:.1f} GB free and needs {FREE_GB} GB: make room, or set VENV=")


# The environment and uv


def make_environment(venv: Path) -> None:
    """Make ``venv`` (unless it works) and put the pinned uv into it."""
    if python_version(venv) not in PYTHONS:
        create(venv)
    if output([str(venv / "bin" / "uv"), "--version"]).split()[1:2] != [UV]:
        install_uv(venv)


def create(venv: Path) -> None:
    python, version = find_python()
    name = f"Python {version[0]}.{version[1]}"
    say(f"{venv} with {name} ({python})")
    if succeeds([python, "-c", "import ensurepip, venv"]):
        run([python, "-m", "venv", str(venv)], f"making {venv}")
    elif shutil.which("uv"):
        run(["uv", "venv", "--quiet", "--allow-existing", "--python", python, str(venv)], f"making {venv} with uv")
    elif succeeds([python, "-m", "pip", "--python", python, "--version"]):
        run([python, "-m", "venv", "--without-pip", str(venv)], f"making {venv} without pip")
    else:
        package = f"python{version[0]}.{version[1]}-venv"
        raise InstallError(f"{python} cannot make environments: install the Debian package {package}, or pip, or uv")


def install_uv(venv: Path) -> None:
    inside, python = venv / "bin" / "python", find_python()[0]
    if succeeds([str(inside), "-m", "pip", "--version"]):
        command = [str(inside), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", f"uv=={UV}"]
    elif shutil.which("uv"):
        command = ["uv", "pip", "install", "--quiet", "--python", str(inside), f"uv=={UV}"]
    else:
        command = [python, "-m", "pip", "--python", str(inside), "install", "--quiet", f"uv=={UV}"]
    run(command, f"installing uv {UV}")


def find_python() -> tuple[str, tuple[int, int]]:
    """The interpreter to build on: $PYTHON, or the first of python3.11, python3.12 and python3 that is new enough."""
    wanted = [os.environ["PYTHON"]] if os.environ.get("PYTHON") else ["python3.11", "python3.12", "python3"]
    for name in wanted:
        path = shutil.which(name)
        version = interpreter_version(path) if path else None
        if path and version in PYTHONS:
            return path, version
    raise InstallError(
        f"needs Python 3.11 or 3.12 and found neither as {', '.join(wanted)}: install one, or set PYTHON="
    )


def python_version(venv: Path) -> tuple[int, int] | None:
    return interpreter_version(str(venv / "bin" / "python"))


def interpreter_version(python: str) -> tuple[int, int] | None:
    """Major and minor version, or None for what does not run (a dead link, a version manager's empty shim)."""
    answer = output([python, "-c", "import sys; print(*sys.version_info[:2])"]).split()
    return (int(answer[0]), int(answer[1])) if len(answer) == 2 else None


def uv_environ(venv: Path) -> dict[str, str]:
    """The environment for uv, which does not read pip's settings: what pip is told and uv is not, is passed on."""
    environ, pip = dict(os.environ), pip_settings(venv)
    passed_on = {
        "UV_FIND_LINKS": ",".join(pip.get("find-links", "").split()),
        "UV_DEFAULT_INDEX": "" if environ.get("UV_INDEX_URL") else pip.get("index-url", ""),
        "UV_INDEX": "" if environ.get("UV_EXTRA_INDEX_URL") else pip.get("extra-index-url", ""),
        "SSL_CERT_FILE": pip.get("cert", ""),
        "UV_HTTP_TIMEOUT": "180",
        "UV_INDEX_STRATEGY": "unsafe-best-match",  # as pip does: all indexes count alike (the lock's hashes hold)
    }
    for name, value in passed_on.items():
        if value and not environ.get(name):
            environ[name] = value
    environ.pop("VIRTUAL_ENV", None)
    return environ


def pip_settings(venv: Path) -> dict[str, str]:
    """pip's own settings by name: its configuration files, overruled by PIP_* variables."""
    pythons = (str(venv / "bin" / "python"), sys.executable)
    listed = next(filter(None, (output([python, "-m", "pip", "config", "list"]) for python in pythons)), "")
    found = re.findall(r"^(?:global|install)\.([\w-]+)='(.*)'$", listed, re.MULTILINE)
    settings = {name: value.replace("\\n", " ").strip() for name, value in found}
    for name in ("find-links", "index-url", "extra-index-url", "cert"):
        variable = "PIP_" + name.upper().replace("-", "_")
        if variable in os.environ:
            settings[name] = os.environ[variable]
    return settings


# torch


def install_torch(venv: Path, environ: dict[str, str], ways: tuple[str, ...]) -> None:
    """Install the pinned torch by the first way that works; each way says in one line how it went."""
    pin = torch_pin()
    if installed_torch(venv).split("+")[0] == pin:
        say(f"torch {installed_torch(venv)} is there")
        return
    attempts = {"find-links": torch_from_find_links, "cpu-index": torch_from_cpu_index, "default": torch_by_default}
    for way in ways:
        outcome = attempts[way](venv, environ, f"torch=={pin}")
        say(f"torch {pin}, way {WAYS.index(way) + 1} of {len(WAYS)}: {outcome}")
        if installed_torch(venv):
            return
    raise InstallError(f"torch {pin} could not be installed by any way tried above")


def torch_from_find_links(venv: Path, environ: dict[str, str], pin: str) -> str:
    folders = environ.get("UV_FIND_LINKS", "")
    if not folders:
        return "no find-links folder is set (PIP_FIND_LINKS or UV_FIND_LINKS)"
    code, _ = attempt(uv_pip(venv, "--no-deps", "--no-index", pin), environ, INSTALL_S)
    return f"a build in the find-links folder {folders}" if code == 0 else f"no build for this Python in {folders}"


def torch_from_cpu_index(venv: Path, environ: dict[str, str], pin: str) -> str:
    """Ask PyTorch's CPU index (uv knows where it is), impatiently, and only then download from it."""
    command = uv_pip(venv, "--no-deps", "--torch-backend", "cpu", pin)
    impatient = {**environ, "UV_HTTP_TIMEOUT": "10", "UV_HTTP_RETRIES": "0"}
    code, told = attempt([*command, "--dry-run"], impatient, PROBE_S)
    if code != 0:
        return f"PyTorch's CPU index does not answer ({told})"
    code, told = attempt(command, environ, INSTALL_S)
    return "from PyTorch's CPU index" if code == 0 else f"PyTorch's CPU index broke off: {told}"


def torch_by_default(venv: Path, environ: dict[str, str], pin: str) -> str:
    say("the default build of torch brings 3 GB of CUDA libraries and runs without a GPU")
    pip_install(venv, environ, "--constraints", str(LOCK), pin)
    return "the default build"


def torch_pin() -> str:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    pins = dict(line.split("==") for line in config["options"]["install_requires"].split())
    return pins["torch"]


def installed_torch(venv: Path) -> str:
    """The version of torch in ``venv``, or an empty string."""
    code = "import importlib.metadata as m; print(m.version('torch'))"
    return output([str(venv / "bin" / "python"), "-c", code]).strip()


def check_imports(venv: Path) -> str:
    """Import what breaks when builds do not fit together; returns torch's version."""
    code = "import torch, transformers, deepspeed, vllm; print(torch.__version__)"
    environ = {**os.environ, "DS_ACCELERATOR": "cpu", "VLLM_LOGGING_LEVEL": "ERROR"}
    status, told = attempt([str(venv / "bin" / "python"), "-W", "ignore", "-c", code], environ, 300)
    if status != 0:
        raise InstallError(f"the installed packages do not import ({told}): remove {venv} and run the command again")
    return installed_torch(venv)


# Running programs


def uv_pip(venv: Path, *arguments: str) -> list[str]:
    return [str(venv / "bin" / "uv"), "pip", "install", "--python", str(venv / "bin" / "python"), *arguments]


def pip_install(venv: Path, environ: dict[str, str], *arguments: str) -> None:
    quiet = () if sys.stderr.isatty() else ("--quiet",)
    run(uv_pip(venv, *quiet, *arguments), f"`uv pip install {' '.join(arguments[-2:])}`", environ)


def run(command: list[str], what: str, environ: dict[str, str] | None = None) -> None:
    """Run to the end with the program's own words on the terminal; InstallError when it fails or takes too long."""
    try:
        code = subprocess.run(command, env=environ, timeout=INSTALL_S, stdin=subprocess.DEVNULL).returncode
    except subprocess.TimeoutExpired:
        raise InstallError(f"{what} did not end within {INSTALL_S} s") from None
    if code != 0:
        raise InstallError(f"{what} failed with exit code {code}; its own words are above")


def attempt(command: list[str], environ: dict[str, str] | None, timeout_s: float) -> tuple[int | None, str]:
    """Run quietly. Returns the exit code (None: ran out of time) and the last line that it said."""
    try:
        done = subprocess.run(
            command, env=environ, timeout=timeout_s, capture_output=True, text=True, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        return None, f"no end within {timeout_s:.0f} s"
    lines = [line.strip() for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    return done.returncode, lines[-1] if lines else "no output"


def succeeds(command: list[str]) -> bool:
    return attempt(command, None, 60)[0] == 0


def output(command: list[str]) -> str:
    """What a short command prints; empty when it cannot run or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)
    except OSError:
        return ""
    return done.stdout if done.returncode == 0 else ""


def say(message: str) -> None:
    print(f"install: {message}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
