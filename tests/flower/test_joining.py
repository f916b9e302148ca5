"""What the server makes of what nodes say when a run begins."""

import pytest

pytest.importorskip("flwr")

from exitflow.errors import TrainingError
from exitflow.flower.courier import Reply, Station
from exitflow.flower.joining import Membership, ask_samples
from tests.small import tiny_system


class Courier:
    """Every node gives the same answer."""

    def __init__(self, answer):
        self.nodes = [node.name for node in tiny_system().topology.nodes]
        self.answer = answer

    def stations(self):
        return [Station(index, node, "key", True) for index, node in enumerate(self.nodes)]

    def send(self, station, header, payload, *, seconds):
        return str(station)

    def receive(self, messages):
        return [Reply(message, **self.answer) for message in messages]


def ask(courier):
    return ask_samples(courier, Membership(None), tiny_system(), "r", status=lambda text: None)


def test_every_node_says_how_many_samples_it_has():
    courier = Courier({"header": {"num_samples": 5}})
    assert ask(courier) == dict.fromkeys(courier.nodes, 5)


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        ({"header": {}}, "its number of samples is None"),
        ({"header": {"num_samples": -1}}, "its number of samples is -1"),
        ({"header": {"num_samples": "many"}}, "its number of samples is 'many'"),
        ({"header": {"error": "no data"}}, "no data"),
        ({"error": "no JSON", "refused": True}, "no JSON"),
    ],
)
def test_an_answer_that_makes_no_sense_names_the_node(answer, problem):
    courier = Courier(answer)
    with pytest.raises(TrainingError, match=f"^node '{courier.nodes[0]}': {problem}$"):
        ask(courier)
