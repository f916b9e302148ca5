"""`python -m exitflow`."""

from exitflow.cli.main import main

main(prog_name="exitflow")
