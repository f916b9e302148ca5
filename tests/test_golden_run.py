"""A refactoring must give the same numbers: a short training in float64 against figures kept on disk.

After a change that is meant to change them: `python -m tests.test_golden_run`, and say why in the commit.
"""

import json
from pathlib import Path

import pytest

from exitflow.federated.loop import run_rounds
from exitflow.federated.plan import TrainingPlan
from exitflow.federated.weighting import WEIGHTINGS
from exitflow.runs.backends import open_backend
from exitflow.system.assembly import Assembly, dataset_of
from tests.small import tiny_system

GOLDEN = Path(__file__).with_name("golden_run.json")
OVERRIDES = ("training.help_probability=0.2", "training.participation=0.9", "training.weighting=flops-prop")


def figures(folder: Path, server_step: str) -> dict:
    system = tiny_system(*OVERRIDES, f"training.server_step={server_step}")
    assembly = Assembly(system, dataset_of(system))
    assembly.model.double()
    nodes = [node.name for node in system.topology.nodes]
    plan = TrainingPlan(nodes, assembly.profile, WEIGHTINGS["flops-prop"], assembly.model.coverage, system.training)
    state, losses = assembly.initial_state(), []
    with open_backend("serial", assembly.trainer(folder), state) as backend:
        for state, report in run_rounds(plan, state, backend):
            losses.append({str(exit): values for exit, values in sorted(report.losses.items())})
    return {"losses": losses, "norms": {name: float(tensor.norm()) for name, tensor in sorted(state.tensors.items())}}


@pytest.mark.parametrize("server_step", ["paper", "coverage"])
def test_a_short_training_gives_the_figures_that_it_always_gave(tmp_path, server_step):
    expected, found = json.loads(GOLDEN.read_text())[server_step], figures(tmp_path, server_step)
    assert len(found["losses"]) == len(expected["losses"]) == 3
    for mine, theirs in zip(found["losses"], expected["losses"], strict=True):
        assert mine.keys() == theirs.keys()
        for exit in mine:
            assert mine[exit] == pytest.approx(theirs[exit], rel=1e-9)
    assert found["norms"] == pytest.approx(expected["norms"], rel=1e-9)


if __name__ == "__main__":
    both = {step: figures(Path("unused"), step) for step in ("paper", "coverage")}
    GOLDEN.write_text(json.dumps(both, indent=1) + "\n")
