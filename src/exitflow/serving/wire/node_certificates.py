"""What `exitflow certs` writes: a private authority for a tree, and a certificate for each of its nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from exitflow.certificates import MAX_COMMON_NAME, make_authority, make_identity
from exitflow.errors import ServingError
from exitflow.files import write_secret
from exitflow.serving.wire.certificate_files import CA, CERTIFICATE, CLIENT, KEY, host_of_node

CA_KEY = "ca-key.pem"
_LOCAL = ("localhost", "127.0.0.1", "::1")


def make_certificates(out: Path, nodes: Sequence[str], hosts: Mapping[str, Sequence[str]], *, days: int) -> None:
    """`out` gets the CA, and a directory with CA, certificate and key for every node and for a client.

    `hosts` says under which names and addresses nodes are called, besides localhost.
    """
    if out.exists():
        raise ServingError(f"{out}: is already there; certificates are never overwritten, choose another --out")
    for name in nodes:
        if name == CLIENT or len(name) > MAX_COMMON_NAME:
            rule = f"has at most {MAX_COMMON_NAME} characters and is not {CLIENT!r}, the name of the clients' own"
            raise ServingError(f"node {name!r}: the name in a certificate {rule}")
    authority = make_authority("exitflow CA", days=days)
    identities = {}
    for name in (*nodes, CLIENT):
        identities[name] = make_identity(
            name, authority, (*_LOCAL, host_of_node(name), *hosts.get(name, ())), days=days
        )
    out.mkdir(parents=True)
    write_secret(out / CA_KEY, authority.key_pem)
    write_secret(out / CA, authority.certificate_pem)
    for name, identity in identities.items():
        folder = out / name
        folder.mkdir()
        write_secret(folder / CA, authority.certificate_pem)
        write_secret(folder / CERTIFICATE, identity.certificate_pem)
        write_secret(folder / KEY, identity.key_pem)
