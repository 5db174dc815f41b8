"""What runs inside the sandbox: a server that starts once and forks per program. Standard library only; a script.

The processes, from the trusted side to the untrusted one (each line forks the next):

    server      one per Sandbox, in the outer namespaces (no network, read-only minimal root); never sees a job's text
    conductor   one per job: reads the job from the server's standard input, holds the deadline, writes the reply
    keeper      one per role: unshares pid, mount and ipc namespaces, mounts a fresh /tmp, chroots (which also forbids
                new user namespaces)
    init        process 1 of that pid namespace: when it ends, everything the program left behind is killed
    program     drops every privilege, sets limits and a system-call filter, then runs model-written code

Two roles: the *candidate* runs the program and answers calls; the *checker* runs test code (HumanEval's `check`) whose
functions are stand-ins that forward each call to the candidate. The checker runs no model-written code, the test text
is read only after the candidate was forked, and both talk in plain values as JSON. Easy to "simplify" wrongly: one
process for both would let the program read the assertions or replace what they use; reading the whole job before the
first fork would leave the tests in the program's memory.
"""

import builtins
import contextlib
import ctypes
import importlib
import json
import os
import platform
import resource
import signal
import struct
import sys
import time

CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWPID = 0x00020000, 0x08000000, 0x20000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 4096, 16384, 1 << 18
MNT_DETACH, AT_FDCWD, AT_RECURSIVE, MOUNT_ATTR_RDONLY, SYS_MOUNT_SETATTR = 2, -100, 0x8000, 1, 442
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 24, 38
NOBODY = 65534

# Imported before the fork: programs that use these need no file, and start in microseconds.
_PRELOADED = """bisect cmath collections copy datetime decimal fractions functools hashlib heapq itertools math operator
random re statistics string typing"""

# System calls a judged program has no business with, by number on each architecture the filter knows.
_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
_DENIED = {
    "fork": (57, None), "vfork": (58, None), "clone": (56, 220), "clone3": (435, 435), "unshare": (272, 97),
    "setns": (308, 268), "execve": (59, 221), "execveat": (322, 281), "ptrace": (101, 117), "bpf": (321, 280),
    "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "socket": (41, 198), "socketpair": (53, 199),
    "shmget": (29, 194), "semget": (64, 190), "msgget": (68, 186), "mq_open": (240, 180), "memfd_create": (319, 279),
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "add_key": (248, 217),
    "request_key": (249, 218), "keyctl": (250, 219), "perf_event_open": (298, 241), "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
}  # fmt: skip

libc = ctypes.CDLL(None, use_errno=True)
_PROXY_ERROR_LENGTH = 300


# --- system calls ---------------------------------------------------------------------------------------------------


def call(name, *arguments):
    """Call a libc function and raise OSError naming it when it returns -1."""
    if getattr(libc, name)(*arguments) == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def mount(source, target, kind, flags, options=None):
    """mount(2) with text arguments."""
    encoded = [None if text is None else text.encode() for text in (source, target, kind, options)]
    call("mount", encoded[0], encoded[1], encoded[2], ctypes.c_ulong(flags), encoded[3])


def enter_root(staging, paths):
    """Make `staging` the root: `paths` bound read-only at their own places, /dev/null, an empty /tmp, and no /proc."""
    mount(None, "/", None, MS_REC | MS_PRIVATE)
    mount("root", staging, "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,mode=755")
    for directory in ("tmp", "jail", "dev"):
        os.mkdir(f"{staging}/{directory}")
    for path in paths:
        target = staging + path
        os.makedirs(os.path.dirname(target), exist_ok=True)
        if os.path.islink(path):
            os.symlink(os.readlink(path), target)
            continue
        if os.path.isdir(path):
            os.makedirs(target, exist_ok=True)
        else:
            os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
        mount(path, target, None, MS_BIND | MS_REC)
    attributes = struct.pack("QQQQ", MOUNT_ATTR_RDONLY, 0, 0, 0)
    call("syscall", SYS_MOUNT_SETATTR, AT_FDCWD, staging.encode(), AT_RECURSIVE, attributes, len(attributes))
    os.chdir(staging)
    call("pivot_root", b".", b".")
    call("umount2", b".", MNT_DETACH)
    os.chdir("/")


