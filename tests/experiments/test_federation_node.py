"""What a node refuses: code that its own file does not name, and data that are not there."""

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


def test_a_directory_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"^--data-dir: there is no directory '/no/such/dir'$"):
        NodeTrainers("device-0", tmp_path, "/no/such/dir")


def test_embedded_data_have_no_directory(tmp_path):
    header = {"run": "r", "system": tiny_system("data.name=digits").to_toml(), "num_steps": 1}
    with pytest.raises(ConfigError, match=r"^--data-dir: data set 'digits' is embedded; leave this out"):
        NodeTrainers("device-0", tmp_path, str(tmp_path))(header)
    assert len(NodeTrainers("device-0", tmp_path, None)(header).data.indices) == 7
