"""A parent's answers are believed only where they can be answers."""

import numpy as np
import pytest

from exitflow.serving.wire.answers import Answers, BadAnswerError, Expected
from exitflow.serving.wire.messages import ModelInferResponse

SOUND = {
    "scores": np.array([[0.25, 0.75], [1.0, 0.0]], np.float32),
    "exits": np.array([2, 3], np.int32),
    "nodes": ["edge", "cloud"],
    "confidences": np.array([0.5, 1.0], np.float32),
}


EXPECTED = Expected("m", "1", 2, {"edge": 2, "cloud": 3})


def received(model="m", version="1", **changes):
    answers = Answers(**{**SOUND, **changes})
    return Answers.from_message(ModelInferResponse.FromString(answers.to_bytes(model, version, "")), 2, EXPECTED)


def test_what_was_sent_arrives():
    found = received()
    assert found.scores.tolist() == SOUND["scores"].tolist()
    assert found.exits.tolist() == [2, 3]
    assert found.nodes == ["edge", "cloud"]
    assert found.confidences.tolist() == [0.5, 1.0]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"scores": np.array([[2, -1], [1, 0]], np.float32)}, "no probabilities"),
        ({"scores": np.array([[0.5, 0], [1, 0.5]], np.float32)}, "no probabilities"),  # 2 in all, but not 1 each
        ({"scores": np.array([[np.nan, 0], [1, 0]], np.float32)}, "no probabilities"),
        ({"exits": np.array([1, 3], np.int32)}, "nodes and exits are none that can answer"),
        ({"exits": np.array([2, 4], np.int32)}, "nodes and exits are none that can answer"),
        ({"exits": np.array([3, 2], np.int32)}, "nodes and exits are none that can answer"),
        ({"nodes": ["edge", "device"]}, "nodes and exits are none that can answer"),
        ({"model": "n"}, "it answers for 'n' '1'"),
        ({"version": "2"}, "it answers for 'm' '2'"),
        ({"confidences": np.array([np.nan, 1], np.float32)}, "confidences are none"),
        ({"nodes": ["edge"]}, "cannot be read"),
    ],
)
def test_nonsense_is_refused(changes, reason):
    with pytest.raises(BadAnswerError, match=reason):
        received(**changes)


def test_a_name_that_is_cut_off_is_refused():
    message = ModelInferResponse.FromString(Answers(**SOUND).to_bytes("m", "1", ""))
    message.raw_output_contents[2] = message.raw_output_contents[2][:-2]
    with pytest.raises(BadAnswerError, match="cannot be read"):
        Answers.from_message(message, 2, EXPECTED)
