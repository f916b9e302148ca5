"""Line 12 of Algorithm 1 as the authors' published code has it, tensor by tensor, for exits nested in depth."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from exitflow.federated.types import Update


def step(
    value: Tensor,
    name: str,
    updates: Sequence[Update],
    exit_weights: Sequence[float],
    exit_samples: Sequence[float],
    *,
    freezes_heads: bool,
    multiplies_by_p: bool,
    takes_root_step: bool,
) -> Tensor:
    """The new value of one parameter, called stages.S.* or heads.E.*, from updates that train one exit each."""
    deepest = len(exit_weights)
    part, number = name.split(".")[0], int(name.split(".")[1])
    new = value.clone()
    for update in updates:
        (e,) = update.task.exits
        is_covered = e == number if part == "heads" else e >= number
        if not is_covered or (freezes_heads and part == "heads" and e < deepest):
            continue
        p = update.task.probability
        weight = exit_weights[e - 1] * update.num_samples / exit_samples[e - 1]
        weight = weight * p if multiplies_by_p else weight / p
        if takes_root_step and number == deepest:  # of its stage and of its head, which the root alone trains
            weight = 1.0
        new = new + weight * update.delta[name]
    return new
