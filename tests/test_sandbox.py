"""The sandbox under attack, on every backend the host permits, and the verifier's refusal to be fooled."""

import os
import socket
import threading
import time
from pathlib import Path

import psutil
import pytest

from trace_rl.errors import UserError
from trace_rl.tasks.sandbox import BACKENDS, Answer, Limits, Sandbox, SandboxUnavailableError
from trace_rl.tasks.verify import verify_program

FAST = Limits(wall_s=20.0, cpu_s=2, memory_bytes=256 << 20)
SHORT = Limits(wall_s=0.5, cpu_s=1, memory_bytes=256 << 20)
LATE_S = 15.0  # a loaded host is slow to tear namespaces down
SECRET = "TRACE_TEST_SECRET"


@pytest.fixture(scope="module", params=BACKENDS)
def sandbox(request: pytest.FixtureRequest):
    os.environ[SECRET] = "hunter2"
    try:
        opened = Sandbox(backend=request.param, limits=FAST)
    except SandboxUnavailableError as error:
        pytest.skip(str(error))
    with opened:
        yield opened
    del os.environ[SECRET]


def answer(sandbox: Sandbox, body: str, x: object = 0, limits: Limits = FAST) -> Answer:
    """The answer of `def solution(x)` with this body."""
    lines = "\n".join(f"    {line}" for line in body.strip("\n").splitlines())
    answers = sandbox.run_calls(f"def solution(x):\n{lines}\n", entry_point="solution", inputs=[x], limits=limits)
    assert len(answers) == 1
    return answers[0]


def passes(sandbox: Sandbox, program: str, expected: object = 42) -> tuple[bool, str]:
    verdict = verify_program(program, tests=[{"input": 1, "expected": expected}], sandbox=sandbox)
    return verdict.passed, verdict.reason


@pytest.mark.parametrize(
    "value",
    [None, True, 0, -(10**30), 1.5, "é\ud800", b"\x00\xff", 2j, [1, [2]], (1, (2,)), {1, 2}, {"a": (1,), 2: None}],
    ids=repr,
)
def test_plain_values_pass_through_with_their_types(sandbox: Sandbox, value: object):
    given = answer(sandbox, "return x", value)
    assert given == Answer(value=value, error=None)
    assert type(given.value) is type(value)


def test_programs_see_no_state_of_the_previous_one(sandbox: Sandbox):
    answer(sandbox, "import builtins\nbuiltins.leak = 1\nopen('/tmp/leak', 'w').write('1')")
    found = answer(sandbox, "import builtins, os\nreturn hasattr(builtins, 'leak'), os.listdir('/tmp')").value
    assert found == (False, [])


def test_writes_stay_in_its_own_tmp(sandbox: Sandbox, tmp_path: Path):
    outside = tmp_path / "escaped"
    program = f"""
failed = []
for path in ({str(outside)!r}, '/a', '/usr/a', '/dev/a', '/jail/a', '/proc/a', '/etc/a'):
    try:
        open(path, 'w').write('x')
    except OSError:
        failed.append(path)
open('note', 'w').write('x')
return len(failed), open('/tmp/note').read()
"""
    assert answer(sandbox, program) == Answer(value=(7, "x"), error=None)
    assert not outside.exists()
    assert not Path("/tmp/note").exists()


def test_tmp_and_file_sizes_are_bounded(sandbox: Sandbox):
    program = """
import os
written = 0
for index in range(4000):
    try:
        with open(f'/tmp/{index}', 'wb', buffering=0) as stream:
            written += stream.write(bytes(x))
    except OSError:
        break
return written
"""
    assert 0 < answer(sandbox, program, FAST.file_bytes).value <= FAST.tmp_bytes
    too_large = answer(sandbox, "with open('/tmp/a', 'wb') as stream:\n    stream.write(bytes(x))", FAST.file_bytes + 1)
    assert too_large.error is not None
    assert "File too large" in too_large.error


