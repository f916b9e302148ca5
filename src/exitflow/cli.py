"""The `exitflow` command. Thin: it reads options, calls the package, and prints."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from exitflow import __version__
from exitflow.commands import serving
from exitflow.commands.report import report
from exitflow.errors import ConfigError, ExitflowError, MissingExtraError, suggestion
from exitflow.experiments.methods import METHODS
from exitflow.federated.weighting import WEIGHTINGS
from exitflow.report.terminal import (
    amount,
    percent,
    print_figures,
    print_gradient_variance,
    print_table,
    progress_bar,
    rate,
    spread,
)
from exitflow.routing import CONFIDENCES

if TYPE_CHECKING:
    from exitflow.evaluation.accuracy import Evaluation
    from exitflow.experiments.explanation import Explanation
    from exitflow.experiments.runs import Run

COMPARED = "equal-weight,flops-prop,serving-rate,balanced-adj,auto"  # the paper's four, and ours
BACKENDS = ("processes", "serial", "ray", "flower")
EXTRAS = {  # package -> the extra that installs it
    "torch": "train",
    "safetensors": "train",
    "flwr": "flower",
    "cryptography": "flower",
    "dp_accounting": "flower",
    "ray": "ray",
    "onnx": "export",
    "onnxscript": "export",
    "onnxruntime": "serve",
    "grpc": "serve",
    "google": "serve",
    "uvicorn": "serve",
    "prometheus_client": "serve",
    "jinja2": "report",
    "matplotlib": "report",
}


class _Group(click.Group):
    """Prints the errors of exitflow as one sentence, without a traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except ExitflowError as error:
            problem, exit_code = str(error), error.exit_code
        except KeyboardInterrupt:
            problem, exit_code = "interrupted; `train --resume`, `compare` and `reproduce` go on where they were", 130
        except OSError as error:
            if error.errno == errno.EPIPE:  # a reader such as `head` has seen enough
                raise
            problem, exit_code = f"{error.filename or 'cannot go on'}: {error.strerror or error}", 1
        except (MemoryError, RuntimeError) as error:
            if not isinstance(error, MemoryError) and "can't allocate memory" not in str(error):
                raise
            problem, exit_code = "not enough memory: choose a smaller model, batch or number of workers", 1
        except ModuleNotFoundError as error:
            extra = EXTRAS.get((error.name or "").partition(".")[0])
            if extra is None:
                raise
            problem, exit_code = str(MissingExtraError(str(error.name), extra)), 2
        click.echo(f"exitflow: {problem}", err=True)
        return ctx.exit(exit_code)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="exitflow")
def main() -> None:
    """Train one early-exit network across devices, edge servers and cloud for the traffic each will serve.

    SYSTEM is a TOML file, or a preset such as paper-7:80-15-5.

    \b
    Example:
      exitflow plan paper-7:80-15-5
      exitflow train paper-7:80-15-5 --out runs/first
      exitflow evaluate runs/first
    """


_json = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
_set = click.option(
    "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Change a key of the system file; repeatable."
)
_data_dir = click.option("--data-dir", metavar="DIR", help="Where the data set's files lie.")
_backend = click.option(
    "--backend", type=click.Choice(BACKENDS), default="processes", show_default=True, help="Where to train."
)
_workers = click.option(
    "--workers", type=click.IntRange(min=1), metavar="N", help="Processes; one for each core if not given."
)


@main.command()
@click.argument("system")
@_set
@_json
def plan(system: str, overrides: tuple[str, ...], as_json: bool) -> None:
    """The rates that will flow through every node and exit of SYSTEM.

    \b
    Example:
      exitflow plan paper-7:60-30-10
      exitflow plan campus.toml --json
    """
    from exitflow.experiments.system import load_system
    from exitflow.topology.rates import serving_plan

    loaded = load_system(system, overrides)
    rates = serving_plan(loaded.topology)
    if as_json:
        _print_json({"name": loaded.name, **rates.to_json()})
        return
    rows = [
        [name, str(node.exit)]
        + [rate(value) for value in (node.arrival_rate, node.received_rate, node.serve_rate, node.transfer_rate)]
        + [percent(node.serve_fraction), ", ".join(f"{parent} {rate(sent)}" for parent, sent in node.parents.items())]
        for name, node in rates.nodes.items()
    ]
    columns = ["node", "exit", "arriving", "received", "served", "sent up", "served %", "to"]
    print_table(f"{loaded.name}: requests/s at every node", columns, rows)
    exits = enumerate(zip(rates.exit_serve_rate, rates.exit_share, strict=True), start=1)
    exit_rows = [[str(exit), rate(served), percent(share)] for exit, (served, share) in exits]
    print_table("Served by every exit", ["exit", "requests/s", "share %"], exit_rows)


