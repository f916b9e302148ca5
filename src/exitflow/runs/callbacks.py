"""Callbacks: whoever wants to see every round of a training, or to end it early.

A callback is called after each round, once the round is safely on disk. Where one gives True, training ends there: the
run can be evaluated and exported as it stands, and `resume` goes on with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from exitflow.errors import MissingExtraError
from exitflow.federated.types import ServerState
from exitflow.parts import Part, check_part, load_part
from exitflow.runs.records import Record

if TYPE_CHECKING:
    from exitflow.runs.runs import Run


@dataclass(frozen=True)
class RoundDone:
    """What a callback is told."""

    round: int  # from 1
    record: Record  # the line that rounds.jsonl has of it
    state: ServerState  # the global model after it
    run: Run


Callback = Callable[[RoundDone], bool | None]  # True: end the training here


def load_callbacks(callbacks: Iterable[Part]) -> tuple[Callback, ...]:
    """Functions as they are; others by name: a tracker of ours, or `module:function`."""
    return tuple(_load_callback(each) if isinstance(each, str) else each for each in callbacks)


def _load_callback(name: str) -> Callback:
    check_part("callback", name, TRACKERS, "callback")
    return TRACKERS[name] if name in TRACKERS else load_part(name, key="callback")


def figures(record: Record) -> Iterator[tuple[str, float]]:
    """The figures of a round by name, as a tracker shows them; what was not measured in it is left out."""
    yield from ((f"loss/exit {exit}", loss) for exit, loss in record["losses"].items())
    yield from ((f"weight/exit {exit}", weight) for exit, weight in enumerate(record["exit_weights"], start=1))
    yield "seconds", record["seconds"]
    if validation := record["validation"]:
        yield "validation/accuracy as served", validation["accuracy"]
        for exit, accuracy in enumerate(validation["exit_accuracy"], start=1):
            yield f"validation/exit {exit}", accuracy
        yield from ((f"validation/{name}", value) for name, value in validation.get("metrics", {}).items())


def tensorboard(done: RoundDone) -> None:
    """Keep the figures for TensorBoard, in the folder `tensorboard` of the run."""
    writer = _tensorboard_writer(str(done.run.path / "tensorboard"))
    for name, value in figures(done.record):
        writer.add_scalar(name, value, done.round)
    writer.close()


def _tensorboard_writer(folder: str) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise MissingExtraError("tensorboard", "tensorboard") from None
    return SummaryWriter(folder)


def mlflow(done: RoundDone) -> None:
    """Send the figures to MLflow: to its active run, or to one that begins with the first round."""
    try:
        import mlflow as tracking
    except ImportError:
        raise MissingExtraError("mlflow", "mlflow") from None
    if tracking.active_run() is None:
        tracking.start_run(run_name=done.run.path.name)
        tracking.log_params({"system": done.run.system.name, "weighting": done.run.system.training.weighting_name})
    named = {name.replace("/", ".").replace(" ", "_").replace(":", "."): value for name, value in figures(done.record)}
    tracking.log_metrics(named, step=done.round)


TRACKERS: dict[str, Callback] = {"tensorboard": tensorboard, "mlflow": mlflow}
