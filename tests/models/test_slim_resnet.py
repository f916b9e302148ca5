"""Networks nested in width, and in depth and width, against plain networks that hold the slices."""

from dataclasses import replace

import pytest
import torch

from exitflow.errors import ConfigError
from exitflow.models.build import build_model
from exitflow.models.cost import exit_costs
from exitflow.models.slim_resnet import num_channels
from exitflow.models.specs import DepthWidthResNet, SlimResNet
from exitflow.tensors import take
from tests.oracles.slim import PlainResNet, load_slices

SLIM = SlimResNet(width=4, blocks=(1, 2), strides=(1, 2), widths=(0.3, 0.5, 1.0), head="grid").resolve(3)
BOTH = DepthWidthResNet(
    width=4, blocks=(1, 2), strides=(1, 2), exit_blocks=(1, 2, 3), widths=(0.3, 0.5, 1.0), heads="grid"
).resolve(3)
SPECS = {"slim-resnet": SLIM, "depth-width": BOTH}


def randomised(spec, seed=0):
    """Every tensor random, so that no wrong slice goes unseen."""
    model = build_model(spec, (3, 8, 8), 5, seed=seed).double()
    generator = torch.Generator().manual_seed(seed)
    for tensor in model.state_dict().values():
        tensor.copy_(torch.rand(tensor.shape, dtype=torch.float64, generator=generator) + 0.1)
    return model


def plain_network(spec, model, exit):
    num_blocks = spec.exit_blocks[exit - 1] if isinstance(spec, DepthWidthResNet) else spec.num_blocks
    plain = PlainResNet(spec, spec.widths[exit - 1], num_blocks, 3, 5, cells=4).double()
    load_slices(plain, model, exit)
    return plain


@pytest.mark.parametrize("family", SPECS)
@pytest.mark.parametrize("exit", [1, 2, 3])
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_an_exit_computes_what_a_plain_network_of_the_sliced_weights_computes(family, exit, mode):
    spec = SPECS[family]
    model = randomised(spec)
    plain = plain_network(spec, model, exit)
    inputs = torch.randn(6, 3, 8, 8, dtype=torch.float64)
    getattr(model, mode)()
    getattr(plain, mode)()
    found = model.classify(model.advance(inputs, 0, exit), exit)
    torch.testing.assert_close(found, plain(inputs), rtol=1e-12, atol=1e-12)
    if mode == "train":
        torch.testing.assert_close(model.stages["1"][0].norm.statistics[str(exit)].mean, plain.norm.running_mean)


@pytest.mark.parametrize("family", SPECS)
@pytest.mark.parametrize("exits", [(1,), (2,), (3,), (1, 2), (1, 3), (1, 2, 3)])
def test_a_submodel_holds_what_is_covered_and_gives_the_logits_of_the_whole(family, exits):
    model = randomised(SPECS[family]).eval()
    submodel = model.submodel(*exits).eval()
    covered = take(model.state_dict(), model.coverage(*exits))
    assert {name: tensor.shape for name, tensor in submodel.state_dict().items()} == {
        name: tensor.shape for name, tensor in covered.items()
    }
    assert all(torch.equal(tensor, covered[name]) for name, tensor in submodel.state_dict().items())
    inputs = torch.randn(3, 3, 8, 8, dtype=torch.float64)
    for exit, logits, alone in zip(exits, submodel(inputs), (submodel(inputs, exit) for exit in exits), strict=True):
        torch.testing.assert_close(logits, model.classify(inputs, exit))
        torch.testing.assert_close(alone[0], logits)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for parameter in submodel.parameters():
        parameter.data.zero_()
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("family", SPECS)
def test_what_several_exits_cover_is_what_each_of_them_covers(family):
    model = randomised(SPECS[family])
    for exits in ((1, 2), (1, 3), (1, 2, 3)):
        marked = {name: torch.zeros_like(tensor) for name, tensor in model.state_dict().items()}
        for exit in exits:
            for part in take(marked, model.coverage(exit)).values():
                part.fill_(1)
        together = take(marked, model.coverage(*exits))
        assert sum(float(tensor.sum()) for tensor in marked.values()) == sum(
            tensor.numel() for tensor in together.values()
        )
        assert all(bool((part == 1).all()) for part in together.values())


