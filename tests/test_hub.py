"""Downloads from a hub on loopback: verified, resumed, refused with one clear error each."""

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from hub_server import HubServer
from huggingface_hub import constants, snapshot_download

from trace_rl.config.checkpoint import HubCheckpoint
from trace_rl.errors import UserError
from trace_rl.models import hub

COMMIT = "0123456789abcdef0123456789abcdef01234567"
REPO = "org/tiny-moe"
WEIGHTS = random.Random(0).randbytes(3_000_000)
FILES = {
    "config.json": b'{"model_type": "qwen3_moe"}',
    "model.safetensors": WEIGHTS,
    "original/params.json": b"{}",
    "README.md": b"hello",
}
SOURCE = HubCheckpoint(source="hub", repo=REPO, revision=COMMIT, patterns=("*.json", "*.safetensors"))


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)  # the test session sets it; this hub is on loopback
    with HubServer(repo=REPO, commit=COMMIT, files=dict(FILES)) as running:
        yield running


def fetch(server: HubServer, target: Path, source: HubCheckpoint = SOURCE, **options) -> Path:
    return hub.download(source, target=target, endpoint=server.endpoint, token=False, **options)


def contents(directory: Path) -> dict[str, bytes]:
    files = [path for path in directory.rglob("*") if path.is_file() and hub.STATE not in path.parts]
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in files}


WANTED = {name: content for name, content in FILES.items() if name != "README.md"}


def test_downloads_the_matching_files_once(server: HubServer, tmp_path: Path):
    assert fetch(server, tmp_path / "target") == tmp_path / "target"
    assert contents(tmp_path / "target") == WANTED
    assert len(server.requests) == 3
    fetch(server, tmp_path / "target")
    assert len(server.requests) == 3


def test_damaged_and_stale_files_are_replaced(server: HubServer, tmp_path: Path):
    target = fetch(server, tmp_path / "target")
    (target / "model.safetensors").write_bytes(WEIGHTS[:-1] + b"x")
    (target / "config.json").unlink()
    fetch(server, target)
    assert contents(target) == WANTED
    only_weights = SOURCE.model_copy(update={"patterns": ("*.safetensors",)})
    assert contents(fetch(server, target, only_weights)) == {"model.safetensors": WEIGHTS}


def test_a_cut_connection_is_resumed(server: HubServer, tmp_path: Path):
    large = WEIGHTS * 5
    server.files["model.safetensors"] = large
    server.cut_after["model.safetensors"] = 12_000_000
    fetch(server, tmp_path / "target")
    assert contents(tmp_path / "target") == WANTED | {"model.safetensors": large}
    ranges = [requested for name, requested in server.requests if name == "model.safetensors"]
    assert ranges == [None, f"bytes={10 << 20}-"]  # the client hands over 10 MiB at a time


def test_a_killed_download_is_resumed_by_the_next_process(server: HubServer, tmp_path: Path):
    target = tmp_path / "target"
    part = target / hub.STATE / f"{hub.hashlib.sha256(WEIGHTS).hexdigest()}.part"
    part.parent.mkdir(parents=True)
    part.write_bytes(WEIGHTS[:2_000_000])
    fetch(server, target)
    assert contents(target) == WANTED
    assert ("model.safetensors", "bytes=2000000-") in server.requests
    assert server.sent["model.safetensors"] == 1_000_000
    assert not part.exists()


def test_a_server_without_ranges_still_works(server: HubServer, tmp_path: Path):
    server.cut_after["model.safetensors"] = 1_000_000
    server.ignore_range = True
    fetch(server, tmp_path / "target")
    assert contents(tmp_path / "target") == WANTED


def test_a_part_with_a_wrong_beginning_is_fetched_again(server: HubServer, tmp_path: Path):
    part = tmp_path / "target" / hub.STATE / f"{hub.hashlib.sha256(WEIGHTS).hexdigest()}.part"
    part.parent.mkdir(parents=True)
    part.write_bytes(b"wrong")
    fetch(server, tmp_path / "target")
    assert contents(tmp_path / "target") == WANTED


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_corrupted_files_are_refused(server: HubServer, tmp_path: Path, name: str):
    server.corrupt.add(name)
    with pytest.raises(UserError, match=f"{name} .* is corrupted"):
        fetch(server, tmp_path / "target")
    assert name not in contents(tmp_path / "target")
    server.corrupt.clear()
    fetch(server, tmp_path / "target")
    assert contents(tmp_path / "target") == WANTED


@pytest.mark.parametrize("revision", ["main", "", COMMIT[:12], COMMIT.upper(), COMMIT + "0"])
def test_an_unpinned_revision_is_refused(server: HubServer, tmp_path: Path, revision: str):
    with pytest.raises(UserError, match="40 hex digits"):
        fetch(server, tmp_path / "target", SOURCE.model_copy(update={"revision": revision}))
    assert not (tmp_path / "target").exists()


