"""A private certificate authority, the server's certificate, and a key pair for every node."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from pathlib import Path

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from exitflow.certificates import make_authority, make_identity
from exitflow.files import read_file, write_secret

DAYS_VALID = 5 * 365


def write_authority(folder: Path, hosts: Sequence[str]) -> None:
    """`ca.crt`, and `server.crt` with `server.key` for the names and addresses `hosts`.

    The authority's own key signs this one certificate and is forgotten: there is nothing to steal or to lose.
    """
    authority = make_authority("exitflow federation", days=DAYS_VALID)
    server = make_identity("exitflow server", authority, hosts, days=DAYS_VALID)
    _make_private(folder)
    (folder / "ca.crt").write_bytes(authority.certificate_pem)
    (folder / "server.crt").write_bytes(server.certificate_pem)
    write_secret(folder / "server.key", server.key_pem)


def _make_private(folder: Path) -> None:
    """For its owner alone: besides keys, states and the SuperLink's database with single updates come to lie there."""
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)


def write_node_key(folder: Path) -> str:
    """`node.key` and `node.pub` in OpenSSH's format; returns the public key as Flower shows it."""
    key = ec.generate_private_key(ec.SECP384R1())
    _make_private(folder)
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    )
    write_secret(folder / "node.key", private)
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    (folder / "node.pub").write_bytes(public + b"\n")
    return public_key_of(folder / "node.pub")


def public_key_of(path: Path) -> str:
    """A public key file in the form of `Station.public_key`."""
    key = serialization.load_ssh_public_key(read_file(path))
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    return key.public_bytes(serialization.Encoding.PEM, form).hex()


def write_shared_secret(path: Path) -> None:
    """What lets the training, and nobody else, act as the federation's server."""
    write_secret(path, secrets.token_bytes(32))
