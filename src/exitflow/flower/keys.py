"""The keys of a federation: its authority, the server's certificate, a key pair for every node, a shared secret."""

from __future__ import annotations

import datetime
import secrets
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.types import PublicKeyTypes

from exitflow.certificates import Identity, hosts_of, make_authority, make_identity, read_identity
from exitflow.errors import ConfigError
from exitflow.files import read_file, write_atomically, write_secret

DAYS_VALID = 5 * 365  # of the server's certificate, which can be renewed
AUTHORITY_DAYS_VALID = 25 * 365  # of what signs it, which every node has

CA, CERTIFICATE, KEY = "ca.crt", "server.crt", "server.key"
AUTHORITY_KEY = "ca.key"


def write_authority(folder: Path) -> Identity:
    """A new authority in `ca.crt` and `ca.key`: whoever has its key can pass for the server before every node."""
    authority = make_authority("exitflow federation", days=AUTHORITY_DAYS_VALID)
    _make_private(folder)
    (folder / CA).write_bytes(authority.certificate_pem)
    write_secret(folder / AUTHORITY_KEY, authority.key_pem)
    return authority


def read_authority(folder: Path) -> Identity:
    """The authority that `write_authority` wrote."""
    return read_identity(folder / CA, folder / AUTHORITY_KEY)


def write_server_certificate(folder: Path, authority: Identity, hosts: Sequence[str], *, days: int) -> None:
    """`server.crt` with `server.key`, for the names and addresses `hosts`, and the authority's own `ca.crt`.

    A server that runs takes them up: the key comes first, and does not fit before the certificate is there.
    """
    server = make_identity("exitflow server", authority, hosts, days=days)
    _make_private(folder)
    write_atomically(folder / CA, authority.certificate_pem)
    write_secret(folder / KEY, server.key_pem)
    write_atomically(folder / CERTIFICATE, server.certificate_pem)


def renew_server_certificate(folder: Path, authority: Identity, *, days: int) -> datetime.datetime:
    """A new one for the same names and addresses in the server's folder; returns when it ends."""
    old = _certificate(folder / CERTIFICATE)
    if read_file(folder / CA) != authority.certificate_pem:
        raise ConfigError(f"{CA} is of another authority, which the nodes of this federation trust", source=str(folder))
    write_server_certificate(folder, authority, hosts_of(old), days=days)
    return valid_until(folder)


def valid_until(folder: Path) -> datetime.datetime:
    """When the server's certificate ends."""
    return _certificate(folder / CERTIFICATE).not_valid_after_utc


def _certificate(path: Path) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(read_file(path))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot be read: {error}", source=str(path)) from None


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


def public_key_in(folder: Path) -> str:
    """The public key of the node whose folder that is, which must fit its private key."""
    try:
        key = serialization.load_ssh_private_key(read_file(folder / "node.key"), password=None)
        public = public_key_of(folder / "node.pub")
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"node.key or node.pub cannot be used: {error}", source=str(folder)) from None
    if _shown(key.public_key()) != public:
        raise ConfigError("node.key does not belong to node.pub", source=str(folder))
    return public


def public_key_of(path: Path) -> str:
    """A public key file in the form of `Station.public_key`."""
    return _shown(serialization.load_ssh_public_key(read_file(path)))


def _shown(key: PublicKeyTypes) -> str:
    """In hexadecimal, as Flower shows it."""
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    return key.public_bytes(serialization.Encoding.PEM, form).hex()


def node_keys(folder: Path) -> dict[str, str]:
    """The public key of each node, as the server's folder has it."""
    return {path.stem: public_key_of(path) for path in sorted((folder / "nodes").glob("*.pub"))}


def write_shared_secret(path: Path) -> None:
    """What lets the training, and nobody else, act as the federation's server."""
    write_secret(path, secrets.token_bytes(32))
