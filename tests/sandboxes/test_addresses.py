"""Which addresses an allowed name may lead to."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandboxes.addresses import embedded_ipv4, is_public
from sandboxes.network import AllowList

PUBLIC = """
    1.1.1.1 8.8.8.8 93.184.216.34 100.63.255.255 100.128.0.0 172.15.255.255 172.32.0.0 169.253.255.255 169.255.0.0
    192.0.1.0 192.31.196.1 192.167.255.255 192.169.0.0 192.175.48.1 198.17.255.255 198.20.0.0 223.255.255.255
    2606:2800:220:1::1 2001:200::1 2001:4860:4860::8888 2620:4f:8000::1 2a00:1450::1 3ffe::1
    ::ffff:8.8.8.8 64:ff9b::8.8.8.8 2002:808:808::1 2a00::5efe:808:808
""".split()  # noqa: SIM905
SPECIAL_IPV4 = """
    0.0.0.0 0.1.2.3 10.0.0.1 10.255.255.255 100.64.0.0 100.100.100.200 100.127.255.255 127.0.0.1 127.255.255.254
    168.63.129.16 169.254.169.254 172.16.0.0 172.31.255.255 192.0.0.1 192.0.0.8 192.0.0.9 192.0.0.10 192.0.0.170
    192.0.0.192 192.0.2.1 192.88.99.1 192.168.0.1 198.18.0.1 198.19.255.255 198.51.100.1 203.0.113.1 224.0.0.1
    239.255.255.255 240.0.0.1 255.255.255.255
""".split()  # noqa: SIM905
SPECIAL_IPV6 = """
    :: ::1 ::2 ::8.8.8.8 ::10.0.0.1 ::ffff:0:10.0.0.1 ::ffff:0:8.8.8.8 64:ff9b:1::1 64:ff9b:1::10.0.0.1
    64:ff9b:1:ffff:ffff:ffff:ffff:ffff 64:ff9b:2::1 64:ff9b:0:1::8.8.8.8 100::1 100:0:0:1::1 2001::1
    2001:0:4136:e378:8000:63bf:3fff:fdd2 2001:0:a00:1::1 2001:1::1 2001:2::1 2001:3::1 2001:4:112::1 2001:10::1
    2001:20::1 2001:30::1 2001:1ff:ffff::1 2001:db8::1 3fff::1 3fff:fff:ffff::1 4000::1 5f00::1 fc00::1 fd00::1
    fdff:ffff::1 fe80::1 febf::1 fec0::1 feff:ffff::1 fec0:0:0:ffff::1 ff02::1 ff0e::1 1::1 8000::1
""".split()  # noqa: SIM905
ipv4 = st.integers(0, 2**32 - 1).map(IPv4Address) | st.sampled_from(SPECIAL_IPV4).map(IPv4Address)
ipv6 = st.integers(0, 2**128 - 1).map(IPv6Address)


@pytest.mark.parametrize("address", PUBLIC)
def test_public(address: str) -> None:
    assert is_public(ip_address(address))


@pytest.mark.parametrize("address", [*SPECIAL_IPV4, *SPECIAL_IPV6])
def test_not_public(address: str) -> None:
    assert not is_public(ip_address(address))


def forms(address: IPv4Address) -> list[IPv6Address]:
    """Every form that embeds an IPv4 address, with what else such an address may hold."""
    number = int(address)
    return [
        IPv6Address(0xFFFF << 32 | number),
        IPv6Address(int(IPv6Address("64:ff9b::")) | number),
        IPv6Address(0x2002 << 112 | number << 80),
        IPv6Address(0x2002 << 112 | number << 80 | 0x123456789),
        IPv6Address(int(IPv6Address("2a00:1450::")) | 0x5EFE << 32 | number),
        IPv6Address(int(IPv6Address("2a00:1450::")) | 0x0200_5EFE << 32 | number),
    ]


@given(ipv4)
def test_an_address_is_as_public_as_the_one_it_embeds(address: IPv4Address) -> None:
    for form in forms(address):
        assert embedded_ipv4(form) == address
        assert is_public(form) == is_public(address), form
    number = int(address)
    for prefix in ("::", "::ffff:0:0:0", "64:ff9b:1::", "64:ff9b:1:fffe::", "2001::"):  # never, whatever it embeds
        assert not is_public(IPv6Address(int(IPv6Address(prefix)) | number))


@given(ipv4 | ipv6)
def test_what_python_calls_private_is_not_public(address: IPv4Address | IPv6Address) -> None:
    if is_public(address) and not (isinstance(address, IPv6Address) and embedded_ipv4(address)):
        flags = (address.is_global, address.is_private, address.is_multicast, address.is_reserved, address.is_loopback)
        assert flags == (True, False, False, False, False)


@given(ipv6)
def test_public_ipv6_is_global_unicast(address: IPv6Address) -> None:
    inside = (IPv6Network("2000::/3"), IPv6Network("::ffff:0:0/96"), IPv6Network("64:ff9b::/96"))
    assert not is_public(address) or any(address in network for network in inside)


def test_a_special_address_is_reached_only_if_it_is_listed() -> None:
    allowed = AllowList(["example.org", "10.0.0.5:8000", "[fec0::1]:80"])
    assert allowed.permits_address("10.0.0.5", 8000)
    assert allowed.permits_address("::ffff:10.0.0.5", 8000)
    assert allowed.permits_address("fec0::1", 80)
    for address in ("64:ff9b::10.0.0.5", "2002:a00:5::", "::10.0.0.5", "fec0::2", "fe80::1%eth0", "64:ff9b:1::a00:5"):
        assert not allowed.permits_address(address, 8000)
