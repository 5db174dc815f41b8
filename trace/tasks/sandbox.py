"""Run model-written Python where it can reach nothing: Linux namespaces, opened by bubblewrap or util-linux `unshare`.

What a program gets: the standard library, read-only; an empty /tmp of its own (the working directory); its inputs. What
it does not get: network, environment variables, the rest of the file system (home, data sets, /proc), other processes,
the right to start processes or threads, more than the limits below, a writable place outside /tmp, and the expected
outputs, which never enter the sandbox for `run_calls`. It cannot print to anyone: its standard streams are /dev/null.

What is and is not guaranteed about a verdict:

- `run_calls` returns what the program answered, decoded here into built-in values only; whoever compares does so in
  this process. A program can therefore not fake a result, only compute it.
- `run_tests` (HumanEval's `check(candidate)`) runs the test code in a second process, in other namespaces, that
  forwards every call to the program's process and receives plain values. The program sees the arguments of each call,
  never the assertions. A test that inspects identity, mutates an argument in place or passes a function cannot be
  expressed, and a test that trusts helper functions which the model wrote itself can be fooled by them: pass those
  as `trusted_source`, which replaces the program's versions.
- It is the kernel that isolates: a kernel vulnerability is out of scope, and so is timing.

`Sandbox` starts an interpreter once and forks per program (sandbox_harness.py); starting one costs 0.2 s, a program a
hundredth of that. One job at a time per Sandbox; open several to use more cores.
"""

import ast
import builtins
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from trace_rl.errors import UserError
from trace_rl.tasks.sandbox_harness import decode_value, encode_value

BackendName = Literal["bubblewrap", "unshare"]
BACKENDS: tuple[BackendName, ...] = ("bubblewrap", "unshare")
REMEDY = (
    "Install bubblewrap (`apt-get install bubblewrap`, or from environment.yml) or util-linux `unshare`, and allow "
    "user namespaces (in a container: `--security-opt seccomp=unconfined`, or run it with CAP_SYS_ADMIN)"
)

_HARNESS = Path(__file__).with_name("sandbox_harness.py")
_GRACE_S = 20.0
_START_S = 60.0


class SandboxUnavailableError(UserError):
    """No sandbox backend works on this host."""


@dataclass(frozen=True)
class Limits:
    """Limits of one program; processes and threads are always refused."""

    wall_s: float = 10.0
    """Wall seconds for the program and all its calls."""
    cpu_s: int = 5
    """Processor seconds."""
    memory_bytes: int = 512 << 20
    """Address space."""
    file_bytes: int = 1 << 20
    """Largest file."""
    tmp_bytes: int = 16 << 20
    """Everything in /tmp together; it is memory."""
    output_bytes: int = 1 << 20
    """Answers of the program together."""
    open_files: int = 32
    """Open files."""


@dataclass(frozen=True)
class Answer:
    """What a program answered to one call: a plain value, or why there is none."""

    value: Any
    error: str | None


@dataclass(frozen=True)
class Verdict:
    """Whether a program passed, the first reason why not, and the wall seconds it took."""

    passed: bool
    reason: str
    seconds: float


