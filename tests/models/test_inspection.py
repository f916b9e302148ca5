import pytest
import torch
from torch import nn

from exitflow.models.backbones import TimmNetwork
from exitflow.models.build import build_model
from exitflow.models.cost import exit_costs
from exitflow.models.inspection import places
from exitflow.models.nested import EarlyExitNetwork
from exitflow.models.specs import EarlyExitResNet, SlimResNet

SHAPE = (1, 32, 32)


def test_a_place_behind_every_block_counts_from_the_input():
    """By hand: 8*9 weights at 32x32, then 64 weights in each of two linear layers at every pixel."""
    network = EarlyExitNetwork(
        [
            nn.Sequential(nn.Conv2d(1, 8, 3, padding=1, bias=False)),
            nn.Sequential(nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1)),
        ],
        [nn.Flatten(), nn.Flatten()],
    )
    first, second = places(network, SHAPE)
    assert (first.block, first.exit, first.num_parameters, first.multiply_adds) == (1, 1, 72, 72 * 1024)
    assert (second.block, second.exit, second.num_parameters) == (2, 2, 72 + 2 * (64 + 8))
    assert second.multiply_adds == (72 + 64 + 64) * 1024
    assert second.feature_bytes == 8 * 1024 * 4
    assert second.milliseconds > 0


@pytest.mark.parametrize(
    "spec",
    [
        EarlyExitResNet(width=4),
        SlimResNet(width=4),
        TimmNetwork(name="test_efficientnet"),
        TimmNetwork(name="test_vit"),
    ],
    ids=lambda spec: f"{spec.family}-{getattr(spec, 'name', '')}",
)
def test_where_exits_stand_the_figures_are_those_of_the_exits_without_their_heads(spec):
    network = build_model(spec.resolve(3), SHAPE, 3, seed=0)
    found = {place.exit: place for place in places(network, SHAPE) if place.exit}
    assert list(found) == [1, 2, 3]
    costs = exit_costs(network, SHAPE)
    if spec.family != "slim-resnet":
        for exit, place in found.items():
            head = sum(param.numel() for param in network.heads[str(exit)].parameters())
            assert place.num_parameters == costs[exit - 1].num_parameters - head
            assert 0 <= costs[exit - 1].multiply_adds - place.multiply_adds <= 3 * head


def test_what_is_frozen_is_not_counted_as_trained():
    network = build_model(
        TimmNetwork(name="test_efficientnet", exit_blocks=(2, 4, 5)).resolve(3), SHAPE, 3, seed=0, tuned="from:4"
    )
    trained = [place.num_trained for place in places(network, SHAPE)]
    assert trained[:3] == [0, 0, 0]
    assert 0 < trained[3] < trained[4]


def test_inspection_leaves_the_network_as_it_was():
    network = build_model(TimmNetwork(name="test_efficientnet").resolve(3), SHAPE, 3, seed=0)
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    places(network, SHAPE)
    assert all(torch.equal(tensor, before[name]) for name, tensor in network.state_dict().items())
