import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from exitflow.evaluation.accuracy import evaluate_plan
from exitflow.evaluation.outputs import ExitOutputs, exit_outputs
from exitflow.models.build import build_model
from exitflow.models.specs import EarlyExitResNet
from exitflow.routing import CONFIDENCES, confidence
from exitflow.topology.graph import Link, Node, Topology
from exitflow.topology.paper_trees import paper_tree
from exitflow.topology.rates import serving_plan
from exitflow.topology.settings import PAPER_SETTINGS
from tests.oracles import serving as oracle
from tests.small import image_dataset, topologies


def random_outputs(num_exits: int, num_samples: int, *, seed: int = 0) -> ExitOutputs:
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(num_exits, num_samples, 4)).astype(np.float32)
    return ExitOutputs(logits, rng.integers(4, size=num_samples))


@pytest.mark.parametrize("damage", [np.nan, np.inf])
def test_what_is_not_finite_is_never_right(damage):
    outputs = ExitOutputs(np.full((1, 2, 3), damage, dtype=np.float32), np.zeros(2, dtype=np.int64))
    assert outputs.exit_accuracy.tolist() == [0.0]


@pytest.mark.heavy
@pytest.mark.parametrize(("num_nodes", "kind"), [*((7, kind) for kind in CONFIDENCES), (17, "entropy")])
@pytest.mark.parametrize("setting", PAPER_SETTINGS)
def test_accuracy_equals_that_of_the_request_by_request_evaluation(kind, num_nodes, setting):
    """With 1,200 samples most cuts are whole; where one falls inside a sample, it may differ by that sample."""
    topology, outputs = paper_tree(num_nodes, setting), random_outputs(3, 1200)
    found = evaluate_plan(outputs, topology, confidence_kind=kind)
    sure = [confidence(logits, kind) for logits in outputs.logits]
    fractions = {name: rates.serve_fraction for name, rates in serving_plan(topology).nodes.items()}
    system, nodes = oracle.accuracy(
        topology,
        fractions,
        lambda exit, sample: sure[exit - 1][sample],
        lambda exit, sample: bool(outputs.correct[exit - 1, sample]),
        1200,
    )
    assert found.accuracy == pytest.approx(system, abs=2 / 1200)
    num_leaves = len(topology.with_exit(1))
    for name, value in nodes.items():
        answered = found.nodes[name].rate / 100 * num_leaves * 1200  # of the samples that all leaves offer
        same_sample = 1 if topology.by_name[name].exit == 1 else num_leaves  # which every leaf may have passed on
        assert found.nodes[name].accuracy == pytest.approx(value, abs=2 * same_sample / answered)
    if setting in ("80-15-5", "60-30-10"):
        assert found.accuracy == pytest.approx(system, abs=1e-9)


@given(topologies(), st.sampled_from(sorted(CONFIDENCES)))
def test_served_rates_are_those_of_the_plan(topology, kind):
    outputs, plan = random_outputs(topology.num_exits, 50), serving_plan(topology)
    found = evaluate_plan(outputs, topology, plan, confidence_kind=kind)
    for name, served in found.nodes.items():
        assert served.rate == plan.nodes[name].serve_rate
        if served.accuracy is not None:
            assert -1e-9 <= served.accuracy <= 1 + 1e-9
    total = sum(served.rate * (served.accuracy or 0) for served in found.nodes.values())
    assert found.accuracy * plan.exit_serve_rate.sum() == pytest.approx(total, rel=1e-9, abs=1e-9)


def test_when_every_exit_is_right_or_wrong_the_accuracy_is_the_share_of_the_right_ones():
    labels = np.zeros(100, dtype=np.int64)
    logits = np.zeros((3, 100, 2), dtype=np.float32)
    logits[0, :, 1] = 1  # exit 1 is always wrong
    logits[1:, :, 0] = 1
    found = evaluate_plan(ExitOutputs(logits, labels), paper_tree(7, "80-15-5"))
    assert found.exit_accuracy == (0.0, 1.0, 1.0)
    assert found.accuracy == pytest.approx(0.2)
    assert found.nodes["device-0"].accuracy == 0.0
    assert found.nodes["cloud-0"].accuracy == pytest.approx(1.0)


def test_a_dag_with_uneven_arrivals_by_hand():
    """Two samples; exit 1 is sure of and right on the first only, so the second goes up, to both parents alike."""
    logits = np.array([[[5, 0], [1, 0]], [[3, 0], [0, 3]]], dtype=np.float32)
    outputs = ExitOutputs(logits, np.array([0, 1]))
    nodes = (
        Node("busy", 1, 6.0, (Link("left", 1.5), Link("right", 1.5))),
        Node("quiet", 1, 2.0, (Link("right", 1.0),)),
        Node("left", 2),
        Node("right", 2, arrival_rate=2.0),
    )
    found = evaluate_plan(outputs, Topology(nodes), confidence_kind="margin")
    assert found.nodes["busy"].accuracy == 1.0
    assert found.exit_accuracy == (0.5, 1.0)
    assert found.accuracy == 1.0
    tighter = (Node("busy", 1, 6.0, (Link("left", 1.0),)), Node("left", 2))
    found = evaluate_plan(outputs, Topology(tighter), confidence_kind="margin")
    assert found.nodes["busy"].rate == 5.0
    assert found.nodes["busy"].accuracy == pytest.approx(3 / 5)  # serves all of the first, and 2 of 3 of the second
    assert found.accuracy == pytest.approx(4 / 6)


def test_outputs_are_the_logits_of_every_submodel():
    dataset = image_dataset()
    spec = EarlyExitResNet(width=2, blocks=(1, 1, 1), strides=(1, 2, 2)).resolve(3)
    model = build_model(spec, (1, 8, 8), 3, seed=0)
    outputs = exit_outputs(model, dataset.test, dataset.preparation)
    for exit in (1, 2, 3):
        (logits,) = model.submodel(exit).eval()(dataset.preparation(dataset.test.inputs))
        alone = logits.detach().numpy()
        np.testing.assert_allclose(outputs.logits[exit - 1], alone, rtol=1e-5, atol=1e-6)
    assert outputs.exit_accuracy.shape == (3,)


def test_a_node_with_two_parents_splits_every_sample_between_them():
    """Both parents get half of all samples, not all of them at a rate for half: they are right on the surer sample."""
    links = (Link("left"), Link("right"))
    topology = Topology((Node("device", 1, 1.0, links), Node("left", 2), Node("right", 2)))
    logits = np.array([[[0, 0], [0, 0]], [[9, 0], [1, 0]]], dtype=np.float32)  # (exit, sample, class)
    result = evaluate_plan(ExitOutputs(logits, np.array([0, 1])), topology)
    assert result.nodes["left"].accuracy == pytest.approx(0.5)
    assert result.nodes["right"].accuracy == pytest.approx(0.5)
    assert result.accuracy == pytest.approx(0.5)