_address = click.option("--address", metavar="ADDRESS", help="Of a Ray cluster; one of our own if not given.")
_superlink = click.option("--superlink", metavar="HOST:PORT", help="Where the nodes of a real federation meet.")
_federation = click.option(
    "--federation",
    metavar="DIR",
    default="federation",
    show_default=True,
    help="What `federation init` wrote, for --superlink.",
)


@main.command(short_help="Train SYSTEM, or go on with a run that was cut off.")
@click.argument("system", required=False)
@click.option("--out", metavar="RUN", help="The new directory of the run.")
@click.option("--resume", "resumed", metavar="RUN", help="Go on with this run instead of starting one.")
@click.option("--weighting", metavar="NAME", help=f"One of {', '.join(WEIGHTINGS)}.")
@click.option("--seed", type=int, metavar="N", help="Of all that is random.")
@click.option("--rounds", type=int, metavar="N", help="How many rounds to train.")
@_backend
@_workers
@_address
@_superlink
@_federation
@_data_dir
@_set
@_json
def train(
    system: str | None,
    out: str | None,
    resumed: str | None,
    as_json: bool,
    backend: str,
    workers: int | None,
    address: str | None,
    superlink: str | None,
    federation: str,
    **changes: Any,
) -> None:
    """Train SYSTEM with Algorithm 1 into the directory RUN; or go on with a run that was cut off.

    \b
    Example:
      exitflow train campus.toml --out runs/campus --weighting balanced-adj --seed 42
      exitflow train paper-7:80-15-5 --out runs/short --rounds 5 --set training.batch_size=64
      exitflow train --resume runs/campus
    """
    from exitflow.experiments import training
    from exitflow.experiments.runs import Run
    from exitflow.experiments.system import load_system

    where = _where(backend, workers, address, superlink, federation)
    if resumed:
        if system or out or any(value not in (None, ()) for key, value in changes.items() if key != "data_dir"):
            raise ConfigError(
                "goes on with a run as it was begun: only options that say where to train, and --data-dir, fit",
                key="--resume",
            )
        run = Run(resumed)
        with progress_bar(run.system.training.rounds) as show:
            label = run.system.training.weighting
            run = training.resume(
                resumed, **where, dataset=_dataset(run, changes["data_dir"]), **_watching(show, label)
            )
    else:
        if not system or not out:
            raise ConfigError("give a SYSTEM and --out RUN, or --resume RUN", key="train")
        loaded = load_system(system, _overrides(**changes))
        with progress_bar(loaded.training.rounds) as show:
            label = loaded.training.weighting
            run = training.train(loaded, out, **where, **_watching(show, label))
    _print_training(run, as_json)


def _where(
    backend: str, workers: int | None, address: str | None, superlink: str | None, federation: str
) -> dict[str, Any]:
    """The options that say where to train."""
    if address and backend != "ray":
        raise ConfigError("is for --backend ray", key="--address")
    if superlink is None:
        return {"backend": backend, "workers": workers, "address": address}
    if backend != "flower":
        raise ConfigError("is for --backend flower", key="--superlink")
    from exitflow.experiments.federation import Membership, check_address, server_folder

    return {"backend": backend, "federation": Membership(server_folder(federation), check_address(superlink))}


def _watching(show: Callable[..., None], label: str) -> dict[str, Any]:
    """Rounds done so far, and what is being waited for."""
    done = [0.0]

    def observe(rounds: float) -> None:
        done[0] = rounds
        show(label, rounds)

    return {"observer": observe, "status": lambda text: show(f"{label}: {text}" if text else label, done[0])}


