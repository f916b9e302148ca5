import json

import numpy as np
import pytest
from scipy.optimize import minimize

from exitflow.errors import ConfigError
from exitflow.evaluation.accuracy import evaluate_plan
from exitflow.evaluation.gains import RIDGE, fit_gains
from exitflow.evaluation.outputs import ExitOutputs
from exitflow.routing.confidence import confidence, gain_features
from exitflow.serving.bundle.bundle import load_bundle
from exitflow.topology.graph import Link, Node, Topology
from tests.serving.small import chain, make_bundle

CHAIN = Topology((Node("d", 1, 10.0, (Link("c", 3.0),)), Node("c", 2)))


def with_hopeless_samples(num_samples=3000, seed=0):
    """A third is easy, a third is learned by the deep exit only, and a third by none, of which exit 1 is least sure."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(3, size=num_samples)
    kind = rng.integers(3, size=num_samples)
    logits = rng.normal(0, 0.3, (2, num_samples, 3))
    rows = np.arange(num_samples)
    logits[0, rows, labels] += np.array([5.0, -2.0, 0.0])[kind]  # of the hopeless it knows nothing: least sure
    logits[1, rows, labels] += np.array([5.0, 5.0, -5.0])[kind]
    return ExitOutputs(logits.astype(np.float32), labels)


def test_the_weights_are_those_of_the_regularised_logistic_regression():
    outputs = with_hopeless_samples(300)
    features = gain_features(outputs.logits[0].astype(np.float64))
    centre, spread = features[:, :-1].mean(axis=0), features[:, :-1].std(axis=0)
    standard = np.hstack(((features[:, :-1] - centre) / spread, features[:, -1:]))
    targets = outputs.correct[0].astype(float)

    def loss(weights):
        scores = standard @ weights
        return float((np.logaddexp(0, scores) - targets * scores).sum() + RIDGE / 2 * weights @ weights)

    best = minimize(loss, np.zeros(5), tol=1e-12).x
    own = np.array(fit_gains(outputs)[0][:5])
    assert features @ own == pytest.approx(standard @ best, abs=1e-3)


def test_what_gains_nothing_stays_although_nobody_is_sure_of_it():
    fitted, fresh = with_hopeless_samples(), with_hopeless_samples(seed=1)
    fresh = ExitOutputs(fresh.logits, fresh.labels, fit_gains(fitted))
    by_entropy = evaluate_plan(fresh, CHAIN).accuracy
    by_gain = evaluate_plan(fresh, CHAIN, confidence_kind="gain").accuracy
    assert by_gain > by_entropy + 0.1


def test_ranks_lie_between_0_and_1_and_need_weights():
    outputs = with_hopeless_samples(100)
    ranks = ExitOutputs(outputs.logits, outputs.labels, fit_gains(outputs)).ranks("gain")
    assert all(((values >= 0) & (values <= 1)).all() for values in ranks)
    with pytest.raises(ConfigError, match="needs 10 weights"):
        confidence(outputs.logits[0], "gain")


def test_a_network_that_has_diverged_ranks_all_alike():
    outputs = ExitOutputs(np.full((2, 4, 3), np.nan, dtype=np.float32), np.zeros(4, dtype=np.int64))
    assert fit_gains(outputs) == ((0.0,) * 10,) * 2


def test_a_bundle_brings_the_weights_to_its_nodes(tmp_path):
    bundle = make_bundle(tmp_path / "bundle", chain(), confidence="gain")
    kind, weights = bundle.manifest.ranking(1)
    assert kind == "gain"
    assert len(weights) == 10
    outputs = bundle.samples().outputs
    assert outputs.ranks("gain")[0] == pytest.approx(confidence(outputs.logits[0], kind, weights))


def test_a_manifest_without_the_weights_it_needs_is_refused(tmp_path):
    bundle = make_bundle(tmp_path / "bundle", chain(), confidence="gain")
    path = bundle.path / "manifest.json"
    found = json.loads(path.read_text())
    path.write_text(json.dumps(found | {"gains": found["gains"][:1]}))
    with pytest.raises(Exception, match="gains: must be 10 weights for each of 3 segments"):
        load_bundle(bundle.path)
