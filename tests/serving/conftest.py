"""A bundle and a running tree, shared where tests do not change them."""

import pytest

from exitflow.serving.traffic.cluster import LocalCluster
from exitflow.topology.graph import Link, Node, Topology
from tests.serving.inprocess import ALL_UP
from tests.serving.small import make_bundle


@pytest.fixture(scope="session")
def bundle(tmp_path_factory):
    return make_bundle(tmp_path_factory.mktemp("bundle") / "small", blends_answers=True)


@pytest.fixture(scope="session")
def eager(tmp_path_factory):
    """device -> edge -> cloud, and all goes up."""
    return make_bundle(tmp_path_factory.mktemp("eager") / "b", ALL_UP)


@pytest.fixture(scope="session")
def two_parents(tmp_path_factory):
    nodes = (Node("device", 1, 10.0, (Link("left"), Link("right"))), Node("left", 2), Node("right", 2))
    return make_bundle(tmp_path_factory.mktemp("two") / "b", Topology(nodes))


@pytest.fixture(scope="session")
def tree(bundle, tmp_path_factory):
    """All seven nodes, without limits: the calibrated thresholds decide."""
    logs = tmp_path_factory.mktemp("logs")
    options = ["--set=control=threshold", "--set=forward=feature", "--set=forward_timeout=30"]
    with LocalCluster(bundle, options=options, logs=logs) as cluster:
        yield cluster
