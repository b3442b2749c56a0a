"""The writable layer: what a command leaves on disk and in memory file systems, copied so that a verifier can have it.

A copy holds directories, regular files and links. Sockets, pipes, devices and set-user-id bits are left out, and so is
every link by which a verifier could be led to its own tests.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from pipeline.sandbox.base import HOME, WORKSPACE
from pipeline.sandbox.builds import Build
from pipeline.sandbox.changes import Changes, without_startup_code
from pipeline.sandbox.disk import BLOCK

SNAPSHOT_BYTES = 4 << 30
SNAPSHOT_FILES = 250_000  # twice what sandbox.workspace_files lets a rollout have: a backstop, no limit of its own
CHUNK = 1 << 20
LAYER = {HOME: "home", "/tmp": "tmp"}  # place inside → directory of a layer; with an image also ROOT
ROOT_LAYER, ROOT_PARTS = "root", ("upper", "work")  # as Apptainer wants them
LINKED = tuple(map(PurePosixPath, (WORKSPACE, HOME, "/usr", "/opt", "/bin", "/lib", "/lib64", "/sbin")))
APART = tuple(map(PurePosixPath, ("/tests", "/logs", "/solution", "/proc", "/dev", "/sys")))  # never a link's target
WHITEOUT = stat.S_IFCHR  # of an overlay file system: a device 0/0 stands for a name that was removed
MARKS = ("user.overlay.", "user.fuseoverlayfs.")  # an overlay's own notes on its directories
TOO_LONG = (errno.ENAMETOOLONG, errno.ELOOP)  # nothing inside could open it by its path either


class WorkspaceTooLarge(Exception):
    """The agent left more than a snapshot may hold."""


def snapshot(
    source: Path,
    target: Path,
    max_bytes: int = SNAPSHOT_BYTES,
    max_files: int = SNAPSHOT_FILES,
    *,
    inside: str = WORKSPACE,
    changes: Changes | None = None,
) -> None:
    """Copy ``source``, which a sandbox sees at ``inside``, to ``target``; holes stay holes, hard links stay one file.

    With ``changes``, ``source`` is the upper directory of an overlay: what they let through goes along with the marks
    of what was removed. ``max_bytes`` counts what is allocated. Raises WorkspaceTooLarge.
    """
    target.mkdir()
    left, files = max_bytes, 0
    copies: dict[int, str] = {}
    for name, status in _walk(source):
        copy = f"{target}/{name}"
        is_directory = stat.S_ISDIR(status.st_mode)
        if changes is not None and not changes.seen(PurePosixPath(name), is_directory):
            continue
        if not os.path.isdir(os.path.dirname(copy)):  # left out
            continue
        files += 1
        left -= status.st_blocks * BLOCK if status.st_ino not in copies else 0
        if left < 0 or files > max_files:
            raise WorkspaceTooLarge(f"the workspace holds more than {max_bytes >> 20} MB or {max_files} files")
        with _too_long_left_out():
            _copy(f"{source}/{name}", status, copy, f"{inside}/{name}", copies, changes is not None)
            if is_directory and changes is not None and not changes.is_programs(PurePosixPath(name)):
                _copy_marks(f"{source}/{name}", copy)


def copy_layer(source: Path, target: Path, image: Build | None) -> None:
    """Copy what a sandbox left; of changes to ``image`` what its verifier may see. Raises WorkspaceTooLarge."""
    target.mkdir()
    source.mkdir(exist_ok=True)  # a command that never ran has left nothing
    for inside, name in LAYER.items():
        own_directory(source / name)
        snapshot(source / name, target / name, inside=inside)
    upper = Path(ROOT_LAYER, ROOT_PARTS[0])
    if (source / upper).is_dir() and image is not None:
        (target / ROOT_LAYER).mkdir()
        snapshot(source / upper, target / upper, inside="", changes=Changes(image.has(), image.search_path))
        without_startup_code(target / upper)


def remove_tree(path: Path) -> None:
    """Delete a tree, also one whose directories were left without permissions, or nest deeper than Python's stack."""
    with contextlib.suppress(OSError):
        for _ in _walk(path):
            pass
    with contextlib.suppress(RecursionError):
        shutil.rmtree(path, ignore_errors=True)
    if os.path.lexists(path):  # deeper than a path is long
        subprocess.run(["rm", "-rf", "--", str(path)], check=False, timeout=60)


