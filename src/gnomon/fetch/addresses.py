"""Which addresses are of the public internet, and of no network that this machine is part of."""

from __future__ import annotations

import contextlib
import ipaddress
from collections.abc import Iterable
from typing import Final

import psutil

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

GLOBAL_UNICAST: Final = ipaddress.IPv6Network("2000::/3")
"""All that IANA has given out for the public internet (RFC 4291, 2.4)."""
SPECIAL: Final[tuple[tuple[Network, str], ...]] = (
    (ipaddress.IPv4Network("192.0.0.0/24"), "of a protocol"),
    (ipaddress.IPv4Network("192.88.99.0/24"), "a 6to4 relay"),
    (ipaddress.IPv6Network("2001::/23"), "of a protocol, such as Teredo, which holds another address"),
    (ipaddress.IPv6Network("2002::/16"), "6to4, which holds another address"),
    (ipaddress.IPv6Network("3fff::/20"), "for documentation"),
)
"""What some version of `ipaddress` calls global and is not to be reached, with the words for it."""
ISATAP: Final = frozenset({0x00005EFE, 0x02005EFE})
"""Upper half of the interface identifier that holds an IPv4 address (RFC 5214, 6.1)."""


def not_public(address: Address, own: Iterable[Network] = ()) -> str | None:
    """Why an address is not of the public internet, in words; None if it is. `own` are networks that are refused besides.

    Addresses of IPv6 that hold one of IPv4 (mapped, compatible, translated, 6to4, Teredo, ISATAP) are refused whichever it is.
    """
    if isinstance(address, ipaddress.IPv6Address):
        if address.scope_id is not None:
            return "of one link"
        if address not in GLOBAL_UNICAST:
            return "outside the global unicast range"
        if (int(address) >> 32) & 0xFFFFFFFF in ISATAP:
            return "ISATAP, which holds another address"
    for network, what in SPECIAL:
        if address in network:
            return what
    if address.is_multicast:
        return "multicast"
    # Private, loopback, link-local, shared (100.64.0.0/10), reserved and unspecified ones are not global.
    if not address.is_global or address.is_reserved:
        return "not global"
    if any(address in network for network in own):
        return "of a network of this machine"
    return None


def own_networks() -> list[Network]:
    """The networks of this machine's interfaces: what is on them answers to neighbours what it may not to strangers."""
    found: list[Network] = []
    for addresses in psutil.net_if_addrs().values():
        for one in addresses:
            host = one.address.partition("%")[0]
            # Addresses of hardware, and masks of point-to-point links, are none.
            with contextlib.suppress(ValueError):
                address = ipaddress.ip_address(host)
                found.append(_network(address, one.netmask))
    return found


def _network(address: Address, netmask: str | None) -> Network:
    """Of an interface; the address alone where there is no mask that parts it from the rest of the world."""
    alone = ipaddress.ip_network(address)
    if netmask is None:
        return alone
    bits = bin(int(ipaddress.ip_address(netmask))).count("1")
    return ipaddress.ip_network((address, bits), strict=False) if bits else alone
