"""Connections to the addresses that were checked, and to no other."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import cast

import httpcore2

from gnomon.fetch.addresses import Network, not_public

log = logging.getLogger(__name__)

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""The addresses of a host, as text."""


class NotPublic(Exception):
    """A host has no address that may be connected to; the log says which it has."""


async def resolve(host: str, port: int) -> list[str]:
    """What the system's resolver says, which also reads `0x7f.1` and `2130706433` as addresses. Raises OSError, UnicodeError."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(one[4][0]) for one in found))


class PinnedBackend(httpcore2.AsyncNetworkBackend):
    """Asks for a host's addresses once, refuses it if any of them is not public, and connects to those very addresses.

    Whoever asks the name again later may hear something else: nobody does. Certificates are still checked against the name.
    """

    def __init__(
        self,
        own: Sequence[Network],
        *,
        anywhere: bool = False,
        resolve: Resolve = resolve,
        network: httpcore2.AsyncNetworkBackend | None = None,
    ) -> None:
        """`anywhere` switches the check off; `network` makes the connections."""
        self._own = own
        self._anywhere = anywhere
        self._resolve = resolve
        self._network = network or cast("httpcore2.AsyncNetworkBackend", httpcore2.AnyIOBackend())

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore2.SOCKET_OPTION] | None = None,
    ) -> httpcore2.AsyncNetworkStream:
        """Raises NotPublic, and httpcore2.ConnectError or ConnectTimeout of the last address tried."""
        error: Exception = NotPublic(host)
        for address in await self._checked(host, port):
            try:
                return await self._network.connect_tcp(address, port, timeout, local_address, socket_options)
            except (httpcore2.ConnectError, httpcore2.ConnectTimeout) as failed:
                error = failed
        raise error

    async def _checked(self, host: str, port: int) -> list[str]:
        try:
            found = [ipaddress.ip_address(one) for one in await self._resolve(host, port)]
        except (OSError, ValueError) as error:
            raise NotPublic(host) from error
        for address in found if not self._anywhere else ():
            why = not_public(address, self._own)
            if why is not None:
                # Not for the client, who would learn of names and addresses within.
                log.warning("%s was not fetched from: its address %s is %s", host, address, why)
                raise NotPublic(host)
        return [str(address) for address in found]
