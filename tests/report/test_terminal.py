"""What a user sees while waiting, on a real terminal and off it."""

import os
import pty
import re
import subprocess
import sys
import termios

import pytest

from exitflow.report.terminal import print_table


def printed(capsys, columns, rows):
    print_table("a title", columns, rows)
    return [line.rstrip() for line in capsys.readouterr().out.splitlines()]


def test_columns_align_text_left_and_figures_right(capsys):
    assert printed(capsys, ["node", "served"], [["a", "10.25"], ["device-0", "3"]]) == [
        "a title",
        "node      served",
        "────────────────",
        "a          10.25",
        "device-0       3",
        "",
    ]


def test_a_table_may_have_no_rows(capsys):
    assert printed(capsys, ["node", "served"], []) == ["a title", "node  served", "────────────", ""]


def test_cells_are_printed_as_they_stand(capsys):
    assert "[/red] :smile:" in printed(capsys, ["node"], [["[/red] :smile:"]])


def test_where_there_is_no_terminal_a_table_fits_80_columns_and_loses_nothing(capsys, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    lines = printed(capsys, ["node", *(f"column {index}" for index in range(12))], [["x" * 100, *["123.45"] * 12]])
    assert max(map(len, lines)) <= 80
    assert "".join(lines).count("x") == 100


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


def shown(written):
    """Without what colours it and moves the cursor."""
    return re.sub(r"\x1b\[[?\d;]*[A-Za-z]", "", written)


@pytest.mark.heavy
def test_progress_says_what_is_done_and_how_long_the_rest_takes():
    written = shown(on_terminal(PROGRESS))
    assert "10.0/20 rounds, 0:00:00 elapsed, -:--:-- left: serving-rate\r" in written
    *_, (done, named) = re.findall(
        r" (\d+)\.0/20 rounds, 0:00:0\d elapsed, 0:00:0\d left: serving-rate (\d+)\r", written
    )
    assert int(done) == int(named) == 19


@pytest.mark.heavy
def test_what_was_done_before_does_not_make_the_rest_seem_short():
    """10 of 20 were there at the start; the mean pace is of the others, a second each."""
    program = PROGRESS.replace("time.sleep(0.11)", "clock[0] += 1.0")
    program = "import time\nclock = [time.monotonic()]\ntime.monotonic = lambda: clock[0]\n" + program
    assert "15.0/20 rounds, 0:00:05 elapsed, 0:00:05 left: serving-rate 15" in shown(on_terminal(program))


@pytest.mark.heavy
def test_no_thread_stands_beside_processes_that_fork():
    program = PROGRESS + "    import threading; print(threading.active_count(), 'thread')"
    assert "1 thread" in on_terminal(program.replace("time.sleep(0.11)", "pass"))


LIVE = """
from exitflow.report.terminal import live_table
with live_table() as show:
    for count in (1, 2):
        show(f"{count} s", ["node", "served"], [["device", str(count)]] * 30)
print("done")
"""


ERASED = r"(?:\r?\x1b\[2K|\x1b\[1A)+"  # the line, and the one above, and so on


@pytest.mark.heavy
def test_a_live_table_is_drawn_in_its_place_and_is_gone_at_the_end():
    *drawn, last = [shown(part) for part in re.split(ERASED, on_terminal(LIVE, columns=20, rows=12))]
    pages = [page.splitlines() for page in drawn if "served" in page]
    assert [lines[0] for lines in pages] == ["1 s", "2 s"]
    for lines in pages:
        assert len(lines) <= 12
        assert max(map(len, lines)) <= 20
    assert last.strip() == "done"


WAITING = """
from exitflow.report.terminal import waiting
with waiting("Measuring"):
    print("work")
print("done")
"""


@pytest.mark.heavy
def test_waiting_says_what_for_until_it_is_over():
    written = on_terminal(WAITING)
    assert "Measuring ..." in written
    assert shown(re.split(ERASED, written)[-1]).strip() == "done"


@pytest.mark.heavy
@pytest.mark.parametrize("program", [PROGRESS, LIVE, WAITING])
def test_nothing_moves_where_nobody_watches(program):
    program = program.replace("0.11", "0").replace("show(f", "show and show(f")
    environment = {**os.environ, "FORCE_COLOR": "1"}  # by which rich takes any file for a terminal
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert done.stderr == ""
    assert done.stdout.strip() in ("", "done", "work\ndone")
