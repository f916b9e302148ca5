"""What carries messages, without Flower's programs."""

import socket
import threading
import time
from contextlib import suppress
from types import SimpleNamespace

import pytest

pytest.importorskip("flwr")

from flwr.app import ConfigRecord, RecordDict

from exitflow.errors import TrainingError
from exitflow.flower import courier
from exitflow.flower.courier import GridCourier, RelayCourier, serve_relay
from exitflow.free_ports import free_ports


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"a":' * 100_000 + "1" + "}" * 100_000, "nested too deeply"),
        ('{"a":' + "[" * 100 + "]" * 100 + "}", "nested too deeply"),
        ("{", "Expecting property name"),
        ("5", "is no JSON object"),
    ],
)
def test_a_reply_that_cannot_be_read_is_refused(text, reason):
    content = RecordDict({"header": ConfigRecord({"json": text})})
    metadata = SimpleNamespace(reply_to_message_id="m1")
    message = SimpleNamespace(content=content, metadata=metadata, has_error=lambda: False)
    (reply,) = GridCourier(SimpleNamespace(pull_messages=lambda messages: [message])).receive(["m1"])
    assert reply.message == "m1"
    assert reply.refused
    assert reason in reply.error


@pytest.fixture
def relay(tmp_path, monkeypatch):
    """Whoever asks over it gets an answer after half a second; the SuperLink may be away for a fifth of one."""
    monkeypatch.setattr(courier, "LOOK", 0.05)
    monkeypatch.setattr(courier, "PATIENCE", 0.2)
    (port,) = free_ports(1)
    relay = RelayCourier(tmp_path / "relay", f"127.0.0.1:{port}")
    slow = SimpleNamespace(stations=lambda: time.sleep(0.5) or [])

    def server_app():
        with socket.socket(socket.AF_UNIX) as connection, suppress(OSError):  # the training may give up
            connection.connect(str(relay.path))
            serve_relay(slow, connection)

    thread = threading.Thread(target=server_app)
    thread.start()
    assert relay.wait(10)
    yield relay, port
    relay.close()
    thread.join()


@pytest.mark.heavy
def test_a_superlink_that_has_gone_ends_the_training_with_a_sentence(relay):
    relay, port = relay
    with pytest.raises(TrainingError, match=f"nobody has answered at 127.0.0.1:{port} for 0.2 s; .* --resume` goes on"):
        relay.stations()


@pytest.mark.heavy
def test_a_superlink_that_is_there_may_take_its_time(relay):
    relay, port = relay
    with socket.create_server(("127.0.0.1", port)):
        assert relay.stations() == []
