"""What a node refuses: code that its own file does not name, and data that are not there."""

import signal
import stat

import pytest

pytest.importorskip("flwr")

from exitflow.errors import ConfigError, TrainingError
from exitflow.flower import node_program
from exitflow.flower.deployment import check_address, init_federation
from exitflow.flower.node_program import NodeTrainers, run_node
from exitflow.flower.worker import serve
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


def test_a_node_ends_when_its_supernode_can_never_be_started(tmp_path, monkeypatch):
    class Refused:
        stopped = False

        def __init__(self, *_, **__):
            pass

        def start(self, *_):
            raise TrainingError("its programs cannot be loaded")

        def stop(self):
            self.stopped = True

    folder = tmp_path / "federation"
    init_federation(tiny_system("data.name=digits"), folder, superlink="127.0.0.1:9092")
    for each in (folder / "server", folder / "nodes" / "device-0"):
        assert stat.S_IMODE(each.stat().st_mode) == 0o700
    monkeypatch.setattr(node_program, "Programs", Refused)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    with pytest.raises(TrainingError, match="SuperNode cannot be started: its programs cannot be loaded"):
        run_node(folder / "nodes" / "device-0", data_dir=None, tell=lambda text: None)


@pytest.mark.parametrize("address", ["host:²", "host:" + "9" * 5000, "hößt:9092", "host:0", "host", ":1", "a b:1"])
def test_an_address_that_is_none_is_one_sentence(address):
    with pytest.raises(ConfigError, match=r"--superlink: expected HOST:PORT, such as 10.0.0.1:9092"):
        check_address(address)


@pytest.mark.parametrize("address", ["fl_server:9092", "[::1]:9092", "10.0.0.1:1", "edge.example:65535"])
def test_an_address_is_taken_as_it_is(address):
    assert check_address(address) == address


def test_a_worker_does_not_delete_what_is_no_socket(tmp_path):
    (tmp_path / "data").write_text("precious")
    with pytest.raises(OSError, match="Address already in use"):
        serve(None, tmp_path / "data", until_closed=0)
    assert (tmp_path / "data").read_text() == "precious"
