"""Lets `python -m exitflow` be the command `exitflow`."""

from exitflow.cli.main import main

main(prog_name="exitflow")
