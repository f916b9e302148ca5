"""Keys of a federation, and certificates that are renewed while a server runs."""

import ssl
from types import SimpleNamespace

import pytest

pytest.importorskip("flwr")

import contextlib

from exitflow.errors import ConfigError
from exitflow.flower.commands import renewable
from exitflow.flower.federation_status import days_until
from exitflow.flower.keys import (
    CA,
    CERTIFICATE,
    KEY,
    node_keys,
    public_key_in,
    read_authority,
    renew_server_certificate,
    valid_until,
    write_authority,
    write_node_key,
    write_server_certificate,
)


@pytest.fixture
def federation(tmp_path):
    """(authority's folder, server's folder)."""
    authority = write_authority(tmp_path / "authority")
    write_server_certificate(tmp_path / "server", authority, ["10.0.0.1", "localhost"], days=100)
    return tmp_path / "authority", tmp_path / "server"


def shown(context, authority, host):
    """The certificate that a new connection gets, in memory."""
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.load_verify_locations(authority / CA)
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = client.wrap_bio(down, up, server_hostname=host), context.wrap_bio(up, down, server_side=True)
    for _ in range(4):
        for end in ends:
            with contextlib.suppress(ssl.SSLWantReadError):
                end.do_handshake()
    return ends[0].getpeercert()["serialNumber"]


@pytest.mark.parametrize("host", ["10.0.0.1", "localhost"])  # for an address no name is sent
def test_new_connections_get_the_certificate_that_is_there(federation, host):
    authority, server = federation

    def make():
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(server / CERTIFICATE, server / KEY)
        return context

    context = renewable(SimpleNamespace(ssl_certfile=server / CERTIFICATE, ssl_keyfile=server / KEY), make)
    first = shown(context, authority, host)
    assert shown(context, authority, host) == first
    until = renew_server_certificate(server, read_authority(authority), days=50)
    second = shown(context, authority, host)
    assert second != first
    assert until == valid_until(server)
    assert 49 < days_until(until) <= 50
    (server / KEY).write_bytes(b"half a key")  # the other half has not been copied yet
    assert shown(context, authority, host) == second
    renew_server_certificate(server, read_authority(authority), days=50)
    assert shown(context, authority, host) not in (first, second)


def test_only_the_authority_that_the_nodes_trust_renews(federation, tmp_path):
    _, server = federation
    before = (server / CERTIFICATE).read_bytes()
    with pytest.raises(ConfigError, match=r"ca.crt is of another authority, which the nodes of this federation trust"):
        renew_server_certificate(server, write_authority(tmp_path / "other"), days=50)
    with pytest.raises(ConfigError, match=r"ca.key and ca.crt cannot be used"):
        read_authority(server)
    (server / "ca.key").write_bytes((tmp_path / "other" / "ca.key").read_bytes())
    with pytest.raises(ConfigError, match=r"ca.key does not belong to ca.crt"):
        read_authority(server)
    assert (server / CERTIFICATE).read_bytes() == before


def test_a_nodes_keys_belong_together(tmp_path):
    key = write_node_key(tmp_path / "device-0")
    assert public_key_in(tmp_path / "device-0") == key
    write_node_key(tmp_path / "other")
    (tmp_path / "device-0" / "node.pub").write_bytes((tmp_path / "other" / "node.pub").read_bytes())
    with pytest.raises(ConfigError, match=r"node.key does not belong to node.pub"):
        public_key_in(tmp_path / "device-0")
    (tmp_path / "device-0" / "node.key").write_text("no key")
    with pytest.raises(ConfigError, match=r"device-0: node.key or node.pub cannot be used"):
        public_key_in(tmp_path / "device-0")


def test_the_server_knows_its_nodes_by_their_keys(tmp_path):
    key = write_node_key(tmp_path / "written")
    (tmp_path / "server" / "nodes").mkdir(parents=True)
    (tmp_path / "server" / "nodes" / "device-0.pub").write_bytes((tmp_path / "written" / "node.pub").read_bytes())
    assert node_keys(tmp_path / "server") == {"device-0": key}
