"""Download a repository's files from the hub into the hub client's own cache: resumable, verified before they are visible.

The hub client lists, resolves, authenticates and lays out the cache; only the bytes of large files are fetched here, because the client
drops a partial file when its process ends. A partial file lies in `blobs/` as `<hash>.gnomon.incomplete`, is continued by the next run,
and becomes `blobs/<hash>` once its hash is right.
"""

from __future__ import annotations

import fnmatch
import hashlib
import logging
import os
import shutil
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

import httpx2
from filelock import FileLock
from huggingface_hub import HfApi, get_session, hf_hub_url, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import build_hf_headers

from gnomon.hub.errors import HubError
from gnomon.hub.registry import hub_cache

MODEL_FILES: Final = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "LICENSE*", "*.tiktoken")
_TRIES: Final = 5
# The client's own handler would say everything a second time.
logging.getLogger("huggingface_hub").handlers.clear()
_CHUNK: Final = 1 << 20
Progress = Callable[[str, int, int], None]
"""Called with a file's name, the bytes of it that are here, and its size."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """One file of a repository. `digest` is a sha256 of the bytes, or for small files git's blob id; `size` is in bytes."""

    name: str
    size: int
    digest: str

    def digester(self) -> Any:
        """A hash object that, fed the bytes, ends at `digest`."""
        if len(self.digest) == 64:
            return hashlib.sha256()
        return hashlib.sha1(b"blob %d\0" % self.size, usedforsecurity=False)


def _quiet(name: str, done: int, total: int) -> None:
    """Progress that nobody watches."""


