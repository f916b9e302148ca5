"""A log can be believed: a line for each record, printable, bounded, whatever a peer sent."""

import io
import json
import logging
import os
import subprocess
import sys

import pytest

from exitflow import logs

log = logging.getLogger("exitflow.tests")
FORGED = "bad\n2026-11-19 06:00:00,000 node INFO forged \x1b[2J\r \u2028 \u202e \udc80"


@pytest.fixture
def written(monkeypatch):
    """(set_up, text): lines that have been logged since."""
    stream, root = io.StringIO(), logging.getLogger()
    level_before = root.level

    def set_up(style, level="info"):
        monkeypatch.setattr(sys, "stderr", stream)  # here: pytest puts its own there between fixture and test
        root.handlers.clear()  # pytest's for this test too: what is logged here cannot be sent to xdist
        logs.set_up(level, style, who="edge-0")
        set_up.handlers = root.handlers[:]

    set_up.handlers = []
    yield set_up, stream.getvalue
    logging.captureWarnings(False)
    for handler in set_up.handlers:
        root.removeHandler(handler)
    root.setLevel(level_before)


@pytest.mark.parametrize("style", logs.FORMATS)
def test_what_a_peer_sent_forges_no_line_and_is_valid_text(written, style):
    set_up, text = written
    set_up(style)
    log.warning("link is cut: %s", FORGED, extra=logs.about(peer=FORGED))
    assert len(text().splitlines()) == 1
    assert text().removesuffix("\n").isprintable()
    text().encode("utf-8")
    assert r"bad\n2026" in (text() if style == "text" else json.loads(text())["message"])


@pytest.mark.parametrize("style", logs.FORMATS)
def test_a_traceback_forges_no_line(written, style):
    set_up, text = written
    set_up(style)
    try:
        raise ValueError(FORGED)
    except ValueError:
        log.exception("failed")
    first, *others = text().split("\n")[:-1]
    assert "failed" in first
    assert all(line.startswith("    | ") and line.isprintable() for line in others)
    assert bool(others) == (style == "text")
    if style == "json":
        assert any("ValueError: bad" in line for line in json.loads(first)["traceback"])


def test_a_line_of_json_says_who_what_and_about_which_request(written):
    set_up, text = written
    set_up("json")
    log.info("refused: %d", 7, extra=logs.about(peer="127.0.0.1:9", request="a-1", seconds=0.5, nothing=None, level=2))
    found = json.loads(text())
    assert found.pop("time").endswith("Z")
    assert found == {
        "level": "info",
        "node": "edge-0",
        "logger": "exitflow.tests",
        "message": "refused: 7",
        "peer": "127.0.0.1:9",
        "request": "a-1",
        "seconds": 0.5,
    }


def test_no_number_of_json_is_a_text(written):
    set_up, text = written
    set_up("json")
    log.info("odd", extra=logs.about(seconds=float("nan"), most=float("inf")))
    assert json.loads(text(), parse_constant=pytest.fail)["seconds"] == "nan"


def test_a_line_of_text_says_the_same(written):
    set_up, text = written
    set_up("text")
    log.warning("cut", extra=logs.about(peer="127.0.0.1:9"))
    assert text().endswith(" edge-0 WARNING cut (peer=127.0.0.1:9)\n")


def test_a_flood_is_left_out_and_others_are_still_heard(written):
    set_up, text = written
    set_up("text")
    for _ in range(10_000):
        log.warning("flood")
    log.warning("another place")
    lines = text().splitlines()
    assert logs.BURST <= len(lines) <= logs.BURST + 5
    assert logs.LEFT_OUT in lines[logs.BURST - 1]
    assert "another place" in lines[-1]


def test_after_a_second_one_more_of_a_flood_is_written(written):
    set_up, text = written
    set_up("json")
    (handler,) = (each for each in logging.getLogger().handlers if isinstance(each, logs.BoundedHandler))
    for created in [0.0] * 200 + [0.5] * 5 + [1.5] * 5 + [0.2] * 5:  # a clock may be set back
        record = log.makeRecord(log.name, logging.INFO, __file__, 1, "flood", (), None)
        record.created = created
        handler.handle(record)
    found = [json.loads(line) for line in text().splitlines()]
    assert len(found) == logs.BURST + 1
    assert [each.get("more_left_out", False) for each in found[-3:]] == [False, True, True]


def test_long_texts_are_cut(written):
    set_up, text = written
    set_up("text")
    log.error("%s", "x" * 10**6)
    assert len(text()) < logs.MAX_TEXT + 200
    assert "(1000000 characters)" in text()


def test_a_level_holds_for_all_and_third_parties_say_warnings_only(written):
    set_up, text = written
    set_up("text", "debug")
    log.debug("seen")
    logging.getLogger("uvicorn.error").info("not seen")
    set_up("text", "error")
    log.warning("not seen")
    assert len(text().splitlines()) == 1


@pytest.mark.heavy
def test_grpc_keeps_quiet_unless_it_was_told_otherwise():
    program = "import os; from exitflow import logs; logs.set_up(); print(os.environ['GRPC_VERBOSITY'])"
    for given, wanted in (({}, "ERROR"), ({"GRPC_VERBOSITY": "DEBUG"}, "DEBUG")):
        clean = {name: value for name, value in os.environ.items() if name != "GRPC_VERBOSITY"}
        done = subprocess.run([sys.executable, "-c", program], env=clean | given, capture_output=True, text=True)
        assert done.stdout.strip() == wanted, done.stderr


@pytest.mark.heavy
def test_without_a_log_a_warning_is_one_sentence_of_the_program_and_is_said_once():
    program = (
        "import logging; from exitflow import logs; logs.set_up_sentences('exitflow'); log = logging.getLogger('x'); "
        "[log.warning('a link\\nis %s', 'slow') for _ in range(3)]; log.info('quiet')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stderr == "exitflow: warning: a link\\nis slow\n"
