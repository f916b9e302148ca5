from exitflow.federated.traffic import link_bytes
from exitflow.federated.types import Task
from exitflow.topology.presets import paper_tree


def test_bytes_travel_link_by_link_up_the_tree():
    tasks = [
        Task(1, "device-0", (1,), (1.0,), 1.0, 0),
        Task(1, "device-3", (1,), (1.0,), 1.0, 0),
        Task(1, "edge-1", (2,), (1.0,), 1.0, 0),
    ]
    found = link_bytes(
        paper_tree(7, "80-15-5"),
        [*tasks, Task(1, "cloud-0", (3,), (1.0,), 1.0, 0)],
        {1: 10, 2: 100, 3: 1000}.__getitem__,
    )
    assert found == {
        "device-0->edge-0": 10,
        "device-3->edge-1": 10,
        "edge-0->cloud-0": 10,
        "edge-1->cloud-0": 110,
    }