class Hub:
    """One hub: the client's default endpoint and cache, or others (tests)."""

    def __init__(self, cache: Path | None = None, endpoint: str | None = None, token: str | bool | None = None) -> None:
        self.cache = hub_cache() if cache is None else cache
        self.token = token
        self.api = HfApi(endpoint=endpoint, token=token)
        self.pause = 1.0

    def get(
        self,
        repo: str,
        revision: str | None = None,
        progress: Progress = _quiet,
        patterns: Sequence[str] = MODEL_FILES,
    ) -> Path:
        """Download `repo` at `revision` (branch, tag or commit; default main) and return the snapshot's directory.

        Files that are there are not fetched again. Raises `HubError` for an unknown repository or revision, missing access, no network,
        no space, or bytes whose hash stays wrong.
        """
        with _explained(repo, revision):
            commit = self.api.model_info(repo, revision=revision).sha
            if commit is None:
                raise HubError(f"the hub names no commit for {repo}")
            wanted = self._list(repo, commit, patterns)
            if not wanted:
                raise HubError(f"{repo} has none of the files a model needs ({', '.join(patterns)})")
            self._check_space(repo, wanted)
            for file in wanted:
                self._fetch(repo, commit, file, progress)
            # Now every blob is in place: this makes the snapshot's links and the ref.
            path = snapshot_download(
                repo,
                revision=revision if self._still(repo, revision, commit) else commit,
                cache_dir=self.cache,
                endpoint=self.api.endpoint,
                token=self.token,
                allow_patterns=[file.name for file in wanted],
                max_workers=1,
            )
        return Path(path)

    def list_files(self, repo: str, revision: str | None = None) -> list[Wanted]:
        """All files of a repository. Raises `HubError` as `get` does."""
        with _explained(repo, revision):
            return self._list(repo, revision, ("*",))

    def _still(self, repo: str, revision: str | None, commit: str) -> bool:
        return self.api.model_info(repo, revision=revision).sha == commit

    def _list(self, repo: str, revision: str | None, patterns: Sequence[str]) -> list[Wanted]:
        files = [
            entry
            for entry in self.api.list_repo_tree(repo, recursive=True, revision=revision)
            if isinstance(entry, RepoFile)
        ]
        return [
            Wanted(file.path, file.size, file.lfs.sha256 if file.lfs else file.blob_id)
            for file in files
            if any(fnmatch.fnmatch(file.path, pattern) for pattern in patterns)
        ]

    def _folder(self, repo: str) -> Path:
        return self.cache / ("models--" + repo.replace("/", "--"))

    def _check_space(self, repo: str, wanted: Sequence[Wanted]) -> None:
        blobs = self._folder(repo) / "blobs"
        blobs.mkdir(parents=True, exist_ok=True)
        lacking = sum(file.size for file in wanted if not (blobs / file.digest).exists())
        free = shutil.disk_usage(blobs).free
        if lacking > free:
            raise HubError(f"{repo} needs {lacking / 1e9:.1f} GB and {self.cache} has {free / 1e9:.1f} GB free")

    def _fetch(self, repo: str, commit: str, file: Wanted, progress: Progress) -> None:
        folder = self._folder(repo)
        blob = folder / "blobs" / file.digest
        locks = self.cache / ".locks" / folder.name
        locks.mkdir(parents=True, exist_ok=True)
        # The client's own lock of this blob, so that both kinds of download exclude each other.
        with FileLock(locks / f"{file.digest}.lock"):
            if blob.is_file() and blob.stat().st_size == file.size:
                progress(file.name, file.size, file.size)
                return
            partial = blob.with_name(f"{file.digest}.gnomon.incomplete")
            for attempt in (1, 2):
                self._complete(repo, commit, file, partial, progress)
                found = _digest(partial, file)
                if found == file.digest:
                    os.replace(partial, blob)
                    return
                partial.unlink()
                if attempt == 2:
                    raise HubError(
                        f"{repo}: {file.name} arrived with hash {found}, expected {file.digest}, twice: nothing was kept"
                    )

    def _complete(self, repo: str, commit: str, file: Wanted, partial: Path, progress: Progress) -> None:
        """Append to `partial` until it has the file's size, continuing after broken connections."""
        failures = 0
        with partial.open("ab") as sink:
            if sink.tell() > file.size:
                sink.truncate(0)
            while sink.tell() < file.size:
                before = sink.tell()
                try:
                    self._stream(repo, commit, file, sink, progress)
                except httpx2.TransportError as error:
                    failures = 1 if sink.tell() > before else failures + 1
                    if failures > _TRIES:
                        reached = f"{sink.tell()} of {file.size} bytes"
                        raise HubError(
                            f"{repo}: {file.name} broke off at {reached} ({error}); run the command again to continue"
                        ) from error
                    sink.flush()
                    time.sleep(self.pause * failures)
                else:
                    if sink.tell() == before:
                        raise HubError(f"{repo}: the hub sent nothing of {file.name} after byte {before}")
            sink.flush()
            os.fsync(sink.fileno())

    def _stream(self, repo: str, commit: str, file: Wanted, sink: BinaryIO, progress: Progress) -> None:
        url = hf_hub_url(repo, file.name, revision=commit, endpoint=self.api.endpoint)
        headers = build_hf_headers(token=self.token) | {"Accept-Encoding": "identity"}
        if (start := sink.tell()) > 0:
            headers["Range"] = f"bytes={start}-"
        with get_session().stream("GET", url, headers=headers, follow_redirects=True, timeout=60.0) as response:
            if response.status_code == 416:
                sink.truncate(0)
                raise httpx2.RemoteProtocolError(f"the hub refused to continue at byte {start}")
            if response.status_code >= 400:
                raise HubError(f"{repo}: {file.name}: the hub answered {response.status_code}")
            if start and response.status_code != 206:
                sink.truncate(0)
            progress(file.name, sink.seek(0, os.SEEK_END), file.size)
            for block in response.iter_bytes():
                if sink.tell() + len(block) > file.size:
                    raise HubError(f"{repo}: {file.name} is longer than the {file.size} bytes the hub lists")
                sink.write(block)
                progress(file.name, sink.tell(), file.size)


def _digest(path: Path, file: Wanted) -> str:
    digest = file.digester()
    with path.open("rb") as source:
        while block := source.read(_CHUNK):
            digest.update(block)
    return digest.hexdigest()


@contextmanager
def _explained(repo: str, revision: str | None) -> Generator[None]:
    """Turn what the client raises into a `HubError` that says what to do."""
    try:
        yield
    except GatedRepoError as error:
        raise HubError(
            f"{repo} is gated: accept its terms on the hub, then log in with 'hf auth login' or set HF_TOKEN"
        ) from error
    except RevisionNotFoundError as error:
        raise HubError(f"{repo} has no revision {revision!r}") from error
    except RepositoryNotFoundError as error:
        raise HubError(
            f"the hub has no {repo}, or it is private: check the name, or log in with 'hf auth login'"
        ) from error
    except (OfflineModeIsEnabled, LocalEntryNotFoundError, httpx2.TransportError) as error:
        raise HubError(f"the hub can't be reached for {repo} (offline?): {error}") from error
    except HFValidationError as error:
        raise HubError(f"{repo!r} is no repository id (OWNER/NAME): {error}") from error
    except HfHubHTTPError as error:
        status = error.response.status_code
        hint = ": log in with 'hf auth login' or set HF_TOKEN" if status in (401, 403) else ""
        raise HubError(f"{repo}: the hub answered {status}{hint}") from error
