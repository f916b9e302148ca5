"""Every family under every weighting on every backend: it trains, resumes bit for bit, evaluates, exports and serves.

Backends come from the table of the package, so what is added there is tried here.
"""

import asyncio
import functools
import importlib.util
import itertools
from dataclasses import replace

import numpy as np
import onnxruntime
import pytest
import tomli_w
import torch

from exitflow.config import encode
from exitflow.evaluation.blending import blended, fit_blends
from exitflow.evaluation.outputs import ExitOutputs
from exitflow.federated.weighting import WEIGHTINGS
from exitflow.models.backbones import TimmNetwork
from exitflow.models.specs import (
    CommonNetwork,
    CustomModel,
    DepthWidthResNet,
    EarlyExitResNet,
    SeparateNetworks,
    SlimResNet,
)
from exitflow.runs.backends import BACKENDS
from exitflow.runs.methods import METHODS, apply_method
from exitflow.runs.runs import evaluate
from exitflow.runs.training import resume, train
from exitflow.serving.bundle.bundle import load_bundle
from exitflow.serving.bundle.export import Trained, export_bundle
from exitflow.serving.traffic.cluster import LocalCluster
from exitflow.system.assembly import prepared_for
from tests.serving.asking import ask_all, expected
from tests.serving.small import chain
from tests.small import image_dataset, tiny_system

pytestmark = pytest.mark.heavy

DATA = image_dataset(96)
TRUNK = {"width": 3, "blocks": (1, 1, 1), "strides": (1, 2, 1)}
FAMILIES = {
    "early-exit-resnet": EarlyExitResNet(**TRUNK),
    "slim-resnet": SlimResNet(**TRUNK),
    "depth-width": DepthWidthResNet(**TRUNK),
    "common": CommonNetwork(network=EarlyExitResNet(**TRUNK)),
    "separate": SeparateNetworks(network=SlimResNet(**TRUNK)),
    "custom": CustomModel(factory="examples.own_backbone:build"),
    "timm": TimmNetwork(name="test_efficientnet", image_size=32),
}
NEEDED = {"ray": "ray", "flower": "flwr"}  # what a backend needs beyond the package


def cases():
    """(backend, family, weighting). Serially all, and of `processes` some pairs, so that each family and each weighting
    comes up; with `make test-all` the rest of `processes`, and all of Ray and Flower, which take long to start."""
    weightings = list(WEIGHTINGS)
    some = [(family, weightings[turn % len(weightings)]) for turn, family in enumerate([*FAMILIES] * 2)]
    for backend, *pair in itertools.product(BACKENDS, FAMILIES, weightings):
        slow = backend in NEEDED or (backend != "serial" and tuple(pair) not in some)
        yield pytest.param(backend, *pair, marks=[pytest.mark.slow] if slow else [])


class Stop(Exception):
    pass


def stop_in_the_second_round(rounds: float) -> None:
    if rounds >= 1.3:
        raise Stop


def system_of(family, weighting):
    overrides = ("training.rounds=2", "training.local_steps=1", f"training.weighting={weighting}")
    return replace(tiny_system(*overrides), model=FAMILIES[family])


def bits(run):
    return {name: tensor.numpy().tobytes() for name, tensor in run.state().tensors.items()}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("uninterrupted")

    @functools.cache
    def run_of(family, weighting):
        return train(system_of(family, weighting), folder / f"{family}-{weighting}", dataset=DATA)

    return run_of