def _print_training(run: Run, as_json: bool) -> None:
    last = run.directory.last_record()
    dropped = {node for record in run.records for node in record["dropped"]}
    validation = last["validation"]
    if as_json:
        _print_json({"run": str(run.path), "rounds": last["round"], "validation": validation})
        return
    click.echo(f"{run.path}: trained for {last['round']} rounds with {run.system.training.weighting}.")
    exits = ", ".join(percent(accuracy) for accuracy in validation["exit_accuracy"])
    click.echo(f"On validation data: {percent(validation['accuracy'])} % as served; exits alone {exits} %.")
    if dropped:
        click.echo(f"Updates that were not finite were dropped, of: {', '.join(sorted(dropped))}; see rounds.jsonl.")
    click.echo(f"Next: exitflow evaluate {run.path}")


@main.command(short_help="How accurately the system of RUN answers.")
@click.argument("run")
@click.option("--serving", multiple=True, metavar="X-Y-Z", help="Another serving setting; may be given more than once.")
@click.option(
    "--confidence", type=click.Choice(list(CONFIDENCES)), default="entropy", show_default=True, help="How nodes rank."
)
@_data_dir
@_json
def evaluate(run: str, serving: tuple[str, ...], confidence: str, data_dir: str | None, as_json: bool) -> None:
    """How accurately the system of RUN answers on test data: each exit, each node on what it serves, and the whole.

    \b
    Example:
      exitflow evaluate runs/campus
      exitflow evaluate runs/campus --serving 60-30-10 --serving 5-15-80 --json
    """
    from exitflow.experiments import runs

    loaded = runs.Run(run)
    outputs = loaded.outputs(_dataset(loaded, data_dir))
    results = [
        (setting, runs.evaluate(loaded, serving=setting, confidence=confidence, outputs=outputs))
        for setting in serving or (None,)
    ]
    if as_json:
        objects = [{"run": run, "serving": setting, **result.to_json()} for setting, result in results]
        _print_json(objects[0] if len(objects) == 1 else objects)
        return
    for setting, result in results:
        _print_evaluation(loaded, setting, result)


def _print_evaluation(run: Run, setting: str | None, result: Evaluation) -> None:
    title = f"{run.system.name} ({run.system.training.weighting}), served as {setting or 'planned'}: accuracy in %"
    exits = enumerate(zip(result.exit_accuracy, result.exits, strict=True), start=1)
    rows = [
        [f"exit {exit}", percent(alone), rate(served.rate), percent(served.accuracy)] for exit, (alone, served) in exits
    ]
    rows += [[name, "", rate(served.rate), percent(served.accuracy)] for name, served in result.nodes.items()]
    total = sum(served.rate for served in result.exits)
    rows.append(["whole system", "", rate(total), percent(result.accuracy)])
    print_table(title, ["", "on all samples", "serves/s", "on what it serves"], rows)


