"""The neighbouring methods as changes of one system, so that all are trained and served by the same code.

A method decides the model's family, what nodes train, and how the server adds it up. It leaves alone what a
comparison has to keep equal: the hierarchy, the data, the rounds, the steps and the nodes' learning rates, and also
the proximal term, which works with every method. Networks of another family get the widths at which every exit costs at
most what it does in the system's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from exitflow.errors import ConfigError, suggestion
from exitflow.federated.training_spec import DistillationSpec, JointLoss
from exitflow.models.matching import matched_widths
from exitflow.models.specs import CommonNetwork, DepthWidthResNet, EarlyExitResNet, SeparateNetworks, SlimResNet
from exitflow.system.system import System, with_exits
from exitflow.topology.settings import with_setting

FEDPROX_WEIGHT = 0.01  # mu, unless the system has one


@dataclass(frozen=True)
class Method:
    """A way to train a system, and perhaps to serve it."""

    name: str
    what: str
    paper: str
    apply: Callable[[System], System]
    knows_serving_rates: bool = False  # whether the training depends on what each exit will serve
    serves: str | None = None  # "first" or "last": all requests are answered by that exit


def apply_method(name: str, system: System) -> System:
    """`system`, trained by the method of that name."""
    return find_method(name).apply(system)


def find_method(name: str) -> Method:
    """The method of that name, or a sentence with the nearest one."""
    if name not in METHODS:
        raise ConfigError(f"there is no method {name!r}{suggestion(name, METHODS)}", key="--methods")
    return METHODS[name]


def serving_setting(method: str, setting: str) -> str:
    """The setting at which a system that is to serve `setting` is served under this method."""
    serves = find_method(method).serves if method else None
    return _all_at(serves, setting.count("-") + 1) if serves else setting


def _all_at(exit: str, num_exits: int) -> str:
    shares = ["0"] * num_exits
    shares[0 if exit == "first" else -1] = "100"
    return "-".join(shares)


# What a method does not say is as in FedAvg: a node trains its own exit on labels, all losses count alike.
_PLAIN: dict[str, Any] = {
    "weighting": "equal-weight",
    "help_probability": 0.0,
    "sampling": {},
    "local_exits": "one",
    "distillation": DistillationSpec(),
    "server_step": "sample-mean",
}


def _changed(
    system: System,
    parts: Mapping[str, Any] | None = None,
    *,
    learns_from: str = "labels",
    joint_loss: JointLoss = "element-mean",
    **training: Any,
) -> System:
    """Other parts, and a training that is plain but for what is said."""
    objective = replace(system.training.objective, name=learns_from, joint_loss=joint_loss)
    changed = replace(system.training, **{**_PLAIN, "exit_weights": (), "objective": objective, **training})
    return replace(system, **(parts or {}), training=changed)


def _exitflow(system: System) -> System:
    return _changed(system, weighting="auto", local_exits="all", server_step="coverage", answers="blended")


def _algorithm_1(system: System) -> System:
    return _changed(system, weighting="serving-rate", server_step="paper")


def _fjord(system: System) -> System:
    return _changed(system, {"model": _in_width(system, "fjord")}, local_exits="each-step")


def _fjord_distilled(system: System) -> System:
    model = _in_width(system, "fjord-kd")
    return _changed(system, {"model": model}, local_exits="each-step", learns_from="soft-labels")


def _heterofl(system: System) -> System:
    model = replace(_in_width(system, "heterofl"), scaler=True)
    return _changed(system, {"model": model}, server_step="node-mean")


def _depthfl(system: System) -> System:
    return _changed(
        system,
        local_exits="all",
        joint_loss="sum",
        learns_from="mutual",
        distillation=DistillationSpec(ramp=0.3),
        server_step="node-mean",
    )


def _scalefl(system: System) -> System:
    return _changed(
        system,
        {"model": _in_depth_and_width(system)},
        weighting="linear-depth",
        local_exits="all",
        joint_loss="mean",
        learns_from="from-deepest",
        distillation=DistillationSpec(weight=0.05, temperature=3.0, start=0.25),
        server_step="node-mean",
    )


def _fedavg(system: System) -> System:
    return _changed(system, {"model": CommonNetwork(network=system.model)})


def _fedprox(system: System) -> System:
    common = _fedavg(system)
    weight = system.training.objective.proximal_weight or FEDPROX_WEIGHT
    objective = replace(common.training.objective, proximal_weight=weight)
    return replace(common, training=replace(common.training, objective=objective))


def _branchynet(system: System) -> System:
    """All data lie at the one node of the deepest exit."""
    topology = system.topology
    places = topology.with_exit(topology.num_exits)
    if len(places) > 1:
        problem = f"trains in one place, but {len(places)} nodes stand at the deepest exit"
        raise ConfigError(problem, key="method 'branchynet'")
    shares = (0.0,) * (topology.num_exits - 1) + (1.0,)
    in_one_place = {"data": replace(system.data, layer_shares=shares)}
    given = system.training.exit_weights
    return _changed(system, in_one_place, local_exits="all", joint_loss="sum", exit_weights=given)


def _local_only(system: System) -> System:
    """Exits are counted node by node, children first: then no two nodes train the same."""
    topology = system.topology
    nodes = list(topology.children_first)
    numbers = {node.name: number for number, node in enumerate(nodes, start=1)}
    shares = system.data.shares(topology.num_exits)
    own_shares = tuple(shares[node.exit - 1] / len(topology.with_exit(node.exit)) for node in nodes)
    parts = {
        "topology": with_exits(topology, numbers),
        "model": SeparateNetworks(exits=tuple(node.exit for node in nodes), network=system.model),
        "data": replace(system.data, layer_shares=own_shares),
    }
    return _changed(system, parts, answers="own")  # the exit before is another node's


def _served_at(exit: str) -> Callable[[System], System]:
    def apply(system: System) -> System:
        setting = _all_at(exit, system.topology.num_exits)
        return _exitflow(replace(system, topology=with_setting(system.topology, setting)))

    return apply


def _in_width(system: System, method: str) -> SlimResNet:
    model = system.model
    if isinstance(model, SlimResNet):
        return model
    if not isinstance(model, EarlyExitResNet):
        raise _unfit(method, "slim-resnet", model.family)
    widths = matched_widths(model, (model.num_blocks,) * len(model.exit_blocks))
    trunk = {key: getattr(model, key) for key in ("width", "stem_stride", "blocks", "strides")}
    return SlimResNet(**trunk, widths=widths)


def _in_depth_and_width(system: System) -> DepthWidthResNet:
    """Each exit stands halfway between its own block and the last, and is as much narrower as that costs."""
    model = system.model
    if isinstance(model, DepthWidthResNet):
        return model
    if not isinstance(model, EarlyExitResNet):
        raise _unfit("scalefl", "depth-width", model.family)
    exit_blocks = _halfway(model.exit_blocks, model.num_blocks)
    trunk = {key: getattr(model, key) for key in ("width", "stem_stride", "blocks", "strides", "heads")}
    return DepthWidthResNet(**trunk, exit_blocks=exit_blocks, widths=matched_widths(model, exit_blocks))


def _halfway(exit_blocks: tuple[int, ...], last: int) -> tuple[int, ...]:
    """Rising still: where two exits would meet, the shallower stays one block behind."""
    moved = [(block + last) // 2 for block in exit_blocks]
    for index in reversed(range(len(moved) - 1)):
        moved[index] = max(min(moved[index], moved[index + 1] - 1), exit_blocks[index])
    return tuple(moved)


def _unfit(method: str, family: str, found: str) -> ConfigError:
    problem = f"needs model family {family!r}, or 'early-exit-resnet', which it converts; got {found!r}"
    return ConfigError(problem, key=f"method {method!r}")


METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        Method(
            "exitflow",
            "all exits of a node at once, weighted by traffic and by the data that can train each",
            "this package",
            _exitflow,
            knows_serving_rates=True,
        ),
        Method(
            "algorithm-1",
            "each node its own exit, weighted by what it serves",
            "Kaplan et al., AAAI 2025",
            _algorithm_1,
            knows_serving_rates=True,
        ),
        Method(
            "fjord",
            "nested in width; a node draws one of its widths for every step",
            "Horvath et al., NeurIPS 2021",
            _fjord,
        ),
        Method(
            "fjord-kd",
            "and the widest of a node teaches the drawn one",
            "Horvath et al., NeurIPS 2021",
            _fjord_distilled,
        ),
        Method(
            "heterofl",
            "nested in width; each node its own width, averaged where they overlap",
            "Diao et al., ICLR 2021",
            _heterofl,
        ),
        Method(
            "depthfl",
            "all exits of a node at once, teaching each other",
            "Kim et al., ICLR 2023",
            _depthfl,
        ),
        Method(
            "scalefl",
            "nested in depth and width; the deepest exit of a node counts most, and teaches the others",
            "Ilhan et al., CVPR 2023",
            _scalefl,
        ),
        Method(
            "fedavg",
            "one network for all nodes, as small as the smallest needs",
            "McMahan et al., AISTATS 2017",
            _fedavg,
        ),
        Method(
            "fedprox",
            "the same, held to the model of the round",
            "Li et al., MLSys 2020",
            _fedprox,
        ),
        Method(
            "branchynet",
            "all data in one place, the losses of all exits added up",
            "Teerapittayanon et al., ICPR 2016",
            _branchynet,
        ),
        Method(
            "local-only",
            "every node trains a network of its own on its own data",
            "",
            _local_only,
        ),
        Method(
            "all-local",
            "as exitflow, for a system whose devices answer everything",
            "",
            _served_at("first"),
            serves="first",
        ),
        Method(
            "all-cloud",
            "as exitflow, for a system whose cloud answers everything",
            "",
            _served_at("last"),
            serves="last",
        ),
    )
}
