"""X.509 certificates of a private authority, for serving and for federations. Needs cryptography."""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, ExtensionOID, NameOID

from exitflow.errors import ConfigError
from exitflow.files import read_file

MAX_COMMON_NAME = 64  # characters, by the standard
_CLOCKS_BEHIND = datetime.timedelta(days=1)  # those of devices often are, a little


@dataclass(frozen=True)
class Identity:
    """A key and what its owner is called; signed by an authority, or an authority itself."""

    key: ec.EllipticCurvePrivateKey
    certificate: x509.Certificate

    @property
    def certificate_pem(self) -> bytes:
        """The certificate, which everybody may see, in PEM."""
        return self.certificate.public_bytes(serialization.Encoding.PEM)

    @property
    def key_pem(self) -> bytes:
        """The private key, which its owner alone may see, in PEM."""
        form = serialization.PrivateFormat.PKCS8
        return self.key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())


def make_authority(name: str, *, days: int) -> Identity:
    """One that signs others, and itself."""
    key = ec.generate_private_key(ec.SECP256R1())
    builder = _builder(name, key, issuer=_name(name), issuer_key=key, days=days, is_authority=True)
    return Identity(key, builder.sign(key, hashes.SHA256()))


def make_identity(name: str, authority: Identity, hosts: Sequence[str], *, days: int) -> Identity:
    """A server or client that is reached as `hosts`, names or addresses."""
    key = ec.generate_private_key(ec.SECP256R1())
    usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    builder = (
        _builder(name, key, issuer=authority.certificate.subject, issuer_key=authority.key, days=days)
        .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        .add_extension(x509.SubjectAlternativeName(list(map(_general_name, hosts))), critical=False)
    )
    return Identity(key, builder.sign(authority.key, hashes.SHA256()))


def read_identity(certificate: Path, key: Path) -> Identity:
    """What stands in these files, which must belong together."""
    try:
        found = x509.load_pem_x509_certificate(read_file(certificate))
        private = serialization.load_pem_private_key(read_file(key), password=None)
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(
            f"{key.name} and {certificate.name} cannot be used: {error}", source=str(key.parent)
        ) from None
    if not isinstance(private, ec.EllipticCurvePrivateKey) or private.public_key() != found.public_key():
        raise ConfigError(f"{key.name} does not belong to {certificate.name}", source=str(key.parent))
    return Identity(private, found)


def hosts_of(certificate: x509.Certificate) -> list[str]:
    """The names and addresses that a certificate is for."""
    hosts: x509.SubjectAlternativeName
    hosts = certificate.extensions.get_extension_for_oid(ExtensionOID.SUBJECT_ALTERNATIVE_NAME).value  # type: ignore[assignment]
    return [str(host.value) for host in hosts]


def _builder(
    name: str,
    key: ec.EllipticCurvePrivateKey,
    *,
    issuer: x509.Name,
    issuer_key: ec.EllipticCurvePrivateKey,
    days: int,
    is_authority: bool = False,
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    authority_key = x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key())
    return (
        x509.CertificateBuilder()
        .subject_name(_name(name))
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCKS_BEHIND)
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=is_authority, path_length=0 if is_authority else None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(authority_key, critical=False)
        .add_extension(_usage(is_authority=is_authority), critical=True)
    )


def _usage(*, is_authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not is_authority,
        key_cert_sign=is_authority,
        crl_sign=is_authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text[:MAX_COMMON_NAME])])


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
