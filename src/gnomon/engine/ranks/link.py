"""How processes find each other, and what connects rank 0 with each of the others."""

from __future__ import annotations

import contextlib
import hmac
import json
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Generator, Mapping
from multiprocessing.connection import Connection
from typing import Any, Protocol, cast

import mlx.core as mx

log = logging.getLogger(__name__)

JOIN_SECONDS = 120.0
"""How long all processes may take to be there."""
HELLO_SECONDS = 10.0
KEY_BYTES = 32
ADDRESS_BYTES = 1024
END_SECONDS = 3.0
"""How long an engine whose peer is gone may take to notice by itself: a collective may never come back from the device."""
TELL_SECONDS = 2.0
"""How long its clients have then to hear of it."""


class RanksError(RuntimeError):
    """The processes don't find each other, or don't go together."""


class Watched(Protocol):
    """An engine, to those who hear of the other processes. Called on any thread."""

    def lost(self, reason: str) -> None:
        """Another process is gone."""
        ...

    def ended(self, timeout: float | None = None) -> bool:
        """Wait for the end of the engine's thread; False if it didn't come in time."""
        ...

    def abandon(self, reason: str) -> None:
        """The engine's thread doesn't come back: tell whoever waits for it."""
        ...


class Ranks:
    """This process's place among them. `links` are rank 0's connections, by rank from 1 on; the others have one, to rank 0."""

    def __init__(self, group: mx.distributed.Group, links: list[Connection]) -> None:
        self.group = group
        self.rank, self.size = group.rank(), group.size()
        self.links = links
        self.memory = 0
        """The least memory that a process has, in bytes."""
        self.lost: str | None = None
        """Why the others are no more."""
        self.over = False
        """The end was told, or heard: a connection that breaks now is nothing to tell of."""

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def agree(self, about: Mapping[str, Any], memory: int) -> None:
        """Compare what must be the same everywhere, and tell all what the smallest of them has. Raises `RanksError` in each process."""
        mine = {key: str(value) for key, value in about.items()}
        with self._joining():
            if not self.leads:
                self.links[0].send((mine, memory))
                wrong, self.memory = cast("tuple[str | None, int]", self.links[0].recv())
            else:
                heard = [cast("tuple[dict[str, str], int]", link.recv()) for link in self.links]
                wrong = next(
                    (bad for rank, (its, _) in enumerate(heard, 1) if (bad := _difference(rank, its, mine))), None
                )
                self.memory = min(memory, *(size for _, size in heard))
                for link in self.links:
                    link.send((wrong, self.memory))
        if wrong is not None:
            raise RanksError(wrong)

    def watch(self, engine: Watched) -> None:
        """Rank 0: hear of processes that end."""
        for rank, link in enumerate(self.links, 1):
            threading.Thread(target=self._listen, args=(rank, link, engine), name=f"rank-{rank}", daemon=True).start()

    def _listen(self, rank: int, link: Connection, engine: Watched) -> None:
        try:
            reason = f"rank {rank} failed: {link.recv()}"
        except (EOFError, OSError):
            reason = f"rank {rank} has ended"
        if not self.over:
            self.end(reason, engine)

    def end(self, reason: str, engine: Watched) -> None:
        """Tell the engine that the others are gone; where it doesn't come back from the device, end the process."""
        self.lost = self.lost or reason
        engine.lost(self.lost)
        if not engine.ended(END_SECONDS):
            log.critical("%s, and this process waits for it on the device: it is ended", self.lost)
            engine.abandon(self.lost)
            time.sleep(TELL_SECONDS)
            os._exit(1)

    def close(self, reason: str | None = None) -> None:
        """The engine's end, for a `reason` if it failed."""
        self.over = True
        for link in self.links:
            with contextlib.suppress(OSError):
                if reason is not None and not self.leads:
                    link.send(reason)
                link.close()

    @contextlib.contextmanager
    def _joining(self) -> Generator[None]:
        try:
            yield
        except (EOFError, OSError) as error:
            raise RanksError(f"a process ended while all were joining: {error or 'its connection broke'}") from error


def _difference(rank: int, its: Mapping[str, str], mine: Mapping[str, str]) -> str | None:
    for key in sorted({*its, *mine}):
        if its.get(key) != mine.get(key):
            return f"rank {rank} doesn't go with rank 0: {key} is {its.get(key)} there and {mine.get(key)} here"
    return None


def join(backend: str, host: str) -> Ranks:
    """Find the other processes through MLX, and connect each with rank 0, which listens at `host`. Raises `RanksError`."""
    try:
        group = mx.distributed.init(strict=True, backend=cast("Any", backend))
    except (RuntimeError, ValueError) as error:
        raise RanksError(f"--distributed {backend}: {error}") from error
    if group.size() < 2:
        raise RanksError(f"--distributed {backend}: this is the only process; start several with mlx.launch -n 2")
    deadline = time.monotonic() + JOIN_SECONDS
    try:
        return _lead(group, host, deadline) if group.rank() == 0 else _follow(group, deadline)
    except (OSError, EOFError) as error:
        raise RanksError(f"rank {group.rank()} can't be connected with the others: {error}") from error


def _lead(group: mx.distributed.Group, host: str, deadline: float) -> Ranks:
    key = secrets.token_bytes(KEY_BYTES)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    links: dict[int, Connection] = {}
    with socket.create_server((host, 0), family=family) as server:
        _tell_all(group, json.dumps([host, server.getsockname()[1], key.hex()]))
        while len(links) < group.size() - 1:
            server.settimeout(max(0.01, deadline - time.monotonic()))
            peer, _ = server.accept()
            # Whoever else finds the port has no key, and doesn't keep the others waiting.
            peer.settimeout(HELLO_SECONDS)
            try:
                hello = _exactly(peer, KEY_BYTES + 4)
            except OSError:
                peer.close()
                continue
            rank = int.from_bytes(hello[KEY_BYTES:], "little")
            if not hmac.compare_digest(hello[:KEY_BYTES], key) or rank in links or not 0 < rank < group.size():
                peer.close()
                continue
            links[rank] = _connection(peer)
    return Ranks(group, [links[rank] for rank in sorted(links)])


def _follow(group: mx.distributed.Group, deadline: float) -> Ranks:
    host, port, key = json.loads(_tell_all(group, ""))
    peer = socket.create_connection((host, port), timeout=max(0.01, deadline - time.monotonic()))
    peer.sendall(bytes.fromhex(key) + group.rank().to_bytes(4, "little"))
    return Ranks(group, [_connection(peer)])


def _tell_all(group: mx.distributed.Group, text: str) -> str:
    """What rank 0 says, to every process; the others say nothing."""
    said = text.encode().ljust(ADDRESS_BYTES)[:ADDRESS_BYTES] if text else bytes(ADDRESS_BYTES)
    heard = mx.distributed.all_sum(mx.array(list(said), dtype=mx.int32), group=group)
    return bytes(cast("list[int]", heard.tolist())).decode().strip()


def _exactly(peer: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size:
        more = peer.recv(size - len(found))
        if not more:
            raise OSError("the connection was closed")
        found += more
    return found


def _connection(peer: socket.socket) -> Connection:
    peer.settimeout(None)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    return Connection(peer.detach())
