"""Train one early-exit network across devices, edge servers and cloud, for the traffic each of them will serve.

    >>> from exitflow import load_system, serving_plan
    >>> system = load_system("paper-7:80-15-5")
    >>> serving_plan(system.topology).exit_share.round(2).tolist()
    [0.8, 0.15, 0.05]

Then `train(system, "runs/first")` gives a Run, and `evaluate(run)` its accuracy as served.
Names are loaded when they are first used, so that planning does not wait for PyTorch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the same names as below, for type checkers and editors
    from exitflow.data.data_spec import DataSpec
    from exitflow.data.dataset import Dataset, Preparation, Split
    from exitflow.data.lazy import from_torch
    from exitflow.errors import ConfigError, DataError, ExitflowError, MissingExtraError, RunError, TrainingError
    from exitflow.evaluation.accuracy import Evaluation
    from exitflow.evaluation.outputs import ExitOutputs
    from exitflow.federated.aggregation import Aggregation, aggregate
    from exitflow.federated.options.federation_spec import FederationSpec
    from exitflow.federated.training_spec import (
        DistillationSpec,
        ObjectiveSpec,
        OptimiserSpec,
        ScheduleSpec,
        TrainingSpec,
    )
    from exitflow.federated.types import ServerState, Update
    from exitflow.federated.weighting import ExitProfile
    from exitflow.models.backbones import TimmNetwork, TransformersNetwork
    from exitflow.models.nested import EarlyExitNetwork, NestedModel
    from exitflow.models.specs import (
        CommonNetwork,
        CustomModel,
        DepthWidthResNet,
        EarlyExitResNet,
        SeparateNetworks,
        SlimResNet,
    )
    from exitflow.runs.callbacks import RoundDone
    from exitflow.runs.comparison import Comparison, compare
    from exitflow.runs.explanation import Explanation, explain
    from exitflow.runs.methods import apply_method
    from exitflow.runs.runs import Run, evaluate
    from exitflow.runs.training import resume, train
    from exitflow.serving.node.device import Answer, Device
    from exitflow.system.system import System, load_system
    from exitflow.topology.graph import Link, Node, Topology
    from exitflow.topology.rates import NodeRates, ServingPlan, serving_plan
    from exitflow.topology.settings import with_setting

__version__ = "0.1.0"

_HOMES = {
    "exitflow.data.dataset": ("Dataset", "Preparation", "Split"),
    "exitflow.data.data_spec": ("DataSpec",),
    "exitflow.errors": (
        "ConfigError",
        "DataError",
        "ExitflowError",
        "MissingExtraError",
        "RunError",
        "TrainingError",
    ),
    "exitflow.evaluation.accuracy": ("Evaluation",),
    "exitflow.serving.node.device": ("Answer", "Device"),
    "exitflow.runs.comparison": ("Comparison", "compare"),
    "exitflow.runs.explanation": ("Explanation", "explain"),
    "exitflow.runs.methods": ("apply_method",),
    "exitflow.runs.runs": ("Run", "evaluate"),
    "exitflow.system.system": ("System", "load_system"),
    "exitflow.runs.training": ("resume", "train"),
    "exitflow.federated.options.federation_spec": ("FederationSpec",),
    "exitflow.federated.aggregation": ("Aggregation", "aggregate"),
    "exitflow.federated.training_spec": (
        "DistillationSpec",
        "ObjectiveSpec",
        "OptimiserSpec",
        "ScheduleSpec",
        "TrainingSpec",
    ),
    "exitflow.federated.types": ("ServerState", "Update"),
    "exitflow.federated.weighting": ("ExitProfile",),
    "exitflow.data.lazy": ("from_torch",),
    "exitflow.evaluation.outputs": ("ExitOutputs",),
    "exitflow.runs.callbacks": ("RoundDone",),
    "exitflow.models.nested": ("EarlyExitNetwork", "NestedModel"),
    "exitflow.models.specs": (
        "CommonNetwork",
        "CustomModel",
        "DepthWidthResNet",
        "EarlyExitResNet",
        "SeparateNetworks",
        "SlimResNet",
    ),
    "exitflow.models.backbones": ("TimmNetwork", "TransformersNetwork"),
    "exitflow.topology.graph": ("Link", "Node", "Topology"),
    "exitflow.topology.rates": ("NodeRates", "ServingPlan", "serving_plan"),
    "exitflow.topology.settings": ("with_setting",),
}
_EXTRA_OF = {"torch": "train", "safetensors": "train", "onnxruntime": "serve", "grpc": "serve"}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "Aggregation",
    "Answer",
    "CommonNetwork",
    "Comparison",
    "ConfigError",
    "CustomModel",
    "DataError",
    "DataSpec",
    "Dataset",
    "DepthWidthResNet",
    "Device",
    "DistillationSpec",
    "EarlyExitNetwork",
    "EarlyExitResNet",
    "Evaluation",
    "ExitOutputs",
    "ExitProfile",
    "ExitflowError",
    "Explanation",
    "FederationSpec",
    "Link",
    "MissingExtraError",
    "NestedModel",
    "Node",
    "NodeRates",
    "ObjectiveSpec",
    "OptimiserSpec",
    "Preparation",
    "RoundDone",
    "Run",
    "RunError",
    "ScheduleSpec",
    "SeparateNetworks",
    "ServerState",
    "ServingPlan",
    "SlimResNet",
    "Split",
    "System",
    "TimmNetwork",
    "Topology",
    "TrainingError",
    "TrainingSpec",
    "TransformersNetwork",
    "Update",
    "__version__",
    "aggregate",
    "apply_method",
    "compare",
    "evaluate",
    "explain",
    "from_torch",
    "load_system",
    "resume",
    "serving_plan",
    "train",
    "with_setting",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'exitflow' has no attribute {name!r}")
    try:
        module = importlib.import_module(_HOME_OF[name])
    except ModuleNotFoundError as error:
        if error.name in _EXTRA_OF:
            from exitflow.errors import MissingExtraError

            raise MissingExtraError(error.name, _EXTRA_OF[error.name]) from None
        raise
    return getattr(module, name)


def __dir__() -> list[str]:
    return __all__
