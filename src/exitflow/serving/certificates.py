"""A private certificate authority for a tree of nodes. Needs cryptography: the extra [certs]."""

from __future__ import annotations

import datetime
import ipaddress
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from exitflow.errors import ServingError
from exitflow.serving.security import CA, CERTIFICATE, KEY

CA_KEY = "ca-key.pem"
CLIENT = "client"
_LOCAL = ("localhost", "127.0.0.1", "::1")


def make_certificates(out: Path, nodes: Sequence[str], hosts: Mapping[str, Sequence[str]], *, days: int) -> None:
    """`out` gets the CA, and a directory with CA, certificate and key for every node and for a client.

    `hosts` says under which names and addresses nodes are called, besides localhost.
    """
    if out.exists():
        raise ServingError(f"{out}: is already there; certificates are never overwritten, choose another --out")
    ca_key = ec.generate_private_key(ec.SECP256R1())
    ca = _certificate("exitflow CA", ca_key, ("exitflow CA", ca_key), (), days)
    out.mkdir(parents=True)
    _write(out / CA_KEY, _key_bytes(ca_key))
    _write(out / CA, ca.public_bytes(serialization.Encoding.PEM))
    for name in (*nodes, CLIENT):
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = _certificate(name, key, ("exitflow CA", ca_key), (*_LOCAL, name, *hosts.get(name, ())), days)
        folder = out / name
        folder.mkdir()
        _write(folder / CA, ca.public_bytes(serialization.Encoding.PEM))
        _write(folder / CERTIFICATE, certificate.public_bytes(serialization.Encoding.PEM))
        _write(folder / KEY, _key_bytes(key))


def _certificate(
    name: str,
    key: ec.EllipticCurvePrivateKey,
    issuer: tuple[str, ec.EllipticCurvePrivateKey],
    hosts: Sequence[str],
    days: int,
) -> x509.Certificate:
    is_ca = not hosts
    now = datetime.datetime.now(datetime.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(_name(name))
        .issuer_name(_name(issuer[0]))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=is_ca, path_length=0 if is_ca else None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer[1].public_key()), critical=False)
        .add_extension(_usage(is_ca=is_ca), critical=True)
    )
    if not is_ca:
        usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        builder = builder.add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        builder = builder.add_extension(x509.SubjectAlternativeName(list(map(_host, hosts))), critical=False)
    return builder.sign(issuer[1], hashes.SHA256())


def _usage(*, is_ca: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not is_ca,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=is_ca,
        crl_sign=is_ca,
        encipher_only=False,
        decipher_only=False,
    )


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text[:64])])


def _host(text: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        return x509.DNSName(text.replace("_", "-"))


def _key_bytes(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _write(path: Path, data: bytes) -> None:
    """Readable by its owner only."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(data)
