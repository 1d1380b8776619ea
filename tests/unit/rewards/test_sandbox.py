"""The reward "code" and its sandbox: whatever a program does is contained and named, and the next one is fine."""

import contextlib
import json
import math
import os
import re
import resource
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from ranks import gone
from slow import slow_except

from megatron_grpo.rewards.arguments import REWARDS
from megatron_grpo.rewards.pool import RewardPool
from megatron_grpo.rewards.registry import Sample, get_rewards
from megatron_grpo.rewards.sandbox import sandbox as module
from megatron_grpo.rewards.sandbox.sandbox import Limits, Sandbox, SandboxError
from megatron_grpo.rewards.sandbox.sandbox_driver import descendants, remove
from megatron_grpo.utils.errors import GrpoError

REPO = Path(__file__).resolve().parents[3]
LIMITS = Limits(seconds=20.0, seconds_in_all=20.0, memory_mb=256)
FLAGS = {"code_sandbox": "auto", "code_timeout": 3.0, "code_memory": 256, "reward_timeout": 60.0}


def works(kind):
    candidate = Sandbox(kind)
    try:
        return "stdout" in candidate.run("import random", [{"stdin": ""}], Limits())[0]
    except SandboxError:
        return False
    finally:
        candidate.close()


namespaces = pytest.mark.skipif(not works("namespaces"), reason="no namespaces on this machine")


@pytest.fixture(scope="module", params=[pytest.param("namespaces", marks=namespaces), "limits"])
def box(request):
    box = Sandbox(request.param)
    yield box
    box.close()


def run(box, program, test=None, limits=LIMITS):
    return box.run(program, [test or {"stdin": ""}], limits)[0]


# What a program may do, and what is said of it; with {} the port of a server of this test.
FAULTS = {
    "hangs": ("while True: pass", "took longer than 1 s"),
    "waits for input that never comes": ("import time\ntime.sleep(60)", "took longer than 1 s"),
    "raises": ("{}['a']", "KeyError: 'a'"),
    "does not compile": ("def f(:", r"SyntaxError: invalid syntax \(program.py, line 1\)"),
    "exits": ("import os\nos._exit(3)", "ended with exit status 3"),
    "ends itself": ("import os\nos.kill(os.getpid(), 9)", "was killed by SIGKILL"),
    "crashes": ("import os\nos.kill(os.getpid(), 11)", "was killed by SIGSEGV"),
    "bombs": ("import os\nwhile True:\n    try: os.fork()\n    except OSError: pass", "took longer than 1 s"),
    "allocates without end": ("x = []\nwhile True: x.append(bytes(1 << 24))", "MemoryError"),
    "recurses": ("def f(): f()\nf()", "RecursionError: .*"),
    "fills the disk": ("f = open('a', 'wb')\nwhile True: f.write(bytes(1 << 20))", "OSError: .*File too large"),
    "prints endlessly": ("while True: print('x' * 1000)", "printed more than 1024 KiB"),
    "complains endlessly": ("import sys\nwhile True: sys.stderr.write('x' * 1000)", "took longer than 1 s"),
    "writes elsewhere": ("open('/usr/lib/x', 'w')", "(PermissionError|OSError): .*(denied|Read-only file system).*"),
}

WAITS = {"waits for input that never comes", "complains endlessly"}  # a second each, as what hangs


@pytest.mark.parametrize("what", slow_except(FAULTS.keys() - WAITS, FAULTS))
def test_a_fault_is_contained_and_named(box, what):
    program, said = FAULTS[what]
    run(box, "")
    before = set(descendants(os.getpid()))
    limits = replace(LIMITS, seconds=1.0) if said == "took longer than 1 s" else LIMITS
    fault = run(box, program, limits=limits)["fault"]
    assert re.fullmatch(said, fault), fault
    assert run(box, "print(int(input()) + 1)", {"stdin": "41"}) == {"stdout": "42\n"}
    assert set(descendants(os.getpid())) == before


def test_what_a_program_leaves_running_is_ended(box):
    run(box, "")
    before = set(descendants(os.getpid()))
    program = "import os, time\nif os.fork() == 0:\n    os.setsid()\n    os.fork()\n    time.sleep(600)\nprint(1)"
    assert run(box, program) == {"stdout": "1\n"}
    assert set(descendants(os.getpid())) == before


