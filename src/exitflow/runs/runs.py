"""Runs on disk, and what can be asked of them."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from exitflow.data.dataset import Dataset
from exitflow.errors import MissingExtraError, RunError
from exitflow.evaluation.accuracy import Evaluation, evaluate_plan
from exitflow.evaluation.blending import Blend, blended, fit_blends
from exitflow.evaluation.outputs import ExitOutputs, exit_outputs
from exitflow.federated.types import ServerState
from exitflow.models.layout import best_layout
from exitflow.models.nested import NestedModel
from exitflow.models.specs import without_weights
from exitflow.models.tuning import saved_tensors, trained_buffers, trained_parameters, trained_tensors
from exitflow.parts import Part, part_name
from exitflow.runs.arguments import check_dataset, check_device, checked_path
from exitflow.runs.callbacks import figures
from exitflow.runs.losses import TrainingLosses
from exitflow.runs.notebook import run_html
from exitflow.runs.run_dir import RunDir, load_state
from exitflow.runs.training_costs import TrainingCosts
from exitflow.system.assembly import Assembly, dataset_of, prepared_for
from exitflow.system.system import System, load_resolved, serving_as
from exitflow.tensors import Tensors, copy_into, load_tensors

if TYPE_CHECKING:
    from pandas import DataFrame


class Run:
    """A training on disk, finished or not."""

    def __init__(self, path: str | Path) -> None:
        self.directory = RunDir.open(path)

    @property
    def path(self) -> Path:
        """The directory of the run."""
        return self.directory.path

    @cached_property
    def system(self) -> System:
        """The system that was trained."""
        return load_resolved(self.directory.spec)

    @property
    def finished(self) -> bool:
        """Whether the training has ended, with a model."""
        return self.directory.finished

    @property
    def records(self) -> list[dict[str, Any]]:
        """The records of all rounds, in order."""
        return self.directory.records()

    @property
    def costs(self) -> TrainingCosts:
        """What all rounds so far have cost."""
        return TrainingCosts.of(self.records)

    @property
    def losses(self) -> TrainingLosses:
        """Which nodes' updates did not count in the rounds so far, and what went with them."""
        return TrainingLosses.of(self.records)

    def state(self) -> ServerState:
        """The trained model, or where an unfinished training stands."""
        if self.finished:
            return load_state(self.directory.model)
        if (state := self.directory.load_checkpoint()) is None:
            raise RunError(
                f"{self.path}: no round has been finished yet; go on with: exitflow train --resume {self.path}"
            )
        return state

    def to_pandas(self) -> DataFrame:
        """A row for each round, with its losses, weights and, where it was validated, accuracies."""
        try:
            import pandas
        except ModuleNotFoundError:
            raise MissingExtraError("pandas", "pandas") from None
        rows = [{"round": record["round"], **dict(figures(record))} for record in self.records]
        return pandas.DataFrame(rows).set_index("round") if rows else pandas.DataFrame()

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return run_html(self)

    def model(self, dataset: Dataset | None = None) -> NestedModel:
        """The network with its trained weights."""
        system = self.system
        if self.finished:  # what is saved then is whole, so the file that the weights once came from is not needed
            system = replace(system, model=without_weights(system.model))
        model = Assembly(system, self._dataset(dataset)).model
        return with_weights(model, self.state(), source=str(self.path))

    def outputs(self, dataset: Dataset | None = None, *, device: str = "cpu") -> ExitOutputs:
        """The answers of all exits on the test set: one pass, from which any serving setting can be evaluated."""
        check_device(device)
        dataset = self._dataset(dataset)
        return blended(self.own_outputs(dataset, device=device), self.blends(dataset, device=device))

    def validation_outputs(self, dataset: Dataset | None = None, *, device: str = "cpu") -> ExitOutputs:
        """The answers of all exits to validation data, as they are served: what thresholds and plans are made from."""
        dataset = self._dataset(dataset)
        validation = dataset.require("validation", "a plan from what a run's exits say")
        own = exit_outputs(self.model(dataset), validation, dataset.preparation, device=device)
        return blended(own, fit_blends(own)) if self.system.training.blends_answers else own

    def own_outputs(self, dataset: Dataset, *, device: str = "cpu") -> ExitOutputs:
        """What each exit says to the test set by itself."""
        dataset = self._dataset(dataset)
        test = dataset.require("test", "an evaluation")
        return exit_outputs(self.model(dataset), test, dataset.preparation, device=device)

    def _dataset(self, given: Dataset | None) -> Dataset:
        """As the model takes it."""
        return prepared_for(self.system, given) if given else dataset_of(self.system)

    def blends(self, dataset: Dataset, *, device: str = "cpu") -> tuple[Blend, ...]:
        """How exits answer together; none where each answers by itself."""
        if not self.system.training.blends_answers:
            return ()
        dataset = self._dataset(dataset)
        validation = dataset.require("validation", "a run whose exits answer together (training.answers)")
        return fit_blends(exit_outputs(self.model(dataset), validation, dataset.preparation, device=device))


