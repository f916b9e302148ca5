"""What earlier versions have written is read as if this one had: a run, one that was cut off, and a bundle.

The archive was made with commit 8e8abe3: a tiny network on digits, with momentum and residuals kept between rounds.
"""

import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch

from exitflow.runs.runs import Run, evaluate
from exitflow.runs.training import resume
from exitflow.serving.bundle.bundle import load_bundle
from exitflow.serving.bundle.engine import Engine


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made")
    with tarfile.open(Path(__file__).with_name("made_with_8e8abe3.tar.xz")) as archive:
        archive.extractall(folder, filter="data")
    return folder


def test_a_run_is_read_and_evaluated(made):
    run = Run(made / "finished")
    assert run.finished
    assert [record.round for record in run.records] == [1, 2, 3]
    assert run.system.training.optimiser.momentum_between_rounds == "keep"
    assert run.costs.bytes_sent == 48576
    assert run.losses.sentences() == []
    assert evaluate(run).accuracy == pytest.approx(0.13)


def test_a_run_that_was_cut_off_ends_with_the_bits_that_it_would_have_had(made):
    whole, cut = Run(made / "finished").state().tensors, resume(made / "cut-off").state().tensors
    assert whole.keys() == cut.keys()
    assert all(torch.equal(whole[name], cut[name]) for name in whole)


def test_a_bundle_answers_as_the_run_that_it_was_made_from(made):
    bundle, run = load_bundle(made / "bundle"), Run(made / "finished")
    assert bundle.topology == run.system.topology
    samples = bundle.samples()
    answers = [logits for _, logits in Engine(bundle.segments).trace(samples.inputs)]
    assert np.allclose(answers, samples.outputs.logits, atol=1e-4)
    expected = run.outputs().logits[:, : len(samples.inputs)]
    assert np.allclose(answers, expected, atol=1e-4)
