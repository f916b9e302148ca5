"""One network for all, one for each, and one of the user's own, under the contract of nested models."""

import sys
import types
from dataclasses import replace

import pytest
import torch
from torch import nn

from exitflow.errors import ConfigError
from exitflow.models.build import build_model
from exitflow.models.layout import best_layout
from exitflow.models.nested import EarlyExitNetwork
from exitflow.models.specs import (
    CommonNetwork,
    CustomModel,
    EarlyExitResNet,
    SeparateNetworks,
    SlimResNet,
    decode_model,
)

EARLY_EXITS = EarlyExitResNet(width=2, blocks=(1, 1, 1), strides=(1, 2, 2))
SLIM = SlimResNet(width=3, blocks=(1,), strides=(1,))


def build(spec, num_exits=3):
    return build_model(spec.resolve(num_exits), (1, 8, 8), 4, seed=0).eval()


@pytest.mark.parametrize("network", [EARLY_EXITS, SLIM])
def test_a_common_network_is_one_exit_of_the_other_family_at_every_exit(network):
    model, nested = build(CommonNetwork(exit=2, network=network)), build(network)
    inputs = torch.randn(2, 1, 8, 8)
    for exit in (1, 2, 3):
        assert torch.equal(model.classify(model.advance(inputs, 0, exit), exit), nested.submodel(2).eval()(inputs)[0])
        assert model.coverage(exit) == dict.fromkeys(model.state_dict(), ())


@pytest.mark.parametrize("network", [EARLY_EXITS, SLIM])
def test_separate_networks_share_nothing_and_begin_alike(network):
    model, nested = build(SeparateNetworks(exits=(1, 1, 3), network=network)), build(network)
    covered = [set(model.coverage(exit)) for exit in (1, 2, 3)]
    assert set.union(*covered) == set(model.state_dict())
    assert sum(map(len, covered)) == len(model.state_dict())
    inputs = torch.randn(2, 1, 8, 8)
    for exit, original in enumerate((1, 1, 3), start=1):
        assert torch.equal(model.classify(inputs, exit), nested.submodel(original).eval()(inputs)[0])


@pytest.mark.parametrize("spec", [CommonNetwork(network=EARLY_EXITS), SeparateNetworks(network=SLIM)])
@pytest.mark.parametrize("exits", [(1,), (2,), (1, 3), (1, 2, 3)])
def test_a_submodel_gives_the_logits_of_the_whole_and_holds_only_what_is_covered(spec, exits):
    model = build(spec)
    submodel = model.submodel(*exits).eval()
    assert set(submodel.state_dict()) == set(model.coverage(*exits))
    inputs = torch.randn(2, 1, 8, 8)
    for exit, logits in zip(exits, submodel(inputs), strict=True):
        assert torch.equal(logits, model.classify(inputs, exit))
        assert torch.equal(submodel(inputs, exit)[0], logits)


def test_a_table_within_a_table_describes_the_network():
    table = {"family": "common", "exit": 2, "network": {"family": "slim-resnet", "width": 8}}
    assert decode_model(table) == CommonNetwork(exit=2, network=SlimResNet(width=8))
    with pytest.raises(ConfigError, match=r"network.width: must be at least 1, got 0"):
        decode_model({"family": "separate", "network": {"width": 0}})


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        (CommonNetwork(exit=4), "exit: must be from 1 to 3, got 4"),
        (SeparateNetworks(exits=(1, 2)), "exits: the deepest node stands at exit 3, but the model has only 2 exits"),
        (SeparateNetworks(exits=(0, 1, 2)), "exits: must be 1 or more"),
        (CommonNetwork(network=EarlyExitResNet(exit_blocks=(1, 8))), "network.exit_blocks: the deepest node"),
    ],
)
def test_what_does_not_fit_is_refused_with_a_sentence(spec, sentence):
    with pytest.raises(ConfigError) as caught:
        spec.resolve(3)
    assert sentence in str(caught.value)


@pytest.fixture
def module(monkeypatch):
    module = types.ModuleType("my_networks")
    monkeypatch.setitem(sys.modules, "my_networks", module)
    return module


def test_a_network_of_the_users_own_comes_from_a_function(module):
    module.build = lambda shape, classes: EarlyExitNetwork([nn.Flatten()], [nn.Linear(64, classes)])
    model = build(CustomModel(factory="my_networks:build"), num_exits=1)
    assert model.num_exits == 1
    module.build = lambda shape, classes: nn.Linear(1, 1)
    with pytest.raises(ConfigError, match="'my_networks:build' must give a NestedModel, got Linear"):
        build(CustomModel(factory="my_networks:build"))


def test_a_function_that_is_not_there_is_named():
    with pytest.raises(ConfigError, match=r"model.factory: cannot import 'no_such_module:build' .* on PYTHONPATH"):
        build(CustomModel(factory="no_such_module:build"))
    with pytest.raises(ConfigError, match=r"factory: expected package.module:function, got 'os.system'"):
        CustomModel(factory="os.system")


@pytest.mark.parametrize("spec", [CommonNetwork(exit=2), SeparateNetworks(exits=(1, 2))])
def test_a_network_of_fewer_exits_than_are_asked_for_is_told(module, spec):
    module.build = lambda shape, classes: EarlyExitNetwork([nn.Flatten()], [nn.Linear(64, classes)])
    with pytest.raises(ValueError, match="network has 1 exits, and exit 2 is asked for"):
        build(replace(spec, network=CustomModel(factory="my_networks:build")), num_exits=2)


def test_convolutions_of_three_dimensions_have_a_layout(module):
    network = EarlyExitNetwork([nn.Conv3d(1, 2, 3)], [nn.Sequential(nn.Flatten(), nn.Linear(16, 4))])
    submodel = network.submodel(1)
    assert best_layout(submodel) is torch.contiguous_format
    assert submodel.to(memory_format=best_layout(submodel))(torch.zeros(1, 1, 4, 4, 4))
