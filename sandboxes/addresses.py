"""Tests for public addresses: on the internet, and not of this machine, its networks or its cloud provider.

The ranges are those of IANA's special-purpose registries
(https://www.iana.org/assignments/iana-ipv4-special-registry, and -ipv6-), as of 2025-10, plus the ways to embed an
IPv4 address in an IPv6 one. `ipaddress.is_global` covers only some of both, depending on the patch release of Python.
"""

from __future__ import annotations

from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network

_SPECIAL_IPV4 = [
    IPv4Network(network)
    for network in (
        "0.0.0.0/8",  # this network
        "10.0.0.0/8",  # private
        "100.64.0.0/10",  # shared by a carrier's customers; Alibaba's metadata service
        "127.0.0.0/8",  # loopback
        "168.63.129.16/32",  # Azure's host, as seen by each of its virtual machines; not in the registry
        "169.254.0.0/16",  # link-local; metadata services
        "172.16.0.0/12",  # private
        "192.0.0.0/24",  # protocol assignments and anycast gateways, including those that the registry marks as global
        "192.0.2.0/24",  # documentation
        "192.88.99.0/24",  # 6to4 relay anycast
        "192.168.0.0/16",  # private
        "198.18.0.0/15",  # benchmarks
        "198.51.100.0/24",  # documentation
        "203.0.113.0/24",  # documentation
        "224.0.0.0/4",  # multicast
        "240.0.0.0/4",  # reserved, broadcast
    )
]
_GLOBAL_UNICAST = IPv6Network("2000::/3")
"""All address space assigned so far; excludes loopback, link-local, site-local, unique local, multicast and SRv6."""
_SPECIAL_IPV6 = [
    IPv6Network(network)
    for network in (
        "2001::/23",  # protocol assignments: Teredo, benchmarks, ORCHID, anycast services
        "2001:db8::/32",  # documentation
        "3fff::/20",  # documentation
    )
]
_MAPPED, _NAT64 = IPv6Network("::ffff:0:0/96"), IPv6Network("64:ff9b::/96")
_6TO4 = IPv6Network("2002::/16")
_ISATAP, _UNIVERSAL = 0x5EFE, 0x0200_0000
"""Upper half of an ISATAP interface identifier (RFC 5214), and its bit for identifiers that are unique in the world."""


def is_public(address: IPv4Address | IPv6Address) -> bool:
    """Whether the address, and the IPv4 address embedded in it (if any), belong to the public internet.

    A NAT64 gateway with an operator-specific prefix can't be recognised.
    """
    if isinstance(address, IPv4Address):
        return not any(address in network for network in _SPECIAL_IPV4)
    embedded = embedded_ipv4(address)
    if embedded is not None and not is_public(embedded):
        return False
    if address in _MAPPED or address in _NAT64:
        return True
    return address in _GLOBAL_UNICAST and not any(address in network for network in _SPECIAL_IPV6)


def embedded_ipv4(address: IPv6Address) -> IPv4Address | None:
    """The IPv4 destination of packets sent to a mapped, NAT64, 6to4 or ISATAP address, or None for other addresses."""
    number = int(address)
    if address in _6TO4:
        return IPv4Address(number >> 80 & 0xFFFFFFFF)
    if address in _MAPPED or address in _NAT64 or (number >> 32 & 0xFFFFFFFF) & ~_UNIVERSAL == _ISATAP:
        return IPv4Address(number & 0xFFFFFFFF)
    return None
