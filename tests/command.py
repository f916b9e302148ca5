"""The command line, called in this process."""

from click.testing import CliRunner

from exitflow.cli.main import main


def call(*args, code=0):
    result = CliRunner().invoke(main, [str(arg) for arg in args])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return result
