"""Who calls from a sandbox: the harness, or something that its agent started.

Only an answer makes an agent act. So whatever ran inside before the session's first answer is the harness, and a
process that was started after it is not: the process that holds a connection is found from outside, and asked for its
age. Headers prove nothing, since an agent can read its harness's key.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator

LOOKS = 3  # a connection that nobody holds may be on its way from one process to another
LOOK_AGAIN_S = 0.02
TICKS = os.sysconf("SC_CLK_TCK")
STAT_BYTES = 4096

# sock_diag(7): a request for one TCP socket, by its addresses, and the inode in the answer
SOCK_DIAG_BY_FAMILY, NLM_F_REQUEST = 20, 1
HEADER = struct.Struct("=IHHII")  # length, type, flags, sequence number, port id
QUERY = struct.Struct("=BBBxI")  # family, protocol, extensions, states
PORTS = struct.Struct("!HH")
REST = struct.Struct("=III")  # interface, cookie: any
INODE, BEFORE_INODE = struct.Struct("=I"), 68
LOOPBACK = socket.inet_aton("127.0.0.1") + bytes(12)

log = logging.getLogger(__name__)


class Origin(enum.StrEnum):
    """Where a call came from."""

    UNSEEN = "unseen"  # the connection comes from no sandbox that can be looked into
    HARNESS = "harness"
    FOREIGN = "foreign"
    UNKNOWN = "unattributed"  # looked in vain

    @property
    def counter(self) -> str:
        """Under what a proxy counts such calls; "" for a harness's own."""
        return "" if self is Origin.HARNESS else str(Origin.FOREIGN if self is Origin.FOREIGN else Origin.UNKNOWN)


class Inspector:
    """Tells who holds a connection to ``port`` in one sandbox. Its methods are for threads.

    The descriptors ``proc`` and ``sockets`` (see records.Inside) belong to it. ``first_answer`` gives the time
    (CLOCK_BOOTTIME) at which the session's first call was answered, or infinity.
    """

    def __init__(self, proc: int, sockets: int, port: int, first_answer: Callable[[], float]) -> None:
        self._open_proc: int | None = proc
        self._sockets = socket.socket(fileno=sockets)
        self._port = port
        self._first_answer = first_answer
        self._lock = threading.Lock()
        self._last = ""  # the process that was found last
        self._number = 0

    def origin(self, client_port: int) -> Origin:
        """Who holds the connection from this port."""
        with self._lock:
            try:
                return self._look(client_port)
            except OSError as error:
                log.info("cannot see who calls: %s", error)
                return Origin.UNKNOWN

    def close(self) -> None:
        """Let go of the sandbox; whoever calls from now on stays unknown."""
        with self._lock:
            if self._open_proc is not None:
                os.close(self._open_proc)
                self._sockets.close()
                self._open_proc = None

    def _look(self, client_port: int) -> Origin:
        for _ in range(LOOKS):
            inode = self._inode(client_port)
            if not inode:
                return Origin.UNKNOWN  # the client has left
            if origin := self._holder(f"socket:[{inode}]"):
                return origin
            time.sleep(LOOK_AGAIN_S)
        return Origin.FOREIGN  # something inside hides it

    def _holder(self, link: str) -> Origin | None:
        """What the oldest process is that has this socket; None when there is none."""
        first, found = self._first_answer(), None
        for pid in self._pids():
            try:
                if link not in self._links(pid):
                    continue
                if self._started(pid) < first:
                    self._last = pid
                    return Origin.HARNESS
                found = Origin.FOREIGN
            except (FileNotFoundError, ProcessLookupError):  # ended
                continue
            except PermissionError:
                found = found or Origin.UNKNOWN
        return found

    def _pids(self) -> Iterator[str]:
        """All processes, the likeliest first."""
        if self._last:
            yield self._last
        yield from (name for name in self._names(".") if name.isdigit() and name != self._last)

    def _links(self, pid: str) -> Iterator[str]:
        """Where a process's descriptors lead."""
        for name in self._names(f"{pid}/fd"):
            with contextlib.suppress(FileNotFoundError):
                yield os.readlink(f"{pid}/fd/{name}", dir_fd=self._proc)

    def _started(self, pid: str) -> float:
        """When a process was started, in seconds since the machine's start and up to 10 ms later: so an agent's is
        never too early. Field 22 of proc_pid_stat(5).
        """
        fd = os.open(f"{pid}/stat", os.O_RDONLY, dir_fd=self._proc)
        try:
            text = os.read(fd, STAT_BYTES)
        finally:
            os.close(fd)
        return (int(text[text.rindex(b")") + 2 :].split()[19]) + 1) / TICKS

    def _names(self, directory: str) -> list[str]:
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY, dir_fd=self._proc)
        try:
            return os.listdir(fd)
        finally:
            os.close(fd)

    def _inode(self, client_port: int) -> int:
        """The inode of the client's end of a connection; 0 when the client has closed it. Raises OSError."""
        self._number += 1
        addresses = PORTS.pack(client_port, self._port) + LOOPBACK + LOOPBACK + REST.pack(0, 2**32 - 1, 2**32 - 1)
        query = QUERY.pack(socket.AF_INET, socket.IPPROTO_TCP, 0, 2**32 - 1) + addresses
        header = HEADER.pack(HEADER.size + len(query), SOCK_DIAG_BY_FAMILY, NLM_F_REQUEST, self._number, 0)
        self._sockets.send(header + query)
        answer, number = b"", -1
        while number != self._number:  # an earlier user of the socket may have left an answer
            answer = self._sockets.recv(4096, socket.MSG_DONTWAIT)  # the kernel answers before `send` returns
            _, kind, _, number, _ = HEADER.unpack_from(answer)
        if kind != SOCK_DIAG_BY_FAMILY:
            return 0
        return int(INODE.unpack_from(answer, HEADER.size + BEFORE_INODE)[0])

    @property
    def _proc(self) -> int:
        if self._open_proc is None:
            raise OSError("the session has ended")
        return self._open_proc