def enter_jail(tmp_bytes):
    """Own pid, mount and ipc namespaces, a fresh /tmp, and a chroot: in a chroot no user namespace can be created."""
    call("unshare", CLONE_NEWNS | CLONE_NEWIPC | CLONE_NEWPID)
    mount("/", "/jail", None, MS_BIND | MS_REC)
    mount("tmp", "/jail/tmp", "tmpfs", MS_NOSUID | MS_NODEV, f"size={tmp_bytes},nr_inodes=1024,mode=1777")
    os.chroot("/jail")
    os.chdir("/tmp")


def drop_privileges():
    """Become nobody where this namespace maps one, and give up every capability for good."""
    for capability in range(64):
        libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
    with contextlib.suppress(OSError):  # a user namespace that maps one user only has no nobody to become
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setgroups([])
        os.setresuid(NOBODY, NOBODY, NOBODY)
    call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    header = struct.pack("Ii", 0x20080522, 0)
    call("capset", header, bytes(24))


def set_limits(limits):
    """Hard limits of this process; one process means that it can start neither a process nor a thread."""
    cpu_s = max(1, int(limits["cpu_s"]))
    for name, soft, hard in (
        ("RLIMIT_AS", limits["memory_bytes"], limits["memory_bytes"]),
        ("RLIMIT_CPU", cpu_s, cpu_s + 1),
        ("RLIMIT_FSIZE", limits["file_bytes"], limits["file_bytes"]),
        ("RLIMIT_NOFILE", limits["open_files"], limits["open_files"]),
        ("RLIMIT_NPROC", 1, 1),
        ("RLIMIT_CORE", 0, 0),
        ("RLIMIT_MEMLOCK", 0, 0),
        ("RLIMIT_MSGQUEUE", 0, 0),
    ):
        resource.setrlimit(getattr(resource, name), (soft, hard))


def filter_system_calls():
    """Refuse _DENIED with EPERM. Limits and namespaces stand without it; it closes memory that they do not count."""
    if platform.machine() not in _ARCHITECTURES:
        return
    column, architecture = _ARCHITECTURES[platform.machine()]
    load, equal, at_least, give = 0x20, 0x15, 0x35, 0x06  # BPF: load word, jump if equal, jump if >=, return
    kill, refuse, allow = 0x80000000, 0x00050000 | 1, 0x7FFF0000  # kill process, EPERM, allow
    program = [(load, 0, 0, 4), (equal, 1, 0, architecture), (give, 0, 0, kill), (load, 0, 0, 0)]
    program += [(at_least, 0, 1, 0x40000000), (give, 0, 0, kill)]  # x32 numbers would pass a list of x86-64 ones
    for number in filter(None, (numbers[column] for numbers in _DENIED.values())):
        program += [(equal, 0, 1, number), (give, 0, 0, refuse)]
    program.append((give, 0, 0, allow))
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in program))
    header = ctypes.create_string_buffer(struct.pack("H6xP", len(program), ctypes.addressof(code)))
    call("prctl", PR_SET_SECCOMP, 2, header, 0, 0)


# --- plain values as text, and messages -----------------------------------------------------------------------------