class Sandbox:
    """A running sandbox. Use as a context manager; safe to call from several threads, which then take turns."""

    def __init__(self, *, backend: BackendName | Literal["auto"] = "auto", limits: Limits | None = None):
        """Start the first backend that works; SandboxUnavailableError says what each one answered, and the remedy."""
        self.limits = limits or Limits()
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._staging = tempfile.mkdtemp(prefix="trace-sandbox-")
        refusals = []
        for name, own_user_namespace in _variants(backend):
            self.backend: BackendName = name
            command = _command(name, own_user_namespace=own_user_namespace, staging=self._staging)
            if command is None:
                refusals.append(f"{name} is not installed")
                continue
            self._command = command
            refusal = self._start()
            if refusal is None:
                # Only a program that answers proves that every limit and namespace inside is permitted, too.
                probe = self.run_calls("def solution(x):\n    return x + 1", entry_point="solution", inputs=[1])
                if probe == [Answer(value=2, error=None)]:
                    return
                refusal = probe[0].error if probe and probe[0].error else "the probe program gave no answer"
            self._stop()
            refusals.append(f"{name}: {refusal}")
        self.close()
        raise SandboxUnavailableError(
            f"no sandbox is permitted on this host ({'; '.join(dict.fromkeys(refusals))}). {REMEDY}"
        )

    def run_calls(
        self, program_source: str, *, entry_point: str, inputs: Sequence[Any], limits: Limits | None = None
    ) -> list[Answer]:
        """`entry_point(x)` for each x of `inputs`, in order, in one process; stops at the first that gives no answer.

        Inputs are plain values (None, bool, int, float, str, bytes, complex and list, tuple, set, dict of them). An
        exception of the program is an Answer with an error; a time-out or a crash is the last Answer of the list.
        """
        calls = [[entry_point, [encode_value(value)]] for value in inputs]
        reply = self._run({"program": program_source, "calls": calls, "has_tests": False}, tests=None, limits=limits)
        answers = [_decode_answer(line) for line in reply["replies"]]
        if reply["problem"]:
            answers.append(Answer(value=None, error=reply["problem"]))
        return answers

    def run_tests(
        self,
        program_source: str,
        *,
        test_source: str,
        entry_point: str,
        trusted_source: str = "",
        limits: Limits | None = None,
    ) -> Verdict:
        """Run `check(candidate)` of `test_source` on the program's `entry_point`, as HumanEval does.

        `test_source` sees the program's top-level functions by name (each call is forwarded), except those that
        `trusted_source` defines; for HumanEval that is the prompt. The entry point is always the program's.
        """
        started = time.monotonic()
        tests = {
            "tests": test_source,
            "trusted": trusted_source,
            "entry_point": entry_point,
            "functions": _function_names(program_source),
        }
        reply = self._run({"program": program_source, "calls": [], "has_tests": True}, tests=tests, limits=limits)
        seconds = time.monotonic() - started
        if reply["problem"]:
            return Verdict(passed=False, reason=reply["problem"], seconds=seconds)
        verdict = json.loads(reply["verdict"])
        return Verdict(passed=verdict["passed"] is True, reason=str(verdict["reason"]), seconds=seconds)

    def close(self) -> None:
        """End the sandbox's processes."""
        self._stop()
        shutil.rmtree(self._staging, ignore_errors=True)

    def __enter__(self) -> "Sandbox":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _run(self, job: dict[str, Any], *, tests: dict[str, Any] | None, limits: Limits | None) -> dict[str, Any]:
        job["limits"] = asdict(limits or self.limits)
        frames = b"j" + _frame(job) + (b"" if tests is None else _frame(tests))
        with self._lock:
            if self._process is None and (refusal := self._start()) is not None:
                raise SandboxUnavailableError(f"the sandbox cannot be started again: {refusal}. {REMEDY}")
            reply = self._exchange(frames, timeout_s=job["limits"]["wall_s"] + _GRACE_S)
            if reply is None:  # a fault of the harness or a stuck kernel: never a pass; the next job gets a new one
                problem = f"the sandbox gave no verdict{self._complaint()}"
                self._stop()
                return {"replies": [], "problem": problem, "verdict": None}
            return reply

    def _start(self) -> str | None:
        """Start the server; what it complained about, or None when it is ready."""
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        environment = {"PATH": os.defpath, "LANG": "C.UTF-8"}
        if "LD_LIBRARY_PATH" in os.environ:  # an interpreter may need it to start; it names no secrets
            environment["LD_LIBRARY_PATH"] = os.environ["LD_LIBRARY_PATH"]
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=environment,
            cwd="/",
            bufsize=0,
            start_new_session=True,
        )
        ready = self._exchange(b"", timeout_s=_START_S)
        return None if ready == {"ready": True} else f"did not start{self._complaint()}"

    def _exchange(self, frames: bytes, *, timeout_s: float) -> dict[str, Any] | None:
        """Send frames and read one; None when the server ends or is late."""
        assert self._process is not None and self._process.stdin and self._process.stdout
        sink, source = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(sink, False)
        deadline = time.monotonic() + timeout_s
        unsent, received = memoryview(frames), bytearray()
        while len(received) < 8 or len(received) < 8 + int.from_bytes(received[:8], "big"):
            remaining = deadline - time.monotonic()
            readable, writable, _ = select.select([source], [sink] if unsent else [], [], max(0.0, remaining))
            if not readable and not writable:
                return None
            if writable:
                try:
                    unsent = unsent[os.write(sink, unsent[:65536]) :]
                except BrokenPipeError:
                    return None
            if readable:
                part = os.read(source, 1 << 16)
                if not part:
                    return None
                received += part
        return json.loads(received[8:])

    def _complaint(self) -> str:
        """The last line the server wrote to its standard error, or nothing."""
        self._errors.seek(0)
        lines = self._errors.read().decode("utf-8", "replace").strip().splitlines()
        return f": {lines[-1]}" if lines else ""

    def _stop(self) -> None:
        if self._process is None:
            return
        # Both commands are told to take their namespace with them, so killing them ends every process inside.
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            stream.close()
        self._errors.close()
        self._process = None


