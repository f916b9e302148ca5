"""Where a node may listen, by any name of the place."""

import socket

import pytest

from exitflow.errors import ServingError
from exitflow.serving.wire.addresses import bound_socket


def has_ipv6():
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.heavy
@pytest.mark.parametrize("address", ["127.0.0.1:0", "localhost:0", "[::1]:0"])
def test_every_way_to_name_this_machine_will_do(address):
    if "::1" in address and not has_ipv6():
        pytest.skip("no IPv6 here")
    with bound_socket(address, "--listen") as found:
        assert found.getsockname()[1] > 0


@pytest.mark.heavy
def test_a_place_that_cannot_be_had_is_one_sentence():
    with bound_socket("127.0.0.1:0", "--listen") as taken:
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ServingError, match=f"--http: cannot listen on {address}: Address already in use"):
            bound_socket(address, "--http")
    with pytest.raises(ServingError, match=r"--listen: cannot listen on no-such-host.invalid:1: "):
        bound_socket("no-such-host.invalid:1", "--listen")
