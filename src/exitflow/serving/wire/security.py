"""Who may listen where, and who may ask: TLS, certificates of nodes, a token of clients."""

from __future__ import annotations

import contextlib
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exitflow.addresses import Address
from exitflow.errors import ConfigError
from exitflow.files import read_file
from exitflow.serving.wire.certificate_files import CA, CERTIFICATE, KEY

if TYPE_CHECKING:
    import grpc


@dataclass(frozen=True)
class Shown:
    """What others see of our certificate."""

    name: str
    expires: float  # seconds since 1970
    authority_expires: float

    @property
    def ends(self) -> float:
        """When nobody believes it any more."""
        return min(self.expires, self.authority_expires)


def _handshake(client: ssl.SSLContext, server: ssl.SSLContext) -> Any:
    """The server's certificate as the client sees it."""
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        client.wrap_bio(to_client, to_server),
        server.wrap_bio(to_server, to_client, server_side=True),
    ]
    for _ in range(4):  # a message of each, and a reserve
        for end in ends:
            with contextlib.suppress(ssl.SSLWantReadError):
                end.do_handshake()
    return ends[0].getpeercert()


@dataclass(frozen=True)
class Security:
    """What protects one node. `certs` is a directory of `exitflow certs`, with the CA and the node's certificate."""

    certs: str | None = None
    token: str | None = None
    insecure: bool = False
    open: bool = False  # whether clients need no token

    def __post_init__(self) -> None:
        """A token must fit into a header."""
        token = self.token
        if token is not None and not (token and token.isascii() and token.isprintable() and token == token.strip()):
            raise ConfigError("must be printable ASCII, not empty, with no blanks at its ends", key="--token")
        if self.certs:
            self.shown  # noqa: B018 - which checks it

    @property
    def mutual(self) -> bool:
        """Whether nodes show each other certificates."""
        return self.certs is not None

    def check_may_listen(self, where: Address, key: str, *, certified: bool) -> None:
        """Beyond this machine only with TLS, and to those who show a certificate or a token, or knowingly without."""
        host, local = where.host, where.is_loopback
        if not local and not self.certs and not self.insecure:
            raise ConfigError(
                f"{host} can be reached from other machines: give --certs DIR (make one with: exitflow certs), "
                "or --insecure to do without",
                key=key,
            )
        if not local and self.certs and not certified and not self.token and not self.open:
            raise ConfigError(
                f"whoever reaches {host} could ask this node: give --token TOKEN, or --open to let everybody", key=key
            )

    def channel_credentials(self) -> grpc.ChannelCredentials | None:
        """The credentials to call a node with."""
        if not self.certs:
            return None
        import grpc

        files = self.files()
        return grpc.ssl_channel_credentials(files[CA], files[KEY], files[CERTIFICATE])

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What every call to a node carries: the token, where there is one."""
        return (("authorization", f"Bearer {self.token}"),) if self.token else ()

    def files(self) -> dict[str, bytes]:
        """What is in the directory, by name."""
        return {name: self._read(name) for name in (CA, CERTIFICATE, KEY)}

    @property
    def shown(self) -> Shown:
        """Our certificate as others see it who trust our CA, and that they do, by a handshake with ourselves.

        This is done here and not left to gRPC, which says only that it cannot listen.
        """
        folder = Path(self.certs or "")
        self.files()
        theirs = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        theirs.check_hostname = False  # hosts differ from client to client; the name of the node is in the subject
        ours = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        what = CA
        try:
            theirs.load_verify_locations(folder / CA)
            what = f"{CERTIFICATE} with {KEY}"
            ours.load_cert_chain(folder / CERTIFICATE, folder / KEY, password="")
            what = f"{CERTIFICATE} under {CA}"
            certificate = _handshake(theirs, ours)
        except ssl.SSLCertVerificationError as error:
            raise self._unusable(what, error.verify_message) from None
        except (ssl.SSLError, ValueError) as error:
            raise self._unusable(what, error) from None
        names = [value for ((key, value),) in certificate["subject"] if key == "commonName"]
        authorities = [ssl.cert_time_to_seconds(each["notAfter"]) for each in theirs.get_ca_certs()]  # type: ignore[arg-type]
        return Shown(names[0] if names else "", ssl.cert_time_to_seconds(certificate["notAfter"]), min(authorities))

    def _unusable(self, what: str, why: object) -> ConfigError:
        return ConfigError(f"{self.certs}: {what} cannot be used: {why}", key="--certs")

    def _read(self, name: str) -> bytes:
        path = Path(self.certs or "") / name
        try:
            return read_file(path)
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read: {error.strerror}", key="--certs") from None
