"""The files that a node is known by: what `exitflow certs` writes, and `--certs` reads."""

from __future__ import annotations

CA, CERTIFICATE, KEY = "ca.pem", "node.pem", "node-key.pem"
