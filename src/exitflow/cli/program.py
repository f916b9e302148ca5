"""What a program of commands on exitflow shares: commands load when called, and errors are one sentence.

@click.group(cls=Program, modules={"train": "my_program.training"}, resumed_by={"train": "train --resume"})
"""

from __future__ import annotations

import errno
import importlib
import re
import signal
import threading
from collections.abc import Mapping
from typing import Any

import click

from exitflow.errors import ExitflowError, MissingExtraError

EXTRAS = {  # package -> the extra that installs it
    "torch": "train",
    "safetensors": "train",
    "tqdm": "train",
    "flwr": "flower",
    "cryptography": "flower",
    "dp_accounting": "flower",
    "ray": "ray",
    "onnx": "export",
    "onnxscript": "export",
    "onnxruntime": "serve",
    "grpc": "serve",
    "google": "serve",
    "uvicorn": "serve",
    "prometheus_client": "serve",
    "jinja2": "report",
    "matplotlib": "report",
}


class _Terminated(KeyboardInterrupt):
    """SIGTERM, as service managers and batch systems send it."""


class Program(click.Group):
    """Loads a command when it is called, and prints the errors of exitflow as one sentence, without a traceback."""

    def __init__(self, *args: Any, modules: Mapping[str, str], resumed_by: Mapping[str, str], **options: Any) -> None:
        super().__init__(*args, **options)
        self.modules = modules  # command -> the module that has it
        self.resumed_by = resumed_by  # command -> what goes on where it was, after SIGINT and SIGTERM

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(self.modules)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.modules:
            return None
        module = importlib.import_module(self.modules[cmd_name])
        command: click.Command = getattr(module, cmd_name)
        return command

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        if name in self.resumed_by:
            _end_on_sigterm(ctx)
        return name, command, rest

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except ExitflowError as error:
            problem, exit_code = str(error), error.exit_code
        except KeyboardInterrupt as error:
            goes_on = self.resumed_by.get(str(ctx.invoked_subcommand), "")
            problem = f"interrupted{goes_on and f'; `{goes_on}` goes on where it was'}"
            exit_code = 128 + (signal.SIGTERM if isinstance(error, _Terminated) else signal.SIGINT)
        except OSError as error:
            if error.errno == errno.EPIPE:  # a reader such as `head` has seen enough
                raise
            problem, exit_code = f"{error.filename or 'cannot go on'}: {error.strerror or error}", 1
        except (MemoryError, RuntimeError) as error:
            if not isinstance(error, MemoryError) and not re.search("can't allocate memory|out of memory", str(error)):
                raise
            problem, exit_code = "not enough memory: choose a smaller model, batch or number of workers", 1
        except ModuleNotFoundError as error:
            extra = EXTRAS.get((error.name or "").partition(".")[0])
            if extra is None:
                raise
            problem, exit_code = str(MissingExtraError(str(error.name), extra)), 2
        click.echo(f"{self.name}: {problem}", err=True)
        return ctx.exit(exit_code)


def _end_on_sigterm(ctx: click.Context) -> None:
    """Until the command ends, SIGTERM is an interrupt."""
    if threading.current_thread() is threading.main_thread():
        before = signal.signal(signal.SIGTERM, _terminate)
        ctx.call_on_close(lambda: signal.signal(signal.SIGTERM, before))


def _terminate(*_: Any) -> None:
    raise _Terminated
