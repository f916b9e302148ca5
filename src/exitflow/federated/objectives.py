"""What the exits of a node learn from: the labels, and each other.

An objective gives the loss of each exit that a step trains, from the logits of all of them. A teacher's answer is
taken as it is: no gradient flows into it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional as F

from exitflow.federated.training_spec import TrainingSpec

Objective = Callable[[Sequence[Tensor], Tensor], list[Tensor]]  # logits of exits that rise, labels -> their losses


@dataclass(frozen=True)
class Distillation:
    """How much, and how softly, exits learn from each other."""

    weight: float = 1.0
    temperature: float = 1.0

    def loss(self, student: Tensor, teacher: Tensor) -> Tensor:
        """T^2 KL(teacher || student), mean over the batch (Hinton et al., 2015)."""
        learned = F.log_softmax(student / self.temperature, dim=1)
        taught = F.log_softmax(teacher.detach() / self.temperature, dim=1)
        return F.kl_div(learned, taught, reduction="batchmean", log_target=True) * self.temperature**2


def from_labels(logits: Sequence[Tensor], labels: Tensor) -> list[Tensor]:
    """Every exit learns from the labels, by cross-entropy."""
    return [F.cross_entropy(each, labels) for each in logits]


def mutual(logits: Sequence[Tensor], labels: Tensor, distillation: Distillation) -> list[Tensor]:
    """Labels, and the mean over all other exits (DepthFL: Kim et al., ICLR 2023)."""
    losses = from_labels(logits, labels)
    for index, student in enumerate(logits):
        teachers = [*logits[:index], *logits[index + 1 :]]
        for teacher in teachers:
            losses[index] = losses[index] + distillation.weight / len(teachers) * distillation.loss(student, teacher)
    return losses


def from_deepest(logits: Sequence[Tensor], labels: Tensor, distillation: Distillation) -> list[Tensor]:
    """Labels, and the deepest exit (ScaleFL: Ilhan et al., CVPR 2023)."""
    *others, deepest = from_labels(logits, labels)
    taught = zip(others, logits[:-1], strict=True)
    return [*(loss + distillation.weight * distillation.loss(each, logits[-1]) for loss, each in taught), deepest]


def soft_labels(logits: Sequence[Tensor], labels: Tensor, distillation: Distillation) -> list[Tensor]:
    """The deepest learns from labels; the share `weight` of what the others learn is its answer, instead of the labels
    (FjORD: Horvath et al., NeurIPS 2021, with a share of 1)."""
    *others, deepest = from_labels(logits, labels)
    share = distillation.weight
    taught = zip(others, logits[:-1], strict=True)
    return [*((1 - share) * loss + share * distillation.loss(each, logits[-1]) for loss, each in taught), deepest]


def _ramp(round: int, length: float) -> float:
    """exp(-5 (1 - x)^2) while x, the share of the ramp that has passed, grows to 1 (DepthFL's own)."""
    return math.exp(-5 * max(0.0, 1 - (round - 1) / length) ** 2) if length else 1.0


_TAUGHT = {"mutual": mutual, "from-deepest": from_deepest, "soft-labels": soft_labels}


def make_objective(spec: TrainingSpec, round: int) -> Objective:
    """The objective that `spec` names, in this round."""
    if spec.objective == "labels" or round <= spec.distillation_start * spec.rounds:
        return from_labels
    objective = _TAUGHT[spec.objective]
    weight = spec.distillation_weight * _ramp(round, spec.distillation_ramp * spec.rounds)
    distillation = Distillation(weight, spec.distillation_temperature)
    return lambda logits, labels: objective(logits, labels, distillation)
