"""The system calls that a sandbox is refused: ways to the host that no namespace closes, and large parts of the kernel.

The filter is a classic BPF program (seccomp(2), linux/filter.h), handed to bubblewrap. ptrace stays allowed: address
sanitizers and debuggers need it, and it reaches only processes of the same sandbox.
"""

from __future__ import annotations

import errno
import os
import struct

# name: numbers on x86_64 and on aarch64
REFUSED = {
    "add_key": (248, 217),  # keyrings belong to no namespace: Kerberos tickets of the host's user may lie there
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "syslog": (103, 116),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),  # its operations pass no filter
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
}
SOCKET = (41, 198)
NESTING = {"unshare": (272, 97), "setns": (308, 268)}  # and clone() with CLONE_NEWUSER, and all of clone3()
CLONE, CLONE3 = (56, 220), (435, 435)
CLONE_NEWUSER = 0x10000000
FAMILIES = (1, 2, 10, 16)  # Unix, IPv4, IPv6, netlink: others (vsock) are in no network namespace, or little used code
MACHINES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}  # AUDIT_ARCH_*, column of the table
X32 = 0x40000000  # numbers from here on are the same calls by another name
LOAD, EQUAL, AT_LEAST, HAS_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
NUMBER, ARCHITECTURE, FIRST_ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data, of the lower half of an argument
ALLOW, REFUSE, UNKNOWN = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS
INSTRUCTION = struct.Struct("=HBBI")


def program(nesting: bool = True) -> bytes | None:
    """The filter for this machine; None for a kind of machine whose numbers are not in the table.

    Calls of another architecture (32-bit programs) are refused too: their numbers mean something else. Without
    ``nesting`` no user namespace can be made inside, where nothing else sees to that.
    """
    machine = MACHINES.get(os.uname().machine)
    if machine is None:
        return None
    architecture, column = machine
    refused = REFUSED if nesting else REFUSED | NESTING
    bad = [(AT_LEAST, X32), *((EQUAL, numbers[column]) for numbers in refused.values())]
    count = len(FAMILIES)
    code = [
        (LOAD, 0, 0, ARCHITECTURE),
        (EQUAL, 1, 0, architecture),  # a jump skips so many instructions: if the test holds, if it does not
        (RETURN, 0, 0, REFUSE),
        (LOAD, 0, 0, NUMBER),
        *(() if nesting else _no_user_namespace(column)),
        *((test, len(bad) + count + 1 - i, 0, value) for i, (test, value) in enumerate(bad)),
        (EQUAL, 0, count + 2, SOCKET[column]),
        (LOAD, 0, 0, FIRST_ARGUMENT),
        *((EQUAL, count - i, 0, family) for i, family in enumerate(FAMILIES)),
        (RETURN, 0, 0, REFUSE),
        (RETURN, 0, 0, ALLOW),
    ]
    return b"".join(INSTRUCTION.pack(*instruction) for instruction in code)


def _no_user_namespace(column: int) -> list[tuple[int, int, int, int]]:
    """Refuse clone() its flag. clone3() has its flags in memory, so it does not exist: libraries then take clone()."""
    return [
        (EQUAL, 0, 1, CLONE3[column]),
        (RETURN, 0, 0, UNKNOWN),
        (EQUAL, 0, 4, CLONE[column]),
        (LOAD, 0, 0, FIRST_ARGUMENT),
        (HAS_BIT, 0, 1, CLONE_NEWUSER),
        (RETURN, 0, 0, REFUSE),
        (RETURN, 0, 0, ALLOW),
    ]
