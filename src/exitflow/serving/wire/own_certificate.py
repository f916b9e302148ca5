"""A node's own certificate while it serves: renewed files are taken up without a stop.

What is connected stays so; whoever connects from then on sees the new certificate.
"""

from __future__ import annotations

import logging
import ssl
from pathlib import Path

import grpc

from exitflow.errors import ConfigError
from exitflow.serving.wire.certificate_files import CA, CERTIFICATE, KEY
from exitflow.serving.wire.security import Security, Shown

log = logging.getLogger("exitflow.serving")


class OwnCertificate:
    """The certificate of one node, read anew when its files change."""

    def __init__(self, security: Security, node: str) -> None:
        self._security, self._node = security, node
        self._tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self.shown, self._files = self._read()

    @property
    def tls(self) -> ssl.SSLContext:
        """For servers of Python; it stays the same, and shows what is newest."""
        return self._tls

    def renewed(self) -> bool:
        """Look at the files again: whether there is something new, which from now on is shown."""
        try:
            if self._security.files() == self._files:
                return False
            self.shown, self._files = self._read()
        except ConfigError as error:  # also while they are written, one after the other
            log.warning("the renewed certificate is not taken: %s", error)
            return False
        log.info("the certificate of node %s is renewed", self._node)
        return True

    def server_credentials(self, *, mutual: bool) -> grpc.ServerCredentials:
        """The credentials of a gRPC port; `mutual`: whoever calls must have a certificate of our CA."""
        given = self._files

        def renew() -> grpc.ServerCertificateConfiguration | None:
            """gRPC asks before every handshake, in a thread of its own."""
            nonlocal given
            if given is self._files:
                return None
            given = self._files
            return self._configuration(mutual=mutual)

        return grpc.dynamic_ssl_server_credentials(self._configuration(mutual=mutual), renew, mutual)

    def _configuration(self, *, mutual: bool) -> grpc.ServerCertificateConfiguration:
        files = self._files
        return grpc.ssl_server_certificate_configuration(
            [(files[KEY], files[CERTIFICATE])], files[CA] if mutual else None
        )

    def _read(self) -> tuple[Shown, dict[str, bytes]]:
        """What the files say, if all of it fits together."""
        files, folder, shown = self._security.files(), self._security.certs, self._security.shown
        if shown.name != self._node:
            problem = f"{folder}: is the certificate of {shown.name!r}, not that of node {self._node!r}"
            raise ConfigError(problem, key="--certs")  # its children would not believe it
        self._tls.load_cert_chain(Path(folder or "") / CERTIFICATE, Path(folder or "") / KEY)
        if self._security.files() != files:
            raise ConfigError(f"{folder}: changed while it was read", key="--certs")
        return shown, files