def test_unpinned_on_request_resolves_to_the_commit(server: HubServer, tmp_path: Path):
    unpinned = SOURCE.model_copy(update={"revision": "main"})
    assert contents(fetch(server, tmp_path / "target", unpinned, allow_unpinned=True)) == WANTED


def test_unknown_repository_revision_pattern_and_gated(server: HubServer, tmp_path: Path):
    target = tmp_path / "target"
    with pytest.raises(UserError, match="no repository org/absent"):
        fetch(server, target, SOURCE.model_copy(update={"repo": "org/absent"}))
    with pytest.raises(UserError, match="no repository not a name"):
        fetch(server, target, SOURCE.model_copy(update={"repo": "not a name"}))
    with pytest.raises(UserError, match="no revision ffff"):
        fetch(server, target, SOURCE.model_copy(update={"revision": "f" * 40}))
    with pytest.raises(UserError, match=r"no file matching \*\.gguf"):
        fetch(server, target, SOURCE.model_copy(update={"patterns": ("*.gguf",)}))
    server.gated = True
    with pytest.raises(UserError, match="gated"):
        fetch(server, target)
    assert contents(target) == {}


def test_unreachable_hub(server: HubServer, tmp_path: Path):
    server.__exit__()
    try:
        with pytest.raises(UserError, match="cannot be reached.*HF_ENDPOINT"):
            fetch(server, tmp_path / "target")
    finally:
        server.__enter__()


def test_disk_space_is_checked_before_the_first_byte(server: HubServer, tmp_path: Path):
    server.claimed_size["model.safetensors"] = 10**18
    with pytest.raises(UserError, match="GB free"):
        fetch(server, tmp_path / "target")
    assert server.requests == []


def test_a_file_outside_the_folder_is_refused(server: HubServer, tmp_path: Path):
    server.files["../escaped.json"] = b"{}"
    with pytest.raises(UserError, match="outside its own folder"):
        fetch(server, tmp_path / "target")
    assert not (tmp_path / "escaped.json").exists()


def test_token_is_sent(server: HubServer, tmp_path: Path):
    hub.download(SOURCE, target=tmp_path / "target", endpoint=server.endpoint, token="hf_secret")
    assert server.authorizations == {"Bearer hf_secret"}


def test_offline_uses_what_is_there_verified(server: HubServer, tmp_path: Path):
    target = fetch(server, tmp_path / "target")
    assert hub.download(SOURCE, target=target, offline=True) == target
    (target / "config.json").write_bytes(b"{ }")
    with pytest.raises(UserError, match="offline"):
        hub.download(SOURCE, target=target, offline=True)


PROGRAM = """
import json, sys
from pathlib import Path
from trace_rl.config.checkpoint import HubCheckpoint
from trace_rl.errors import UserError
from trace_rl.models import hub
try:
    hub.download(HubCheckpoint(**json.loads(sys.argv[1])), target=Path(sys.argv[2]))
except UserError as error:
    print(error)
"""


def in_a_process(target: Path, **environment: str) -> str:
    """Download in a new process, where the client reads its settings from the environment."""
    command = [sys.executable, "-c", PROGRAM, SOURCE.model_dump_json(), str(target)]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    done = subprocess.run(command, env={**kept, **environment}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_mirror_offline_and_cache_settings_of_the_client(server: HubServer, tmp_path: Path):
    home = str(tmp_path / "home")
    assert in_a_process(tmp_path / "a", HF_ENDPOINT=server.endpoint, HF_HOME=home) == ""
    assert contents(tmp_path / "a") == WANTED
    assert "offline" in in_a_process(tmp_path / "b", HF_HUB_OFFLINE="1", HF_HOME=home)
    assert contents(tmp_path / "b") == {}
    fill_cache(Path(home) / "hub")
    assert in_a_process(tmp_path / "b", HF_HUB_OFFLINE="1", HF_HOME=home) == ""
    assert contents(tmp_path / "b") == WANTED
    requests = len(server.requests)
    assert in_a_process(tmp_path / "c", HF_ENDPOINT=server.endpoint, HF_HOME=home) == ""
    assert contents(tmp_path / "c") == WANTED
    assert len(server.requests) == requests


def fill_cache(cache: Path) -> None:
    """The client's cache layout: blobs by checksum, snapshots of links to them."""
    repository = cache / "models--org--tiny-moe"
    for name, content in FILES.items():
        large = len(content) >= 1 << 16
        blob = repository / "blobs" / (hub.hashlib.sha256(content).hexdigest() if large else git_sha1(content))
        blob.parent.mkdir(parents=True, exist_ok=True)
        blob.write_bytes(content)
        link = repository / "snapshots" / COMMIT / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(blob, link.parent))
    assert Path(snapshot_download(REPO, revision=COMMIT, cache_dir=cache, local_files_only=True)).is_dir()


def git_sha1(content: bytes) -> str:
    return hub.hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
