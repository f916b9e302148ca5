"""From a trained network to a bundle. Needs PyTorch and onnx: the extra [export]."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from exitflow.data.dataset import Dataset, Split
from exitflow.errors import ConfigError
from exitflow.evaluation.blending import blended, fit_blends
from exitflow.evaluation.outputs import exit_outputs
from exitflow.models.cost import exit_costs
from exitflow.models.nested import NestedModel
from exitflow.models.tuning import merged
from exitflow.serving.bundle.assembling import LabelledInputs, Parts, assemble, check_place
from exitflow.serving.bundle.bundle import Manifest
from exitflow.serving.bundle.onnx_segments import export_segments, quantise_segments
from exitflow.topology.graph import Topology

MAX_CALIBRATION = 1000  # validation samples that set the ranges of int8


@dataclass(frozen=True)
class Trained:
    """A network with what it was trained for."""

    name: str
    model: NestedModel
    dataset: Dataset
    topology: Topology
    system_toml: str  # node by node
    blends_answers: bool = False  # whether an exit answers together with those before it


def export_bundle(
    trained: Trained,
    out: str | Path,
    *,
    precision: str = "fp32",
    confidence: str = "entropy",
    replace: bool = False,
) -> Manifest:
    """Write the bundle into the new directory `out`; with `replace`, in place of the bundle that is there."""
    out = Path(out)
    check_place(out, replace=replace)
    dataset, model = trained.dataset, merged(trained.model)
    test = dataset.require("test", "a bundle")  # what it costs against PyTorch is told
    reference = exit_outputs(model, test, dataset.preparation)
    if trained.blends_answers:
        validation = dataset.require("validation", "a bundle whose exits answer together (training.answers)")
        reference = blended(reference, fit_blends(exit_outputs(model, validation, dataset.preparation)))
    examples = _raw(dataset.held_out.tensor)
    segments = export_segments(model, examples, dataset.preparation)
    if precision == "int8":
        segments = quantise_segments(segments, examples[:MAX_CALIBRATION].numpy())
    totals = [0, *(cost.multiply_adds for cost in exit_costs(model, dataset.prepared_shape))]
    parts = Parts(
        name=trained.name,
        topology=trained.topology,
        system_toml=trained.system_toml,
        segments=[segment.SerializeToString() for segment in segments],
        multiply_adds=[max(after - before, 0) for before, after in pairwise(totals)],
        validation=_labelled(dataset.held_out),
        test=_labelled(dataset.test),
        confidence=confidence,
        precision=precision,
        blends_answers=trained.blends_answers,
    )
    return assemble(parts, out, reference=reference)


def _raw(inputs: Tensor) -> Tensor:
    if inputs.dtype == torch.uint8:
        return inputs
    if not inputs.is_floating_point():
        raise ConfigError(f"inputs must be bytes or floats to be served, these are {inputs.dtype}", key="data")
    return inputs.float()


def _labelled(split: Split) -> LabelledInputs:
    return LabelledInputs(_raw(split.tensor).numpy(), split.labels.numpy().astype(np.int64))