def given_weights(source: Run | str | Path, model: NestedModel) -> ServerState:
    """The weights of a run, or of a file of weights by name, as what a training of `model` begins with."""
    if not isinstance(source, Run) and Path(source).is_file():
        given = load_tensors(Path(source))[0]
    else:
        source = source if isinstance(source, Run) else Run(source)
        given = source.state().tensors
        source = source.path
    params, buffers = trained_parameters(model), trained_buffers(model)
    if not _fits({**params, **buffers}, given):
        raise RunError(f"{source}: the weights to start with do not fit the model; they need its names and shapes")
    return ServerState(0, {name: given[name] for name in params}, {name: given[name] for name in buffers})


def _fits(wanted: Tensors, given: Tensors) -> bool:
    """Whether what is wanted is given, in its shape."""
    return all(name in given and given[name].shape == tensor.shape for name, tensor in wanted.items())


def check_fit(model: NestedModel, state: ServerState, *, source: str) -> None:
    """Refuse a state that is of another model: one has what is trained, and perhaps what is frozen too."""
    params, buffers = saved_tensors(model)
    if not _fits(trained_tensors(model), state.tensors) or not _fits(state.tensors, {**params, **buffers}):
        raise RunError(f"{source}: the weights do not fit the model in spec.toml")


def whole(model: NestedModel, state: ServerState) -> ServerState:
    """A state with what is frozen too."""
    params, buffers = saved_tensors(model)
    return ServerState(state.round, {**params, **state.params}, {**buffers, **state.buffers})


@torch.no_grad()
def with_weights(model: NestedModel, state: ServerState, *, source: str) -> NestedModel:
    """`model` with the tensors of `state`, in the layout in which it computes fastest."""
    check_fit(model, state, source=source)
    own, buffers = saved_tensors(model)
    copy_into({name: tensor for name, tensor in {**own, **buffers}.items() if name in state.tensors}, state.tensors)
    return model.to(memory_format=best_layout(model))  # type: ignore[call-overload, no-any-return]


def evaluate(
    run: Run | str | Path,
    *,
    serving: str | None = None,
    confidence: Part = "entropy",
    dataset: Dataset | None = None,
    outputs: ExitOutputs | None = None,
) -> Evaluation:
    """How accurately the run's system answers on test data, as planned or at another serving setting.

    `confidence` ranks what a node sees: "entropy", "max-softmax", "margin", or a function of (N, C) logits.
    `outputs`, from `run.outputs()`, saves the pass over the test set when one run is evaluated often.
    """
    run = run if isinstance(run, Run) else Run(checked_path(run))
    check_dataset(dataset)
    topology = run.system.topology
    if serving is not None:
        topology = serving_as(run.system, serving)
    kind = part_name("confidence", confidence)
    return evaluate_plan(outputs or run.outputs(dataset), topology, confidence_kind=kind)
