"""`python -m paper`, called in this process."""

from functools import partial

from paper.__main__ import main
from tests.command import call_program

call = partial(call_program, main)
