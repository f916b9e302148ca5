from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from exitflow.data.data_spec import DataSpec
from exitflow.data.partition import layer_shares, node_samples, partition
from exitflow.errors import ConfigError
from exitflow.topology.graph import Tier, Topology, expand_tiers
from exitflow.topology.paper_trees import paper_tree
from tests.small import topologies


@pytest.mark.parametrize(
    ("num_nodes", "kind", "device", "edge", "cloud"),
    [
        (7, "equal", 3750, 7500, 15000),
        (17, "equal", 1250, 3750, 15000),
        (7, "highly-biased", 384, 4480, 34504),
    ],
)
def test_node_sizes_are_those_of_the_paper(num_nodes, kind, device, edge, cloud):
    counts = node_samples(paper_tree(num_nodes, "80-15-5"), layer_shares(kind, 3), 45000)
    by_tier = {name.split("-")[0]: count for name, count in counts.items()}
    assert by_tier == {"device": device, "edge": edge, "cloud": cloud}
    assert sum(counts.values()) == 45000


def test_samples_that_do_not_divide_stay_in_their_layer():
    """The paper leaves two of the 45,000 images unused: 4 x 1,607, 2 x 6,428 and 25,714."""
    counts = node_samples(paper_tree(7, "80-15-5"), layer_shares("biased", 3), 45000)
    assert counts == {
        **dict.fromkeys(("device-0", "device-1", "device-2", "device-3"), 1607),
        "edge-0": 6429,
        "edge-1": 6428,
        "cloud-0": 25715,
    }


@pytest.mark.parametrize(("num_devices", "each"), [(150, {2, 3}), (401, {0, 1})])
def test_many_devices_keep_all_the_samples_of_their_layer(num_devices, each):
    tiers = [Tier("device", num_devices, exit=1, arrival_rate=1.0), Tier("edge", 1, exit=2), Tier("cloud", 1, exit=3)]
    counts = node_samples(Topology(expand_tiers(tiers)), (1.0, 1.0, 1.0), 1200)
    devices = [count for name, count in counts.items() if name.startswith("device")]
    assert (sum(devices), set(devices)) == (400, each)
    assert sum(counts.values()) == 1200


@given(topologies(), st.integers(0, 500))
def test_nodes_of_a_layer_differ_by_one_sample_at_most(topology, total):
    counts = node_samples(topology, [1.0] * topology.num_exits, total)
    for exit in range(1, topology.num_exits + 1):
        layer = [counts[node.name] for node in topology.with_exit(exit)]
        assert not layer or max(layer) - min(layer) <= 1


@given(topologies(), st.integers(0, 500), st.data())
def test_every_sample_is_in_exactly_one_node(topology, total, data):
    shares = data.draw(
        st.lists(st.floats(0, 10), min_size=topology.num_exits, max_size=topology.num_exits).filter(
            lambda shares: any(shares[node.exit - 1] > 0 for node in topology.nodes)
        )
    )
    alpha = data.draw(st.none() | st.floats(0.01, 100))
    counts = node_samples(topology, shares, total)
    assert sum(counts.values()) == total
    labels = np.arange(total) % 7
    held = partition(labels, counts, seed=data.draw(st.integers(0, 10)), dirichlet_alpha=alpha)
    assert {node: len(rows) for node, rows in held.items()} == counts
    everything = np.concatenate(list(held.values())) if held else np.array([])
    assert sorted(everything.tolist()) == list(range(total))


@given(topologies(), st.integers(0, 300))
def test_a_layer_without_a_share_holds_nothing(topology, total):
    shares = [0.0] * topology.num_exits
    shares[-1] = 1.0
    counts = node_samples(topology, shares, total)
    assert all(counts[node.name] == 0 for node in topology.nodes if node.exit < topology.num_exits)


def test_the_seed_decides_the_partition():
    labels, counts = np.zeros(50, dtype=int), {"a": 20, "b": 30}
    one, same, other = (partition(labels, counts, seed=seed) for seed in (1, 1, 2))
    assert np.array_equal(one["a"], same["a"])
    assert not np.array_equal(one["a"], other["a"])


def _label_spread(alpha):
    """Mean over nodes of the largest label's share."""
    labels = np.arange(10_000) % 10
    held = partition(labels, {f"n{i}": 500 for i in range(20)}, seed=0, dirichlet_alpha=alpha)
    shares = [np.bincount(labels[rows], minlength=10).max() / len(rows) for rows in held.values()]
    return float(np.mean(shares))


def test_a_small_alpha_gives_skewed_label_mixes_and_a_large_one_even_ones():
    assert _label_spread(0.1) > 0.4
    assert _label_spread(1000.0) < 0.16
    assert _label_spread(None) < 0.16


def test_dirichlet_mixes_have_the_mean_and_variance_of_the_distribution():
    """With far more samples than are taken, a node's label shares are Dirichlet(alpha) plus multinomial noise."""
    labels, alpha, classes, size = np.arange(200_000) % 4, 0.5, 4, 400
    counts = {f"n{i}": size for i in range(60)} | {"rest": 200_000 - 60 * size}
    shares = []
    for seed in range(5):
        held = partition(labels, counts, seed=seed, dirichlet_alpha=alpha)
        shares += [np.bincount(labels[held[f"n{i}"]], minlength=classes) / size for i in range(60)]
    variance = (1 / classes) * (1 - 1 / classes) / (classes * alpha + 1)
    assert np.mean(shares, axis=0) == pytest.approx([0.25] * 4, abs=0.05)
    assert np.var(shares) == pytest.approx(variance, rel=0.15)


def test_highly_biased_needs_three_exits():
    with pytest.raises(ConfigError, match="give layer_shares instead"):
        layer_shares("highly-biased", 2)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"name": "cifar"}, "did you mean 'cifar10'"),
        ({"layer_shares": (1.0, -1.0)}, "layer_shares: must be 0 or more"),
        ({"layer_shares": (0.0, 0.0)}, "not all 0"),
        ({"dirichlet_alpha": 0.0}, "dirichlet_alpha: must be above 0, got 0.0"),
    ],
)
def test_what_does_not_fit_is_refused_with_a_sentence(fields, sentence):
    with pytest.raises(ConfigError) as caught:
        DataSpec(**fields)
    assert sentence in str(caught.value)


def test_layer_shares_need_one_for_each_exit():
    with pytest.raises(ConfigError, match="one for each of the 3 exits, got 2"):
        DataSpec(layer_shares=(1.0, 2.0)).shares(3)


def test_shares_of_single_nodes_are_as_exact_as_those_of_their_layer():
    tree = paper_tree(17, "80-15-5")
    apart = Topology(tuple(replace(node, exit=number) for number, node in enumerate(tree.children_first, start=1)))
    shares = [1 / 12] * 12 + [1 / 4] * 4 + [1.0]
    assert node_samples(apart, shares, 45000) == node_samples(tree, (1.0, 1.0, 1.0), 45000)


def test_an_unknown_partition_is_none_of_the_others():
    with pytest.raises(ConfigError, match="partition: there is no partition 'bised'"):
        layer_shares("bised", 3)
