"""What a program of commands on exitflow shares: commands load when called, and errors are one sentence.

@click.group(cls=Program, modules={"train": "my_program.training"}, resumed_by={"train": "train --resume"})
"""

from __future__ import annotations

import errno
import importlib
import re
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import click

from exitflow import logs
from exitflow.errors import ConfigError, ExitflowError, MissingExtraError, one_line, os_problem, suggestion

EXTRAS = {  # package -> the extra that installs it
    "torch": "train",
    "safetensors": "train",
    "flwr": "flower",
    "httpx": "flower",
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


ASKED_WRONGLY = {  # what the machine refuses, and a user mends by naming another file
    *(errno.EACCES, errno.EEXIST, errno.EFBIG, errno.EINVAL, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG),
    *(errno.ENOENT, errno.ENOTDIR, errno.ENOTEMPTY, errno.EPERM, errno.EROFS),
}
TOO_LITTLE_MEMORY = (
    "not enough memory: it takes less with a smaller system, model, training.batch_size or data set, or fewer --workers"
)


class _Terminated(KeyboardInterrupt):
    """SIGTERM, as service managers and batch systems send it."""


class Command(click.Command):
    """Refuses values that are empty: an empty variable of a shell asks for nothing that anybody means."""

    def invoke(self, ctx: click.Context) -> Any:
        for parameter in self.params:
            value = ctx.params.get(str(parameter.name))
            if value == "" or (isinstance(value, tuple) and "" in value):
                raise ConfigError("must not be empty", key=_name_of(parameter, ctx))
        return super().invoke(ctx)


class Group(click.Group):
    """Knows the nearest command when it does not know the one that was asked for."""

    command_class = Command

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        names = self.list_commands(ctx)
        if not args[0].startswith("-") and args[0] not in names and not ctx.resilient_parsing:
            raise ConfigError(f"there is no command {args[0]!r}{suggestion(args[0], names)}")
        return super().resolve_command(ctx, args)


class Program(Group):
    """Loads a command when it is called, and prints the errors of exitflow as one sentence, without a traceback."""

    def __init__(self, *args: Any, modules: Mapping[str, str], resumed_by: Mapping[str, str], **options: Any) -> None:
        super().__init__(*args, **options)
        self.modules = modules  # command -> the module that has it
        self.resumed_by = resumed_by  # command -> what goes on where it was, after SIGINT and SIGTERM

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.modules)  # in the order in which they are used

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

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        logs.set_up_sentences(str(self.name))
        with self._one_sentence(ctx):
            return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        with self._one_sentence(ctx):
            return super().invoke(ctx)

    @contextmanager
    def _one_sentence(self, ctx: click.Context) -> Iterator[None]:
        """Ends the program with a sentence on stderr where what is in here cannot go on."""
        try:
            yield
            return
        except (click.exceptions.NoArgsIsHelpError, BrokenPipeError):  # a reader such as `head` has seen enough
            raise
        except ExitflowError as error:
            problem, exit_code = str(error), error.exit_code
        except click.UsageError as error:
            problem, exit_code = _usage_problem(error), 2
        except KeyboardInterrupt as error:
            goes_on = self.resumed_by.get(str(ctx.invoked_subcommand), "")
            problem = f"interrupted{goes_on and f'; `{goes_on}` goes on where it was'}"
            exit_code = 128 + (signal.SIGTERM if isinstance(error, _Terminated) else signal.SIGINT)
        except OSError as error:
            problem, exit_code = os_problem(error), 2 if error.errno in ASKED_WRONGLY else 1
        except (MemoryError, RuntimeError) as error:
            if not isinstance(error, MemoryError) and not re.search("can't allocate memory|out of memory", str(error)):
                raise
            problem, exit_code = TOO_LITTLE_MEMORY, 1
        except ModuleNotFoundError as error:
            extra = EXTRAS.get((error.name or "").partition(".")[0])
            if extra is None:
                raise
            problem, exit_code = str(MissingExtraError(str(error.name), extra)), 2
        click.echo(f"{self.name}: {one_line(problem)}", err=True)
        ctx.exit(exit_code)


def _usage_problem(error: click.UsageError) -> str:
    """What click says, as exitflow says it."""
    advice = f"; see {error.ctx.command_path} --help" if error.ctx else ""
    if isinstance(error, click.NoSuchOption) and error.ctx:
        options = [name for each in error.ctx.command.params for name in each.opts if name.startswith("--")]
        return f"there is no option {error.option_name!r}{suggestion(error.option_name, options)}"
    if isinstance(error, click.BadParameter) and error.param:
        problem = "is missing" if isinstance(error, click.MissingParameter) else error.message.rstrip(".")
        return f"{_name_of(error.param, error.ctx)}: {problem}{advice}"
    message = error.format_message()
    return f"{message[:1].lower()}{message[1:].rstrip('.')}{advice}"


def _name_of(parameter: click.Parameter, ctx: click.Context | None) -> str:
    """What a parameter is called on the command line: `--seeds`, or RUN."""
    if isinstance(parameter, click.Option):
        return max(parameter.opts, key=len)
    return parameter.make_metavar(ctx or click.get_current_context())


def _end_on_sigterm(ctx: click.Context) -> None:
    """Until the command ends, SIGTERM is an interrupt."""
    if threading.current_thread() is threading.main_thread():
        before = signal.signal(signal.SIGTERM, _terminate)
        ctx.call_on_close(lambda: signal.signal(signal.SIGTERM, before))


def _terminate(*_: Any) -> None:
    raise _Terminated
