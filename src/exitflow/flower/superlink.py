"""Flower's SuperLink as a federation runs it: a renewed certificate is taken up while it runs."""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from uvicorn import Config


def main() -> None:
    """Flower's own program, with two settings of the web server below it, which it has no options for."""
    import uvicorn
    from flwr.superlink.cli import flower_superlink

    run = uvicorn.run

    def run_renewable(*args: Any, **options: Any) -> None:
        # no line for every request either: nodes ask every few seconds, and the log would grow for ever
        run(*args, **{**options, "ssl_context_factory": renewable, "access_log": False})

    uvicorn.run = run_renewable
    flower_superlink()


def renewable(config: Config, make: Callable[[], ssl.SSLContext]) -> ssl.SSLContext:
    """A context that shows every new connection the certificate that is in the files at that time.

    What cannot be used is passed over: key and certificate may be replaced one after the other.
    """
    files = [Path(str(name)) for name in (config.ssl_certfile, config.ssl_keyfile)]
    seen, current = _stamps(files), make()

    def renew(connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        nonlocal seen, current
        if (stamps := _stamps(files)) != seen:
            seen = stamps
            with contextlib.suppress(OSError, ValueError):
                current = make()
        connection.context = current

    first = current
    first.sni_callback = renew  # called for every connection, also for those that name no host
    return first


def _stamps(files: list[Path]) -> list[tuple[int, int] | None]:
    """What changes when one of the files is replaced."""
    return [(found.st_mtime_ns, found.st_ino) if path.exists() and (found := path.stat()) else None for path in files]
