"""Callbacks: whoever wants to see every round of a training, or to end it early.

A callback is called after each round, once the round is safely on disk. Where one gives True, training ends there: the
run can be evaluated and exported as it stands, and `resume` goes on with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from exitflow.config import require
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


def load_callbacks(callbacks: Sequence[Part]) -> tuple[Callback, ...]:
    """Functions as they are; others by name: a tracker of ours, or `module:function`."""
    parts = isinstance(callbacks, list | tuple) and all(isinstance(each, str) or callable(each) for each in callbacks)
    require(parts, "callbacks", f"expected a list of functions or of their names, got {callbacks!r}")
    return tuple(_load_callback(each) if isinstance(each, str) else each for each in callbacks)


def _load_callback(name: str) -> Callback:
    check_part("callback", name, TRACKERS, "callback")
    return TRACKERS[name] if name in TRACKERS else load_part(name, key="callback")


def tensorboard(done: RoundDone) -> None:
    """Keep the figures for TensorBoard, in the folder `tensorboard` of the run."""
    writer = _tensorboard_writer(str(done.run.path / "tensorboard"))
    for name, value in done.record.figures():
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
    named = {name.replace("/", ".").replace(" ", "_").replace(":", "."): value for name, value in done.record.figures()}
    tracking.log_metrics(named, step=done.round)


TRACKERS: dict[str, Callback] = {"tensorboard": tensorboard, "mlflow": mlflow}
