"""A system: the hierarchy, the model, the data and the training, from one TOML file or a preset.

load_system("campus.toml")                     a file
load_system("paper-7:80-15-5")                 the paper's tree of 7 nodes at a serving setting, on digits
load_system("paper-17-cifar10:60-30-10")       17 nodes, on CIFAR-10
"""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

import tomli_w

from exitflow.config import (
    Changes,
    assign,
    check_keys,
    decode,
    encode,
    located,
    parse_changes,
    read_toml,
    require,
    require_table,
)
from exitflow.data.data_spec import DataSpec
from exitflow.errors import ConfigError
from exitflow.federated.options.federation_spec import FederationSpec
from exitflow.federated.sampling import check_every_exit_is_trained, probability_matrix
from exitflow.federated.training_spec import TrainingSpec
from exitflow.files import MEDIUM_FILE
from exitflow.models.specs import (
    CommonNetwork,
    EarlyExitResNet,
    ModelSpec,
    SeparateNetworks,
    decode_model,
    factories,
)
from exitflow.parts import is_own
from exitflow.system.older import modernised, refuse_older_keys
from exitflow.system.presets import preset
from exitflow.topology.doubts import doubts
from exitflow.topology.graph import Topology, decode_topology
from exitflow.topology.rates import check_requests_arrive
from exitflow.topology.settings import with_setting

log = logging.getLogger("exitflow.system")

MAX_NAME = 200  # characters
_KEYS = ("name", "tiers", "nodes", "model", "data", "training", "federation")


@dataclass(frozen=True)
class System:
    """Everything that decides a training, valid as a whole and with nothing left open."""

    name: str
    topology: Topology
    model: ModelSpec = field(default_factory=EarlyExitResNet)
    data: DataSpec = field(default_factory=DataSpec)
    training: TrainingSpec = field(default_factory=TrainingSpec)
    federation: FederationSpec = field(default_factory=FederationSpec)

    def __post_init__(self) -> None:
        check_requests_arrive(self.topology)
        num_exits = self.topology.num_exits
        object.__setattr__(self, "model", located("model", self.model.resolve, num_exits))
        shares = located("data", self.data.shares, num_exits)
        bounded = self.training.server_step in ("coverage", "paper")
        problem = "needs server_step 'coverage' or 'paper', whose sums are known to be bounded"
        located("federation", require, self.federation.clip_norm is None or bounded, "clip_norm", problem)
        given = self.training.exit_weights
        problem = f"one for each of the {num_exits} exits, got {list(given)}"
        located("training", require, len(given) in (0, num_exits), "exit_weights", problem)
        by_layer = {node.name: shares[node.exit - 1] for node in self.topology.nodes}
        check_every_exit_is_trained(located("training", probability_matrix, self.topology, by_layer, self.training))

    def to_toml(self) -> str:
        """A file that gives the same system; tiers are written node by node."""
        nodes = [encode(node) for node in self.topology.nodes]
        tables = {part: encode(getattr(self, part)) for part in ("model", "data", "training", "federation")}
        return tomli_w.dumps({"name": self.name, **tables, "nodes": nodes})


def serving_as(system: System, setting: str) -> Topology:
    """The topology with limits under which its layers serve what `setting` says.

    Where every node has a network of its own, its layer is that of the exit that this network was cut from.
    """
    numbers = {node.name: node.exit for node in system.topology.nodes}
    own_layers = {name: layers(system)[number - 1] for name, number in numbers.items()}
    return with_exits(with_setting(with_exits(system.topology, own_layers), setting), numbers)


def layers(system: System) -> tuple[int, ...]:
    """For each exit itself, or, where every node has a network of its own, the exit that this was cut from."""
    model, topology = system.model, system.topology
    if isinstance(model, SeparateNetworks) and len(topology.nodes) == topology.num_exits:
        return model.exits
    return tuple(range(1, topology.num_exits + 1))


def with_exits(topology: Topology, exits: Mapping[str, int]) -> Topology:
    """The same nodes and links, at other exits."""
    return Topology(tuple(replace(node, exit=exits[node.name]) for node in topology.nodes))


