import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from exitflow.federated.options.compression import Compression
from exitflow.federated.options.federation_spec import FederationSpec
from exitflow.runs.training import train
from exitflow.tensors import pack, unpack
from tests.small import image_dataset, task_of, tiny_system

KINDS = ["fp16", "int8", "top-k"]


def compression(kind, fraction=0.25):
    return Compression.of(FederationSpec(compression=kind, top_k_fraction=fraction))


@pytest.mark.parametrize("kind", KINDS)
@given(values=st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=40))
def test_a_rounded_update_survives_the_wire_to_the_bit(kind, values):
    delta = {"w": torch.tensor(values), "e": torch.zeros(2, 3)}
    rounded = compression(kind).rounded(delta)
    sent = unpack(pack(compression(kind).encoded(rounded)))
    found = compression(kind).decoded(sent, delta)
    assert all(torch.equal(found[name], rounded[name]) for name in delta)


def test_rounding_is_as_near_as_the_kind_allows():
    delta = {"w": torch.randn(1000, generator=torch.Generator().manual_seed(0))}
    assert (compression("fp16").rounded(delta)["w"] - delta["w"]).abs().max() <= 2**-11 * delta["w"].abs().max()
    assert (compression("int8").rounded(delta)["w"] - delta["w"]).abs().max() <= delta["w"].abs().max() / 127
    kept = compression("top-k", 0.1).rounded(delta)["w"]
    assert int((kept != 0).sum()) == 100
    assert kept.abs()[kept != 0].min() >= delta["w"][kept == 0].abs().max()


def test_bytes_shrink():
    delta = {"w": torch.randn(100, 100)}
    plain = len(pack(delta))
    sizes = {kind: len(pack(compression(kind, 0.05).encoded(compression(kind, 0.05).rounded(delta)))) for kind in KINDS}
    assert sizes["fp16"] < 0.51 * plain
    assert sizes["int8"] < 0.26 * plain
    assert sizes["top-k"] < 0.11 * plain


@pytest.mark.parametrize(
    ("kind", "parts", "problem"),
    [
        ("fp16", {"w": torch.zeros(3)}, "is torch.float32 instead of torch.float16"),
        ("fp16", {"w": torch.zeros(4).half()}, "has shape"),
        ("fp16", {"x": torch.zeros(3).half()}, "not those asked for: w, x"),
        ("int8", {"w": torch.zeros(3, dtype=torch.int8)}, "cannot be read"),
        ("top-k", {"w": torch.ones(1), "w\x1fplaces": torch.tensor([3], dtype=torch.int32)}, "outside of its shape"),
        ("top-k", {"w": torch.ones(1), "w\x1fplaces": torch.tensor([-1], dtype=torch.int32)}, "outside of its shape"),
        ("top-k", {"w": torch.ones(2), "w\x1fplaces": torch.tensor([1], dtype=torch.int32)}, "outside of its shape"),
    ],
)
def test_what_does_not_fit_is_refused(kind, parts, problem):
    with pytest.raises(ValueError, match=problem):
        compression(kind).decoded(parts, {"w": torch.zeros(3)})


@pytest.mark.parametrize("kind", ["int8", "top-k"])
def test_what_is_lost_comes_with_later_updates(kind, tmp_path):
    """The sum of what was sent, plus the last residual, is the sum of what was trained."""
    from exitflow.system.assembly import Assembly

    assembly = Assembly(tiny_system(f"federation.compression={kind}", "training.rounds=10"), image_dataset(96))
    plain = Assembly(tiny_system("training.rounds=10"), image_dataset(96)).trainer(tmp_path / "plain" / "nodes")
    trainer, state = assembly.trainer(tmp_path / "run" / "nodes"), assembly.initial_state()
    trained, sent = 0.0, 0.0
    for round in range(1, 5):
        task = task_of(round, "device-0", 1, 1.0, round)
        trained += torch.cat([t.flatten() for t in plain.train(state, task).delta.values()])
        sent += torch.cat([t.flatten() for t in trainer.train(state, task).delta.values()])
    residual = trainer.residuals.load(task_of(5, "device-0", 1, 1.0, 0))
    left = torch.cat([residual[name].flatten() for name in trainer.train(state, task).delta])
    torch.testing.assert_close(sent + left, trained, rtol=1e-4, atol=1e-6)
    assert not torch.allclose(sent, trained, rtol=1e-4, atol=1e-6)


@pytest.mark.heavy
@pytest.mark.parametrize("kind", KINDS)
def test_compressed_training_is_the_same_on_every_backend(kind, tmp_path):
    system = tiny_system(f"federation.compression={kind}")
    serial = train(system, tmp_path / "serial", dataset=image_dataset(96)).state()
    processes = train(system, tmp_path / "processes", dataset=image_dataset(96), backend="processes", workers=2).state()
    plain = train(tiny_system(), tmp_path / "plain", dataset=image_dataset(96)).state()
    assert all(torch.equal(serial.tensors[name], processes.tensors[name]) for name in serial.tensors)
    assert not all(torch.equal(serial.params[name], plain.params[name]) for name in serial.params)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_arrives_as_such(kind, bad):
    """It is not rounded, and the loop drops it or stops, whatever the backend."""
    delta = {"w": torch.tensor([1.0, bad, 0.5])}
    sent = unpack(pack(compression(kind).encoded(delta)))
    back = compression(kind).decoded(sent, delta)
    assert not torch.isfinite(back["w"]).all()


def test_the_smallest_numbers_are_rounded_to_numbers():
    tiny = {"w": torch.tensor([1e-44, 0.0])}
    rounded = compression("int8").rounded(tiny)
    assert torch.isfinite(rounded["w"]).all()
    found = compression("int8").decoded(compression("int8").encoded(rounded), tiny)
    assert torch.equal(found["w"], rounded["w"])
