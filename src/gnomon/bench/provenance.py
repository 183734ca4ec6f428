"""Where a number comes from: source revision, packages, native libraries, model content, device and machine."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
from collections.abc import Iterable
from functools import cache
from importlib import metadata
from pathlib import Path

import psutil

from gnomon.bench.environment import neutralised
from gnomon.bench.schema import Provenance

PACKAGES = ("gnomon", "mlx", "mlx-cpu", "mlx-cuda-13", "mlx-metal", "mlx-lm", "numpy", "transformers", "tokenizers")
HASH_CACHE_FORMAT = 1


def sha256_file(path: Path) -> str:
    """SHA-256 of a file's content, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sha256_ids(ids: Iterable[int]) -> str:
    """SHA-256 of token ids written as decimal numbers with a comma between them."""
    return hashlib.sha256(",".join(map(str, ids)).encode()).hexdigest()


def sha256_text(text: str) -> str:
    """SHA-256 of a text's UTF-8 bytes."""
    return hashlib.sha256(text.encode()).hexdigest()


class HashCache:
    """Remembers file hashes by path, size and modification time, so that large models are read once. Unknown formats are ignored."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._known: dict[str, str] = {}
        if path is not None and path.is_file():
            try:
                stored = json.loads(path.read_text())
            except ValueError:
                stored = {}
            if stored.get("format") == HASH_CACHE_FORMAT:
                self._known = stored["hashes"]

    def sha256(self, file: Path) -> str:
        """Hash of `file`, from memory if neither size nor modification time changed."""
        real = file.resolve()
        stat = real.stat()
        key = f"{real}|{stat.st_size}|{stat.st_mtime_ns}"
        if key not in self._known:
            self._known[key] = sha256_file(real)
            if self._path is not None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                partial = self._path.with_suffix(f".{os.getpid()}")
                partial.write_text(json.dumps({"format": HASH_CACHE_FORMAT, "hashes": self._known}))
                partial.replace(self._path)
        return self._known[key]


def model_content(directory: Path, cache: HashCache | None = None) -> tuple[str, dict[str, str]]:
    """Hash of a model directory's content and of each file. Two directories with equal files have equal hashes wherever they lie.

    Raises `FileNotFoundError` if `directory` holds no config.json.
    """
    if not (directory / "config.json").is_file():
        raise FileNotFoundError(f"{directory} is not a model directory: it has no config.json")
    known = cache or HashCache(None)
    files = sorted(f for f in directory.rglob("*") if f.is_file() and not f.name.startswith("."))
    hashes = {str(f.relative_to(directory)): known.sha256(f) for f in files}
    return hashlib.sha256("\n".join(f"{h}  {n}" for n, h in hashes.items()).encode()).hexdigest(), hashes


def source_sha256(directory: Path) -> str | None:
    """Hash of the one file that a model directory was converted from, as the conversion noted it; None if it wasn't, or of several."""
    try:
        found = json.loads((directory / "gnomon.json").read_text()).get("sha256")
    except (OSError, ValueError, AttributeError):
        return None
    return found if isinstance(found, str) else None


def _git(root: Path, *arguments: str) -> bytes | None:
    try:
        done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, timeout=30, check=False)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def revision(root: Path) -> tuple[str | None, bool | None, str | None]:
    """Commit, whether the tree differs from it, and the SHA-256 of that difference (untracked files included); Nones outside git."""
    head = _git(root, "rev-parse", "HEAD")
    if head is None:
        return None, None, None
    digest = hashlib.sha256()
    difference = _git(root, "diff", "--binary", "HEAD") or b""
    digest.update(difference)
    untracked = (_git(root, "ls-files", "--others", "--exclude-standard", "--full-name", "-z", ":/") or b"").split(
        b"\0"
    )
    top = Path((_git(root, "rev-parse", "--show-toplevel") or str(root).encode()).decode().strip())
    present = [name for name in sorted(untracked) if name and (top / os.fsdecode(name)).is_file()]
    for name in present:
        digest.update(name + b"\0" + sha256_file(top / os.fsdecode(name)).encode())
    dirty = bool(difference or present)
    return head.decode().strip(), dirty, digest.hexdigest() if dirty else None


def _packages() -> dict[str, str]:
    found: dict[str, str] = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _native_libraries() -> dict[str, str]:
    import mlx.core as mx  # loading it is what decides which libraries count

    folder = Path(mx.__file__).parent
    files = [*folder.glob("core.*"), *folder.glob("lib/libmlx*"), *folder.glob("lib/*.metallib")]
    return {f.name: sha256_file(f) for f in sorted(files) if f.is_file() and f.suffix not in (".pyi",)}


def device() -> str:
    """Name of MLX's default device."""
    import mlx.core as mx

    kind = mx.default_device()
    details = mx.device_info(kind) if hasattr(mx, "device_info") else {}
    return f"{kind} {details.get('device_name', '')}".strip()


def processor() -> str:
    """The processor's name as the system tells it."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


@cache
def machine() -> str:
    """A fingerprint that is equal for runs on the same machine: host, processor, cores and memory, hashed."""
    parts = (platform.node(), processor(), os.cpu_count(), psutil.virtual_memory().total)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def provenance(model: Path | None = None, hash_cache: Path | None = None) -> Provenance:
    """Everything but the machine's momentary state. Hashing the model happens here, outside of any timing."""
    head, dirty, difference = revision(Path(__file__).parent)
    content, files = (None, {}) if model is None else model_content(model, HashCache(hash_cache))
    return Provenance(
        revision=head,
        dirty=dirty,
        diff_sha256=difference,
        packages=_packages(),
        native_libraries=_native_libraries(),
        python=platform.python_version(),
        system=platform.platform(),
        processor=processor(),
        cores=os.cpu_count() or 1,
        memory_bytes=psutil.virtual_memory().total,
        device=device(),
        machine=machine(),
        model_path=None if model is None else str(model),
        model_sha256=content,
        model_files=files,
        neutralised=neutralised(),
    )
