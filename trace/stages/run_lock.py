"""One process per job: a second one that would write the same artifacts is refused, and a killed one blocks nobody.

The lock is the kernel's (POSIX, fcntl): it ends with its process, even after ``kill -9``, and children do not inherit
it, so no stale lock has to be removed by hand. Two workflows started on one folder therefore stop each other where they
would train the same run twice, and nowhere else.
"""

import contextlib
import errno
import fcntl
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from trace_rl.config.paths import RunPaths
from trace_rl.errors import UserError

_UNSUPPORTED = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)  # a network file system without a lock service


@contextlib.contextmanager
def run_lock(paths: RunPaths, job: str) -> Iterator[None]:
    """Hold ``<run>/locks/<job>.lock`` while the block runs.

    UserError when another process holds it, with its process id. A file system that has no locks is reported on
    standard error and the block runs without one.
    """
    path = paths.locks / (re.sub(r"[^\w.@=+,-]", "_", job) + ".lock")
    made = [folder for folder in (paths.base, paths.root) if not folder.exists()]
    file = _acquire(path, job=job)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(file)
        with contextlib.suppress(OSError):  # not empty: another job's lock, or what this one wrote
            for folder in (paths.locks, *made):
                folder.rmdir()


def _acquire(path: Path, *, job: str) -> int:
    """An open descriptor of the locked file, which holds the process id."""
    while True:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        except FileNotFoundError:  # another job removed the empty folder between the two calls
            continue
        except OSError as error:
            raise UserError(
                f"{path.parent}: cannot be written ({error.strerror}); give another folder for results"
            ) from error
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(file, 32, 0).decode().strip() or "unknown"
            os.close(file)
            if error.errno in _UNSUPPORTED:
                print(f"warning: {path}: no locks on this file system; start no job twice", file=sys.stderr)
                return os.open(os.devnull, os.O_RDONLY)
            if not isinstance(error, BlockingIOError | PermissionError):  # EAGAIN or EACCES: another process has it
                raise
            raise UserError(
                f"{path}: process {holder} runs {job} and writes the same artifacts; wait for it or stop it first"
            ) from error
        if _is_same(file, path):
            os.truncate(file, 0)
            os.pwrite(file, f"{os.getpid()}\n".encode(), 0)
            return file
        os.close(file)  # its last holder removed the file between our open and our lock


def _is_same(file: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except FileNotFoundError:
        return False