@pytest.mark.parametrize("family", SPECS)
def test_training_an_exit_gives_no_gradient_beyond_what_it_covers(family):
    model = randomised(SPECS[family])
    model.classify(torch.randn(4, 3, 8, 8, dtype=torch.float64), 2).sum().backward()
    for name, parameter in model.named_parameters():
        reached = torch.zeros_like(parameter)
        if name in model.coverage(2):
            reached[model.coverage(2)[name]] = 1
        if parameter.grad is not None:
            assert not (parameter.grad * (1 - reached)).any(), name


def test_no_two_exits_share_statistics():
    model = randomised(SLIM)
    statistics = [{name for name in model.coverage(exit) if "statistics" in name} for exit in (1, 2, 3)]
    assert all(statistics)
    assert not statistics[0] & statistics[1]
    assert not statistics[1] & statistics[2]


def test_what_goes_up_is_the_input():
    model = randomised(SLIM)
    inputs = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    assert model.advance(inputs, 0, 3) is inputs


def test_costs_are_those_of_the_plain_networks():
    model = build_model(SLIM, (3, 8, 8), 5, seed=0)
    costs = exit_costs(model, (3, 8, 8))
    for exit, cost in enumerate(costs, start=1):
        plain = plain_network(SLIM, model.double(), exit)
        assert cost.num_parameters == sum(parameter.numel() for parameter in plain.parameters())
    assert costs[0].multiply_adds < costs[1].multiply_adds < costs[2].multiply_adds


def test_the_scaler_divides_every_convolution_by_the_width():
    """In training and in service. Behind it stands a batch norm, which takes any factor out again but for epsilon."""
    plain, scaled = randomised(SLIM), randomised(replace(SLIM, scaler=True))
    features = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    for exit, width in enumerate(SLIM.widths, start=1):
        without = plain.stages["1"][0].conv(features, exit)
        torch.testing.assert_close(scaled.stages["1"][0].conv(features, exit), without / width)
        torch.testing.assert_close(
            scaled.train().classify(features, exit), plain.train().classify(features, exit), rtol=1e-2, atol=1e-2
        )


@pytest.mark.parametrize(
    ("share", "count", "expected"), [(0.3, 4, 2), (0.5, 4, 2), (0.2, 10, 2), (0.01, 4, 1), (1, 7, 7)]
)
def test_channels_are_rounded_up(share, count, expected):
    assert num_channels(share, count) == expected


def test_widths_are_spread_evenly_unless_given():
    assert SlimResNet().resolve(4).widths == (0.25, 0.5, 0.75, 1.0)


@pytest.mark.parametrize(
    ("spec", "fields", "sentence"),
    [
        (SlimResNet, {"widths": (0.5, 0.25, 1.0)}, "widths: must rise, from above 0 to 1; got [0.5, 0.25, 1.0]"),
        (SlimResNet, {"widths": (0.0, 1.0)}, "widths: must rise"),
        (SlimResNet, {"widths": (0.5, 0.75)}, "widths: must rise"),
        (SlimResNet, {"widths": (0.5, 1.0)}, "only 2 exits"),
        (DepthWidthResNet, {"exit_blocks": (1, 2)}, "exit_blocks: must rise"),
        (DepthWidthResNet, {"widths": (0.5, 1.0)}, "only 2 exits"),
        (DepthWidthResNet, {"width": 0}, "width: must be at least 1"),
    ],
)
def test_what_does_not_fit_is_refused_with_a_sentence(spec, fields, sentence):
    with pytest.raises(ConfigError) as caught:
        spec(**fields).resolve(3)
    assert sentence in str(caught.value)


@pytest.mark.parametrize("family", SPECS)
def test_images_below_8x8_are_refused(family):
    with pytest.raises(ValueError, match=f"{family} takes .* from 8x8 up"):
        build_model(SPECS[family], (1, 7, 7), 2, seed=0)
