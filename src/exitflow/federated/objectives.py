"""What the exits of a node learn from: the labels, and each other.

An objective gives the loss of each exit that a step trains, from the logits of all of them. A teacher's answer is
taken as it is: no gradient flows into it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import Tensor
from torch.nn import functional as F

from exitflow.federated.training_spec import OBJECTIVES, DistillationSpec, TrainingSpec
from exitflow.parts import load_part

Objective = Callable[[Sequence[Tensor], Tensor], list[Tensor]]  # logits of exits that rise, labels -> their losses


def distilled(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """T^2 KL(teacher || student), mean over the batch (Hinton et al., 2015)."""
    learned = F.log_softmax(student / temperature, dim=1)
    taught = F.log_softmax(teacher.detach() / temperature, dim=1)
    return F.kl_div(learned, taught, reduction="batchmean", log_target=True) * temperature**2


def from_labels(logits: Sequence[Tensor], labels: Tensor) -> list[Tensor]:
    """Every exit learns from the labels, by cross-entropy."""
    return [F.cross_entropy(each, labels) for each in logits]


def mutual(logits: Sequence[Tensor], labels: Tensor, how: DistillationSpec) -> list[Tensor]:
    """Labels, and the mean over all other exits (DepthFL: Kim et al., ICLR 2023)."""
    losses = from_labels(logits, labels)
    for index, student in enumerate(logits):
        teachers = [*logits[:index], *logits[index + 1 :]]
        for teacher in teachers:
            losses[index] = losses[index] + how.weight / len(teachers) * distilled(student, teacher, how.temperature)
    return losses


def from_deepest(logits: Sequence[Tensor], labels: Tensor, how: DistillationSpec) -> list[Tensor]:
    """Labels, and the deepest exit (ScaleFL: Ilhan et al., CVPR 2023)."""
    *others, deepest = from_labels(logits, labels)
    taught = zip(others, logits[:-1], strict=True)
    return [
        *(loss + how.weight * distilled(each, logits[-1], how.temperature) for loss, each in taught),
        deepest,
    ]


def soft_labels(logits: Sequence[Tensor], labels: Tensor, how: DistillationSpec) -> list[Tensor]:
    """The deepest learns from labels; the share `weight` of what the others learn is its answer, instead of the labels
    (FjORD: Horvath et al., NeurIPS 2021, with a share of 1)."""
    *others, deepest = from_labels(logits, labels)
    share = how.weight
    taught = zip(others, logits[:-1], strict=True)
    return [
        *((1 - share) * loss + share * distilled(each, logits[-1], how.temperature) for loss, each in taught),
        deepest,
    ]


def _ramp(round: int, length: float) -> float:
    """exp(-5 (1 - x)^2) while x, the share of the ramp that has passed, grows to 1 (DepthFL's own)."""
    return math.exp(-5 * max(0.0, 1 - (round - 1) / length) ** 2) if length else 1.0


_TAUGHT = {"mutual": mutual, "from-deepest": from_deepest, "soft-labels": soft_labels}


def make_objective(spec: TrainingSpec, round: int) -> Objective:
    """The objective that `spec` names, in this round."""
    distillation = spec.distillation
    if spec.objective.name not in OBJECTIVES:
        return load_part(spec.objective.name, key="training.objective.name")
    if spec.objective.name == "labels" or round <= distillation.start * spec.rounds:
        return from_labels
    objective = _TAUGHT[spec.objective.name]
    ramped = replace(distillation, weight=distillation.weight * _ramp(round, distillation.ramp * spec.rounds))
    return lambda logits, labels: objective(logits, labels, ramped)
