"""Script inside the sandbox; ``sandbox`` starts it with an empty environment.

The driver isolates itself, then reads jobs from stdin (one line of JSON each), runs the program of a job once for each
test in a separate process, and writes the results to stdout (one line of JSON each). With namespaces the driver is
process 1 of a new process tree, without a network, with a root directory that holds only Python and an empty folder in
memory. Generated code sees only the processes of this tree. It cannot kill process 1; when process 1 ends, the kernel
ends all other processes of the tree.
"""

import contextlib
import itertools
import json
import os
import resource
import select
import signal
import sys
import tempfile
import time
import types

sys.path.insert(0, os.path.dirname(__file__))  # -I omits it; removed again below, for generated code
from sandbox_calls import refuse_calls
from sandbox_namespaces import (
    BOX,
    MS_NODEV,
    MS_NOEXEC,
    MS_NOSUID,
    NOBODY,
    PR_SET_CHILD_SUBREAPER,
    PR_SET_DUMPABLE,
    PR_SET_NO_NEW_PRIVS,
    PR_SET_PDEATHSIG,
    drop_privileges,
    enter_namespaces,
    mount,
    prctl,
    umount,
)

del sys.path[0]

MIB = 1 << 20
ANSWER = 60  # descriptor for return values: below RLIMIT_NOFILE, above the descriptors of opened files


# ---- one test


class Test:
    """A running program: its process and its output so far."""

    def __init__(self, job: dict, test: dict, folder: str):
        out, out_child = os.pipe()
        err, err_child = os.pipe()
        answer, answer_child = os.pipe()
        into_child, into = os.pipe()
        self.limit = job["output_kb"] * 1024
        self.pid = os.fork()
        if self.pid == 0:
            try:
                os.dup2(into_child, 0)
                os.dup2(out_child, 1)
                os.dup2(err_child, 2)
                os.dup2(answer_child, ANSWER)
                os.closerange(3, ANSWER)
                os.closerange(ANSWER + 1, 1 << 16)
                confine(job, folder)
                run_program(job["program"], test)
            except SystemExit as error:
                finish(0 if error.code in (None, 0) else 1)
            except BaseException as error:
                with contextlib.suppress(BaseException):
                    sys.stderr.write(f"\n{type(error).__name__}: {error}"[:300].rstrip(": "))
                finish(1)
            finish(0)
        for descriptor in (out_child, err_child, answer_child, into_child):
            os.close(descriptor)
        self.written = {out: b"", err: b"", answer: b""}
        self.out, self.err, self.answer = out, err, answer
        self.into: int | None = into
        self.input = test.get("stdin", "").encode(errors="replace")
        os.set_blocking(into, False)
        if not self.input:
            self._close_input()

    def run(self, seconds: float) -> str | None:
        """Wait until the process has ended; return its fault, or None."""
        deadline = time.monotonic() + seconds
        exit_code = None
        poll = select.poll()
        for descriptor in self.written:
            poll.register(descriptor, select.POLLIN)
        if self.into is not None:
            poll.register(self.into, select.POLLOUT)
        while exit_code is None:
            left = deadline - time.monotonic()
            if left <= 0:
                return f"took longer than {seconds:g} s"
            for descriptor, _ in poll.poll(min(left, 0.005) * 1000):
                if descriptor == self.into:
                    poll.unregister(descriptor)
                    if self._write_input():
                        poll.register(descriptor, select.POLLOUT)
                elif not self._read_output(descriptor):
                    poll.unregister(descriptor)
            if max(map(len, self.written.values())) > self.limit:
                return f"printed more than {self.limit // 1024} KiB"
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                exit_code = os.waitstatus_to_exitcode(status)
        for descriptor in self.written:  # read the rest of the pipes, without waiting for leftover children
            os.set_blocking(descriptor, False)
            with contextlib.suppress(BlockingIOError):
                while self._read_output(descriptor) and len(self.written[descriptor]) <= self.limit:
                    pass
        if exit_code == 0:
            return None
        last = self.written[self.err].decode(errors="replace").strip().rpartition("\n")[2]
        if exit_code < 0:
            return f"was killed by {signal.Signals(-exit_code).name}"
        return last[:300] or f"ended with exit status {exit_code}"

    def _write_input(self) -> bool:
        assert self.into is not None
        try:
            self.input = self.input[os.write(self.into, self.input) :]
        except BlockingIOError:
            return True
        except BrokenPipeError:
            self.input = b""
        if not self.input:
            self._close_input()
        return bool(self.input)

    def _close_input(self) -> None:
        assert self.into is not None
        os.close(self.into)
        self.into = None

    def _read_output(self, descriptor: int) -> bool:
        data = os.read(descriptor, 1 << 16)
        self.written[descriptor] += data
        if descriptor == self.err:  # only the end is used
            self.written[descriptor] = self.written[descriptor][-4096:]
        return bool(data)

    def close(self) -> None:
        """End the process and its descendants; close the pipes."""
        kill_all(self.pid)
        for descriptor in [*self.written, *([self.into] if self.into is not None else [])]:
            os.close(descriptor)


def confine(job: dict, folder: str) -> None:
    """Isolate the child process: start a new session, change to its folder, drop privileges, set limits."""
    os.setsid()
    os.chdir(folder)
    drop_privileges()
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    memory, file = job["memory_mb"] * MIB, job["file_mb"] * MIB
    cpu = int(job["seconds"]) + 1
    for limit, most in (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_CPU, cpu),
        (resource.RLIMIT_FSIZE, file),
        (resource.RLIMIT_NPROC, job["processes"] + job["other_processes"]),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(limit, (most, most))
    refuse_calls()
    os.environ.clear()


