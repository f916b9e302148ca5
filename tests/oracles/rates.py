"""The rate equations, read from the paper word by word."""

from __future__ import annotations

from exitflow.topology.graph import Topology


def transfer_rates(topology: Topology) -> dict[tuple[str, str], float]:
    """lambda^t_i = min{mu^max_i, lambda^a_i + sum over children j of lambda^t_j}, split over the links of i."""
    nodes = {node.name: node for node in topology.nodes}

    def received(name: str) -> float:
        total = nodes[name].arrival_rate
        for child in nodes.values():
            for link in child.parents:
                if link.name == name:
                    total += sent(child.name, name)
        return total

    def sent(child: str, parent: str) -> float:
        links = nodes[child].parents
        arriving = received(child)
        unlimited = [link for link in links if link.max_transfer_rate is None]
        if unlimited:
            return arriving / len(unlimited) if parent in [link.name for link in unlimited] else 0.0
        limit = {link.name: link.max_transfer_rate for link in links}
        total_limit = sum(limit.values())
        if total_limit == 0:
            return 0.0
        return min(total_limit, arriving) * limit[parent] / total_limit

    return {(node.name, link.name): sent(node.name, link.name) for node in topology.nodes for link in node.parents}


def exit_serve_rates(topology: Topology) -> list[float]:
    """Lambda_e: sum over i in N_e of (lambda^a_i + sum over children j of lambda^t_j - lambda^t_i)."""
    transfers = transfer_rates(topology)
    num_exits = max(node.exit for node in topology.nodes)
    rates = [0.0] * num_exits
    for node in topology.nodes:
        from_children = sum(rate for (_, parent), rate in transfers.items() if parent == node.name)
        to_parents = sum(rate for (child, _), rate in transfers.items() if child == node.name)
        rates[node.exit - 1] += node.arrival_rate + from_children - to_parents
    return rates
