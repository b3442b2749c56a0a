"""The file systems that Apptainer runs in: the host's own system, or an image file that is fetched once and kept.

A fetched image appears under its name whole or not at all. Builders that come at the same time wait for one of them;
the claim by which they do only saves work, so nothing depends on locks.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shlex
import shutil
import socket
import subprocess
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pipeline.config import SandboxConfig, UserError, yoke_home
from pipeline.sandbox.base import HOME, TASK

logger = logging.getLogger(__name__)

CLAIM_S = 30.0  # a claim that nobody has renewed for so long is a dead builder's
WAIT_S = 1.0
ROOT_LINKS = ("bin", "sbin", "lib", "lib32", "lib64")
PLACES = ("dev", "etc", "opt", "proc", "root", "run", "tmp", "usr", "var/tmp", "workspace", HOME[1:])
FILES = ("etc/group", "etc/hosts", "etc/passwd", "etc/resolv.conf")

# What apptainer says when a fetch fails, and what a user can do about it; the first that fits.
ADVICE = (
    (("no space left", "disk quota"), "the disk is full: free some space in {folder}, or set YOKE_HOME, and "
     "APPTAINER_CACHEDIR and APPTAINER_TMPDIR, to places with room"),
    (("no such host", "dial tcp", "network is unreachable", "connection refused", "i/o timeout", "tls handshake"),
     "this machine does not reach the registry. On one that does, run: {command}   then copy the file to {target}"),
    (("manifest unknown", "not found", "denied", "unauthorized"),
     "there is no such image, or it needs a login (apptainer registry login)"),
    (("mksquashfs",), "mksquashfs is missing or failed: install squashfs-tools, or run elsewhere: {command}"),
)  # fmt: skip


@dataclass(frozen=True)
class Image:
    """A root file system. ``binds`` (on the host, inside) complete it; ``python`` starts process 1 there."""

    path: Path
    binds: tuple[tuple[str, str], ...] = ()
    python: str = "python3"
    host: bool = False  # the machine's own system
    own: bool = False  # of a task, built for it; with what follows
    layers: tuple[Path, ...] = ()  # above it, read-only
    env: tuple[tuple[str, str], ...] = ()
    workdir: str = ""
    own_workspace: bool = False
    writable: bool = False  # below an overlay


def folder() -> Path:
    """Where images are kept: $YOKE_HOME/images, on the shared file system of a cluster."""
    return yoke_home() / "images"


def host_system(python: str, etc: tuple[str, ...]) -> Image:
    """The host's /usr over a directory of empty places, as bubblewrap shows it. ``etc``: names that go along.

    Nothing is fetched. Raises UserError when the directory cannot be made.
    """
    links = {name: os.readlink(f"/{name}") for name in ROOT_LINKS if os.path.islink(f"/{name}")}
    own = [name for name in ROOT_LINKS if name not in links and os.path.isdir(f"/{name}")]
    shared = [f"/etc/{name}" for name in etc if os.path.exists(f"/etc/{name}")]
    binds = tuple((path, path) for path in ("/usr", *(f"/{name}" for name in own), *shared))
    places = [*PLACES, *own, *(path[1:] for path in shared if os.path.isdir(path))]
    files = [*FILES, *(path[1:] for path in shared if not os.path.isdir(path))]
    digest = hashlib.sha256(repr((links, places, files)).encode()).hexdigest()[:12]
    target = folder() / f"host-{digest}"
    if not target.is_dir():
        try:
            _lay_out(target, links, places, files)
        except OSError as error:
            raise UserError(
                f"cannot make {target} ({error.strerror}): set YOKE_HOME to a place that you may write to"
            ) from None
    return Image(target, binds, python, host=True)


def _lay_out(target: Path, links: dict[str, str], places: list[str], files: list[str]) -> None:
    part = _part_of(target)
    for place in places:
        (part / place).mkdir(parents=True, exist_ok=True)
    for file in files:
        (part / file).parent.mkdir(parents=True, exist_ok=True)
        (part / file).touch()
    for name, to in links.items():
        (part / name).symlink_to(to)
    try:
        part.rename(target)
    except OSError:  # another one was faster
        shutil.rmtree(part)
        if not target.is_dir():
            raise


def find(name: str, program: str, timeout_s: float) -> Image:
    """The image ``name``: a file or directory, or an address (docker://…), which is fetched if it was not before.

    Raises UserError, in one line with what to do.
    """
    if "://" not in name:
        path = Path(name).expanduser().absolute()
        if not path.exists():
            raise UserError(f"sandbox.image={name}: no such file (give a .sif file, or an address as docker://…)")
        return Image(path)
    target = kept_as(name)
    if not target.exists():
        if not program:
            by_hand = f"run: {_pull(name, target)}   then copy the file to {target}"
            raise UserError(f"sandbox.image={name}: no apptainer in PATH to fetch it with; where one is, {by_hand}")
        _fetch_once(name, target, program, timeout_s)
    return Image(target)


def fetch_image(config: SandboxConfig) -> None:
    """Have the image of ``config`` at hand, before a job is sent to nodes without a network. Raises UserError."""
    if config.image not in ("", TASK) and not ("://" in config.image and kept_as(config.image).exists()):
        find(config.image, shutil.which("apptainer") or "", config.pull_timeout_s)


def kept_as(address: str) -> Path:
    """Where the image of this address is kept. Remove the file to have it fetched again."""
    return folder() / f"{hashlib.sha256(address.encode()).hexdigest()[:16]}.sif"


def _fetch_once(name: str, target: Path, program: str, timeout_s: float) -> None:
    """Fetch it, or wait for another one that does: on this node or on another."""
    deadline = time.monotonic() + timeout_s
    claim = target.with_suffix(".claim")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        while not target.exists():
            if _claimed(claim):
                try:
                    if not target.exists():  # else another one has just finished
                        _fetch(name, target, claim, program, deadline)
                finally:
                    claim.unlink(missing_ok=True)
            elif time.monotonic() > deadline:
                raise UserError(
                    f"{_owner(claim)} has not fetched {name} within {timeout_s:.0f} s (its claim is {claim})"
                )
            else:
                time.sleep(WAIT_S)
    except OSError as error:
        raise UserError(
            f"cannot keep {name} in {target.parent}: {error.strerror}; set YOKE_HOME to another place"
        ) from None


def _claimed(claim: Path) -> bool:
    """Whether it is ours to fetch. A dead builder's claim is taken away first; should two do that, both fetch."""
    with suppress(FileNotFoundError):
        if time.time() - claim.stat().st_mtime > CLAIM_S:
            logger.warning("%s: left behind by %s, taken over", claim, _owner(claim))
            claim.unlink()
    try:
        with claim.open("x") as file:
            file.write(f"{socket.gethostname()} process {os.getpid()}")
    except FileExistsError:
        return False
    return True


def _owner(claim: Path) -> str:
    try:
        return claim.read_text() or "another process"
    except OSError:
        return "another process"


def _fetch(name: str, target: Path, claim: Path, program: str, deadline: float) -> None:
    part = _part_of(target)
    command = [program, "pull", "--force", str(part), name]
    words = target.with_suffix(".log")
    logger.info("fetching %s: %s", name, shlex.join(command))
    try:
        with words.open("wb") as log:
            popen = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
            ended = _wait(popen, claim, deadline)
        if ended != 0 or not part.exists():
            raise UserError(_advice(name, target, ended, words))
        os.replace(part, target)
        words.unlink(missing_ok=True)
    finally:
        part.unlink(missing_ok=True)


def _wait(popen: subprocess.Popen[bytes], claim: Path, deadline: float) -> int | None:
    """Its exit code; None when it ran out of time. Renews the claim meanwhile."""
    try:
        while time.monotonic() < deadline:
            with suppress(subprocess.TimeoutExpired):
                return popen.wait(WAIT_S)
            with suppress(FileNotFoundError):
                os.utime(claim)
        return None
    finally:
        if popen.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(popen.pid, 9)
            popen.wait()


def _advice(name: str, target: Path, ended: int | None, words: Path) -> str:
    """One line: what failed, in apptainer's own words, and what to do."""
    text = words.read_text(errors="replace").strip()
    last = text.splitlines()[-1] if text else f"exit {ended}"
    command = _pull(name, target)
    if ended is None:
        limit = "sandbox.pull_timeout_s"
        return f"fetching {name} took longer than {limit}: raise it, or run: {command}   then copy the file to {target}"
    known = (advice for signs, advice in ADVICE if any(sign in text.lower() for sign in signs))
    advice = next(known, "try by hand: {command}   then copy the file to {target}")
    return f"cannot fetch {name}: {last}; {advice.format(folder=target.parent, command=command, target=target)}"


def _pull(name: str, target: Path) -> str:
    return shlex.join(["apptainer", "pull", target.name, name])


def _part_of(target: Path) -> Path:
    """A name beside ``target`` that nobody else has."""
    return target.with_name(f".{target.name}.{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}")