@pytest.mark.parametrize(("backend", "family", "weighting"), list(cases()))
def test_every_family_trains_and_resumes_bit_for_bit(tmp_path, uninterrupted, request, backend, family, weighting):
    if importlib.util.find_spec(NEEDED.get(backend, "exitflow")) is None:
        pytest.skip(f"{NEEDED[backend]} is not installed")
    if backend == "ray":
        request.getfixturevalue("ray_cluster")
    how = {"dataset": DATA, "backend": backend, "workers": 2}
    with pytest.raises(Stop):
        train(system_of(family, weighting), tmp_path, observer=stop_in_the_second_round, **how)
    assert bits(resume(tmp_path, **how)) == bits(uninterrupted(family, weighting))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_evaluated_as_it_is_served(uninterrupted, family):
    for weighting in WEIGHTINGS:
        run = uninterrupted(family, weighting)
        found = evaluate(run, dataset=DATA)
        assert 0 <= found.accuracy <= 1
        assert all(record.multiply_adds > 0 for record in run.records)
        logits = run.outputs(DATA).logits
        assert np.isfinite(logits).all()
        own = outputs_by_submodels(run, DATA.test)
        if run.system.training.blends_answers:
            own = blended(own, fit_blends(outputs_by_submodels(run, DATA.validation)))
        np.testing.assert_allclose(logits, own.logits, rtol=1e-3, atol=1e-3)


def outputs_by_submodels(run, split):
    """Each exit computed by itself, from the input on."""
    networks = [run.model(DATA).submodel(exit).eval() for exit in (1, 2, 3)]
    preparation = prepared_for(run.system, DATA).preparation
    logits = [network(preparation(split.inputs))[0].detach() for network in networks]
    return ExitOutputs(torch.stack(logits).numpy(), split.labels.numpy())


@pytest.mark.parametrize("method", METHODS)
def test_every_method_resumes_bit_for_bit(tmp_path, method):
    system = apply_method(method, tiny_system("training.rounds=2", "training.local_steps=2", "model.width=3"))
    whole = train(system, tmp_path / "whole", dataset=DATA)
    with pytest.raises(Stop):
        train(system, tmp_path / "cut", dataset=DATA, observer=stop_in_the_second_round)
    assert bits(resume(tmp_path / "cut", dataset=DATA, backend="processes", workers=2)) == bits(whole)


@pytest.fixture(scope="module")
def exported(uninterrupted, tmp_path_factory):
    folder = tmp_path_factory.mktemp("exported")

    @functools.cache
    def bundle_of(family, weighting):
        run, topology, out = uninterrupted(family, weighting), chain(), folder / f"{family}-{weighting}"
        data = prepared_for(run.system, DATA)
        system = tomli_w.dumps({"nodes": [encode(node) for node in topology.nodes]})
        together = run.system.training.blends_answers
        export_bundle(Trained(run.system.name, run.model(DATA), data, topology, system, together), out)
        return load_bundle(out)

    return bundle_of


TRAINED = [
    pytest.param(family, weighting, marks=[] if weighting == "auto" else [pytest.mark.slow])
    for family, weighting in itertools.product(FAMILIES, WEIGHTINGS)
]


@pytest.mark.parametrize(("family", "weighting"), TRAINED)
def test_every_family_exports_segments_that_answer_as_in_the_evaluation(uninterrupted, exported, family, weighting):
    """Each is given what the one before it gives, as nodes do."""
    bundle, carry, own = exported(family, weighting), DATA.test.inputs.numpy(), []
    for segment in bundle.segments:
        session = onnxruntime.InferenceSession(segment)
        outputs = dict(
            zip([output.name for output in session.get_outputs()], session.run(None, {"carry": carry}), strict=True)
        )
        own.append(outputs["logits"])
        carry = outputs.get("features")
    answers = blended(ExitOutputs(np.stack(own), DATA.test.labels.numpy()), bundle.manifest.blends).logits
    assert bool(bundle.manifest.blends) == (weighting == "auto")
    np.testing.assert_allclose(answers, uninterrupted(family, weighting).outputs(DATA).logits, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("family", "weighting"), TRAINED)
def test_every_family_answers_from_running_nodes_as_in_the_evaluation(exported, family, weighting):
    bundle = exported(family, weighting)
    samples = bundle.samples()
    with LocalCluster(bundle, options=["--set=control=threshold", "--set=forward_timeout=30"]) as tree:
        found = asyncio.run(ask_all(tree.places["device"].grpc, bundle.manifest.name, samples.inputs))
    assert found == expected(bundle, "device", samples)
    assert len({exit for _, exit, _ in found}) > 1
