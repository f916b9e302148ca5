"""What carries messages, without Flower's programs."""

from types import SimpleNamespace

import pytest

pytest.importorskip("flwr")

from flwr.app import ConfigRecord, RecordDict

from exitflow.federated.flower.courier import GridCourier


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