def test_nothing_is_left_for_the_next_program(box):
    assert run(box, "open('a', 'w').write('secret')\nimport os\nprint(os.listdir())") == {"stdout": "['a']\n"}
    program = "import os\nprint(os.listdir(), dict(os.environ), os.sched_getaffinity(0) != set())"
    assert run(box, program) == {"stdout": "[] {} True\n"}


def test_descriptors_of_the_driver_are_closed(box):
    program = """
import os
for number in range(3, 60):
    try: print(number, os.fstat(number))
    except OSError: pass
"""
    assert run(box, program) == {"stdout": ""}


@pytest.fixture(scope="module")
def isolated():
    box = Sandbox("namespaces")
    yield box
    box.close()


@namespaces
def test_namespaces_have_no_network(isolated):
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        program = f"import socket\nsocket.create_connection(('127.0.0.1', {server.getsockname()[1]}), 1)"
        assert re.search("unreachable|refused", run(isolated, program)["fault"])
        with pytest.raises(TimeoutError):
            server.accept()


@namespaces
def test_sockets_that_know_no_namespaces_are_refused(isolated):
    """A virtual machine's host is reached through family 40."""
    program = "import socket\nfor family in (1, 2, 10, {}): socket.socket(family, socket.SOCK_STREAM)"
    for family in (40, 38, 16):
        assert re.search("Address family not supported", run(isolated, program.format(family))["fault"])


def test_memory_that_no_limit_counts_is_refused(box):
    assert run(box, "import os\nos.memfd_create('a')") == {"fault": "OSError: [Errno 38] Function not implemented"}


@namespaces
def test_nothing_is_left_in_the_kernel_for_the_next_program(isolated):
    """Segments, queues and keys, which outlive the processes that made them."""
    program = """
import ctypes
libc = ctypes.CDLL(None)
print(libc.shmget(7, 4096, 0o1600), libc.msgget(7, 0o1600), libc.semget(7, 1, 0o1600), end=" ")
print(libc.mq_open(b"/a", 66, 0o600, None), libc.syscall({add_key}, b"user", b"a", b"b", 1, -4))
""".replace("{add_key}", {"x86_64": "248", "aarch64": "217"}[os.uname().machine])
    assert run(isolated, program) == {"stdout": "-1 -1 -1 -1 -1\n"}


def test_a_folder_is_thrown_away_however_deep_and_closed_it_is(tmp_path):
    top = tmp_path / "top"
    top.mkdir()
    (tmp_path / "kept").write_text("x")
    deep = os.open(top, os.O_RDONLY)
    for _ in range(1200):  # deeper than Python recurses
        os.mkdir("d", dir_fd=deep)
        below = os.open("d", os.O_RDONLY, dir_fd=deep)
        os.close(deep)
        deep = below
    os.mkdir("closed", mode=0, dir_fd=deep)
    os.symlink(tmp_path, "a link", dir_fd=deep)
    os.close(deep)
    remove(str(top))
    assert os.listdir(tmp_path) == ["kept"]


@namespaces
def test_namespaces_show_no_files_but_pythons(isolated, tmp_path):
    (tmp_path / "secret").write_text("x")
    for path in (tmp_path / "secret", REPO / "README.md", "/etc/passwd", "/proc/1/environ"):
        assert re.search("No such file", run(isolated, f"open({str(path)!r})")["fault"])
    assert run(isolated, "import os\nprint(sorted(os.listdir('/dev')))") == {"stdout": "['null', 'urandom', 'zero']\n"}


@namespaces
def test_namespaces_protect_the_parent_and_everybody_else(isolated):
    for program in ("os.kill(os.getppid(), 9)", "os.kill(-1, 9)", "os.kill(1, 9)", f"os.kill({os.getpid()}, 9)"):
        run(isolated, f"import os\n{program}")
    pid = isolated._process.pid
    assert run(isolated, "print(1)") == {"stdout": "1\n"} and isolated._process.pid == pid


