from exitflow.federated.training_spec import TrainingSpec
from exitflow.federated.types import Task
from exitflow.runs.round_costs import forward_multiply_adds, link_bytes
from exitflow.topology.paper_trees import paper_tree


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


def test_a_batch_has_no_more_samples_than_its_node():
    tasks = [Task(1, "few", (1,), (1.0,), 1.0, 0), Task(1, "many", (1, 2), (0.5, 0.5), 1.0, 0)]
    spec = TrainingSpec(batch_size=10, local_exits="all")
    found = forward_multiply_adds(tasks, spec, num_steps=3, samples={"few": 4, "many": 1000}, cost=sum)
    assert found == 3 * 4 * 1 + 3 * 10 * (1 + 2)
