"""torchvision without its compiled operators.

timm and transformers import torchvision, which registers what its operators give for shapes as soon as it is
imported, and fails where the compiled operators cannot be loaded beside a PyTorch of another build. Nothing here
computes with them. So where they are missing, and only there, the schemas of the two that it asks for are registered.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys

import torch

_SCHEMAS = ("nms", "qnms")


@functools.cache
def with_operators() -> torch.library.Library | None:
    """Make torchvision importable; gives what was registered for it, None where nothing had to be."""
    if importlib.util.find_spec("torchvision") is None:
        return None
    try:
        importlib.import_module("torchvision")
    except RuntimeError as error:
        if "torchvision::" not in str(error):
            raise
    else:
        return None
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        del sys.modules[name]  # half imported
    library = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]
    for name in _SCHEMAS:
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")  # type: ignore[no-untyped-call]
    importlib.import_module("torchvision")
    return library
