"""`python -m exitflow`."""

from exitflow.cli import main

main(prog_name="exitflow")
