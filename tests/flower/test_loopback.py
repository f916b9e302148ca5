"""A real federation on the loopback address: processes, TLS and keys of Flower's, our workers behind them."""

import pytest
import torch

from exitflow.federated.loop import run_rounds
from exitflow.flower.backend import FlowerBackend
from exitflow.flower.loopback import LocalFederation
from tests.federated.places.test_places import VARIANTS, assembled, final_state

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(600)]

NODES = [*(f"device-{index}" for index in range(4)), "edge-0", "edge-1", "cloud-0"]


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    folder = tmp_path_factory.mktemp("states")
    trainers = {run: assembled(VARIANTS[run], rounds=2)[0].trainer(folder / str(run)) for run in VARIANTS}
    started = LocalFederation(NODES, lambda header: trainers[header["run"]])
    yield started
    started.close()
    assert not started.folder.exists()


@pytest.mark.parametrize("variant", ["p=0", "p=0.2", "partial"])
def test_flower_gives_the_bits_of_serial(variant, federation, tmp_path):
    expected, losses, _ = final_state("serial", None, VARIANTS[variant], tmp_path, rounds=2)
    assembly, plan = assembled(VARIANTS[variant], rounds=2)
    backend = FlowerBackend(federation.courier, federation.stations, plan.coverage, variant, assembly.samples)
    state, found = assembly.initial_state(), []
    for state, report in run_rounds(plan, state, backend):
        found.append(report.losses)
    assert all(torch.equal(expected.tensors[name], state.tensors[name]) for name in expected.tensors)
    assert found == losses
