"""The `exitflow` command. Thin: it reads options, calls the package, and prints."""

from __future__ import annotations

import errno
import importlib
import re
import signal
import threading
from typing import Any

import click

from exitflow import __version__
from exitflow.errors import ExitflowError, MissingExtraError

COMMANDS = {  # name -> the module of exitflow.cli, which is loaded when it is needed
    "plan": "systems",
    "explain": "systems",
    "train": "training",
    "evaluate": "training",
    "compare": "training",
    "reproduce": "reproduce",
    "report": "report",
    "federation": "federation",
    "export": "serving",
    "up": "serving",
    "serve": "serving",
    "load": "serving",
    "observe": "serving",
    "reload": "serving",
    "certs": "serving",
}
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
RESUMED_BY = {  # command -> what goes on where it was
    "train": "train --resume",
    "compare": "compare",
    "reproduce": "reproduce",
}


class _Terminated(KeyboardInterrupt):
    """SIGTERM, as service managers and batch systems send it."""


class _Group(click.Group):
    """Loads a command when it is called, and prints the errors of exitflow as one sentence, without a traceback."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"exitflow.cli.{COMMANDS[cmd_name]}")
        command: click.Command = getattr(module, cmd_name)
        return command

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except ExitflowError as error:
            problem, exit_code = str(error), error.exit_code
        except KeyboardInterrupt as error:
            goes_on = RESUMED_BY.get(str(ctx.invoked_subcommand), "")
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
        click.echo(f"exitflow: {problem}", err=True)
        return ctx.exit(exit_code)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="exitflow")
@click.pass_context
def main(ctx: click.Context) -> None:
    """Train one early-exit network across devices, edge servers and cloud for the traffic each will serve.

    SYSTEM is a TOML file, or a preset such as paper-7:80-15-5.

    \b
    Example:
      exitflow plan paper-7:80-15-5
      exitflow train paper-7:80-15-5 --out runs/first
      exitflow evaluate runs/first
    """
    if ctx.invoked_subcommand in RESUMED_BY and threading.current_thread() is threading.main_thread():
        before = signal.signal(signal.SIGTERM, _terminate)
        ctx.call_on_close(lambda: signal.signal(signal.SIGTERM, before))


def _terminate(*_: Any) -> None:
    raise _Terminated
