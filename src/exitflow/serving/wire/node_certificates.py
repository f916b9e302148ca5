"""What `exitflow certs` writes: a private authority for a tree, and a certificate for each of its nodes."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from pathlib import Path

from exitflow.certificates import MAX_COMMON_NAME, Identity, hosts_of, make_authority, make_identity, read_identity
from exitflow.errors import ServingError
from exitflow.files import write_secret
from exitflow.serving.wire.certificate_files import CA, CERTIFICATE, CLIENT, KEY, host_of_node

CA_KEY = "ca-key.pem"
_LOCAL = ("localhost", "127.0.0.1", "::1")


def make_certificates(
    out: Path, nodes: Sequence[str], hosts: Mapping[str, Sequence[str]], *, days: int, authority_days: int = 3650
) -> None:
    """`out` gets the CA, and a directory with CA, certificate and key for every node and for a client.

    `hosts` says under which names and addresses nodes are called, besides localhost.
    """
    if out.exists():
        raise ServingError(f"{out}: is already there; choose another --out, or give --renew to keep its CA")
    _check_names(nodes)
    authority = make_authority("exitflow CA", days=max(days, authority_days))
    out.mkdir(parents=True)
    write_secret(out / CA_KEY, authority.key_pem)
    write_secret(out / CA, authority.certificate_pem)
    for name in (*nodes, CLIENT):
        _write(out, name, authority, hosts.get(name, ()), days=days)


def renew_certificates(out: Path, nodes: Sequence[str], hosts: Mapping[str, Sequence[str]], *, days: int) -> None:
    """New certificates, also for nodes that had none, of the CA that is in `out`.

    A node is called as before, unless `hosts` says otherwise.
    """
    _check_names(nodes)
    authority = read_identity(out / CA, out / CA_KEY)
    left = (authority.certificate.not_valid_after_utc - datetime.datetime.now(datetime.UTC)).days
    if left < days:
        problem = f"its CA ends in {left} days, before certificates of {days} days would: make another with --out"
        raise ServingError(f"{out}: {problem}")
    for name in (*nodes, CLIENT):
        old = out / name / CERTIFICATE
        known = hosts_of(read_identity(old, out / name / KEY).certificate) if old.exists() else []
        _write(out, name, authority, hosts.get(name) or known, days=days)


def _check_names(nodes: Sequence[str]) -> None:
    for name in nodes:
        if name == CLIENT or len(name) > MAX_COMMON_NAME:
            rule = f"has at most {MAX_COMMON_NAME} characters and is not {CLIENT!r}, the name of the clients' own"
            raise ServingError(f"node {name!r}: the name in a certificate {rule}")


def _write(out: Path, name: str, authority: Identity, hosts: Sequence[str], *, days: int) -> None:
    """A node that runs takes them up: the key comes first, and does not fit before the certificate is there."""
    called = dict.fromkeys((*_LOCAL, host_of_node(name), *hosts))
    identity = make_identity(name, authority, list(called), days=days)
    folder = out / name
    folder.mkdir(exist_ok=True)
    write_secret(folder / CA, authority.certificate_pem)
    write_secret(folder / KEY, identity.key_pem)
    write_secret(folder / CERTIFICATE, identity.certificate_pem)
