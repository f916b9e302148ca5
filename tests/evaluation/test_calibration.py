"""Every node gets the threshold that fills its planned rate, on what its children forward."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from exitflow.evaluation.accuracy import follow_samples
from exitflow.evaluation.calibration import calibrate
from exitflow.evaluation.outputs import ExitOutputs
from exitflow.routing import confidence, serves
from exitflow.topology.paper_trees import paper_tree
from exitflow.topology.rates import serving_plan


def outputs(num_samples=1000, seed=0):
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(3, num_samples, 5)).astype(np.float32) * 3
    return ExitOutputs(logits, rng.integers(5, size=num_samples))


def shares_by_threshold(found, topology, cuts):
    """Follow every sample by thresholds alone, from one device up."""
    sure = [confidence(logits) for logits in found.logits]
    left = np.ones(len(found.labels), dtype=bool)
    shares = []
    for name in ("device-0", "edge-0", "cloud-0"):
        exit = topology.by_name[name].exit
        answered = left & serves(sure[exit - 1], cuts[name])
        shares.append(answered.mean())
        left &= ~answered
    return shares


@pytest.mark.parametrize("setting", ["80-15-5", "20-35-45", "100-0-0", "0-0-100", "0.1-0.1-99.8", "0.01-49.99-50"])
def test_thresholds_alone_serve_what_was_planned(setting):
    topology, found = paper_tree(7, setting), outputs()
    cuts = {name: node.cut for name, node in calibrate(found, topology).items()}
    expected = serving_plan(topology).exit_share
    assert shares_by_threshold(found, topology, cuts) == pytest.approx(expected, abs=2e-3)


def test_samples_without_an_answer_leave_thresholds_that_are_numbers():
    found = outputs()
    found.logits[0, :50] = np.nan
    devices = calibrate(found, paper_tree(7, "80-15-5"))["device-0"]
    assert np.isfinite(devices.threshold)
    assert np.isfinite(devices.confidences).all()
    assert serves(confidence(found.logits[0]), devices.threshold).mean() == pytest.approx(0.8, abs=2e-3)


def test_calibrated_on_all_samples_an_edge_would_answer_wrongly_many():
    """Why tiers are calibrated on what reaches them: with exits that agree, the easy ones are gone."""
    rng = np.random.default_rng(0)
    shared = rng.normal(size=(1000, 5)) * 3
    found = ExitOutputs(np.stack([shared] * 3).astype(np.float32), rng.integers(5, size=1000))
    topology = paper_tree(7, "80-15-5")
    cuts = {name: node.cut for name, node in calibrate(found, topology).items()}
    naive = float(np.quantile(confidence(found.logits[1]), 0.25))
    assert shares_by_threshold(found, topology, cuts) == pytest.approx([0.8, 0.15, 0.05], abs=2e-3)
    assert shares_by_threshold(found, topology, cuts | {"edge-0": naive})[1] < 0.02


@given(st.sampled_from(["80-15-5", "60-30-10", "5-15-80"]), st.integers(0, 50))
def test_quantiles_describe_what_the_node_receives(setting, seed):
    topology, found = paper_tree(7, setting), outputs(200, seed)
    ranks = [confidence(logits) for logits in found.logits]
    for node, received, _ in follow_samples(ranks, topology, serving_plan(topology)):
        grid = np.array(calibrate(found, topology)[node.name].confidences)
        assert (np.diff(grid) >= 0).all()
        weighted = received[ranks[node.exit - 1] <= grid[100]].sum() / received.sum()
        assert weighted == pytest.approx(0.5, abs=0.05)


def test_the_root_answers_everything():
    cloud = calibrate(outputs(), paper_tree(7, "80-15-5"))["cloud-0"]
    assert (cloud.serve_fraction, cloud.threshold, cloud.cut) == (1.0, None, -np.inf)
