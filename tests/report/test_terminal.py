"""What a user sees while waiting, on a real terminal and off it."""

import os
import pty
import re
import subprocess
import sys
import termios

import pytest

from exitflow.report.terminal import table_lines


def test_columns_align_text_left_and_figures_right():
    lines = table_lines(["node", "served"], [["a", "10.25"], ["device-0", "3"]])
    assert lines == [
        " node       served",
        " ─────────────────",
        " a           10.25",
        " device-0        3",
    ]


def test_a_table_may_have_no_rows():
    assert table_lines(["node", "served"], []) == [" node   served", " ─────────────"]


def on_terminal(program, *, columns=100, rows=24):
    """What `program`, in Python, writes to a terminal of this size."""
    here, there = pty.openpty()
    termios.tcsetwinsize(there, (rows, columns))
    environment = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "LINES")}
    with subprocess.Popen([sys.executable, "-c", program], stdout=there, stderr=there, env=environment) as process:
        os.close(there)
        written = b""
        while data := read(here):
            written += data
    os.close(here)
    assert process.returncode == 0, written.decode()
    return written.decode()


def read(terminal):
    try:
        return os.read(terminal, 65536)
    except OSError:  # the other end is closed
        return b""


PROGRESS = """
from exitflow.report.terminal import progress_bar
import time
with progress_bar(20) as show:
    show("serving-rate", 10)
    for done in range(11, 20):
        time.sleep(0.11)
        show(f"serving-rate {done}", done)
"""


@pytest.mark.heavy
def test_progress_says_what_is_done_and_how_long_the_rest_takes():
    written = on_terminal(PROGRESS)
    assert "10.0/20 rounds, 00:00 elapsed, ? left: serving-rate\r" in written
    *_, (done, named) = re.findall(r"\| (\d+)\.0/20 rounds, 00:0\d elapsed, 00:0\d left: serving-rate (\d+)\r", written)
    assert 15 <= int(done) == int(named) <= 19


@pytest.mark.heavy
def test_what_was_done_before_does_not_make_the_rest_seem_short():
    """10 of 20 were there at the start; the mean pace is of the others, a second each."""
    program = PROGRESS.replace("time.sleep(0.11)", "clock[0] += 1.0")
    program = "import time\nclock = [time.time()]\ntime.time = lambda: clock[0]\n" + program
    assert "15.0/20 rounds, 00:05 elapsed, 00:05 left: serving-rate 15" in on_terminal(program)


LIVE = """
from exitflow.report.terminal import live_table
with live_table() as show:
    for count in (1, 2):
        show(f"{count} s", ["node", "served"], [["device", str(count)]] * 30)
print("done")
"""


@pytest.mark.heavy
def test_a_live_table_is_drawn_in_its_place_and_is_gone_at_the_end():
    parts = on_terminal(LIVE, columns=10, rows=12).split("\x1b[11F\x1b[J")
    assert len(parts) == 3
    for count, part in enumerate(parts[:2], start=1):
        lines = part.splitlines()
        assert lines[0] == f"{count} s"
        assert len(lines) == 11
        assert max(map(len, lines)) <= 10
    assert parts[2] == "done\r\n"


@pytest.mark.heavy
def test_nothing_is_live_where_nobody_watches():
    program = "from exitflow.report.terminal import live_table\nwith live_table() as show: print(show)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("None\n", "")