def encode_value(value, depth=0):
    """A plain value as JSON-ready data with its exact types; TypeError for anything else, subclasses included."""
    kind = type(value)
    if depth > 100:
        raise TypeError("nested deeper than 100")
    if value is None or kind in (bool, int, float, str):
        return value
    if kind in (list, tuple, set, frozenset):
        return {kind.__name__: [encode_value(item, depth + 1) for item in value]}
    if kind is dict:
        return {"dict": [[encode_value(key, depth + 1), encode_value(item, depth + 1)] for key, item in value.items()]}
    if kind is complex:
        return {"complex": [value.real, value.imag]}
    if kind is bytes:
        return {"bytes": value.hex()}
    raise TypeError(f"{kind.__name__} is not a plain value")


def decode_value(data):
    """The inverse of `encode_value`, building built-in types only; raises ValueError or TypeError for other data."""
    if not isinstance(data, dict):
        if data is None or isinstance(data, (bool, int, float, str)):
            return data
        raise ValueError("not an encoded value")
    if len(data) != 1:
        raise ValueError("not an encoded value")
    ((kind, content),) = data.items()
    if kind in ("list", "tuple", "set", "frozenset"):
        return getattr(builtins, kind)([decode_value(item) for item in content])
    if kind == "dict":
        return {decode_value(key): decode_value(item) for key, item in content}
    if kind == "complex":
        return complex(*content)
    if kind == "bytes":
        return bytes.fromhex(content)
    raise ValueError("not an encoded value")


def read_exactly(descriptor, size):
    """`size` bytes, or None at the end of the stream."""
    parts = []
    while size:
        part = os.read(descriptor, min(size, 1 << 20))
        if not part:
            return None
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def read_frame(descriptor):
    """One length-prefixed JSON message, or None at the end of the stream."""
    header = read_exactly(descriptor, 8)
    body = None if header is None else read_exactly(descriptor, int.from_bytes(header, "big"))
    return None if body is None else json.loads(body)


def write_all(descriptor, data):
    """Write everything."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def write_frame(descriptor, message):
    """One length-prefixed JSON message."""
    body = json.dumps(message).encode()
    write_all(descriptor, len(body).to_bytes(8, "big") + body)


class Lines:
    """Lines from a descriptor that an untrusted process writes: bounded in total, None at the end of the stream."""

    def __init__(self, descriptor, limit):
        self.descriptor, self.remaining, self.buffer = descriptor, limit, b""

    def next(self):
        """The next line; OverflowError past the limit."""
        while b"\n" not in self.buffer:
            part = os.read(self.descriptor, 1 << 16)
            if not part:
                return None
            self.remaining -= len(part)
            if self.remaining < 0:
                raise OverflowError
            self.buffer += part
        line, _, self.buffer = self.buffer.partition(b"\n")
        return line.decode("utf-8", "replace")


# --- the two roles and their processes ------------------------------------------------------------------------------


def describe(error):
    """`Type: message` of an exception, bounded; its own __str__ may fail."""
    try:
        return f"{type(error).__name__}: {error}"[:_PROXY_ERROR_LENGTH]
    except BaseException:
        return type(error).__name__[:_PROXY_ERROR_LENGTH]


def candidate(program, calls, replies):
    """Run the program, then answer each call line `[name, [arguments]]` with `{"value": ...}` or `{"error": ...}`."""
    namespace = {"__name__": "solution"}
    failure = None
    try:
        exec(compile(program, "<program>", "exec", dont_inherit=True), namespace)
    except BaseException as error:  # SystemExit and KeyboardInterrupt are answers of the program too
        failure = describe(error)
    lines = Lines(calls, 1 << 62)
    while (line := lines.next()) is not None:
        text = json.dumps({"error": failure})
        if failure is None:
            try:
                name, arguments = json.loads(line)
                if name not in namespace:
                    raise NameError(f"the program defines no {name}")
                value = namespace[name](*[decode_value(item) for item in arguments])
                text = json.dumps({"value": encode_value(value)})
            except BaseException as error:
                text = json.dumps({"error": describe(error)})
        write_all(replies, text.encode() + b"\n")


class ProgramError(Exception):
    """The program under test raised an exception that has no built-in name, or answered unreadably."""


class ProgramEnded(BaseException):
    """The program's process is gone; not an Exception, so that no test can take it for an expected one."""


