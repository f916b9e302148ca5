"""What a round costs: bytes over each link of the hierarchy, and multiply-adds of the nodes.

The server stands at the top. What a node receives and returns travels link by link along its first parent, its
parent's first parent, and so on; a node without parents is where the server is, and sends nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from exitflow.federated.sampling import step_exits
from exitflow.federated.training_spec import TrainingSpec
from exitflow.federated.types import Task
from exitflow.topology.graph import Topology


def link_bytes(topology: Topology, tasks: Sequence[Task], covered_bytes: Callable[..., int]) -> dict[str, int]:
    """`child->parent`: bytes in each direction; what goes down, the covered slices, also comes back up.

    Before any compression of the updates.
    """
    carried = {node.name: 0 for node in topology.nodes}
    for task in tasks:
        carried[task.node] += covered_bytes(*task.exits)
    links: dict[str, int] = {}
    for node in topology.children_first:
        if node.parents and carried[node.name]:
            parent = node.parents[0].name
            links[f"{node.name}->{parent}"] = carried[node.name]
            carried[parent] += carried[node.name]
    return links


def forward_multiply_adds(
    tasks: Sequence[Task],
    spec: TrainingSpec,
    *,
    num_steps: int,
    samples: Mapping[str, int],
    cost: Callable[[tuple[int, ...]], int],
) -> int:
    """The cost of all forward passes of a round; `cost` is that of some exits, computed together, for one input.

    A backward pass takes about twice as many again, whatever is trained.
    """
    return sum(
        min(spec.batch_size, samples[task.node]) * cost(exits)
        for task in tasks
        for exits in step_exits(task, spec, num_steps)
    )