@main.command(short_help="Train SYSTEM in several ways, and compare.")
@click.argument("system")
@click.option("--weightings", metavar="A,B", help=f"What to compare; {COMPARED} if nothing is said.")
@click.option("--methods", metavar="A,B", help=f"More to compare: {', '.join(METHODS)}.")
@click.option("--seeds", metavar="N,N", help="Each of them is trained with each seed; the system's own if not given.")
@click.option("--out", metavar="DIR", help="Where the runs are kept; a folder for the system in runs/ if not given.")
@_backend
@_workers
@_data_dir
@_set
@_json
def compare(
    system: str,
    weightings: str | None,
    methods: str | None,
    seeds: str | None,
    out: str | None,
    backend: str,
    workers: int | None,
    data_dir: str | None,
    overrides: tuple[str, ...],
    as_json: bool,
) -> None:
    """The same SYSTEM trained in several ways: accuracy of each exit and as served, mean ± deviation over the seeds.

    A weighting changes how much each exit counts; a method may change the model's family, what nodes train and how
    the server adds it up, and docs/methods.md says what each does. Beside methods stands what their training takes:
    bytes over all links, and multiply-adds of the forward passes. Runs that are already there are used again,
    unfinished ones are gone on with.

    \b
    Example:
      exitflow compare campus.toml --weightings serving-rate,balanced-adj --seeds 9,42,67
      exitflow compare campus.toml --methods exitflow,fjord,depthfl,fedavg,local-only
    """
    from exitflow.experiments import comparison
    from exitflow.experiments.system import load_system

    chosen_methods = _names(methods) if methods else []
    chosen_weightings = _names(weightings or COMPARED) if weightings or not chosen_methods else []
    for name in chosen_weightings:
        if name not in WEIGHTINGS:
            raise ConfigError(f"there is no weighting {name!r}{suggestion(name, WEIGHTINGS)}", key="--weightings")
    names = [*chosen_weightings, *chosen_methods]
    loaded = load_system(system, _overrides(data_dir=data_dir, overrides=overrides))
    numbers = _seeds(seeds) if seeds else [loaded.training.seed]
    rounds = loaded.training.rounds
    with progress_bar(rounds * len(names) * len(numbers)) as show:
        finished: list[str] = []

        def observer(label: str, done: float) -> None:
            if label not in finished:
                finished.append(label)
            show(label, rounds * (len(finished) - 1) + done)

        result = comparison.compare(
            loaded,
            chosen_weightings,
            numbers,
            methods=chosen_methods,
            out=out,
            backend=backend,
            workers=workers,
            observer=observer,
        )
    if as_json:
        _print_json(result.to_json())
        return
    exits = [f"exit {exit}" for exit in range(1, loaded.topology.num_exits + 1)]
    columns = ["weighting", *exits, "as served"]
    rows = [
        [name, *(spread(each.mean, each.std) for each in (*result.exit_accuracy(name), result.accuracy(name)))]
        for name in names
    ]
    if chosen_methods:
        columns = ["training", *columns[1:], "bytes sent", "multiply-adds"]
        rows = [[*row, amount(result.bytes_sent(row[0])), amount(result.multiply_adds(row[0]))] for row in rows]
    count = f"{len(numbers)} seed{'s' if len(numbers) > 1 else ''}"
    print_table(f"{loaded.name}: test accuracy in %, {count}", columns, rows)


@main.command()
@click.argument("table")
@click.option("--scale", type=click.Choice(["small", "paper"]), default="small", show_default=True, help="How large.")
@click.option("--seeds", metavar="N,N", default="9,42,67", show_default=True, help="Every training with each of them.")
@click.option("--datasets", metavar="A,B", default="cifar10,cifar100", show_default=True, help="On which data.")
@click.option("--out", metavar="DIR", help="Where results are kept; results/SCALE if not given.")
@click.option("--device", default="cpu", show_default=True, help="Where PyTorch computes, such as cuda.")
@_workers
@_data_dir
@_json
def reproduce(
    table: str,
    scale: Any,
    seeds: str,
    datasets: str,
    out: str | None,
    device: str,
    workers: int | None,
    data_dir: str | None,
    as_json: bool,
) -> None:
    """Run the experiments of TABLE that have no result yet, and print it beside the paper's figures.

    TABLE is table1, table2, table4, table5, table6, gradient-variance (the paper's Table 3), ours, parts, peers, or
    all. Trainings that several cells share run once; a run that was killed goes on where it stood.

    \b
    Example:
      exitflow reproduce table1 --data-dir data --seeds 9
      exitflow reproduce all --scale paper --device cuda
    """
    import os
    from pathlib import Path

    from exitflow.experiments.figures import TableFigures, gradient_variance_json
    from exitflow.experiments.reproduction import Reproduction
    from exitflow.experiments.results import Results
    from exitflow.experiments.tables import GRADIENT_VARIANCE, TABLES, find_table

    chosen = list(TABLES.values()) if table == "all" else [find_table(table)] if table != GRADIENT_VARIANCE else []
    names, numbers = _dataset_names(datasets), _seeds(seeds)
    results = Results(out or Path("results") / scale)
    reproduction = Reproduction(results, scale, data_dir, device)
    reproduction.check(names)
    jobs = reproduction.missing(chosen, numbers, names)
    measured = [(name, seed) for name in names for seed in numbers] if table in ("all", GRADIENT_VARIANCE) else []
    with progress_bar(len(jobs), unit="trainings") as show:
        reproduction.run(jobs, workers=workers or os.cpu_count() or 1, observer=show)
        for name, seed in measured:
            show(f"gradient variance, {name}, seed {seed}", len(jobs))
            reproduction.measure_gradient_variance(name, seed)
    figures = [TableFigures(each, results, tuple(numbers)) for each in chosen]
    if as_json:
        tables = [each.to_json(names) for each in figures]
        _print_json(tables + ([gradient_variance_json(results, names, numbers)] if measured else []))
        return
    for each in figures:
        print_figures(each, names)
    if measured:
        print_gradient_variance(results, names, numbers)


