"""Addresses as a person writes them: ``host``, ``host:port``, ``[::1]:7400``, ``::1``.

This module knows their grammar. It resolves nothing and opens nothing.
"""

from __future__ import annotations

from ipaddress import IPv6Address
from typing import NamedTuple

from hurray_rdma.errors import ConfigError

__all__ = ["DEFAULT_PORT", "Address", "parse_address"]

DEFAULT_PORT = 7400


class Address(NamedTuple):
    """Host (a name, or an IPv4 or IPv6 literal without brackets) and TCP port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(text: str, *, default_port: int = DEFAULT_PORT) -> Address:
    """Parse an address; IPv6 literals with a port need brackets.

    Examples:
        >>> parse_address("decode-3:7401")
        Address(host='decode-3', port=7401)
        >>> parse_address("[::1]:7401")
        Address(host='::1', port=7401)
        >>> parse_address("::1")
        Address(host='::1', port=7400)

    Raises:
        ConfigError: it is none of the forms above, or the port is not 0 to 65535.
    """
    literal = text.startswith("[")
    if literal:
        host, bracket, rest = text[1:].partition("]")
        if not bracket or (rest and not rest.startswith(":")):
            raise _bad(text, "an opening bracket needs a closing one, then nothing or :port")
        port = rest[1:] if rest else None
    elif text.count(":") > 1:
        literal, host, port = True, text, None
    else:
        host, colon, rest = text.partition(":")
        port = rest if colon else None
    if literal:
        try:
            IPv6Address(host)
        except ValueError as error:
            raise _bad(text, f"{host!r} is not an IPv6 address") from error
    if not host or any(c.isspace() or c in "[]/" for c in host):
        raise _bad(text, "the host must be a name or an IP address")
    if port is None:
        return Address(host, default_port)
    if not (port.isascii() and port.isdigit() and len(port) <= 5 and int(port) <= 65535):
        raise _bad(text, f"the port must be 0 to 65535, not {port!r}")
    return Address(host, int(port))


def _bad(text: str, rule: str) -> ConfigError:
    fix = "Write host, host:port, [IPv6]:port or an IPv6 address"
    return ConfigError(rule, field="address", value=text, fix=fix)
