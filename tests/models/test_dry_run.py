"""A factory of the user's own that fails, or gives what does not fit, is one sentence before any training."""

import math
import sys
import types

import pytest
import torch
from torch import nn

from exitflow.errors import ConfigError
from exitflow.models.build import build_model
from exitflow.models.nested import EarlyExitNetwork
from exitflow.models.specs import CustomModel
from tests.small import NestedLinear

SHAPE, CLASSES = (1, 8, 8), 3


def good(shape, classes):
    stages = [
        nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), 8)),
        nn.Sequential(nn.BatchNorm1d(8), nn.Dropout()),
    ]
    return EarlyExitNetwork(stages, [nn.Linear(8, classes) for _ in stages])


def too_few_classes(shape, classes):
    return good(shape, classes - 1)


def no_arguments():
    return good(SHAPE, CLASSES)


def other_shape(shape, classes):
    return good((3, 8, 8), classes)


def fails(shape, classes):
    raise RuntimeError("no weights\nhere")


def nothing(shape, classes):
    return nn.Linear(2, 2)


def not_numbers(shape, classes):
    network = good(shape, classes)
    with torch.no_grad():
        next(network.parameters())[0, 0] = math.nan
    return network


def exits_as_text(shape, classes):
    network = good(shape, classes)
    network.num_exits = "2"
    return network


def no_parameters(shape, classes):
    return EarlyExitNetwork([nn.Flatten()], [nn.Identity()])


def overflowing(shape, classes):
    network = good(shape, classes)
    with torch.no_grad():
        network.heads["2"].bias.fill_(3e38)
        network.heads["2"].weight.fill_(3e38)
        network.stages["2"][0].bias.fill_(3e38)
    return network


class Flat(NestedLinear):
    """Takes flat inputs of eight."""

    def advance(self, carry, start, stop):
        return carry.flatten(1)[:, :8]


def of_flat(kind):
    def build(shape, classes):
        return kind((4, 8), classes)

    return build


class WrongCoverage(Flat):
    def coverage(self, *exits):
        return {"wait": (), "bias": ()}


class TooSmallCoverage(Flat):
    def coverage(self, *exits):
        return {"weight": (slice(None), slice(0, 3)), "bias": ()}


class PartOfCoverage(Flat):
    def coverage(self, *exits):
        return {"weight": ()}


class NoTuple(Flat):
    def submodel(self, *exits):
        return _Wrapped(super().submodel(*exits), lambda answers: answers[0])


class OtherLogits(Flat):
    def submodel(self, *exits):
        return _Wrapped(super().submodel(*exits), lambda answers: (answers[0] + 1,))


class _Wrapped(nn.Module):
    def __init__(self, inner, change):
        super().__init__()
        self.weight, self.bias = inner.weight, inner.bias
        self.inner, self.change = [inner], change

    def forward(self, inputs, *exits):
        return self.change(self.inner[0](inputs.flatten(1)[:, :8], *exits))


BAD = {
    too_few_classes: r"exit 1 of the network: its logits have the shape \[2, 2\], expected \[2, 3\] for 2 inputs and 3",
    no_arguments: r"calling 'own_network:build' with \(\(1, 8, 8\), 3\) failed: TypeError: no_arguments\(\) takes 0",
    other_shape: "exit 1 of the network: RuntimeError: mat1 and mat2 shapes cannot be multiplied",
    fails: "calling .* failed: RuntimeError: no weights here",
    nothing: "must give a NestedModel, got Linear",
    not_numbers: r"tensor 'stages.1.1.weight' holds NaN or infinity before any training",
    exits_as_text: "num_exits must be a whole number from 1 on, got '2'",
    no_parameters: "the network has no parameters, or none that are floats",
    overflowing: "exit 2 of the network: its logits for an input of zeros are NaN or infinity",
    of_flat(WrongCoverage): "exit 1 of the network: coverage names 'wait', which is no tensor of the network",
    of_flat(TooSmallCoverage): r"tensor 'weight' has the shape \[3, 4\] in its submodel, and \[3, 3\] in its coverage",
    of_flat(PartOfCoverage): "tensor 'bias' is in its submodel, and not in its coverage",
    of_flat(NoTuple): "its submodel, called with inputs, must give a tuple",
    of_flat(OtherLogits): "its submodel gives other logits than advance and classify",
}


@pytest.fixture
def built(monkeypatch):
    """Builds what a function of the user's own gives."""

    def build(function):
        module = types.ModuleType("own_network")
        module.build = function
        monkeypatch.setitem(sys.modules, "own_network", module)
        return build_model(CustomModel(factory="own_network:build"), SHAPE, CLASSES, seed=0)

    return build


@pytest.mark.parametrize("number", range(len(BAD)), ids=lambda number: list(BAD)[number].__name__)
def test_a_network_that_does_not_fit_is_one_sentence(built, number):
    function, problem = list(BAD.items())[number]
    with pytest.raises(ConfigError, match=problem) as caught:
        built(function)
    assert str(caught.value).startswith("model.factory: ")
    assert "\n" not in str(caught.value)


def test_a_network_that_fits_is_left_as_it_was_made(built):
    network = built(good)
    assert network.training
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        expected = good(SHAPE, CLASSES)
    assert all(torch.equal(tensor, network.state_dict()[name]) for name, tensor in expected.state_dict().items())


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("def build(:\n", "importing 'own_file:build' failed: SyntaxError"),
        ("raise SystemExit(3)\n", "importing 'own_file:build' failed: SystemExit: 3"),
        (
            "def build(*_):\n    raise SystemExit(3)\n",
            "calling 'own_file:build' with .* failed: SystemExit: 3",
        ),
        ("1 / 0\n", "importing 'own_file:build' failed: ZeroDivisionError"),
        ("import nothing_of_that_name\n", "cannot import 'own_file:build' .No module named 'nothing_of_that_name'"),
        ("bild = 1\n", "cannot import 'own_file:build'"),
        ("build = 1\n", "'own_file:build' must be a function, got int"),
    ],
)
def test_a_file_that_cannot_be_used_is_one_sentence(tmp_path, monkeypatch, text, problem):
    (tmp_path / "own_file.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_file", raising=False)
    with pytest.raises(ConfigError, match=problem):
        build_model(CustomModel(factory="own_file:build"), SHAPE, CLASSES, seed=0)