def run_program(program: str, test: dict) -> None:
    """Run the program in the child process, then the call or the assert of the test."""
    sys.stdin, sys.stdout, sys.stderr = (open(n, "rw"[n > 0], encoding="utf-8", errors="replace") for n in range(3))  # noqa: SIM115
    module = types.ModuleType("__main__" if "stdin" in test else "program")
    names = vars(module)
    sys.modules[module.__name__] = module  # dataclasses and pickle look their module up
    exec(compile(program, "program.py", "exec"), names)
    if "call" in test:
        if not callable(names.get(test["call"])):
            raise NameError(f"the program has no function {test['call']}")
        value = json.dumps(names[test["call"]](*test["args"]))
    elif "assert" in test:
        exec(compile(test["assert"], "test.py", "exec"), names)
        value = "true"
    else:
        return
    with open(ANSWER, "wb", closefd=False) as file:
        file.write(value.encode())


def finish(status: int) -> None:
    """End the child process without the driver's exit handlers."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(BaseException):
            stream.flush()
    os._exit(status)


def kill_all(pid: int) -> None:
    """Kill all remaining processes of a test: process 1 kills all others, else all descendants of this process."""
    while True:
        if os.getpid() == 1:
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)
        else:
            for target in (-pid, *descendants(os.getpid())):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(target, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def descendants(pid: int) -> list[int]:
    """Return the ids of all descendants of a process that /proc lists."""
    try:
        with open(f"/proc/{pid}/task/{pid}/children") as file:
            children = [int(word) for word in file.read().split()]
    except OSError:
        return []
    return [*children, *(found for child in children for found in descendants(child))]


def nproc_limit_is_separate() -> bool:
    """Return whether RLIMIT_NPROC ignores the user's processes outside, as in a user namespace since Linux 5.14."""
    child = os.fork()
    if child == 0:
        try:
            drop_privileges()
            resource.setrlimit(resource.RLIMIT_NPROC, (8, 8))
            if os.fork():
                os.wait()
        except OSError:
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1] == 0


def processes_of(uid: int) -> int:
    """Return the number of running processes of a user, which count towards RLIMIT_NPROC."""
    count = 0
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            count += name.isdigit() and os.stat(f"/proc/{name}").st_uid == uid
    return count


@contextlib.contextmanager
def temporary_folder(size_mb: int, base: str):
    """Provide an empty folder for one test and remove it: in memory at ``BOX`` if ``base`` is ``BOX``, else on disk."""
    if base == BOX:
        mount("tmpfs", BOX, "tmpfs", MS_NOSUID | MS_NODEV | MS_NOEXEC, f"size={size_mb}m,nr_inodes=4k,mode=777")
        try:
            yield BOX
        finally:
            umount(BOX)
    else:
        folder = tempfile.mkdtemp(prefix="sandbox-", dir=base)
        os.chmod(folder, 0o777)
        try:
            yield folder
        finally:
            with contextlib.suppress(OSError):
                remove(folder)


def remove(folder: str) -> None:
    """Remove a folder and its content, for any depth of nesting and any file modes."""
    names = (f"{folder}/{number}." for number in itertools.count())
    while entries := list(os.scandir(folder)):
        for entry in entries:
            if not entry.is_dir(follow_symlinks=False):
                os.unlink(entry.path)
                continue
            os.chmod(entry.path, 0o700)
            for inside in list(os.scandir(entry.path)):
                if inside.is_dir(follow_symlinks=False):
                    os.chmod(inside.path, 0o700)  # rename needs write permission
                os.rename(inside.path, next(names))
            os.rmdir(entry.path)
    os.rmdir(folder)


def results_of(job: dict, base: str) -> list[dict]:
    """Return the result of each test, in order; ``sandbox.Sandbox.run`` describes the results."""
    deadline = time.monotonic() + job["seconds_in_all"]
    results = []
    for description in job["tests"]:
        left = deadline - time.monotonic()
        if left <= 0:
            results.append({"fault": f"the earlier tests used up all {job['seconds_in_all']:g} s"})
            continue
        with temporary_folder(job["file_mb"], base) as folder:
            test = Test(job, description, folder)
            try:
                fault = test.run(min(job["seconds"], left))
            finally:
                test.close()
        results.append(result(description, test, fault))
    return results


def result(description: dict, test: Test, fault: str | None) -> dict:
    """Return the result of one test."""
    if fault:
        return {"fault": fault}
    if "stdin" in description:
        return {"stdout": test.written[test.out].decode(errors="replace")}
    answer = test.written[test.answer].decode(errors="replace")
    if not answer:
        return {"fault": "ended before the end of the test"}
    if "call" in description:
        try:
            return {"value": json.loads(answer)}
        except (ValueError, RecursionError):
            return {"fault": "returned a value that JSON cannot represent"}
    return {"passed": answer == "true"}


def main() -> None:
    """Isolate this process and run jobs until stdin ends: ``sandbox_driver.py KIND PYTHON FOLDER``."""
    kind, python, base = sys.argv[1:]
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    others = processes_of(os.geteuid() or NOBODY)
    jobs, reports = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    if kind == "namespaces":
        enter_namespaces(python)
        base = BOX
    else:
        prctl(PR_SET_CHILD_SUBREAPER, 1)
    if nproc_limit_is_separate():
        others = 0
    prctl(PR_SET_DUMPABLE, 0)  # a program may run as the same user: it must neither read nor trace this process
    for line in jobs:
        job = json.loads(line) | {"other_processes": others}
        reports.write(json.dumps(results_of(job, base)).encode() + b"\n")
        reports.flush()


if __name__ == "__main__":
    main()