def test_no_environment_no_home_no_processes_no_data(sandbox: Sandbox, tmp_path: Path):
    (tmp_path / "expected.json").write_text("[42]")
    program = f"""
import os
seen = dict(os.environ)
private = ({str(tmp_path / "expected.json")!r}, '/etc/passwd', '/proc/1', '/proc/self/fd', '/sys/kernel', '/home',
           {str(Path.home())!r} + '/.ssh', {os.getcwd()!r} + '/pyproject.toml')
exists = [path for path in private if os.path.exists(path)]
return {SECRET!r} in seen, exists
"""
    assert answer(sandbox, program) == Answer(value=(False, []), error=None)


def test_no_network_even_on_loopback(sandbox: Sandbox):
    reached = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(1.5)

        def accept() -> None:
            try:
                server.accept()
                reached.set()
            except TimeoutError:
                pass

        listener = threading.Thread(target=accept)
        listener.start()
        given = answer(sandbox, "import socket\nsocket.create_connection(('127.0.0.1', x), 1)", server.getsockname()[1])
        listener.join()
    assert given.error is not None
    assert not reached.is_set()


@pytest.mark.parametrize(
    "bomb",
    [
        "import os\nwhile True:\n    os.fork()",
        "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass",
        "import threading, time\nwhile True:\n    threading.Thread(target=time.sleep, args=(60,)).start()",
        "import subprocess\nsubprocess.Popen(['/bin/sh', '-c', 'sleep 60'])",
        "import os\nos.execv('/bin/sh', ['sh', '-c', 'exit 0'])",
    ],
    ids=["fork", "fork_ignoring_errors", "threads", "subprocess", "exec"],
)
def test_no_second_process(sandbox: Sandbox, bomb: str):
    server = psutil.Process(sandbox._process.pid)
    most = 0
    finished: list[Answer] = []
    runner = threading.Thread(target=lambda: finished.append(answer(sandbox, bomb, limits=SHORT)))
    runner.start()
    while runner.is_alive():
        most = max(most, len(server.children(recursive=True)))
        time.sleep(0.02)
    runner.join()
    assert finished[0].error is not None
    assert most < 10
    assert answer(sandbox, "return 1").value == 1


def test_memory_bombs_are_refused(sandbox: Sandbox):
    assert (answer(sandbox, "return len(bytearray(1 << 30))").error or "").startswith("MemoryError")
    assert answer(sandbox, "held = []\nwhile True:\n    held.append(bytearray(1 << 24))").error is not None
    shared = "import ctypes\nreturn ctypes.CDLL(None).shmget(0, ctypes.c_size_t(1 << 30), 0o1777)"
    assert answer(sandbox, shared).value == -1


ENDLESS = {
    "loop": "while True:\n    pass",
    "sleep": "import time\ntime.sleep(60)",
    "c_loop": "return sum(range(10**12))",
    "regex": "import re\nre.match('(a*)*b', 'a' * 40)",
    "ignoring_signals": "import signal\nfor number in (signal.SIGXCPU, signal.SIGALRM, signal.SIGTERM):\n"
    "    signal.signal(number, signal.SIG_IGN)\nwhile True:\n    pass",
}


@pytest.mark.parametrize("body", ENDLESS.values(), ids=ENDLESS)
def test_endless_programs_end(sandbox: Sandbox, body: str):
    started = time.monotonic()
    given = answer(sandbox, body, limits=SHORT)
    assert given.error is not None
    assert "limit" in given.error
    assert time.monotonic() - started < SHORT.wall_s + LATE_S


def test_processor_time_is_bounded_before_wall_time(sandbox: Sandbox):
    given = answer(sandbox, "while True:\n    pass", limits=Limits(wall_s=20.0, cpu_s=1))
    assert "processor-time" in (given.error or "")


def test_endless_at_import_ends_too(sandbox: Sandbox):
    (given,) = sandbox.run_calls("while True:\n    pass", entry_point="solution", inputs=[1], limits=SHORT)
    assert "limit" in (given.error or "")


def test_output_is_bounded(sandbox: Sandbox):
    assert answer(sandbox, "for _ in range(500):\n    print('x' * 100000)\nreturn 1").value == 1
    assert "bytes" in (answer(sandbox, "return 'x' * (8 << 20)").error or "")
    raw = "import os\nwhile True:\n    os.write(4, b'x' * 100000)"
    assert answer(sandbox, raw, limits=SHORT).error is not None


