"""One process per job: a second one is refused with the first one's process id, a killed one leaves nothing behind."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from trace_rl.config.paths import RunPaths
from trace_rl.errors import UserError
from trace_rl.stages import run_lock as module
from trace_rl.stages.run_lock import run_lock

HOLD = """
import sys, time
from pathlib import Path
from trace_rl.config.paths import RunPaths
from trace_rl.stages.run_lock import run_lock
with run_lock(RunPaths("r", Path(sys.argv[1])), sys.argv[2]):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    return RunPaths("r", tmp_path)


@pytest.fixture
def holder(tmp_path: Path):
    """A process that holds the lock of ``train qat seed0``."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path), "train qat seed0"], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def test_second_process_is_refused_and_other_jobs_are_not(holder, paths: RunPaths):
    with (
        pytest.raises(UserError, match=f"process {holder.pid} runs train qat seed0"),
        run_lock(paths, "train qat seed0"),
    ):
        pass
    with run_lock(paths, "train qat seed1"), run_lock(paths, "train trace@guidance.bits=2 seed0"):
        assert len(list(paths.locks.iterdir())) == 3
    assert [file.name for file in paths.locks.iterdir()] == ["train_qat_seed0.lock"]


def test_killed_process_blocks_nobody(holder, paths: RunPaths):
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert list(paths.locks.iterdir())
    with run_lock(paths, "train qat seed0"):
        assert (paths.locks / "train_qat_seed0.lock").read_text() == f"{os.getpid()}\n"
    assert not paths.locks.exists()


def test_children_do_not_keep_the_lock(paths: RunPaths, tmp_path: Path):
    """A worker that outlives its killed parent must not stop the resume."""
    code = HOLD.replace("time.sleep(60)", "import os\n    os.fork() or time.sleep(60)\n    os._exit(0)")
    parent = subprocess.Popen([sys.executable, "-c", code, str(tmp_path), "job"], stdout=subprocess.PIPE, text=True)
    assert parent.stdout.readline() == "held\n"
    parent.wait(timeout=30)
    with run_lock(paths, "job"):
        pass
    parent.stdout.close()


def test_an_error_inside_lets_go_and_leaves_no_folder(paths: RunPaths):
    with pytest.raises(KeyError), run_lock(paths, "job"):
        raise KeyError
    assert not paths.base.exists() and paths.root.exists()
    with run_lock(paths, "job"):
        (paths.base / "written").touch()
    assert [file.name for file in paths.base.iterdir()] == ["written"]


def test_file_removed_while_waiting_is_not_taken_for_the_lock(paths: RunPaths, monkeypatch):
    """The lock of an unlinked file protects nothing: the next process would lock a new file of that name."""
    real, seen = module.fcntl.lockf, []

    def lockf(file: int, command: int) -> None:
        if not seen:
            (paths.locks / "job.lock").unlink()
        seen.append(file)
        real(file, command)

    monkeypatch.setattr(module.fcntl, "lockf", lockf)
    with run_lock(paths, "job"):
        assert len(seen) == 2
        assert (paths.locks / "job.lock").read_text() == f"{os.getpid()}\n"


def test_file_system_without_locks_is_said(paths: RunPaths, monkeypatch, capsys):
    def lockf(file: int, command: int) -> None:
        raise OSError(module.errno.ENOLCK, "no locks")

    monkeypatch.setattr(module.fcntl, "lockf", lockf)
    with run_lock(paths, "job"):
        pass
    assert "no locks on this file system" in capsys.readouterr().err


def test_results_that_cannot_be_written(tmp_path: Path):
    (tmp_path / "r").write_text("a file")
    with pytest.raises(UserError, match="cannot be written"), run_lock(RunPaths("r", tmp_path), "job"):
        pass


def test_the_command_line_refuses_with_exit_code_2(holder, tmp_path: Path):
    command = [sys.executable, "-m", "trace_rl", "train", "--method", "qat", "--config", '{"run": "r"}']
    done = subprocess.run([*command, "--results", str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert f"error: {tmp_path}/r/locks/train_qat_seed0.lock: process {holder.pid} runs" in done.stderr