def load_system(source: str | Path, overrides: Changes = ()) -> System:
    """From a TOML file or the name of a preset.

    `overrides` go before what it says: {"training.rounds": 5}, or texts such as "training.rounds=5".
    """
    system = read_system(source, overrides)
    for sentence in doubts(system.topology):
        log.warning("%s: %s", source, sentence)
    return system


def read_system(source: str | Path, overrides: Changes = ()) -> System:
    """The same without a word on what is doubtful in it, for systems that nobody has written down as they are."""
    named = isinstance(source, str | os.PathLike)
    require(named, "source", f"expected the path of a TOML file or the name of a preset, got {source!r}")
    name = str(source)
    is_file = name.endswith(".toml") or (os.path.exists(name) and not os.path.isdir(name))
    table = read_toml(Path(name)) if is_file else preset(name)
    try:
        return decode_system(table, overrides, default_name=Path(name).stem if is_file else name)
    except ConfigError as error:
        raise error.within(source=name) from None


def load_resolved(path: Path) -> System:
    """From a file that `System.to_toml` has written, now or in an earlier version.

    It may be long, as it has an entry for each node.
    """
    try:
        return decode_system(modernised(read_toml(path, MEDIUM_FILE)))
    except ConfigError as error:
        raise error.within(source=str(path)) from None


def decode_system(table: Mapping[str, Any], overrides: Changes = (), *, default_name: str = "system") -> System:
    """The system that parsed TOML describes."""
    changed = copy.deepcopy(dict(table)) if overrides else dict(table)
    for key, value in parse_changes(overrides).items():
        assign(changed, key, value)
    _check_top_keys(changed)
    name = changed.get("name", default_name)
    if not isinstance(name, str) or not name.isprintable() or not 1 <= len(name) <= MAX_NAME:
        raise ConfigError(f"expected a name of 1 to {MAX_NAME} printable characters, got {name!r}", key="name")
    return System(
        name,
        decode_topology(changed),
        located("model", decode_model, changed.get("model", {})),
        located("data", decode, DataSpec, changed.get("data", {})),
        located("training", _decode_training, changed.get("training", {})),
        located("federation", decode, FederationSpec, changed.get("federation", {})),
    )


def _decode_training(table: Any) -> TrainingSpec:
    refuse_older_keys(require_table(table))
    return decode(TrainingSpec, table)


def with_absolute_dir(system: System) -> System:
    """The same system, whose data are found from any working directory."""
    if system.data.dir is None:
        return system
    return replace(system, data=replace(system.data, dir=os.path.abspath(system.data.dir)))


def _check_top_keys(table: Mapping[str, Any]) -> None:
    """Refuse a key that no system has; one of a table that stands outside of it is told where it belongs."""
    specs = {"training": TrainingSpec, "data": DataSpec, "federation": FederationSpec, "model": EarlyExitResNet}
    for key in table:
        homes = [name for name, spec in specs.items() if key in (field.name for field in fields(spec))]
        require(key in _KEYS or not homes, key, f"unknown key; did you mean '{''.join(homes[:1])}.{key}'?")
    check_keys(table, _KEYS)


def own_parts(system: System) -> frozenset[str]:
    """The functions of the user's own, `module:function`, that training the system would call."""
    names = {system.data.partition, system.data.name, *system.training.own_parts.values()}
    return factories(system.model) | {name for name in names if is_own(name)}


def same_training(one: System, other: System) -> bool:
    """Whether they train the same, wherever the data lie, and whether or not they say how exits answer."""
    return what_decides(one) == what_decides(other)


def what_decides(system: System) -> System:
    """The system without what makes no difference to its training: where the data lie, for example."""
    answers: Literal["blended", "own"] = "blended" if system.training.blends_answers else "own"
    data, training = replace(system.data, dir=None), replace(system.training, answers=answers)
    return replace(system, model=_wherever_it_lies(system.model), data=data, training=training)


def _wherever_it_lies(model: ModelSpec) -> ModelSpec:
    """Without the place of pretrained weights, of which a digest says what they are."""
    if isinstance(model, CommonNetwork | SeparateNetworks):
        return replace(model, network=_wherever_it_lies(model.network))
    return replace(model, weights=None) if getattr(model, "weights_sha256", None) else model  # type: ignore[type-var]
