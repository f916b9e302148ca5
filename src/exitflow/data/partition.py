"""Which node holds which training samples: every sample is in exactly one node.

Each layer, that is the nodes of one exit, holds a share of all samples, spread evenly over its nodes: two of them
differ by at most one sample. Which samples
a node gets is drawn at random: uniformly (IID), or with a label mix of its own from a Dirichlet distribution.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from exitflow.config import require
from exitflow.errors import ConfigError
from exitflow.topology.graph import Topology

IntArray = npt.NDArray[np.int64]
Partition = Mapping[str, IntArray]  # node -> indices of its training samples

HIGHLY_BIASED = (1536, 8960, 34504)  # samples of devices, edges and cloud among the paper's 45,000


def layer_shares(kind: str, num_exits: int) -> tuple[float, ...]:
    """Relative amounts of data of layers 1..E: the paper's `equal`, `biased` (each layer twice the one below)
    and `highly-biased` partitions."""
    if kind == "equal":
        return (1.0,) * num_exits
    if kind == "biased":
        return tuple(2.0**exit for exit in range(num_exits))
    if kind != "highly-biased":
        raise ConfigError(f"there is no partition {kind!r}", key="partition")
    if num_exits != len(HIGHLY_BIASED):
        problem = f"'highly-biased' is for 3 exits, this system has {num_exits}; give layer_shares instead"
        raise ConfigError(problem, key="partition")
    return tuple(map(float, HIGHLY_BIASED))


def node_samples(topology: Topology, shares: Sequence[float], total: int) -> dict[str, int]:
    """How many of `total` samples each node holds.

    The few samples that do not divide evenly between layers go to the deepest ones, a sample each; those that do not
    divide evenly between the nodes of a layer go to its first nodes, so that every layer holds its share.
    """
    layers = {exit: nodes for exit in range(1, topology.num_exits + 1) if (nodes := topology.with_exit(exit))}
    largest = Fraction(max(shares[exit - 1] for exit in layers))
    exact = {exit: (Fraction(shares[exit - 1]) / largest).limit_denominator(10**9) for exit in layers}  # 1/12 is meant
    whole = sum(exact.values())
    sizes = {exit: int(exact[exit] / whole * total) for exit in layers}
    sharing = [exit for exit in layers if exact[exit]]
    for exit in sharing[len(sharing) - (total - sum(sizes.values())) :]:
        sizes[exit] += 1
    counts: dict[str, int] = {}
    for exit, nodes in layers.items():
        each, rest = divmod(sizes[exit], len(nodes))
        counts |= {node.name: each + (index < rest) for index, node in enumerate(nodes)}
    return {node.name: counts[node.name] for node in topology.nodes}


def own_partition(given: Mapping[str, npt.ArrayLike], topology: Topology, total: int) -> Partition:
    """What a partition of the user's own gives, as indices of each node's samples; refused where they are none."""
    strangers = sorted(given.keys() ^ topology.by_name.keys())
    problem = f"must name every node of the system, and no other; see {strangers[:1]}"
    require(not strangers, "data.partition", problem)
    held = {}
    for node in topology.by_name:
        rows = np.asarray(given[node])
        valid = rows.ndim == 1 and (rows.size == 0 or np.issubdtype(rows.dtype, np.integer))
        valid = valid and bool(((rows >= 0) & (rows < total)).all()) and len(np.unique(rows)) == len(rows)
        problem = f"node {node!r}: expected different whole numbers from 0 to {total - 1}"
        require(valid, "data.partition", problem)
        held[node] = rows.astype(np.int64)
    return held


def partition(
    labels: npt.ArrayLike, counts: Mapping[str, int], *, seed: int, dirichlet_alpha: float | None = None
) -> Partition:
    """Draw the samples of every node: `counts[node]` of them, IID or with Dirichlet(alpha) label mixes."""
    labels = np.asarray(labels)
    if sum(counts.values()) != len(labels):
        raise ValueError(f"the nodes hold {sum(counts.values())} samples, the data set has {len(labels)}")
    rng = np.random.default_rng(seed)
    if dirichlet_alpha is None:
        shuffled = rng.permutation(len(labels))
        cuts = np.cumsum(list(counts.values()))[:-1]
        return dict(zip(counts, np.split(shuffled, cuts), strict=True))
    return _dirichlet_partition(labels, counts, rng, dirichlet_alpha)


def _dirichlet_partition(
    labels: npt.NDArray[np.int64], counts: Mapping[str, int], rng: np.random.Generator, alpha: float
) -> Partition:
    """Node by node, the smallest first: their mixes come out as drawn, and the largest takes what is left."""
    pools = [rng.permutation(np.flatnonzero(labels == label)) for label in np.unique(labels)]
    held: dict[str, IntArray] = {}
    shuffled = map(str, rng.permutation(list(counts)))
    for name in sorted(shuffled, key=counts.__getitem__):
        mix = rng.dirichlet(np.full(len(pools), alpha))
        taken = _draw_labels(mix, [len(pool) for pool in pools], counts[name], rng)
        parts = [pool[:count] for pool, count in zip(pools, taken, strict=True)]
        pools = [pool[count:] for pool, count in zip(pools, taken, strict=True)]
        held[name] = rng.permutation(np.concatenate((np.empty(0, dtype=np.int64), *parts)))  # there may be no labels
    return {name: held[name] for name in counts}


def _draw_labels(mix: npt.NDArray[np.float64], available: list[int], count: int, rng: np.random.Generator) -> IntArray:
    """How many of each label: multinomial by `mix`, drawn again from the other labels where one runs out."""
    room = np.array(available)
    taken = np.zeros(len(room), dtype=np.int64)
    while (missing := count - taken.sum()) > 0:
        weights = np.where(room > taken, mix, 0.0)
        if not weights.sum() > 0:  # only labels are left that this node's mix gives nothing
            weights = (room - taken).astype(np.float64)
        taken = np.minimum(taken + rng.multinomial(missing, weights / weights.sum()), room)
    return taken