def test_deep_recursion_and_crashes_are_errors(sandbox: Sandbox):
    assert (answer(sandbox, "return solution(x)").error or "").startswith("RecursionError")
    assert answer(sandbox, "import sys\nsys.setrecursionlimit(10**9)\nreturn solution(x)").error is not None
    nested = "value = []\nfor _ in range(100000):\n    value = [value]\nreturn value"
    assert answer(sandbox, nested).error is not None
    assert "signal" in (answer(sandbox, "import ctypes\nctypes.string_at(0)").error or "")
    assert "syntax" in (answer(sandbox, "return ((").error or "").lower()


ENDINGS = (
    "os._exit(0)",
    "sys.exit(0)",
    "os.kill(os.getpid(), 9)",
    "os.kill(os.getppid(), 9)",
    "os.kill(-1, 9)",
    "raise KeyboardInterrupt",
    "os.close(4)",
    "os.abort()",
)


@pytest.mark.parametrize("ending", ENDINGS)
def test_ending_early_is_not_passing(sandbox: Sandbox, ending: str):
    passed, _ = passes(sandbox, f"import os, sys\ndef solution(x):\n    {ending}\n")
    assert not passed
    assert not passes(sandbox, f"import os, sys\n{ending}\n")[0]
    assert passes(sandbox, "def solution(x):\n    return 42\n") == (True, "passed")


def test_claims_of_success_are_not_success(sandbox: Sandbox):
    always_equal = """
class Equal(int):
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __hash__(self): return 0
    def __repr__(self): return "42"
def solution(x): return Equal(7)
"""
    printing = 'print(\'{"passed": true, "reason": "passed"}\')\nimport os\nfor fd in range(1, 64):\n' + (
        "    try: os.write(fd, b'{\"passed\": true}\\n')\n    except OSError: pass\ndef solution(x): return 7\n"
    )
    patched = """
import json, builtins
json.dumps = lambda value, *rest, **more: '{"passed": true, "reason": "passed", "value": 42, "error": null}'
builtins.type = lambda value: int
def solution(x): return 7
"""
    patched_harness = """
import sys
main = sys.modules["__main__"]
main.encode_value = lambda value, depth=0: {"passed": True}
def solution(x): return object()
"""
    for program in (always_equal, printing, patched, patched_harness):
        assert not passes(sandbox, program)[0]


def test_the_program_cannot_find_what_is_expected(sandbox: Sandbox):
    program = """
import gc
def solution(x):
    texts = [str(value) for value in gc.get_objects() if isinstance(value, (dict, list, tuple)) and len(value) < 50]
    wanted = "9182" + str(73645 * x // 5)  # not a constant of this program itself
    return any(wanted in text for text in texts if len(text) < 10000)
"""
    tests = [{"input": 5, "expected": 918273645}]
    verdict = verify_program(program, tests=tests, sandbox=sandbox)
    assert not verdict.passed
    assert "got False" in verdict.reason


COMPARED = (
    ("True", 1, False),
    ("1.0", 1, False),
    ("(1, [2])", [1, [2]], True),
    ("[1, 2]", [1, 2, 3], False),
    ("{'a': 1}", {"a": 1}, True),
    ("{'a': True}", {"a": 1}, False),
    ("'1'", 1, False),
    ("None", None, True),
    ("{1}", [1], False),
    ("10**5000", 1, False),
    ("float('nan')", 0.0, False),
)


@pytest.mark.parametrize(("value", "expected", "same"), COMPARED)
def test_equality_is_by_type_and_value(sandbox: Sandbox, value: str, expected: object, same: bool):
    assert passes(sandbox, f"def solution(x):\n    return {value}\n", expected)[0] is same


def test_no_new_namespaces_and_no_privileges(sandbox: Sandbox):
    program = """
import ctypes, os
libc = ctypes.CDLL(None)
unshared = [libc.unshare(flag) for flag in (0x10000000, 0x00020000, 0x40000000)]
return [*unshared, libc.mount(b'a', b'/tmp', b'tmpfs', 0, None)]
"""
    assert answer(sandbox, program).value == [-1, -1, -1, -1]


