"""Download a checkpoint from a model hub: pinned, resumable, verified.

A pinned revision is a commit of 40 hex digits: the same name means the same bytes for ever. Sizes and checksums come
from the hub's metadata of that commit: SHA-256 for large (LFS) files, the git blob SHA-1 for small ones (sha1 of
"blob <size>\\0" + content). Every file is checked after its last byte; a file appears under its name only when it is
right, and nothing is downloaded twice:

- a right file in the target, or in the hub client's cache, is kept;
- a part is kept under `.hub/<checksum>.part` and continued with a Range request, also after a kill (the client's own
  downloads restart each file from zero in a new process, which is why this does not use them);
- a wrong file is fetched once more from zero, then reported.

Honoured settings, all of the hub's client: `HF_ENDPOINT` (mirror), `HF_HUB_OFFLINE`, `HF_TOKEN`, `HF_HOME`, proxies.
Offline, the target or the client's cache must hold the files; they are verified the same way.
"""

import hashlib
import json
import re
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath

from huggingface_hub import HfApi, constants, hf_hub_url, snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.file_download import http_get
from huggingface_hub.hf_api import RepoSibling
from huggingface_hub.utils import HFValidationError, build_hf_headers, filter_repo_objects

from trace_rl.config.checkpoint import HubCheckpoint
from trace_rl.errors import UserError

STATE = ".hub"
RECORD = "record.json"
_COMMIT = re.compile(r"[0-9a-f]{40}")
_RESERVE_BYTES = 64 << 20
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class HubFile:
    """A file of a commit, as the hub describes it."""

    name: str
    size: int
    checksum: str
    """64 hex digits: SHA-256 of the content; 40: git blob SHA-1."""


def download(
    source: HubCheckpoint,
    *,
    target: Path,
    endpoint: str | None = None,
    token: str | bool | None = None,
    offline: bool = False,
    allow_unpinned: bool = False,
) -> Path:
    """Fetch the files of `source.repo` at `source.revision` that match `source.patterns` into `target`; returns it.

    `endpoint` and `token` default to the hub client's settings, `offline` adds to them. `allow_unpinned` accepts a
    branch or tag, which may mean something else tomorrow. UserError for an unpinned revision, an unreachable hub, an
    unknown or gated repository, an unknown revision, no matching files, a full disk and a corrupted file.
    """
    if not _COMMIT.fullmatch(source.revision) and not allow_unpinned:
        raise UserError(
            f"checkpoint.revision {source.revision!r} of {source.repo} is not a commit; give its 40 hex digits "
            "(the repository's history page shows them), so that a rerun means the same weights"
        )
    target.mkdir(parents=True, exist_ok=True)
    if offline or constants.is_offline_mode():
        return _from_disk(source, target=target)
    files, commit = _describe(source, endpoint=endpoint, token=token)
    missing = [file for file in files if not _is_right(target / file.name, file)]
    missing = [file for file in missing if not _copy_from_cache(source, file, commit=commit, target=target)]
    _check_space(missing, target=target)
    for file in missing:
        url = hf_hub_url(source.repo, file.name, revision=commit, endpoint=endpoint)
        _fetch(file, url=url, headers=build_hf_headers(token=token), target=target)
    _write_record(files, source=source, target=target)
    return target


def _describe(source: HubCheckpoint, *, endpoint: str | None, token: str | bool | None) -> tuple[list[HubFile], str]:
    """The wanted files of the commit with sizes and checksums, and the commit."""
    hub = endpoint or constants.ENDPOINT
    try:
        info = HfApi(endpoint=endpoint, token=token).model_info(
            source.repo, revision=source.revision, files_metadata=True
        )
    except GatedRepoError as error:
        raise UserError(f"{source.repo} on {hub} is gated; accept its terms there and set HF_TOKEN") from error
    except RevisionNotFoundError as error:
        raise UserError(f"{source.repo} on {hub} has no revision {source.revision}; correct it") from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise UserError(
            f"no repository {source.repo} on {hub}; correct checkpoint.repo, or set HF_TOKEN if it is private"
        ) from error
    except HfHubHTTPError as error:
        status = error.response.status_code
        raise UserError(f"{hub} answered {status} for {source.repo}; try again later or set HF_ENDPOINT") from error
    except (HTTPError, OSError) as error:
        raise _unreachable(hub, error) from error
    wanted = filter_repo_objects(
        info.siblings or [], allow_patterns=list(source.patterns), key=lambda sibling: sibling.rfilename
    )
    files = [_hub_file(sibling, source=source) for sibling in wanted]
    if not files:
        raise UserError(f"{source.repo} has no file matching {', '.join(source.patterns)}; correct checkpoint.patterns")
    return files, info.sha or source.revision


def _hub_file(sibling: RepoSibling, *, source: HubCheckpoint) -> HubFile:
    name, size, lfs = sibling.rfilename, sibling.size, sibling.lfs
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or path.parts[0] == STATE:
        raise UserError(f"{source.repo} lists a file {name!r} outside its own folder; do not use this repository")
    checksum = lfs.sha256 if lfs is not None else sibling.blob_id
    if size is None or not checksum:
        raise UserError(f"the hub gives no size or checksum of {name} in {source.repo}; use a hub-compatible endpoint")
    return HubFile(name=name, size=size, checksum=checksum)


def _fetch(file: HubFile, *, url: str, headers: dict[str, str], target: Path) -> None:
    """Download or continue one file; it appears under its name only when it is right."""
    part = target / STATE / f"{file.checksum}.part"
    part.parent.mkdir(exist_ok=True)
    for _ in range(2):
        _continue_part(part, file=file, url=url, headers=headers)
        if _is_right(part, file):
            (target / file.name).parent.mkdir(parents=True, exist_ok=True)
            part.replace(target / file.name)
            return
        part.unlink()  # the rest may be right and the beginning wrong: only a start from zero can mend it
    raise UserError(
        f"{file.name} from {url} is corrupted: twice its {file.size} bytes did not have the hub's checksum "
        f"{file.checksum}; try another mirror (HF_ENDPOINT) or check the network's proxy"
    )