def _dataset_names(text: str) -> list[str]:
    from exitflow.experiments.tables import DATASETS

    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in DATASETS:
            raise ConfigError(f"expected cifar10, cifar100 or both, got {name!r}", key="--datasets")
    return names


@main.command()
@click.argument("system")
@_backend
@_workers
@_data_dir
@_set
@_json
def explain(
    system: str,
    backend: str,
    workers: int | None,
    data_dir: str | None,
    overrides: tuple[str, ...],
    as_json: bool,
) -> None:
    """Why one weighting and not another: their weights in the last round of SYSTEM, and the errors these allow.

    Measures the gradients at the initial model, and fills the paper's error bound with them. The errors are in units
    of the loss; docs/theory.md says what is measured and what is estimated.

    \b
    Example:
      exitflow explain campus.toml
      exitflow explain paper-7:5-15-80 --set training.rounds=5 --json
    """
    from exitflow.experiments import explanation
    from exitflow.experiments.system import load_system

    loaded = load_system(system, _overrides(data_dir=data_dir, overrides=overrides))
    result = explanation.explain(loaded, backend=backend, workers=workers)
    if as_json:
        _print_json(result.to_json())
        return
    exits = [f"exit {exit}" for exit in range(1, loaded.topology.num_exits + 1)]
    errors = ("generalisation", "bias", "noise", "sampling", "total")
    rows = [
        [name, *(percent(weight) for weight in weights), *(f"{terms.to_json()[error]:.3f}" for error in errors)]
        for (name, weights), terms in zip(result.weights.items(), result.terms.values(), strict=True)
    ]
    title = f"{loaded.name}: weights in %, and the errors they allow, {result.inputs.loss_bound:.2f} each at most"
    print_table(title, ["weighting", *exits, *errors], rows)
    click.echo(f"Least in total: {result.cheapest}. {_why(result)}")


def _why(result: Explanation) -> str:
    """What the other weightings pay for."""
    best = result.terms[result.cheapest].to_json()
    worst = {
        error: max(terms.to_json()[error] for terms in result.terms.values()) - best[error]
        for error in ("generalisation", "bias", "noise", "sampling")
    }
    error = max(worst, key=worst.__getitem__)
    if worst[error] < 1e-3:
        return "The errors hardly tell the weightings apart."
    return f"What tells the others apart most is {error}: up to {worst[error]:.3f} more."


@main.group(cls=_Group)
def federation() -> None:
    """Train across machines that keep their data: see docs/federation.md.

    \b
    Example:
      exitflow federation init campus.toml --superlink 10.0.0.1:9092
      exitflow federation server federation
      exitflow federation node federation/nodes/device-0 --data-dir /data
      exitflow train campus.toml --backend flower --superlink 10.0.0.1:9092 --out runs/campus
    """


@federation.command()
@click.argument("system")
@click.option("--out", metavar="DIR", default="federation", show_default=True, help="The new folder.")
@click.option(
    "--superlink",
    metavar="HOST:PORT",
    default="127.0.0.1:9092",
    show_default=True,
    help="Where the nodes will meet: the server as they reach it.",
)
@_set
def init(system: str, out: str, superlink: str, overrides: tuple[str, ...]) -> None:
    """Write what each machine of SYSTEM needs: certificates, a key for every node, start scripts, systemd units.

    \b
    Example:
      exitflow federation init campus.toml --superlink 10.0.0.1:9092
    """
    from pathlib import Path

    from exitflow.experiments.federation import init_federation
    from exitflow.experiments.system import load_system

    loaded = load_system(system, list(overrides))
    init_federation(loaded, Path(out), superlink=superlink)
    click.echo(f"{out}/server: for the machine at {superlink}; start it with {out}/server/start.sh")
    click.echo(
        f"{out}/nodes/NAME: for each of the {len(loaded.topology.nodes)} nodes; hand out each to its own machine"
    )
    click.echo(f"Then: exitflow train {system} --backend flower --superlink {superlink} --out RUN")


