"""One forward pass through a network of the user's own: it finds most of what would fail in the middle of a training.

What training, evaluation and serving ask of a `NestedModel` is asked once, of each exit, for two inputs of zeros. The
first thing that does not fit is a ValueError of one sentence.
"""

from __future__ import annotations

import torch
from torch import Tensor

from exitflow.errors import one_line
from exitflow.models.nested import NestedModel
from exitflow.tensors import take

BATCH = 2  # inputs
TOLERANCE = 1e-3  # between two ways to compute the same logits


@torch.no_grad()
def check_network(model: NestedModel, input_shape: tuple[int, ...], num_classes: int) -> None:
    """Ask everything of `model` once."""
    num_exits = getattr(model, "num_exits", None)
    if type(num_exits) is not int or num_exits < 1:
        raise ValueError(f"num_exits must be a whole number from 1 on, got {num_exits!r}")
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    floats = [param.dtype for param in model.parameters() if param.dtype.is_floating_point]
    if not floats:
        raise ValueError("the network has no parameters, or none that are floats")
    for name, tensor in tensors.items():
        if not tensor.isfinite().all():
            raise ValueError(f"tensor {name!r} holds NaN or infinity before any training")
    training = model.training
    inputs = carry = torch.zeros(BATCH, *input_shape, dtype=floats[0])
    for exit in range(1, num_exits + 1):
        try:
            model.eval()
            carry = model.advance(carry, exit - 1, exit)
            logits = model.classify(carry, exit)
            _check_logits(logits, num_classes)
            _check_submodel(model, exit, inputs, logits, tensors)
        except Exception as error:
            said = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
            raise ValueError(f"exit {exit} of the network: {one_line(said)}") from None
        finally:
            model.train(training)


def _check_logits(logits: object, num_classes: int) -> None:
    if not isinstance(logits, Tensor):
        raise ValueError(f"classify gives {type(logits).__name__}, and logits are a tensor")
    if logits.shape != (BATCH, num_classes):
        expected = f"{[BATCH, num_classes]} for {BATCH} inputs and {num_classes} classes"
        raise ValueError(f"its logits have the shape {list(logits.shape)}, expected {expected}")
    if not logits.isfinite().all():
        raise ValueError("its logits for an input of zeros are NaN or infinity")


def _check_submodel(model: NestedModel, exit: int, inputs: Tensor, logits: Tensor, tensors: dict[str, Tensor]) -> None:
    """The network of one exit alone, as nodes train it, is what the exit covers, and says the same."""
    covered = model.coverage(exit)
    if unknown := sorted(covered.keys() - tensors.keys()):
        raise ValueError(f"coverage names {unknown[0]!r}, which is no tensor of the network")
    network = model.submodel(exit).eval()
    own = {**dict(network.named_parameters()), **dict(network.named_buffers())}
    expected = {name: part.shape for name, part in take(tensors, covered).items()}
    for name in sorted(own.keys() ^ expected.keys()):
        place = (
            "in its submodel, and not in its coverage" if name in own else "in its coverage, and not in its submodel"
        )
        raise ValueError(f"tensor {name!r} is {place}")
    for name, tensor in own.items():
        if tensor.shape != expected[name]:
            shapes = f"{list(tensor.shape)} in its submodel, and {list(expected[name])} in its coverage"
            raise ValueError(f"tensor {name!r} has the shape {shapes}")
    answers = network(inputs)
    if not isinstance(answers, tuple) or len(answers) != 1:
        raise ValueError("its submodel, called with inputs, must give a tuple of the logits of its exits")
    _check_logits(answers[0], num_classes=logits.shape[1])
    if not torch.allclose(answers[0], logits, rtol=TOLERANCE, atol=TOLERANCE):
        raise ValueError("its submodel gives other logits than advance and classify")