@namespaces
def test_namespaces_give_no_rights(isolated):
    program = """
import ctypes
libc = ctypes.CDLL(None)
print(libc.mount(b"", b"/", None, 32 | 4096, None), libc.ptrace(16, 1, 0, 0), libc.setuid(0), libc.setns(0, 0))
print(libc.unshare(0x10000000), libc.unshare(0x20000))
"""
    assert run(isolated, program) == {"stdout": "-1 -1 -1 -1\n-1 -1\n"}


@namespaces
def test_namespaces_bound_the_number_of_processes(isolated):
    program = """
import os, time
made = 0
try:
    while made < 200:
        if os.fork() == 0:
            time.sleep(60)
        made += 1
except BlockingIOError:
    print(made)
"""
    assert 20 <= int(run(isolated, program)["stdout"]) <= 40


@namespaces
def test_namespaces_bound_all_files_together(isolated):
    program = "for i in range(40): open(str(i), 'wb').write(bytes(1 << 20))"
    assert re.search("No space left", run(isolated, program)["fault"])


@pytest.mark.skipif(os.geteuid() == 0, reason="as root a program has another user")
def test_with_limits_alone_a_killed_driver_costs_one_sample():
    box = Sandbox("limits")
    with pytest.raises(SandboxError, match="the sandbox failed"):
        run(box, "import os\nos.kill(os.getppid(), 9)")
    assert run(box, "print(1)") == {"stdout": "1\n"}
    box.close()


def test_time_for_all_tests_together(box):
    limits = Limits(seconds=0.5, seconds_in_all=0.8)
    results = box.run("while True: pass", [{"stdin": ""}] * 3, limits)
    assert results[0] == {"fault": "took longer than 0.5 s"} and results[2] == {
        "fault": "the earlier tests used up all 0.8 s"
    }


def test_the_sandbox_ends_with_its_worker(tmp_path):
    program = f"""
import sys
sys.path.insert(0, {str(REPO)!r})
from megatron_grpo.rewards.sandbox.sandbox import Limits, Sandbox
from megatron_grpo.rewards.sandbox.sandbox_driver import descendants
import os, threading, time
box = Sandbox({"namespaces" if works("namespaces") else "limits"!r})
box.run("", [{{"stdin": ""}}], Limits())
idle = len(descendants(os.getpid()))
threading.Thread(target=box.run, args=("while True: pass", [{{"stdin": ""}}], Limits(60.0, 60.0)), daemon=True).start()
while len(descendants(os.getpid())) == idle:
    time.sleep(0.01)
print(*descendants(os.getpid()), flush=True)
sys.stdin.read()
"""
    worker = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    pids = worker.stdout.readline().split()
    assert pids and all(Path("/proc", pid).exists() for pid in pids)
    worker.kill()
    worker.communicate()
    assert gone(pids)


def test_a_run_takes_limits_alone_only_if_it_says_so():
    (default,) = [default for name, _, default, _ in REWARDS if name == "--code-sandbox"]
    assert default == "strict"


def test_no_sandbox_at_all(monkeypatch):
    def failing(self, program, tests, limits):
        if self.kind == "namespaces":
            raise SandboxError("unshare: Operation not permitted")
        return [{"fault": "ModuleNotFoundError: No module named 'random'"}]

    monkeypatch.setattr(Sandbox, "run", failing)
    module.sandbox.cache_clear()
    with pytest.raises(GrpoError, match=r"namespaces: unshare: .*permitted\): allow namespaces .*--code-sandbox auto"):
        module.sandbox(strict=True)
    with pytest.raises(GrpoError, match=r"namespaces: unshare: .*; limits: ModuleNotFoundError.*rewards\.md"):
        module.sandbox(strict=False)

    def limited(self, program, tests, limits):
        return failing(self, program, tests, limits) if self.kind == "namespaces" else [{"stdout": f"{math.pi}\n"}]

    monkeypatch.setattr(Sandbox, "run", limited)
    assert module.sandbox(strict=False).kind == "limits"
    module.sandbox.cache_clear()


# --- the reward


@pytest.fixture
def any_box(box, monkeypatch):
    monkeypatch.setattr("megatron_grpo.rewards.builtin.code_tests.sandbox", lambda strict: box)


def code(program, tests, fence="```python\n{}\n```", seconds=20.0):
    (function,) = get_rewards(["code"], FLAGS | {"code_timeout": seconds})
    return function(Sample("", "So:\n" + fence.format(program), {"tests": tests}))


