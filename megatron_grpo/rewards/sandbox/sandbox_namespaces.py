"""Isolation of the calling process: new namespaces, and a root directory that holds only Python.

Part of ``sandbox_driver``; standard library only. Source of the steps and numbers: namespaces(7), user_namespaces(7),
pid_namespaces(7), mount_namespaces(7) and pivot_root(2).
"""

import contextlib
import ctypes
import os
import signal

NOBODY = 65534
BOX = "/box"

# From <sched.h>, <sys/mount.h>, <sys/prctl.h>, <linux/capability.h>.
CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 1, 2, 4, 8, 32
MS_NOATIME, MS_NODIRATIME, MS_BIND, MS_REC, MS_PRIVATE = 1 << 10, 1 << 11, 1 << 12, 1 << 14, 1 << 18
MS_RELATIME, ST_RELATIME = 1 << 21, 1 << 12
MNT_DETACH = 2
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 4, 36, 38
CAPABILITY_VERSION_3 = 0x20080522

libc = ctypes.CDLL(None, use_errno=True)


def check(result: int, what: str) -> None:
    """Raise OSError with the kernel's reason if a call of libc failed."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def prctl(option: int, value: int) -> None:
    """Call prctl(2)."""
    check(libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0), "prctl")


def mount(source: str, target: str, kind: str = "", flags: int = 0, data: str = "") -> None:
    """Call mount(2)."""
    arguments = [text.encode() or None for text in (source, target, kind)]
    check(libc.mount(*arguments, ctypes.c_ulong(flags), data.encode() or None), f"mount {target}")


def umount(target: str) -> None:
    """Detach a mount by umount2(2)."""
    check(libc.umount2(target.encode(), MNT_DETACH), f"umount {target}")


def enter_namespaces(python: str) -> None:
    """Continue in a child that is process 1 of new namespaces.

    The calling process waits for the child and exits with its status.
    """
    spaces = CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWPID | CLONE_NEWNET
    proc = os.open("/proc", os.O_DIRECTORY)  # not in the new root directory
    if os.geteuid() != 0:
        enter_user_namespace(proc, spaces)
        new_root(python)
    elif unprivileged_mounts_work():
        # Outside a user namespace, generated code could create one and fill memory through mounts.
        check(libc.unshare(CLONE_NEWNS), "unshare")
        new_root(python)  # as root, because Python's folder may be readable by root only
        become_nobody()
        prctl(PR_SET_DUMPABLE, 1)  # else the files of this process in /proc still belong to root
        enter_user_namespace(proc, spaces)
    else:
        check(libc.unshare(spaces), "unshare")
        new_root(python)
    os.close(proc)
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # again: a change of the user id clears it
    inside = os.fork()
    if inside:
        _, status = os.waitpid(inside, 0)
        os._exit(os.waitstatus_to_exitcode(status) & 255)
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def enter_user_namespace(proc: int, spaces: int) -> None:
    """Enter a new user namespace with all capabilities, and the new namespaces ``spaces`` in it; keep the user id."""
    uid, gid = os.geteuid(), os.getegid()
    check(libc.unshare(CLONE_NEWUSER | spaces), "unshare")
    write("self/setgroups", "deny", proc)
    write("self/uid_map", f"{uid} {uid} 1", proc)
    write("self/gid_map", f"{gid} {gid} 1", proc)
    with contextlib.suppress(OSError):  # no further user namespaces for generated code
        write("sys/user/max_user_namespaces", "0", proc)


def unprivileged_mounts_work() -> bool:
    """Return whether an unprivileged user can mount in a user namespace, found by trial. Needs root."""
    child = os.fork()
    if child == 0:
        try:
            become_nobody()
            check(libc.unshare(CLONE_NEWUSER | CLONE_NEWNS), "unshare")
            mount("none", "/", flags=MS_REC | MS_PRIVATE)
        except OSError:
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1] == 0


def become_nobody() -> None:
    """Change from root to an unprivileged user."""
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)


def new_root(python: str) -> None:
    """Change to a root directory in memory that holds Python's files, read-only, and the folder ``BOX``."""
    mount("none", "/", flags=MS_REC | MS_PRIVATE)
    mount("tmpfs", "/tmp", "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,mode=755")
    os.mkdir("/tmp/old")
    check(libc.pivot_root(b"/tmp", b"/tmp/old"), "pivot_root")
    os.chdir("/")
    for path in dict.fromkeys(["/usr/lib", "/usr/lib64", "/lib", "/lib64", python]):
        mount_read_only(path)
    os.mkdir("/dev")
    for name in ("null", "zero", "urandom"):
        write(f"/dev/{name}", "")
        mount(f"/old/dev/{name}", f"/dev/{name}", flags=MS_BIND)
    os.mkdir(BOX)
    umount("/old")
    os.rmdir("/old")
    mount("", "/", flags=MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV)


def mount_read_only(path: str) -> None:
    """Mount a directory of the old root at the same path, read-only; copy a symbolic link as a link."""
    old = "/old" + path
    if os.path.lexists(path) or not os.path.lexists(old):
        return
    os.makedirs(os.path.dirname(path), exist_ok=True)
    if os.path.islink(old):
        os.symlink(os.readlink(old), path)
        return
    os.mkdir(path)
    mount(old, path, flags=MS_BIND)
    # In a user namespace a remount must keep the existing flags of a mount.
    given = os.statvfs(path).f_flag
    flags = given & (MS_NOSUID | MS_NODEV | MS_NOEXEC | MS_NOATIME | MS_NODIRATIME)
    flags |= MS_RELATIME if given & ST_RELATIME else 0
    mount("", path, flags=MS_REMOUNT | MS_BIND | MS_RDONLY | flags)


def write(path: str, text: str, folder: int | None = None) -> None:
    """Write text to a file; ``folder`` is the descriptor of the folder of a relative path."""
    file = os.open(path, os.O_WRONLY | (os.O_CREAT if folder is None else 0), 0o666, dir_fd=folder)
    try:
        os.write(file, text.encode())
    finally:
        os.close(file)


def drop_privileges() -> None:
    """Drop the privileges of root or of the user namespace, irrevocably."""
    if os.geteuid() == 0:
        become_nobody()
        return
    header, none = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0), (ctypes.c_uint32 * 6)()
    check(libc.capset(header, none), "capset")
