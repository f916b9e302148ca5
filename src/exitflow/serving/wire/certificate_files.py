"""The files that a node is known by: what `exitflow certs` writes, and `--certs` reads."""

from __future__ import annotations

import hashlib
import re

CA, CERTIFICATE, KEY = "ca.pem", "node.pem", "node-key.pem"
CLIENT = "client"  # the name of the certificate of whoever runs the tree


def host_of_node(name: str) -> str:
    """The host name that a node's certificate is for, so that its children know it whatever its address is."""
    if re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", name):
        return name
    return f"node-{hashlib.sha256(name.encode()).hexdigest()[:32]}"  # no host can be called as it is