ADD = "def add(a, b):\n    return a + b\nif __name__ == '__main__':\n    print(add(*map(int, input().split())))"


@pytest.mark.parametrize(
    ("program", "tests", "expected"),
    [
        (ADD, ["assert add(1, 2) == 3", "assert add(1, 2) == 4"], 1 / 2),
        (ADD, [{"stdin": "1 2\n", "stdout": "3"}, {"stdin": "2 2", "stdout": "4 \n\n"}], 1),
        (ADD, [{"stdin": "1 2\n", "stdout": "3"}, {"stdin": "1 2", "stdout": "4"}, {"stdin": "", "stdout": ""}], 1 / 3),
        (ADD, [{"call": "add", "args": [[1], [2.5]], "returns": [1, 2.5]}], 1),
        (ADD, [{"call": "add", "args": [1, 2], "returns": "3"}, {"call": "sub", "args": [], "returns": None}], 0),
        ("def f(): return (1, {'a': None})", [{"call": "f", "args": [], "returns": [1, {"a": None}]}], 1),
        ("def f(): return object()", [{"call": "f", "args": [], "returns": 1}], 0),
        ("import sys\nsys.exit(0)", ["assert False", {"call": "f", "args": [], "returns": 1}], 0),
        ("import os\nos._exit(0)", ["assert False", {"stdin": "", "stdout": "1"}], 0),
        ("print('é')", [{"stdin": "", "stdout": "é"}], 1),
        ("print(input())", [{"stdin": "x" * 300_000, "stdout": "x" * 300_000}], 1),
        ("print(1)", [{"stdin": "x" * 300_000, "stdout": "1"}], 1),
        ("", ["pass"], 1),
    ],
)
def test_share_of_tests_that_pass(any_box, program, tests, expected):
    assert code(program, tests) == pytest.approx(expected)
    assert code(program, json.dumps(tests)) == pytest.approx(expected)


def test_a_program_that_takes_too_long_has_not_passed(any_box):
    assert code("while True: pass", ["pass"], seconds=0.5) == 0


def test_no_code_no_reward(any_box):
    assert code(ADD, ["pass"], fence="{}") == 0


def test_a_program_does_not_see_what_is_expected(any_box):
    program = "import gc\nprint('exp' + 'ected-42' in str(gc.get_objects()), 'expected-' + '42' in repr(globals()))"
    assert code(program, [{"stdin": "", "stdout": "expected-42"}]) == 0
    assert code("def f(): return __import__('sys')._getframe(1).f_locals['test'].get('returns')",
                [{"call": "f", "args": [], "returns": "expected"}]) == 0  # fmt: skip


@pytest.mark.parametrize(
    "tests", [None, [], "", "assert f()", [1], [{"stdin": ""}], [{"call": "f", "args": 1, "returns": 1}]]
)
def test_rows_without_tests(tests):
    with pytest.raises(GrpoError, match='the row\'s "tests" must be a list of'):
        code(ADD, tests)


@namespaces
def test_with_many_open_files():
    """Descriptors above 1,023, which select() does not take; a trainer's connections and files can be as many."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(limits[0], 2048), limits[1]))
    with contextlib.ExitStack() as opened:
        opened.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
        for _ in range(1100):
            opened.enter_context(open(os.devnull))
        candidate = Sandbox("limits")
        opened.callback(candidate.close)
        assert candidate.run("print(1 + 1)", [{"stdin": ""}], Limits(10.0, 10.0))[0]["stdout"] == "2\n"


@pytest.mark.slow
def test_in_the_pool(tmp_path):
    programs = [ADD, *(program for program, _ in FAULTS.values()), "import os\nos.kill(-1, 9)", ADD]
    row = {"tests": [{"stdin": "1 2", "stdout": "3"}]}
    pool = RewardPool(["code"], workers=2, timeout=60.0, flags=FLAGS)
    values, failures = pool.score([Sample("", f"```\n{program}\n```", row) for program in programs])
    pool.close()
    assert values.ravel().tolist() == [1.0] + [0.0] * (len(programs) - 2) + [1.0] and failures == []