def _variants(backend: str) -> list[tuple[BackendName, bool]]:
    """Backends to try in order, each without a user namespace first where we are root.

    As real root a program can become nobody, whom the kernel counts and keeps out of root's files; in a user namespace
    of root's it would stay the kernel's root, which process limits do not bind.
    """
    if backend not in (*BACKENDS, "auto"):
        raise UserError(f"unknown sandbox backend {backend!r}; use auto, {', '.join(BACKENDS)}")
    names = BACKENDS if backend == "auto" else [name for name in BACKENDS if name == backend]
    return [(name, own) for name in names for own in ((False, True) if os.geteuid() == 0 else (True,))]


def _command(backend: BackendName, *, own_user_namespace: bool, staging: str) -> list[str] | None:
    """The command that starts the harness in its outer namespaces; None when the tool is not installed."""
    tool = shutil.which("bwrap" if backend == "bubblewrap" else "unshare")
    if tool is None:
        return None
    interpreter = [os.path.realpath(sys.executable), "-I", "-S", "-B"]
    if backend == "unshare":
        config = json.dumps({"staging": staging, "paths": _visible_paths()})
        user = ["--user", "--map-root-user"] if own_user_namespace else []
        flags = ["--pid", "--fork", "--kill-child=SIGKILL", "--net", "--ipc", "--uts", "--mount"]
        return [tool, *user, *flags, *interpreter, str(_HARNESS), config]
    user = ["--unshare-user", "--uid", "0", "--gid", "0"] if own_user_namespace else []
    namespaces = ["--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
    capabilities = ["--cap-drop", "ALL"]  # what the harness needs to make namespaces; programs lose all of it
    for name in ("SYS_ADMIN", "SYS_CHROOT", "SETUID", "SETGID", "SETPCAP", "KILL"):
        capabilities += ["--cap-add", f"CAP_{name}"]
    root = []
    for path in _visible_paths():
        bind = "--dev-bind" if path.startswith("/dev/") else "--ro-bind"  # bubblewrap's plain binds disable devices
        root += ["--symlink", os.readlink(path), path] if os.path.islink(path) else [bind, path, path]
    root += ["--ro-bind", str(_HARNESS), "/harness.py"]
    root += ["--dir", "/tmp", "--dir", "/jail", "--remount-ro", "/", "--chdir", "/"]
    config = json.dumps({"staging": None, "paths": []})
    isolation = [*user, *namespaces, *capabilities, "--die-with-parent", "--new-session"]
    return [tool, *isolation, *root, *interpreter, "/harness.py", config]


def _visible_paths() -> list[str]:
    """What an interpreter needs to run: system libraries, its own prefix, and the random device."""
    paths = ["/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache", "/dev/null", "/dev/urandom"]
    if not os.path.realpath(sys.base_prefix).startswith("/usr/"):
        paths.append(os.path.realpath(sys.base_prefix))
    return [path for path in paths if os.path.lexists(path)]


def _frame(message: dict[str, Any]) -> bytes:
    body = json.dumps(message).encode()
    return len(body).to_bytes(8, "big") + body


def _decode_answer(line: str) -> Answer:
    """An answer line, which the program may have written itself: anything unreadable is an error."""
    try:
        reply = json.loads(line)
        if "error" in reply:
            return Answer(value=None, error=str(reply["error"])[:300] or "error")
        return Answer(value=decode_value(reply["value"]), error=None)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return Answer(value=None, error="unreadable answer")


def _function_names(source: str) -> list[str]:
    """Names of the functions a program defines at top level; none when it does not parse.

    Not those of built-in functions: a program with an `abs` of its own must not decide what `abs` means to the tests.
    """
    try:
        body = ast.parse(source).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    names = [node.name for node in body if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    return [name for name in names if not hasattr(builtins, name)]
