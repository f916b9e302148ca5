"""HOST:PORT, wherever somebody gives it."""

import pytest

from exitflow.addresses import Address, parse_address
from exitflow.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "address", "loopback"),
    [
        ("127.0.0.1:8001", Address("127.0.0.1", 8001), True),
        ("localhost:0", Address("localhost", 0), True),
        ("[::1]:65535", Address("::1", 65535), True),
        ("10.0.0.1:1", Address("10.0.0.1", 1), False),
        ("edge_0.example:80", Address("edge_0.example", 80), False),
    ],
)
def test_an_address_is_read_and_written_again(text, address, loopback):
    assert parse_address(text, "--listen") == address
    assert str(address) == text
    assert address.is_loopback == loopback


@pytest.mark.parametrize(
    "text",
    [
        "",
        ":",
        "host",
        "host:",
        ":80",
        "host:x",
        "host:65536",
        "host:-1",
        "host:٣",
        "::1:80",
        "a b:80",
        "büro:80",
        "h:80\n",
        3,
    ],
)
def test_what_is_no_address_is_one_sentence(text):
    with pytest.raises(ConfigError, match=r"--listen: expected HOST:PORT, such as 127.0.0.1:8001, got"):
        parse_address(text, "--listen")


def test_where_to_connect_has_a_port():
    with pytest.raises(ConfigError, match=r"--address: expected HOST:PORT, such as 10.0.0.1:6379, got 'host:0'"):
        parse_address("host:0", "--address", example="10.0.0.1:6379", may_be_any=False)
