"""The paper's trees, of 7 and of 17 nodes, at any serving setting."""

from __future__ import annotations

from exitflow.errors import ConfigError
from exitflow.topology.graph import Tier, Topology, expand_tiers
from exitflow.topology.settings import parse_setting

PAPER_TREES = {7: (4, 2, 1), 17: (12, 4, 1)}  # nodes in all: devices, edge servers, cloud
TOTAL_ARRIVAL_RATE = 100.0  # requests/s, so that rates read as percentages


def paper_tree(num_nodes: int, setting: str) -> Topology:
    """All requests arrive at the devices; the links let exits 1, 2 and 3 serve what `setting` says."""
    shares = parse_setting(setting)
    if len(shares) != 3:
        raise ConfigError(f"the paper's trees have 3 exits, setting {setting!r} has {len(shares)} parts")
    devices, edges, cloud = PAPER_TREES[num_nodes]
    above_devices = TOTAL_ARRIVAL_RATE * (shares[1] + shares[2])
    above_edges = TOTAL_ARRIVAL_RATE * shares[2]
    tiers = (
        Tier("device", devices, 1, TOTAL_ARRIVAL_RATE / devices, above_devices / devices),
        Tier("edge", edges, 2, max_transfer_rate=above_edges / edges),
        Tier("cloud", cloud, 3),
    )
    return Topology(expand_tiers(tiers))
