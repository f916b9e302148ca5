"""Who answers, and who is asked: the rules of a node, shared by evaluation, simulation and serving. Needs no PyTorch.

The rules know no network, no thread and no clock of their own: time is an argument, or a `Clock` that is passed in.
"""

from exitflow.routing.confidence import (
    CONFIDENCES,
    GAIN,
    NUM_FEATURES,
    RANKINGS,
    ConfidenceKind,
    confidence,
    served_rates,
    serves,
    surest_first,
)

__all__ = [
    "CONFIDENCES",
    "GAIN",
    "NUM_FEATURES",
    "RANKINGS",
    "ConfidenceKind",
    "confidence",
    "served_rates",
    "serves",
    "surest_first",
]
