"""What a node refuses: code that its own file does not name, and data that are not there."""

import logging
import signal
import stat
from contextlib import contextmanager

import pytest

pytest.importorskip("flwr")

from exitflow.errors import ConfigError, TrainingError
from exitflow.flower import supernode
from exitflow.flower.federation_status import Present
from exitflow.flower.folders import check_address, init_federation
from exitflow.flower.supernode import UNKNOWN_TO_SERVER, NodeTrainers, SuperNode, run_node
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
    with pytest.raises(ConfigError, match="calling 'os:getcwd' with"):  # where the node knows it, it is called
        NodeTrainers("device-0", tmp_path, None, frozenset({"os:getcwd"}))(header)


@pytest.mark.parametrize(
    "key", ["weighting", "server_step", "schedule.name", "optimiser.name", "objective.name", "data.partition"]
)
def test_a_part_of_a_training_that_the_node_does_not_know_is_not_called(tmp_path, key):
    system = tiny_system(f"{key if key.startswith('data') else 'training.' + key}=os:getcwd").to_toml()
    header = {"run": "r", "system": system, "num_steps": 1}
    with pytest.raises(ConfigError, match=r"'os:getcwd' is not in this node's own system.toml"):
        NodeTrainers("device-0", tmp_path, None)(header)


def test_a_directory_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"^--data-dir: there is no directory '/no/such/dir'$"):
        NodeTrainers("device-0", tmp_path, "/no/such/dir")


def test_embedded_data_have_no_directory(tmp_path):
    header = {"run": "r", "system": tiny_system("data.name=digits").to_toml(), "num_steps": 1}
    with pytest.raises(ConfigError, match=r"^--data-dir: data set 'digits' is embedded; leave this out"):
        NodeTrainers("device-0", tmp_path, str(tmp_path))(header)
    assert len(NodeTrainers("device-0", tmp_path, None)(header).data.indices) == 7


@pytest.mark.heavy
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
    monkeypatch.setattr(supernode, "Programs", Refused)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    with pytest.raises(TrainingError, match="SuperNode cannot be started: its programs cannot be loaded"):
        run_node(folder / "nodes" / "device-0", data_dir=None)


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


class FakeProgram:
    def __init__(self, log, words=""):
        self.log, self.words = log, words

    def last_words(self):
        return self.words


@pytest.fixture
def connecting(tmp_path, monkeypatch, caplog):
    """(what connects a node, sets whom the server knows, the log)."""
    present = []

    @contextmanager
    def calling(address, authority):
        yield lambda: present[-1]

    monkeypatch.setattr(supernode, "calling", calling)
    caplog.set_level(logging.INFO, "exitflow.federation")
    connection = SuperNode("device-0", "host:1", tmp_path / "ca.crt", "aa")

    def told():
        found = [record.getMessage() for record in caplog.records]
        caplog.clear()
        return found

    return connection, present.append, told


def test_a_key_that_the_server_does_not_know_ends_the_node_after_a_while(connecting, tmp_path):
    connection, knows, told = connecting
    refused = FakeProgram(tmp_path, "Failed to activate SuperNode.")
    knows([Present("device-0", "bb", False, None)])
    for _ in range(UNKNOWN_TO_SERVER - 1):  # a server registers keys when it has started
        connection.explain(refused)
    assert set(told()) == {"Flower's SuperNode ended: the server knows no node with this key; trying again"}
    knows(None)  # nobody answers, so nobody has said that it can never work
    connection.explain(refused)
    knows([Present("device-0", "bb", False, None)])
    with pytest.raises(ConfigError, match=r"node.key: the server at host:1 knows no node with this key; take the"):
        connection.explain(refused)


def test_a_node_that_the_server_has_not_missed_yet_is_told_so(connecting, tmp_path):
    connection, knows, told = connecting
    knows([Present("device-0", "aa", True, None)])
    for _ in range(2 * UNKNOWN_TO_SERVER):
        connection.explain(FakeProgram(tmp_path, "Failed to activate SuperNode."))
    assert "for the server this node is connected still" in told()[0]


def test_the_log_tells_when_the_connection_comes_and_goes(connecting, tmp_path):
    connection, _, told = connecting
    program, read = FakeProgram(tmp_path / "log"), 0
    for line, sentences in (
        ("INFO :      Starting Flower SuperNode", []),
        ("INFO :      SuperNode ID: 7", ["connected to the server at host:1"]),
        (
            "WARNING :   Connection attempt failed, retrying in 1.00 seconds",
            ["the server at host:1 does not answer; trying again"],
        ),
        ("WARNING :   Connection attempt failed, retrying in 2.00 seconds", []),
        ("INFO :      Connection successful after 3.00 seconds and 3 tries.", ["connected to the server at host:1"]),
    ):
        with (tmp_path / "log").open("a") as file:
            file.write(line + "\n")
        read = connection.tell(program, read)
        assert told() == sentences