def stand_in(name, calls, lines):
    """A function that forwards its call to the candidate process."""

    def forward(*arguments):
        try:
            write_all(calls, json.dumps([name, [encode_value(item) for item in arguments]]).encode() + b"\n")
            line = lines.next()
        except BrokenPipeError:
            line = None
        if line is None:
            raise ProgramEnded
        try:
            reply = json.loads(line)
            if "error" not in reply:
                return decode_value(reply["value"])
            text = str(reply["error"])
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            raise ProgramError("unreadable answer") from None
        kind, _, message = text.partition(": ")
        known = getattr(builtins, kind, None)
        if isinstance(known, type) and issubclass(known, Exception):
            raise known(message)
        raise ProgramError(text)

    return forward


def checker(tests, calls, replies, verdict, output_bytes):
    """Run trusted helper code, then the test code, then `check(candidate)`; write the verdict."""
    lines = Lines(replies, output_bytes)
    outcome = {"passed": False, "reason": "no verdict"}
    try:
        namespace = {"__name__": "tests"}
        for name in tests["functions"]:
            namespace[name] = stand_in(name, calls, lines)
        exec(compile(tests["trusted"], "<trusted>", "exec", dont_inherit=True), namespace)
        # A prompt used as trusted code defines the entry point, too, without a body.
        namespace[tests["entry_point"]] = stand_in(tests["entry_point"], calls, lines)
        exec(compile(tests["tests"], "<tests>", "exec", dont_inherit=True), namespace)
        namespace["check"](namespace[tests["entry_point"]])
        outcome = {"passed": True, "reason": "passed"}
    except AssertionError as error:
        outcome["reason"] = f"an assertion failed: {error}"[:_PROXY_ERROR_LENGTH]
    except OverflowError:
        outcome["reason"] = "too much output"
    except ProgramEnded:
        outcome["ended"] = True  # the conductor knows how
    except BaseException as error:
        outcome["reason"] = describe(error)
    write_all(verdict, json.dumps(outcome).encode() + b"\n")


def start(role, descriptors, limits, null):
    """Fork keeper, init and the role's process, which sees `descriptors` as 3, 4, ... and nothing else; the keeper's
    pid. Killing the keeper kills all of them; its exit code is the role's, or 128 plus the signal that ended it."""
    keeper = os.fork()
    if keeper:
        return keeper
    code = 120
    try:
        enter_jail(limits["tmp_bytes"])
        init = os.fork()
        if init == 0:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            call("prctl", PR_SET_DUMPABLE, 0, 0, 0, 0)
            call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            process = os.fork()
            if process == 0:
                run_role(role, descriptors, limits, null)
            os.closerange(0, 4096)
            while True:
                pid, status = os.wait()
                if pid == process:
                    os._exit(status >> 8 if status & 127 == 0 else 128 + (status & 127))
        os.closerange(0, 4096)
        code = os.waitpid(init, 0)[1] >> 8
    finally:
        os._exit(code)


def run_role(role, descriptors, limits, null):
    """The body of the innermost process: only `descriptors` stay open, no privileges, limits on, then the role."""
    code = 121
    try:
        high = [os.dup2(descriptor, 100 + index) for index, descriptor in enumerate(descriptors)]
        for standard in range(3):
            os.dup2(null, standard)
        for index, descriptor in enumerate(high):
            os.dup2(descriptor, 3 + index)
        os.closerange(3 + len(high), 4096)
        drop_privileges()
        set_limits(limits)
        filter_system_calls()
        role(*range(3, 3 + len(high)))
        code = 0
    finally:
        os._exit(code)