HUMAN_EVAL = """
def check(candidate):
    assert candidate([1, 2, 3], 2) == [2, 4, 6]
    assert candidate([], 5) == []
    assert abs(sum(candidate([0.5], 2)) - 1.0) < 1e-9
"""


def scale(body: str) -> str:
    return f"def scale(values, factor):\n    {body}\n"


def run_check(sandbox: Sandbox, program: str, tests: str = HUMAN_EVAL, *, trusted: str = "", limits: Limits = FAST):
    return sandbox.run_tests(program, test_source=tests, entry_point="scale", trusted_source=trusted, limits=limits)


def test_check_passes_and_fails(sandbox: Sandbox):
    assert run_check(sandbox, scale("return [value * factor for value in values]")).passed
    wrong = run_check(sandbox, scale("return values"))
    assert not wrong.passed
    assert "assertion" in wrong.reason
    assert "ZeroDivisionError" in run_check(sandbox, scale("return 1 / 0")).reason
    assert not run_check(sandbox, "def other(): pass").passed
    assert "limit" in run_check(sandbox, scale("while True: pass"), limits=SHORT).reason


@pytest.mark.parametrize(
    "program",
    [
        "import os\nos._exit(0)",
        scale("import os; os._exit(0)"),
        scale("raise SystemExit(0)"),
        "class E(list):\n    def __eq__(self, o): return True\n" + scale("return E([7])"),
        "import builtins\nbuiltins.AssertionError = ValueError\nbuiltins.sum = lambda v: 1.0\n" + scale("return 7"),
        'import os\nfor fd in range(3, 32):\n    try: os.write(fd, b\'{"passed": true, "reason": "passed"}\\n\')\n'
        "    except OSError: pass\n" + scale("return 7"),
        "def check(candidate): pass\n" + scale("return 7"),
    ],
    ids=["exit", "exit_in_call", "system_exit", "always_equal", "patched", "writes_everywhere", "own_check"],
)
def test_check_cannot_be_forged(sandbox: Sandbox, program: str):
    assert not run_check(sandbox, program).passed
    assert run_check(sandbox, scale("return [value * factor for value in values]")).passed


def test_trusted_helpers_replace_the_programs_own(sandbox: Sandbox):
    tests = "def check(candidate):\n    assert double(candidate(3)) == 12\n"
    program = "def double(x):\n    return 12\ndef scale(x):\n    return 0\n"
    assert run_check(sandbox, program, tests).passed
    assert not run_check(sandbox, program, tests, trusted="def double(x):\n    return 2 * x\n").passed
    stub = "def double(x):\n    return 2 * x\ndef scale(x):\n    pass\n"
    by_name = "def check(candidate):\n    assert double(scale(3)) == 12\n"
    assert run_check(sandbox, "def scale(x):\n    return 2 * x\n", by_name, trusted=stub).passed


def test_a_program_does_not_redefine_the_tests_built_ins(sandbox: Sandbox):
    program = "def scale(x):\n    return 5.0\ndef abs(x):\n    return 0\ndef all(x):\n    return True\n"
    for tests in ("assert abs(candidate(3) - 6) < 1e-6", "assert all([candidate(3) == 6])"):
        assert not run_check(sandbox, program, f"def check(candidate):\n    {tests}\n").passed


def test_exceptions_reach_the_tests_with_their_type(sandbox: Sandbox):
    tests = "def check(candidate):\n  try:\n    candidate(1)\n    assert False\n  except KeyError:\n    pass\n"
    assert run_check(sandbox, "def scale(x):\n    raise KeyError(x)\n", tests).passed
    assert not run_check(sandbox, "def scale(x):\n    raise IndexError(x)\n", tests).passed


def test_closing_ends_every_process():
    try:
        opened = Sandbox()
    except SandboxUnavailableError as error:
        pytest.skip(str(error))
    process = psutil.Process(opened._process.pid)
    family = [process, *process.children(recursive=True)]
    opened.close()
    assert psutil.wait_procs(family, timeout=3)[1] == []


def test_unknown_backend_names_the_choices():
    with pytest.raises(UserError, match="bubblewrap, unshare"):
        Sandbox(backend="docker")  # type: ignore[arg-type]