def own_directory(path: Path) -> None:
    """See to it that ``path`` is a directory, whatever an agent without isolation has put in its place."""
    if path.is_symlink() or not path.is_dir():
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        path.mkdir()


def link_stays(link: PurePosixPath, target: str, anywhere: bool = False) -> bool:
    """Whether a link at ``link``, as the sandbox sees it, may be copied: one that leads neither to the tests nor to
    their reward, but to a place in LINKED or, with ``anywhere``, in an image.

    A .. after a name would climb from wherever that name leads, so it is refused. Without any, a path reaches only what
    some link names, and none may name / or what holds the tests.
    """
    there = link.parent
    parts = [part for part in target.split("/") if part not in ("", ".")]
    if target.startswith("/"):
        there = PurePosixPath("/")
    while parts and parts[0] == "..":
        there = there.parent
        del parts[0]
    there = there.joinpath(*parts)
    if ".." in parts or there == PurePosixPath("/") or any(there.is_relative_to(place) for place in APART):
        return False
    return anywhere or any(there.is_relative_to(place) for place in LINKED)


def _walk(root: Path) -> Iterator[tuple[str, os.stat_result]]:
    """The name below ``root`` and the state of everything in it, parents first, links not followed; closed directories
    are opened.

    Without recursion, and on plain text: an agent may nest directories deeper than Python's stack, or than a path is
    long, and leave files by the thousand.
    """
    waiting = [""]
    while waiting:
        directory = waiting.pop()
        names: list[str] = []
        with _too_long_left_out():
            place = f"{root}/{directory}"
            mode = os.stat(place).st_mode
            if mode & 0o700 != 0o700:
                os.chmod(place, mode | 0o700)
            names = sorted(os.listdir(place))
        for name in names:
            name = f"{directory}{name}"
            with _too_long_left_out():
                status = os.lstat(f"{root}/{name}")
                yield name, status
                if stat.S_ISDIR(status.st_mode):
                    waiting.append(f"{name}/")


@contextlib.contextmanager
def _too_long_left_out() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in TOO_LONG:
            raise


def _copy(path: str, status: os.stat_result, copy: str, seen: str, copies: dict[int, str], overlay: bool) -> None:
    mode = status.st_mode
    if stat.S_ISDIR(mode):
        os.mkdir(copy)
    elif stat.S_ISLNK(mode):
        link = os.readlink(path)
        if link_stays(PurePosixPath(seen), link, anywhere=overlay):
            os.symlink(link, copy)
    elif stat.S_ISREG(mode):
        if status.st_ino in copies:
            os.link(copies[status.st_ino], copy)
            return
        if not mode & 0o400:
            os.chmod(path, mode | 0o400)
        _copy_data(path, copy, mode & 0o777 | 0o600)
        if status.st_nlink > 1:
            copies[status.st_ino] = copy
    elif overlay and stat.S_ISCHR(mode) and status.st_rdev == 0:
        os.mknod(copy, WHITEOUT)


def _copy_data(source: str, target: str, mode: int) -> None:
    """The regular file's data; what was never written is not written either."""
    given = os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        copy = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        try:
            size = os.fstat(given).st_size
            for begin, end in _extents(given, size):
                while begin < end and (chunk := os.pread(given, min(CHUNK, end - begin), begin)):
                    begin += os.pwrite(copy, chunk, begin)
            os.ftruncate(copy, size)
            os.fchmod(copy, mode)
        finally:
            os.close(copy)
    finally:
        os.close(given)


def _extents(descriptor: int, size: int) -> Iterator[tuple[int, int]]:
    """Where the file holds data."""
    end = 0
    while end < size:
        try:
            begin = os.lseek(descriptor, end, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # nothing but a hole is left
                return
            begin, end = end, size  # a file system that does not know
        else:
            end = os.lseek(descriptor, begin, os.SEEK_HOLE)
        yield begin, end


def _copy_marks(path: str, copy: str) -> None:
    for name in os.listxattr(path):
        if name.startswith(MARKS):
            os.setxattr(copy, name, os.getxattr(path, name))