def _continue_part(part: Path, *, file: HubFile, url: str, headers: dict[str, str]) -> None:
    """Append what is missing of a part; an interrupted transfer leaves it for the next call."""
    if part.exists() and part.stat().st_size > file.size:
        part.unlink()
    with part.open("ab") as stream:
        done = stream.tell()
        if done == file.size:
            return
        try:
            http_get(
                url,
                stream,
                resume_size=done,
                headers={**headers, "Accept-Encoding": "identity"},
                expected_size=file.size,
                displayed_filename=file.name,
            )
        except HfHubHTTPError as error:
            raise UserError(f"{url} answered {error.response.status_code}; try again later") from error
        except (HTTPError, OSError) as error:
            stream.flush()
            kept = part.stat().st_size
            if kept >= file.size:  # whole but of another size: the checksum decides
                return
            raise UserError(
                f"the download of {file.name} stopped after {kept} of {file.size} bytes ({_short(error)}); run "
                "again to continue from there"
            ) from error


def _from_disk(source: HubCheckpoint, *, target: Path) -> Path:
    """Offline: what an earlier download left in `target`, or the hub client's cache, verified."""
    record = target / STATE / RECORD
    if record.is_file():
        known = json.loads(record.read_text(encoding="utf-8"))
        if {**known, "files": None} == {**_identity(source), "files": None}:
            wrong = [file["name"] for file in known["files"] if not _is_right(target / file["name"], HubFile(**file))]
            if not wrong:
                return target
    try:
        cached = Path(
            snapshot_download(
                source.repo,
                revision=source.revision,
                allow_patterns=list(source.patterns),
                local_files_only=True,
            )
        )
    except (LocalEntryNotFoundError, HFValidationError) as error:
        raise UserError(
            f"offline, and neither {target} nor the hub cache {constants.HF_HUB_CACHE} holds {source.repo} at "
            f"{source.revision}; unset HF_HUB_OFFLINE once, or download it into the cache first"
        ) from error
    files = []
    present = sorted(path.relative_to(cached).as_posix() for path in cached.rglob("*") if path.is_file())
    for name in filter_repo_objects(present, allow_patterns=list(source.patterns)):
        blob = (cached / name).resolve()  # the cache names a blob by its checksum
        file = HubFile(name=name, size=blob.stat().st_size, checksum=blob.name)
        if not _is_right(blob, file):
            raise UserError(f"{cached / name} in the hub cache is corrupted; delete {blob} and download it again")
        _copy(blob, target=target / name)
        files.append(file)
    if not files:
        raise UserError(f"offline, and the hub cache of {source.repo} has no file of {', '.join(source.patterns)}")
    _write_record(files, source=source, target=target)
    return target


def _copy_from_cache(source: HubCheckpoint, file: HubFile, *, commit: str, target: Path) -> bool:
    """Take a right file from the hub client's cache, if it is there."""
    cached = try_to_load_from_cache(source.repo, file.name, revision=commit)
    if not isinstance(cached, str) or not _is_right(Path(cached), file):
        return False
    _check_space([file], target=target)
    _copy(Path(cached), target=target / file.name)
    return True


def _copy(path: Path, *, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(target.name + ".tmp")
    shutil.copyfile(path, temporary)
    temporary.replace(target)


def _is_right(path: Path, file: HubFile) -> bool:
    """Whether the file at `path` has the size and checksum the hub gives."""
    if not path.is_file() or path.stat().st_size != file.size:
        return False
    if len(file.checksum) == 64:
        digest = hashlib.sha256()
    else:
        digest = hashlib.sha1(f"blob {file.size}\0".encode(), usedforsecurity=False)
    with path.open("rb") as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest() == file.checksum


def _check_space(files: list[HubFile], *, target: Path) -> None:
    """UserError before the first byte when the files cannot fit; parts already here count."""
    parts = [target / STATE / f"{file.checksum}.part" for file in files]
    needed = sum(file.size for file in files) - sum(part.stat().st_size for part in parts if part.is_file())
    free = shutil.disk_usage(target).free
    if files and needed + _RESERVE_BYTES > free:
        raise UserError(
            f"{target} has {free / 1e9:.1f} GB free and the download needs {needed / 1e9:.1f} GB more; free some "
            "space or put the results elsewhere"
        )


def _identity(source: HubCheckpoint) -> dict[str, object]:
    return {"repo": source.repo, "revision": source.revision, "patterns": list(source.patterns)}


def _write_record(files: list[HubFile], *, source: HubCheckpoint, target: Path) -> None:
    """Remember what is here, for an offline rerun; files of an earlier request that are no longer wanted go."""
    record = target / STATE / RECORD
    record.parent.mkdir(exist_ok=True)
    if record.is_file():
        earlier = {file["name"] for file in json.loads(record.read_text(encoding="utf-8"))["files"]}
        for name in earlier - {file.name for file in files}:
            (target / name).unlink(missing_ok=True)
    content = {**_identity(source), "files": [asdict(file) for file in files]}
    temporary = record.with_suffix(".tmp")
    temporary.write_text(json.dumps(content, indent=1), encoding="utf-8")
    temporary.replace(record)


def _unreachable(hub: str, error: Exception) -> UserError:
    return UserError(
        f"the model hub {hub} cannot be reached ({_short(error)}); check the network and proxy, set HF_ENDPOINT to a "
        "mirror, or use checkpoint.source local"
    )


def _short(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]
