"""What `exitflow time` measures."""

import json

from exitflow.serving.bundle.service_times import service_times
from tests.command import call
from tests.serving.small import chain, make_bundle


def test_every_exit_is_measured_from_the_input_and_from_the_exit_before(tmp_path):
    bundle = make_bundle(tmp_path / "bundle", chain())
    found = service_times(bundle, repeats=10)
    assert [each.exit for each in found] == list(range(1, len(bundle.segments) + 1))
    assert found[0].from_features is None
    assert all(0 < each.from_input[0] <= each.from_input[1] for each in found)
    assert all(0 < each.from_features[0] <= each.from_features[1] for each in found[1:])
    printed = json.loads(call("time", bundle.path, "--repeats", "10", "--json").stdout)
    assert len(printed["exits"]) == len(found)
    assert "from features" in call("time", bundle.path, "--repeats", "10").stdout