@federation.command()
@click.argument("folder")
@click.option("--host", metavar="ADDRESS", help="Listen here; at the host that `init` was told if not given.")
@click.option("--flwr-run", is_flag=True, help="Run here what `flwr run` submits, instead of `exitflow train`.")
def server(folder: str, host: str | None, flwr_run: bool) -> None:
    """The meeting point: run Flower's SuperLink from FOLDER, until it is ended.

    \b
    Example:
      exitflow federation server federation
      exitflow federation server federation/server --host 0.0.0.0
    """
    from exitflow.experiments.federation import read_address, run_server, server_folder

    found = server_folder(folder)
    ready = f"The federation meets at {read_address(found)}."
    run_server(found, host=host, flwr_run=flwr_run, ready=lambda: click.echo(ready))


_node_data = click.option(
    "--data-dir",
    metavar="DIR",
    help="All training samples there are this node's; its part of the system's partition if not given.",
)


@federation.command()
@click.argument("folder")
@_node_data
def node(folder: str, data_dir: str | None) -> None:
    """A node: train on its own data whenever the server asks, until it is ended.

    \b
    Example:
      exitflow federation node federation/nodes/device-0 --data-dir /data
    """
    from pathlib import Path

    from exitflow.experiments.federation_node import run_node

    run_node(Path(folder), data_dir=data_dir, tell=lambda text: click.echo(f"exitflow: {text}", err=True))


@federation.command()
@click.argument("name")
@click.option(
    "--socket", "path", metavar="PATH", required=True, help="Where to listen, for the Flower app of the node."
)
@click.option("--states", metavar="DIR", default="states", show_default=True, help="Where the node keeps its states.")
@_node_data
def worker(name: str, path: str, states: str, data_dir: str | None) -> None:
    """Only the worker of node NAME, for a Flower SuperNode that runs already.

    \b
    Example:
      exitflow federation worker device-0 --socket /run/exitflow/device-0 --data-dir /data
      flower-supernode ... --node-config 'worker="/run/exitflow/device-0"'
    """
    from pathlib import Path

    from exitflow.experiments.federation_node import run_worker

    run_worker(name, Path(path), states=Path(states), data_dir=data_dir)


for command in serving.COMMANDS:
    main.add_command(command)
main.add_command(report)


def _overrides(
    *,
    weighting: str | None = None,
    seed: int | None = None,
    rounds: int | None = None,
    data_dir: str | None = None,
    overrides: tuple[str, ...] = (),
) -> list[str]:
    """Options that stand for keys, after --set, as `key=value`."""
    options = {"training.weighting": weighting, "training.seed": seed, "training.rounds": rounds, "data.dir": data_dir}
    given = [f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in options.items() if value is not None]
    return [*overrides, *given]


def _names(text: str) -> list[str]:
    return list(dict.fromkeys(name.strip() for name in text.split(",")))


def _seeds(text: str) -> list[int]:
    try:
        seeds = [int(part) for part in text.split(",")]
    except ValueError:
        seeds = []
    if not seeds or min(seeds) < 0 or len(set(seeds)) < len(seeds):
        raise ConfigError(f"expected different numbers such as 9,42,67, got {text!r}", key="--seeds")
    return seeds


def _dataset(run: Run, data_dir: str | None) -> Any:
    """The run's data set, from `data_dir` where that is given."""
    from exitflow.experiments.assembly import dataset_of

    system = run.system
    return dataset_of(replace(system, data=replace(system.data, dir=data_dir)) if data_dir else system)


def _print_json(value: Any) -> None:
    click.echo(json.dumps(value, indent=2, allow_nan=False))
