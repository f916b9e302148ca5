"""Systems that ship with the package: the paper's set-ups, as the tables of a system file."""

from __future__ import annotations

from typing import Any

from exitflow.config import encode
from exitflow.errors import ConfigError, suggestion
from exitflow.topology.paper_trees import PAPER_TREES, paper_tree

DEFAULT_SETTING = "80-15-5"

# Where the paper puts the exits (it counts the stem as the first block), and the size that each data set is given.
_PAPER_MODELS: dict[str, dict[str, Any]] = {
    "digits": {"width": 8, "exit_blocks": [1, 4, 8]},
    "cifar10": {"width": 64, "exit_blocks": [1, 4, 8]},
    "cifar100": {"width": 64, "exit_blocks": [4, 6, 8]},
}
_PAPER_TRAINING: dict[str, Any] = {
    "weighting": "serving-rate",
    "rounds": 100,
    "batch_size": 128,
    "learning_rate": 0.1,
    "schedule": {"name": "cosine", "final_learning_rate": 0.001},
    "optimiser": {"momentum": 0.9, "weight_decay": 5e-4},
    "server_step": "paper",
    "seed": 9,
}

# paper-7 and paper-17 train on the embedded digits; paper-7-cifar10 and so on, on CIFAR.
PRESETS = {
    f"paper-{num_nodes}{'' if data == 'digits' else '-' + data}": (num_nodes, data)
    for num_nodes in PAPER_TREES
    for data in _PAPER_MODELS
}


def preset(text: str) -> dict[str, Any]:
    """The tables of `NAME` or `NAME:SETTING`, such as paper-7:80-15-5."""
    name, _, setting = text.partition(":")
    if name not in PRESETS:
        raise ConfigError(f"there is no such file, and no preset {name!r}{suggestion(name, PRESETS)}", source=text)
    num_nodes, data = PRESETS[name]
    try:
        topology = paper_tree(num_nodes, setting or DEFAULT_SETTING)
    except ConfigError as error:
        raise error.within(source=text) from None
    batch_size = 32 if data == "digits" else _PAPER_TRAINING["batch_size"]
    return {
        "name": text,
        "nodes": [encode(node) for node in topology.nodes],
        "model": {"family": "early-exit-resnet", "strides": [1, 1, 2, 2], "heads": "gap"} | _PAPER_MODELS[data],
        "data": {"name": data},
        "training": _PAPER_TRAINING | {"batch_size": batch_size},
    }
