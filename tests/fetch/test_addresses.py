"""Which addresses count as public. Expected values are those of IANA's special-purpose registries and the RFCs they name."""

from __future__ import annotations

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gnomon.fetch.addresses import _network, not_public, own_networks

PUBLIC = [
    "8.8.8.8",
    "1.1.1.1",
    "93.184.215.14",
    "172.32.0.1",
    "100.63.255.255",
    "2606:4700:4700::1111",
    "2001:4860:4860::8888",
]
OTHERS = [
    "0.0.0.0",
    "0.1.2.3",
    "10.0.0.1",
    "100.64.0.1",
    "100.127.255.254",
    "127.0.0.1",
    "127.255.255.254",
    "169.254.169.254",
    "172.16.0.1",
    "172.31.255.255",
    "192.0.0.8",
    "192.0.2.1",
    "192.88.99.1",
    "192.168.1.1",
    "198.18.0.1",
    "198.51.100.1",
    "203.0.113.1",
    "224.0.0.1",
    "239.255.255.250",
    "240.0.0.1",
    "255.255.255.255",
    "::",
    "::1",
    "::7f00:1",
    "::ffff:127.0.0.1",
    "::ffff:8.8.8.8",
    "::ffff:0:7f00:1",
    "64:ff9b::7f00:1",
    "64:ff9b::808:808",
    "64:ff9b:1::a00:1",
    "100::1",
    "2001::1",
    "2001:db8::1",
    "2002:7f00:1::",
    "2002:808:808::1",
    "3fff::1",
    "5f00::1",
    "fc00::1",
    "fd12:3456::1",
    "fe80::1",
    "fe80::1%lo",
    "fec0::1",
    "ff02::1",
    "2606:4700::5efe:7f00:1",
    "2606:4700::200:5efe:a00:1",
    "4000::1",
]


@pytest.mark.parametrize("address", PUBLIC)
def test_public(address: str) -> None:
    assert not_public(ipaddress.ip_address(address)) is None


@pytest.mark.parametrize("address", OTHERS)
def test_not_public(address: str) -> None:
    assert not_public(ipaddress.ip_address(address)) is not None


@given(st.integers(0, 2**32 - 1))
def test_no_way_of_writing_ipv4_in_ipv6_gets_past(number: int) -> None:
    inner = ipaddress.IPv4Address(number)
    for outer in (
        f"::ffff:{inner}",
        f"64:ff9b::{inner}",
        f"::{inner}",
        f"2002:{number >> 16:x}:{number & 0xFFFF:x}::1",
    ):
        assert not_public(ipaddress.ip_address(outer)) is not None


@given(st.integers(0, 2**32 - 1))
def test_nothing_local_to_the_standard_library_is_public(number: int) -> None:
    address = ipaddress.IPv4Address(number)
    local = (
        address.is_private,
        address.is_loopback,
        address.is_link_local,
        address.is_multicast,
        address.is_unspecified,
    )
    if any(local):
        assert not_public(address) is not None


def test_networks_of_this_machine() -> None:
    own = own_networks()
    assert ipaddress.ip_network("127.0.0.0/8") in own
    near = _network(ipaddress.ip_address("8.8.8.8"), "255.255.255.0")
    assert not_public(ipaddress.ip_address("8.8.8.77"), [near]) == "of a network of this machine"
    assert not_public(ipaddress.ip_address("8.8.9.1"), [near]) is None
    six = _network(ipaddress.ip_address("2a00:1450::5"), "ffff:ffff:ffff:ffff::")
    assert not_public(ipaddress.ip_address("2a00:1450::9"), [six]) is not None
    # A mask of nothing would make the whole world a neighbour.
    for mask in (None, "0.0.0.0"):
        assert str(_network(ipaddress.ip_address("8.8.8.8"), mask)) == "8.8.8.8/32"
