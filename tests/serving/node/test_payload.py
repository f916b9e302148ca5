"""Features or the input: what takes less time on the link, computing again included."""

from dataclasses import replace

import pytest

from exitflow.serving.node.node_settings import ServingSpec
from exitflow.serving.node.payload import choose_payload
from tests.serving.small import chain, make_bundle

SLOW_LINK = 0.008  # Mbit/s: a byte takes a millisecond


@pytest.fixture(scope="module")
def manifest(tmp_path_factory):
    return make_bundle(tmp_path_factory.mktemp("payload") / "b", chain()).manifest


@pytest.mark.parametrize(
    ("codec", "seconds", "chosen"),
    [
        ("fp32", 0.007, "input"),  # 16 ms and 7 to compute again, against 24 of the features
        ("fp32", 0.009, "features"),
        ("u8", 0.0, "features"),  # 14 ms against 16
    ],
)
def test_the_quicker_one_is_chosen_and_the_reason_given(manifest, codec, seconds, chosen):
    spec = ServingSpec(forward="auto", codec=codec, link_megabits=SLOW_LINK)
    found, why = choose_payload(manifest, 1, spec, seconds)
    assert found == chosen
    assert "the input takes 16 bytes" in why
    assert f"{codec} features take {24 if codec == 'fp32' else 14} bytes" in why


def test_who_was_told_does_not_choose(manifest):
    spec = ServingSpec(forward="input", link_megabits=SLOW_LINK)
    assert choose_payload(manifest, 1, spec, 1e9) == ("input", "as it was told")
    assert choose_payload(manifest, 1, replace(spec, forward="feature"), 0.0) == ("features", "as it was told")
