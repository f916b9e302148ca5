"""A server cannot have code called on a node that the node's own file does not name."""

import pytest

pytest.importorskip("flwr")

from exitflow.errors import ConfigError
from exitflow.experiments.federation_node import NodeTrainers
from exitflow.models.specs import CommonNetwork, CustomModel, SlimResNet, factories
from tests.small import tiny_system

CUSTOM = CustomModel(factory="os:getcwd")


def test_factories_are_found_wherever_they_stand():
    assert factories(CUSTOM) == factories(CommonNetwork(network=CUSTOM)) == {"os:getcwd"}
    assert factories(CommonNetwork(network=SlimResNet())) == frozenset()


def test_a_factory_that_the_node_does_not_know_is_refused_before_it_is_called(tmp_path):
    system = tiny_system().to_toml()
    start, _, rest = system.partition("[model]")
    model = '[model]\nfamily = "custom"\nfactory = "os:getcwd"\n\n[data]'
    header = {"run": "r", "system": start + model + rest.partition("[data]")[2], "num_steps": 1}
    with pytest.raises(ConfigError, match=r"'os:getcwd' is not in this node's own system.toml"):
        NodeTrainers("device-0", tmp_path, None)(header)
    with pytest.raises(TypeError, match="getcwd"):  # where the node knows it, it is called
        NodeTrainers("device-0", tmp_path, None, frozenset({"os:getcwd"}))(header)
