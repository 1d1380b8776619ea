"""Refuses the system calls by which a program would get around what shuts it in, by seccomp(2): a part of
``sandbox_driver``, with the standard library alone.

Memory that no limit counts, and that outlives the program in its IPC namespace or in a key ring; sockets to the machine
that hosts a virtual one, which know no network namespaces; and io_uring, which makes sockets by calls of its own.
"""

import ctypes
import errno
import os
from collections.abc import Iterator

# Numbers from <asm/unistd.h>, architectures from <linux/audit.h>, the rest from <linux/seccomp.h> and <linux/filter.h>.
# The calls: shmget, semget, msgget, mq_open, memfd_create, memfd_secret, add_key, request_key, keyctl, io_uring_setup,
# and last socket, of which some are allowed.
MACHINES = {
    "x86_64": (0xC000003E, (29, 64, 68, 240, 319, 447, 248, 249, 250, 425, 41)),
    "aarch64": (0xC00000B7, (194, 190, 186, 180, 279, 447, 217, 218, 219, 425, 198)),
}
FAMILIES = (1, 2, 10)  # of sockets that namespaces hold: unix, IPv4, IPv6
X32 = 0x40000000  # calls of x86-64 by other numbers begin here
PR_SET_SECCOMP, MODE_FILTER = 22, 2
LOAD, EQUAL, AT_LEAST, RETURN = 0x20, 0x15, 0x35, 0x06
NUMBER, ARCHITECTURE, FIRST_ARGUMENT = 0, 4, 16  # bytes into what a filter looks at
ALLOW, ERROR = 0x7FFF0000, 0x00050000


class Instruction(ctypes.Structure):
    """struct sock_filter."""

    _fields_ = (("code", ctypes.c_uint16), ("then", ctypes.c_uint8), ("other", ctypes.c_uint8), ("k", ctypes.c_uint32))


class Program(ctypes.Structure):
    """struct sock_fprog."""

    _fields_ = (("length", ctypes.c_uint16), ("filter", ctypes.POINTER(Instruction)))


def refuse_calls() -> None:
    """Refuse them in this process and all that it starts, for good; needs PR_SET_NO_NEW_PRIVS."""
    if os.uname().machine not in MACHINES:
        return
    instructions = list(filter_of(*MACHINES[os.uname().machine]))
    program = Program(len(instructions), (Instruction * len(instructions))(*instructions))
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_SECCOMP, MODE_FILTER, ctypes.byref(program), 0, 0):
        raise OSError(ctypes.get_errno(), f"seccomp: {os.strerror(ctypes.get_errno())}")


def filter_of(architecture: int, numbers: tuple[int, ...]) -> Iterator[tuple[int, int, int, int]]:
    """The filter's instructions: (code, how many to skip if it holds, and if it does not, value)."""
    *refused, socket = numbers
    absent = ERROR | errno.ENOSYS
    yield LOAD, 0, 0, ARCHITECTURE
    yield EQUAL, 1, 0, architecture
    yield RETURN, 0, 0, absent
    yield LOAD, 0, 0, NUMBER
    yield AT_LEAST, 0, 1, X32
    yield RETURN, 0, 0, absent
    for number in refused:
        yield EQUAL, 0, 1, number
        yield RETURN, 0, 0, absent
    yield EQUAL, 1, 0, socket
    yield RETURN, 0, 0, ALLOW
    yield LOAD, 0, 0, FIRST_ARGUMENT
    for family in FAMILIES:
        yield EQUAL, 0, 1, family
        yield RETURN, 0, 0, ALLOW
    yield RETURN, 0, 0, ERROR | errno.EAFNOSUPPORT