def ending(keeper):
    """Kill what is left of a role and say how it ended."""
    pid, status = os.waitpid(keeper, os.WNOHANG)
    deadline = time.monotonic() + 0.2  # the pipe closes a moment before the exit code arrives
    while pid == 0 and time.monotonic() < deadline:
        time.sleep(0.002)
        pid, status = os.waitpid(keeper, os.WNOHANG)
    if pid == 0:
        stop(keeper)
        return "stopped answering"
    code = status >> 8
    if code == 128 + signal.SIGXCPU or code == 128 + signal.SIGKILL:
        return "exceeded the processor-time or memory limit"
    return f"ended by signal {code - 128}" if code > 128 else f"exited with code {code}"


def stop(keeper):
    """Kill a keeper, and by it init and everything below."""
    with contextlib.suppress(ProcessLookupError, ChildProcessError):
        os.kill(keeper, signal.SIGKILL)
        os.waitpid(keeper, 0)


def conduct(null):
    """Read one job from standard input, run it, and return the reply."""
    job = read_frame(0)
    limits = job["limits"]
    call_read, call_write = os.pipe()
    reply_read, reply_write = os.pipe()
    program = job.pop("program")
    keepers = [start(lambda calls, replies: candidate(program, calls, replies), (call_read, reply_write), limits, null)]
    os.close(call_read)
    os.close(reply_write)
    reply = {"replies": [], "problem": None}
    signal.signal(signal.SIGALRM, raise_timeout)
    signal.setitimer(signal.ITIMER_REAL, limits["wall_s"])
    try:
        if job["has_tests"]:
            tests = read_frame(0)
            verdict_read, verdict_write = os.pipe()
            keepers.append(
                start(
                    lambda calls, replies, verdict: checker(tests, calls, replies, verdict, limits["output_bytes"]),
                    (call_write, reply_read, verdict_write),
                    limits,
                    null,
                )
            )
            for descriptor in (verdict_write, call_write, reply_read):
                os.close(descriptor)
            reply["verdict"] = Lines(verdict_read, 1 << 16).next()
            if reply["verdict"] is None:
                reply["problem"] = f"the tests {ending(keepers.pop())}"
            elif "ended" in json.loads(reply["verdict"]):
                reply["problem"] = f"the program {ending(keepers.pop(0))} before it answered"
        else:
            lines = Lines(reply_read, limits["output_bytes"])
            for request in job["calls"]:
                try:
                    write_all(call_write, json.dumps(request).encode() + b"\n")
                    line = lines.next()
                except BrokenPipeError:
                    line = None
                if line is None:
                    reply["problem"] = f"the program {ending(keepers.pop())} before it answered"
                    break
                reply["replies"].append(line)
    except TimeoutError:
        reply["problem"] = f"exceeded the wall-time limit of {limits['wall_s']:g} s"
    except OverflowError:
        reply["problem"] = f"answered more than {limits['output_bytes']} bytes"
    signal.setitimer(signal.ITIMER_REAL, 0)
    for keeper in keepers:
        stop(keeper)
    return reply


def raise_timeout(number, frame):
    """The handler of the conductor's deadline."""
    raise TimeoutError


def serve(config):
    """Enter the root, report ready, and fork a conductor for each job announced on standard input."""
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    for name in _PRELOADED.split():
        importlib.import_module(name)
    null = os.open("/dev/null", os.O_RDWR)
    if config["staging"]:
        enter_root(config["staging"], config["paths"])
    write_frame(1, {"ready": True})
    while read_exactly(0, 1):  # one byte announces a job; its text is read after the fork
        conductor = os.fork()
        if conductor == 0:
            code = 1
            try:
                write_frame(1, conduct(null))
                code = 0
            finally:
                if code:
                    sys.excepthook(*sys.exc_info())
                os._exit(code)
        while True:  # as process 1 of its namespace the server also reaps what conductors leave
            pid, status = os.wait()
            if pid == conductor:
                break
        if status:
            os._exit(1)


if __name__ == "__main__":
    serve(json.loads(sys.argv[1]))
