import numpy as np
import pytest

from exitflow.errors import ConfigError
from exitflow.federated.sampling import check_every_exit_is_trained, probability_matrix, sample_tasks
from exitflow.federated.training_spec import TrainingSpec
from exitflow.topology.paper_trees import paper_tree

PAPER = TrainingSpec(weighting="serving-rate")
TREE = paper_tree(7, "80-15-5")
NODES = [node.name for node in TREE.nodes]
EVEN = dict.fromkeys(NODES, 1.0)


def test_without_help_every_node_trains_its_own_exit():
    matrix = probability_matrix(TREE, EVEN, PAPER)
    assert matrix.tolist() == [[1, 0, 0]] * 4 + [[0, 1, 0]] * 2 + [[0, 0, 1]]


def test_help_goes_to_every_lower_exit():
    matrix = probability_matrix(TREE, EVEN, TrainingSpec(help_probability=0.2))
    np.testing.assert_allclose(matrix, [[1, 0, 0]] * 4 + [[0.2, 0.8, 0]] * 2 + [[0.2, 0.2, 0.6]])


def test_participation_is_inside_the_probabilities():
    matrix = probability_matrix(TREE, EVEN, TrainingSpec(help_probability=0.2, participation=0.5))
    np.testing.assert_allclose(matrix, [[0.5, 0, 0]] * 4 + [[0.1, 0.4, 0]] * 2 + [[0.1, 0.1, 0.3]])


def test_a_node_without_samples_trains_nothing():
    matrix = probability_matrix(TREE, EVEN | {"device-0": 0.0}, PAPER)
    assert matrix[0].tolist() == [0, 0, 0]


def test_the_matrix_may_be_given_in_full():
    rows = dict.fromkeys(NODES[:4], (1.0,)) | dict.fromkeys(NODES[4:6], (0.5, 0.25)) | {"cloud-0": (0, 0, 1)}
    matrix = probability_matrix(TREE, EVEN, TrainingSpec(sampling=rows))
    assert matrix.tolist() == [[1, 0, 0]] * 4 + [[0.5, 0.25, 0]] * 2 + [[0, 0, 1]]
    halved = probability_matrix(TREE, EVEN, TrainingSpec(sampling=rows, participation=0.5))
    assert halved.tolist() == (matrix / 2).tolist()


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"help_probability": 0.6}, "help_probability: 0.6 for each of 2 lower exits of node 'cloud-0' is more than 1"),
        ({"sampling": {"device-9": (1.0,)}}, "sampling.device-9: no such node; did you mean"),
        ({"sampling": {"device-0": (1.0,)}}, "sampling.device-1: needs a row for every node"),
        ({"sampling": dict.fromkeys(NODES, (1.0, 1.0))}, "sampling.device-0: needs 1 probabilities"),
        ({"sampling": dict.fromkeys(NODES, (-0.5,))}, "sampling.device-0: needs 1 probabilities"),
    ],
)
def test_probabilities_that_are_none_are_refused(fields, sentence):
    with pytest.raises(ConfigError) as caught:
        probability_matrix(TREE, EVEN, TrainingSpec(**fields))
    assert sentence in str(caught.value)


def test_an_exit_that_nobody_trains_is_refused():
    with pytest.raises(ConfigError, match="exit 2 has no data to train on"):
        check_every_exit_is_trained(np.array([[1.0, 0.0, 0.0], [0.0, 0.0, 1.0]]))
    with pytest.raises(ConfigError, match=r"exit 1 .*: of the 2 training samples, the nodes that could .* hold none;"):
        check_every_exit_is_trained(np.array([[0.0, 1.0]]), 2)


def test_exits_are_drawn_as_often_as_the_matrix_says():
    matrix = np.array([[0.1, 0.3, 0.6], [0.25, 0.25, 0.0], [1.0, 0.0, 0.0]])
    rounds = 20_000
    drawn = np.zeros((3, 3))
    for round in range(1, rounds + 1):
        for task in sample_tasks(["a", "b", "c"], matrix, round=round, seed=1):
            drawn["abc".index(task.node), task.deepest - 1] += 1
            assert task.probability == matrix["abc".index(task.node), task.deepest - 1]
    np.testing.assert_allclose(drawn / rounds, matrix, atol=0.015)


def test_nodes_draw_independently():
    matrix = np.full((2, 1), 0.5)
    both = sum(len(sample_tasks(["a", "b"], matrix, round=round, seed=1)) == 2 for round in range(10_000))
    assert both / 10_000 == pytest.approx(0.25, abs=0.02)


def test_a_draw_depends_on_seed_round_and_node_only():
    matrix = np.full((3, 2), 0.4)
    all_nodes = {task.node: task for task in sample_tasks(["a", "b", "c"], matrix, round=4, seed=7)}
    for task in sample_tasks(["c", "a"], matrix[:2], round=4, seed=7):
        assert all_nodes[task.node] == task
    other_seed = [sample_tasks(["a", "b", "c"], matrix, round=round, seed=8) for round in range(20)]
    assert other_seed != [sample_tasks(["a", "b", "c"], matrix, round=round, seed=7) for round in range(20)]


def test_the_deepest_tasks_come_first():
    tasks = sample_tasks(NODES, probability_matrix(TREE, EVEN, PAPER), round=1, seed=0)
    assert [task.deepest for task in tasks] == [3, 2, 2, 1, 1, 1, 1]


def test_all_exits_of_a_node_are_one_task_whose_loss_weighs_them_as_the_server_does():
    matrix = probability_matrix(TREE, EVEN, TrainingSpec(participation=0.5, local_exits="all"))
    assert matrix[NODES.index("cloud-0")].tolist() == [0.5, 0.5, 0.5]
    assert matrix[NODES.index("device-0")].tolist() == [0.5, 0, 0]
    weights = np.array([0.2, 0.0, 0.6])
    tasks = [
        task for t in range(1, 400) for task in sample_tasks(NODES, matrix, round=t, seed=0, joint_weights=weights)
    ]
    of_cloud = [task for task in tasks if task.node == "cloud-0"]
    assert {task.exits for task in of_cloud} == {(1, 3)}  # nobody counts the loss of exit 2
    assert of_cloud[0].loss_weights == pytest.approx((0.25, 0.75))
    assert {task.exits for task in tasks if task.node == "device-0"} == {(1,)}
    assert len(of_cloud) == pytest.approx(200, abs=40)
    assert {task.probability for task in tasks} == {0.5}


def test_a_node_whose_losses_count_nothing_still_has_a_task():
    matrix = probability_matrix(TREE, EVEN, TrainingSpec(local_exits="all"))
    tasks = sample_tasks(NODES, matrix, round=1, seed=0, joint_weights=np.array([0.0, 0.0, 1.0]))
    assert {task.node: task.exits for task in tasks}["device-0"] == (1,)
