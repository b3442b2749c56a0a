"""Process 1 of an Apptainer sandbox: hands out its socket, waits for the word, starts the command, buries the dead.

It runs inside, on whatever Python 3 there is, so it imports nothing of the project. What to do comes through a
descriptor (``order``): neither `ps` on the host nor /proc inside shows a key. Nothing inside can end it.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import socket
import sys
from contextlib import suppress
from typing import Any, NoReturn

NETLINK_SOCK_DIAG = 4
PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 22, 2
IGNORED = (signal.SIGUSR1, signal.SIGUSR2)  # Slurm's warnings reach every process of a step; they are not for agents
PATH = "/usr/local/bin:/usr/bin:/bin"


def main(control_end: int, status: int, order_end: int) -> None:
    """The whole life of process 1."""
    for number in (signal.SIGINT, *IGNORED):
        signal.signal(number, signal.SIG_IGN)
    with open(order_end, encoding="utf-8") as file:
        order = json.load(file)
    control = socket.socket(fileno=control_end)
    refuse_calls(bytes.fromhex(order["filter"]))
    hand_out(control, order["port"])
    if control.recv(1) != b"g":
        os._exit(125)
    control.close()
    command = os.fork()
    if command == 0:
        become(order)
    ended, result = 0, 0
    while ended != command:
        ended, result = os.wait()
    os.write(status, b"exit-code")
    os._exit(128 + os.WTERMSIG(result) if os.WIFSIGNALED(result) else os.WEXITSTATUS(result))


class Program(ctypes.Structure):
    """struct sock_fprog of linux/filter.h."""

    _fields_ = [("length", ctypes.c_ushort), ("code", ctypes.c_char_p)]


def refuse_calls(code: bytes) -> None:
    """Put the filter of system calls on this process and all its children."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "no new privileges")
    program = Program(len(code) // 8, code)
    if code and libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0):
        raise OSError(ctypes.get_errno(), "filter of system calls")


def hand_out(control: socket.socket, port: int | None) -> None:
    """Send /proc, a socket that tells about others and, with a port, a listening one. Closes its own ends."""
    given = [os.open("/proc", os.O_RDONLY | os.O_DIRECTORY)]
    given.append(socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_SOCK_DIAG).detach())
    if port is not None:
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen(128)
        given.append(listener.detach())
    packed = b"".join(descriptor.to_bytes(4, sys.byteorder) for descriptor in given)
    control.sendmsg([b"l"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, packed)])
    for descriptor in given:
        os.close(descriptor)


def become(order: dict[str, Any]) -> NoReturn:
    """Turn into the command, in a session of its own, with its output, limits and environment. Never returns."""
    argv, environment = order["argv"], order["env"]
    try:
        os.setsid()
        for number in (signal.SIGINT, signal.SIGPIPE):
            signal.signal(number, signal.SIG_DFL)
        for target, source in enumerate(order["output"], 1):
            os.dup2(source, target)
        for name in os.listdir("/proc/self/fd"):
            if int(name) > 2:
                with suppress(OSError):  # it was for this list
                    os.set_inheritable(int(name), False)
        for name, value in order["limits"].items():
            resource.setrlimit(getattr(resource, "RLIMIT_" + name), (value, value))
        os.chdir(order["directory"])
        environment.setdefault("PATH", os.environ.get("PATH", PATH))
        os.execvpe(argv[0], argv, environment)
    except OSError as error:
        sys.stderr.write(f"{argv[0]}: {error.strerror}\n")
        sys.stderr.flush()
    finally:
        os._exit(127)


if __name__ == "__main__":
    main(*(int(word) for word in sys.argv[1:]))
