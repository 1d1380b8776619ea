"""seccomp(2) filter for system calls that bypass the isolation. Part of ``sandbox_driver``; standard library only.

The filter refuses three groups of calls: shared memory, message queues, memory files and key rings, because no limit
counts their memory and some of it outlives the program; sockets other than unix, IPv4 and IPv6, because network
namespaces do not isolate sockets between a virtual machine and its host; and io_uring, because it opens sockets without
the call ``socket``.
"""

import ctypes
import errno
import os
from collections.abc import Iterator

# Numbers from <asm/unistd.h>, architectures from <linux/audit.h>, the rest from <linux/seccomp.h> and <linux/filter.h>.
# The calls: shmget, semget, msgget, mq_open, memfd_create, memfd_secret, add_key, request_key, keyctl, io_uring_setup.
# The last one is socket, which the filter allows for FAMILIES.
MACHINES = {
    "x86_64": (0xC000003E, (29, 64, 68, 240, 319, 447, 248, 249, 250, 425, 41)),
    "aarch64": (0xC00000B7, (194, 190, 186, 180, 279, 447, 217, 218, 219, 425, 198)),
}
FAMILIES = (1, 2, 10)  # socket families that network namespaces isolate: unix, IPv4, IPv6
X32 = 0x40000000  # first number of the x32 calls of x86-64
PR_SET_SECCOMP, MODE_FILTER = 22, 2
LOAD, EQUAL, AT_LEAST, RETURN = 0x20, 0x15, 0x35, 0x06
NUMBER, ARCHITECTURE, FIRST_ARGUMENT = 0, 4, 16  # byte offsets in struct seccomp_data
ALLOW, ERROR = 0x7FFF0000, 0x00050000


class Instruction(ctypes.Structure):
    """C structure sock_filter of <linux/filter.h>."""

    _fields_ = (("code", ctypes.c_uint16), ("then", ctypes.c_uint8), ("other", ctypes.c_uint8), ("k", ctypes.c_uint32))


class Program(ctypes.Structure):
    """C structure sock_fprog of <linux/filter.h>."""

    _fields_ = (("length", ctypes.c_uint16), ("filter", ctypes.POINTER(Instruction)))


def refuse_calls() -> None:
    """Install the filter in this process and its future children, irrevocably; needs PR_SET_NO_NEW_PRIVS."""
    if os.uname().machine not in MACHINES:
        return
    instructions = [Instruction(*one) for one in filter_of(*MACHINES[os.uname().machine])]
    program = Program(len(instructions), (Instruction * len(instructions))(*instructions))
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_SECCOMP, MODE_FILTER, ctypes.byref(program), 0, 0):
        raise OSError(ctypes.get_errno(), f"seccomp: {os.strerror(ctypes.get_errno())}")


def filter_of(architecture: int, numbers: tuple[int, ...]) -> Iterator[tuple[int, int, int, int]]:
    """Yield the filter's instructions: (code, instructions to skip if true, instructions to skip if false, value)."""
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
