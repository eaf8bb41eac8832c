"""Addresses as a person writes them."""

import pytest

from hurray_rdma.control.address import Address, parse_address
from hurray_rdma.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("decode-3", "decode-3", 7400),
        ("decode-3:7401", "decode-3", 7401),
        ("10.0.0.1:0", "10.0.0.1", 0),
        ("127.0.0.1:65535", "127.0.0.1", 65535),
        ("::1", "::1", 7400),
        ("[::1]", "::1", 7400),
        ("[::1]:7401", "::1", 7401),
        ("fe80::1%eth0", "fe80::1%eth0", 7400),
        ("[fe80::1%eth0]:7401", "fe80::1%eth0", 7401),
        ("::", "::", 7400),
    ],
)
def test_forms(text: str, host: str, port: int) -> None:
    assert parse_address(text) == (host, port)


@pytest.mark.parametrize(
    "text",
    [
        "",
        ":7400",
        "host:",
        "host:-1",
        "host:65536",
        "host:7400x",
        "host:٣",
        "host:000000001",
        "[::1",
        "[::1]7400",
        "[::1]:",
        "[host]:1",
        "::1:zz",
        "a:b:c",
        "http://host:1",
        "ho st:1",
        "[]:1",
    ],
)
def test_what_is_none_of_them_is_refused_with_the_forms(text: str) -> None:
    with pytest.raises(ConfigError, match=r"\[IPv6\]:port"):
        parse_address(text)


@pytest.mark.parametrize("address", [Address("::1", 7400), Address("host", 1), Address("10.1.2.3", 65535)])
def test_str_parses_back(address: Address) -> None:
    assert parse_address(str(address)) == address
