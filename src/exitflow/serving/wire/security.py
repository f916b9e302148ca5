"""Who may listen where, and who may ask: TLS, certificates of nodes, a token of clients."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

import grpc

from exitflow.errors import ConfigError
from exitflow.files import read_file
from exitflow.serving.wire.certificate_files import CA, CERTIFICATE, KEY


@dataclass(frozen=True)
class Security:
    """Of one node. `certs` is a directory of `exitflow certs`, with the CA and this node's own certificate."""

    certs: str | None = None
    token: str | None = None
    insecure: bool = False

    def __post_init__(self) -> None:
        """A token must fit into a header."""
        token = self.token
        if token is not None and not (token and token.isascii() and token.isprintable() and token == token.strip()):
            raise ConfigError("must be printable ASCII, not empty, with no blanks at its ends", key="--token")
        if self.certs:
            self._check_certificates()

    @property
    def mutual(self) -> bool:
        """Whether nodes show each other certificates."""
        return self.certs is not None

    def check_may_listen(self, host: str, key: str, *, local: bool) -> None:
        """Beyond this machine only with TLS, or knowingly without."""
        if not local and not self.certs and not self.insecure:
            raise ConfigError(
                f"{host} can be reached from other machines: give --certs DIR (make one with: exitflow certs), "
                "or --insecure to do without",
                key=key,
            )

    def node_credentials(self) -> grpc.ServerCredentials | None:
        """Of the port that nodes use: whoever calls must have a certificate of our CA."""
        if not self.certs:
            return None
        pair = [(self._read(KEY), self._read(CERTIFICATE))]
        return grpc.ssl_server_credentials(pair, root_certificates=self._read(CA), require_client_auth=True)

    def client_credentials(self) -> grpc.ServerCredentials | None:
        """Of the port for clients without a certificate."""
        return grpc.ssl_server_credentials([(self._read(KEY), self._read(CERTIFICATE))]) if self.certs else None

    def channel_credentials(self) -> grpc.ChannelCredentials | None:
        """To call a node."""
        if not self.certs:
            return None
        return grpc.ssl_channel_credentials(self._read(CA), self._read(KEY), self._read(CERTIFICATE))

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Of every call to a node: the token, where there is one."""
        return (("authorization", f"Bearer {self.token}"),) if self.token else ()

    def path(self, name: str) -> str | None:
        """Of a file in `certs`, checked to be there."""
        if not self.certs:
            return None
        self._read(name)
        return str(Path(self.certs) / name)

    def _check_certificates(self) -> None:
        """Here and not in gRPC, which says only that it cannot listen."""
        for name in (CA, CERTIFICATE, KEY):
            self._read(name)
        folder = Path(self.certs or "")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        what = CA
        try:
            context.load_verify_locations(folder / CA)
            what = f"{CERTIFICATE} with {KEY}"
            context.load_cert_chain(folder / CERTIFICATE, folder / KEY, password="")
        except (ssl.SSLError, ValueError) as error:
            raise ConfigError(f"{self.certs}: {what} cannot be used: {error}", key="--certs") from None

    def _read(self, name: str) -> bytes:
        path = Path(self.certs or "") / name
        try:
            return read_file(path)
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read: {error.strerror}", key="--certs") from None
