import pytest
import torch
from torch import nn

from exitflow.errors import ConfigError
from exitflow.models.build import build_model
from exitflow.models.cost import exit_costs
from exitflow.models.nested import EarlyExitNetwork
from exitflow.models.specs import EarlyExitResNet


def build(spec: EarlyExitResNet, shape=(3, 32, 32), num_classes=10):
    return build_model(spec.resolve(len(spec.exit_blocks) or 3), shape, num_classes, seed=0)


@pytest.mark.parametrize(
    ("exit_blocks", "millions"), [((1, 4, 8), (77.7, 691.7, 1766.4)), ((4, 6, 8), (691.8, 1229.2, 1766.4))]
)
def test_costs_are_those_that_the_authors_report(exit_blocks, millions):
    """They count batch norm and pooling too, which is less than a percent."""
    spec = EarlyExitResNet(width=64, strides=(1, 1, 2, 2), exit_blocks=exit_blocks, heads="gap")
    costs = exit_costs(build(spec), (3, 32, 32))
    assert [cost.multiply_adds / 1e6 for cost in costs] == pytest.approx(list(millions), rel=0.01)


def test_cost_of_the_first_exit_by_hand():
    spec = EarlyExitResNet(width=4, blocks=(1, 1), strides=(1, 2), exit_blocks=(1, 2), heads="gap")
    first, second = exit_costs(build(spec, (1, 8, 8)), (1, 8, 8))
    stem, block = 1 * 4 * 9 * 64, 2 * 4 * 4 * 9 * 64
    assert first.multiply_adds == stem + block + 4 * 10
    convolutions, norms, head = 1 * 4 * 9 + 2 * 4 * 4 * 9, 3 * 2 * 4, 4 * 10 + 10
    assert first.num_parameters == convolutions + norms + head
    assert second.multiply_adds > first.multiply_adds


def test_a_submodel_gives_the_logits_of_the_whole_network_and_holds_only_what_is_covered():
    model = build(EarlyExitResNet(width=4, blocks=(1, 1, 1), strides=(1, 2, 2), exit_blocks=(1, 2, 3))).eval()
    inputs = torch.randn(2, 3, 32, 32)
    for exits in ((1,), (2,), (3,), (1, 3), (1, 2, 3)):
        submodel = model.submodel(*exits).eval()
        expected = [model.classify(model.advance(inputs, 0, exit), exit) for exit in exits]
        assert all(map(torch.equal, submodel(inputs), expected))
        assert len(submodel(inputs)) == len(exits)
        assert set(submodel.state_dict()) == set(model.coverage(*exits))
        assert set(model.coverage(*exits)) == set().union(*(model.coverage(exit) for exit in exits))


def test_the_stem_may_halve_the_image():
    spec = EarlyExitResNet(width=4, blocks=(1, 1), strides=(1, 2), exit_blocks=(1, 2), stem_stride=2)
    assert build(spec).advance(torch.zeros(1, 3, 32, 32), 0, 1).shape == (1, 4, 16, 16)


def test_advancing_exit_by_exit_is_advancing_at_once():
    model = build(EarlyExitResNet(width=4)).eval()
    inputs = torch.randn(2, 3, 32, 32)
    step_by_step = model.advance(model.advance(inputs, 0, 1), 1, 3)
    assert torch.equal(step_by_step, model.advance(inputs, 0, 3))


def test_training_an_exit_gives_no_gradient_beyond_it():
    model = build(EarlyExitResNet(width=4, blocks=(1, 1, 1), strides=(1, 2, 2), exit_blocks=(1, 2, 3)))
    model.classify(model.advance(torch.randn(2, 3, 32, 32), 0, 2), 2).sum().backward()
    reached = {name for name, param in model.named_parameters() if param.grad is not None}
    assert reached == {name for name in model.coverage(2) if name in dict(model.named_parameters())}


def test_the_last_exit_covers_everything_but_the_other_heads():
    model = build(EarlyExitResNet(width=4))
    uncovered = set(model.state_dict()) - set(model.coverage(3))
    assert uncovered == {f"heads.{exit}.2.{kind}" for exit in (1, 2) for kind in ("weight", "bias")}


@pytest.mark.parametrize(
    ("heads", "sizes"), [((), (16, 16, 1)), ("gap", (1, 1, 1)), (("gap", "grid", "gap"), (1, 16, 1))]
)
def test_heads_are_grid_at_the_shallow_exits_unless_said_otherwise(heads, sizes):
    model = build(EarlyExitResNet(width=4, heads=heads))
    channels = (4, 8, 32)
    inputs = [model.heads[str(exit)][2].in_features for exit in (1, 2, 3)]
    assert inputs == [channel * size for channel, size in zip(channels, sizes, strict=True)]


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 8, 8), (1, 28, 28), (3, 32, 32), (3, 33, 47)])
@pytest.mark.parametrize("heads", ["gap", "grid"])
def test_any_image_from_8x8_up(shape, heads):
    model = build(EarlyExitResNet(width=2, heads=heads), shape).eval()
    for exit in (1, 2, 3):
        assert model.submodel(exit).eval()(torch.zeros(2, *shape))[0].shape == (2, 10)


def test_images_below_8x8_are_refused():
    with pytest.raises(ValueError, match="from 8x8 up"):
        build(EarlyExitResNet(width=2), (1, 7, 7))


@pytest.mark.parametrize(
    ("num_exits", "blocks", "places"),
    [(1, (2, 2, 2, 2), (8,)), (2, (2, 2, 2, 2), (1, 8)), (3, (2, 2, 2, 2), (1, 4, 8)), (3, (1, 1, 1), (1, 2, 3))],
)
def test_exits_are_spread_over_the_blocks(num_exits, blocks, places):
    spec = EarlyExitResNet(blocks=blocks, strides=(1,) * len(blocks))
    assert spec.resolve(num_exits).exit_blocks == places


@pytest.mark.parametrize(
    ("fields", "num_exits", "sentence"),
    [
        ({"width": 0}, 3, "width: must be at least 1, got 0"),
        ({"blocks": ()}, 3, "blocks: each must be at least 1"),
        ({"strides": (1, 2)}, 3, "strides: one from 1 to 64 for each of the 4 stages"),
        ({"exit_blocks": (4, 1, 8)}, 3, "exit_blocks: must rise"),
        ({"exit_blocks": (1, 4, 7)}, 3, "to the last block, 8"),
        ({"exit_blocks": (1, 4, 8)}, 2, "the model has 3 exits, but no node stands at exit 3"),
        ({"exit_blocks": (1, 8)}, 3, "the deepest node stands at exit 3, but the model has only 2 exits"),
        ({"heads": ("gap",)}, 3, "heads: one for each of the 3 exits"),
        ({}, 9, "9 exits do not fit into 8 residual blocks"),
    ],
)
def test_what_does_not_fit_is_refused_with_a_sentence(fields, num_exits, sentence):
    with pytest.raises(ConfigError) as caught:
        EarlyExitResNet(**fields).resolve(num_exits)
    assert sentence in str(caught.value)


def test_the_seed_decides_the_initial_weights_and_leaves_the_global_state_alone():
    spec = EarlyExitResNet(width=2).resolve(3)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    one, same, other = (build_model(spec, (1, 8, 8), 10, seed=seed).state_dict() for seed in (1, 1, 2))
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert any(not torch.equal(one[name], other[name]) for name in one)


def test_every_stage_needs_a_head():
    with pytest.raises(ValueError, match="2 stages and 1 heads"):
        EarlyExitNetwork([nn.Identity(), nn.Identity()], [nn.Identity()])
