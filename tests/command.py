"""The command line, called in this process."""

import click
from click.testing import CliRunner

from exitflow.cli.main import main


def call(*args, code=0):
    return call_program(main, *args, code=code)


def call_program(program: click.Command, *args, code=0):
    result = CliRunner().invoke(program, [str(arg) for arg in args])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return result
