import doctest
import importlib

import exitflow

PUBLIC = {
    "Answer",
    "Device",
    "from_torch",
    "aggregate",
    "Update",
    "ServerState",
    "ScheduleSpec",
    "RoundDone",
    "OptimiserSpec",
    "ObjectiveSpec",
    "ExitProfile",
    "ExitOutputs",
    "DistillationSpec",
    "Aggregation",
    "CommonNetwork",
    "Comparison",
    "ConfigError",
    "CustomModel",
    "DataError",
    "DataSpec",
    "Dataset",
    "DepthWidthResNet",
    "EarlyExitNetwork",
    "EarlyExitResNet",
    "Evaluation",
    "ExitflowError",
    "FederationSpec",
    "Explanation",
    "Link",
    "MissingExtraError",
    "NestedModel",
    "Node",
    "NodeRates",
    "Preparation",
    "Run",
    "RunError",
    "SeparateNetworks",
    "ServingPlan",
    "SlimResNet",
    "Split",
    "System",
    "TimmNetwork",
    "Topology",
    "TrainingError",
    "TrainingSpec",
    "TransformersNetwork",
    "__version__",
    "apply_method",
    "compare",
    "evaluate",
    "explain",
    "load_system",
    "resume",
    "serving_plan",
    "train",
    "with_setting",
}


def test_the_public_names_are_these():
    assert set(exitflow.__all__) == PUBLIC
    assert dir(exitflow) == exitflow.__all__


def test_every_public_name_is_there_and_documented():
    for name in PUBLIC - {"__version__"}:
        assert getattr(exitflow, name).__doc__, name


def test_a_name_that_is_not_public_is_an_attribute_error():
    assert not hasattr(exitflow, "nonsense")


def test_the_example_in_the_documentation_is_true():
    assert doctest.testmod(importlib.import_module("exitflow")).failed == 0
