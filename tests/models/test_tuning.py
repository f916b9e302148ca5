"""What is trained is what travels: the state of a training holds nothing that is frozen."""

from dataclasses import replace

import pytest
import torch

from exitflow.errors import ConfigError
from exitflow.federated.training_spec import TrainingSpec
from exitflow.models.backbones import TimmNetwork
from exitflow.models.build import build_model
from exitflow.models.specs import SlimResNet
from exitflow.models.tuning import merged, trained_parameters, trained_tensors, training_mode
from exitflow.runs.runs import Run
from exitflow.runs.training import resume, train
from exitflow.serving.bundle.export import Trained, export_bundle
from exitflow.system.assembly import Assembly
from exitflow.tensors import num_bytes
from tests.small import image_dataset, tiny_system

pytestmark = pytest.mark.heavy

DATA = image_dataset(96)
CONVOLUTIONS = TimmNetwork(name="test_efficientnet", image_size=32, exit_blocks=(2, 4, 5))
TRANSFORMER = TimmNetwork(name="test_vit", image_size=32)


def network(tuned, spec=CONVOLUTIONS):
    return build_model(spec.resolve(3), (1, 32, 32), 3, seed=0, tuned=tuned)


def system(tuned, spec=CONVOLUTIONS, *more):
    made = tiny_system("training.rounds=2", "training.local_steps=2", f"training.tune={tuned}", *more)
    return replace(made, model=spec)


def test_all_of_a_network_is_trained_unless_it_is_said():
    assert trained_tensors(network("full")).keys() == network("full").state_dict().keys()


def test_of_a_frozen_trunk_only_heads_are_trained():
    assert {name.split(".")[0] for name in trained_tensors(network("heads"))} == {"heads"}


def test_from_a_block_on_everything_is_trained_with_its_statistics():
    some = network("from:4")  # block 4 is the second of the second stage
    units = {name.rsplit(".", 1)[0] for name in trained_tensors(some) if name.startswith("stages.")}
    assert {".".join(unit.split(".")[:3]) for unit in units} == {"stages.2.1", "stages.3.0", "stages.3.1", "stages.3.2"}
    trained = {name for name in trained_tensors(some) if name.startswith("stages.2.1.")}
    assert trained == {name for name in some.state_dict() if name.startswith("stages.2.1.")}


def test_frozen_parts_stay_in_evaluation_mode_while_the_others_train():
    some = network("from:4")
    before = {name: buffer.clone() for name, buffer in some.named_buffers()}
    training_mode(some)
    carry = some.advance(torch.randn(8, 1, 32, 32), 0, 3)
    changed = {name for name, buffer in some.named_buffers() if not torch.equal(buffer, before[name])}
    assert carry.requires_grad
    assert changed
    assert changed <= trained_tensors(some).keys()


@pytest.mark.parametrize("spec", [CONVOLUTIONS, TRANSFORMER], ids=["convolutions", "transformer"])
def test_adapters_are_trained_alone_and_merged_they_answer_the_same(spec):
    adapted = network("lora:2", spec).eval()
    trained = trained_parameters(adapted)
    assert all("lora_" in name or name.startswith("heads.") for name in trained)
    assert any("lora_" in name for name in trained)
    with torch.no_grad():
        for param in trained.values():
            param.add_(0.1 * torch.randn(param.shape, generator=torch.Generator().manual_seed(0)))
        inputs = torch.randn(4, 1, 32, 32)
        plain = merged(adapted)
        for exit in (1, 2, 3):
            torch.testing.assert_close(
                plain.submodel(exit)(inputs), adapted.submodel(exit)(inputs), rtol=1e-4, atol=1e-4
            )
    assert plain.state_dict().keys() == network("full", spec).state_dict().keys()


@pytest.mark.parametrize("tuned", ["heads", "from:4", "lora:2"])
def test_a_round_carries_what_is_trained_and_nothing_else(tmp_path, tuned):
    made = system(tuned)
    run = train(made, tmp_path / "run", dataset=DATA)
    model = Assembly(made, DATA).model
    carried = trained_tensors(model)
    through = {link.split("->")[1] for link in run.records[-1].link_bytes}  # these pass on what others send
    for link, sent in run.records[-1].link_bytes.items():
        node = link.split("->")[0]
        if node in through:
            continue
        covered = model.coverage(*range(1, made.topology.by_name[node].exit + 1))
        assert sent == num_bytes({name: tensor for name, tensor in carried.items() if name in covered})
    stopped = train(replace(made, training=replace(made.training, rounds=1)), tmp_path / "one", dataset=DATA)
    before, after = stopped.state().tensors, run.state().tensors
    assert before.keys() == after.keys() == model.state_dict().keys()
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved
    assert moved <= carried.keys()


def test_a_run_of_a_frozen_trunk_is_whole_without_the_file_that_its_weights_came_from(tmp_path):
    torch.save(named_by_timm(), tmp_path / "weights.pth")
    spec = replace(CONVOLUTIONS, weights=str(tmp_path / "weights.pth"), mean=(0.5,), std=(0.5,))
    run = train(system("heads", spec), tmp_path / "run", dataset=DATA, backend="processes", workers=2)
    assert run.system.model.weights_sha256
    expected = run.outputs(DATA).logits
    (tmp_path / "weights.pth").unlink()
    again = Run(tmp_path / "run")
    assert (again.outputs(DATA).logits == expected).all()
    with pytest.raises(ConfigError, match=r"weights.pth: cannot be read: No such file.*nothing is fetched"):
        Assembly(run.system, DATA).model  # noqa: B018
    topology = run.system.topology
    export_bundle(
        Trained("x", again.model(DATA), Assembly(again.system, DATA).dataset, topology, "", True), tmp_path / "b"
    )


def named_by_timm():
    from exitflow.models.timm_networks import import_timm

    whole = import_timm().create_model("test_efficientnet")
    return whole.state_dict()


@pytest.mark.parametrize("tuned", ["head", "from:0", "from:", "lora:x", "lora", ""])
def test_a_way_to_tune_that_is_none_is_refused(tuned):
    with pytest.raises(ConfigError, match='tune: must be "full", "heads", "from:N"'):
        TrainingSpec(tune=tuned)


def test_what_a_network_cannot_freeze_is_refused():
    with pytest.raises(ConfigError, match=r"training.tune: the network has 5 blocks, got 'from:6'"):
        network("from:6")
    with pytest.raises(
        ConfigError, match=r"training.tune: 'heads' is for networks that are cut into stages; SlimNetwork"
    ):
        build_model(SlimResNet(width=4).resolve(3), (1, 8, 8), 3, seed=0, tuned="heads")


def test_a_resumed_run_of_a_frozen_trunk_ends_with_the_same_bits(tmp_path):
    made = system("heads")

    def stop(rounds):
        if rounds >= 1.3:
            raise KeyboardInterrupt

    whole = train(made, tmp_path / "whole", dataset=DATA)
    with pytest.raises(KeyboardInterrupt):
        train(made, tmp_path / "cut", dataset=DATA, observer=stop)
    again = resume(tmp_path / "cut", dataset=DATA)
    for name, tensor in whole.state().tensors.items():
        assert torch.equal(tensor, again.state().tensors[name]), name
