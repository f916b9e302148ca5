"""Train, evaluate, compare: read options, call the package, print."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from exitflow.cli.completion import FILE, FOLDER, SYSTEM, one_of, some_of
from exitflow.cli.options import (
    as_overrides,
    backend_option,
    data_dir_option,
    dataset_for,
    json_option,
    print_json,
    say_next,
    set_option,
    split_names,
    split_seeds,
    workers_option,
)
from exitflow.cli.program import Command
from exitflow.config import encode
from exitflow.errors import ConfigError, suggestion
from exitflow.federated.training_spec import GIVEN
from exitflow.federated.weighting import WEIGHTINGS
from exitflow.parts import check_part, is_own
from exitflow.report.terminal import amount, percent, print_table, progress_bar, rate, spread, waiting
from exitflow.routing import RANKINGS
from exitflow.runs.methods import METHODS

if TYPE_CHECKING:
    from exitflow.evaluation.accuracy import Evaluation
    from exitflow.runs.comparison import Comparison
    from exitflow.runs.runs import Run

COMPARED = "equal-weight,flops-prop,serving-rate,balanced-adj,auto"  # the paper's four, and ours

_address = click.option("--address", metavar="ADDRESS", help="Of a Ray cluster; one of our own if not given.")
_superlink = click.option("--superlink", metavar="HOST:PORT", help="Where the nodes of a real federation meet.")
_federation = click.option(
    "--federation",
    type=FOLDER,
    metavar="DIR",
    default="federation",
    show_default=True,
    help="What `federation init` wrote, for --superlink.",
)
_relay = click.option("--relay", type=FILE, hidden=True)  # where a ServerApp that started this command connects


@click.command(cls=Command, short_help="Train SYSTEM, or go on with a run that was cut off.")
@click.argument("system", type=SYSTEM, required=False)
@click.option("--out", type=FOLDER, metavar="RUN", help="The new directory of the run.")
@click.option("--resume", "resumed", type=FOLDER, metavar="RUN", help="Go on with this run instead of starting one.")
@click.option(
    "--accept",
    multiple=True,
    metavar="WHAT",
    help="With --resume, what is gone on with knowingly: edited-spec, or lost-states of nodes; repeatable.",
)
@click.option("--weighting", type=one_of(WEIGHTINGS), metavar="NAME", help=f"One of {', '.join(WEIGHTINGS)}.")
@click.option("--seed", type=int, metavar="N", help="Of all that is random.")
@click.option("--rounds", type=int, metavar="N", help="How many rounds to train.")
@click.option(
    "--start", type=FILE, metavar="RUN", help="Begin with the weights of another run, or of a .safetensors file."
)
@click.option(
    "--callback",
    "callbacks",
    multiple=True,
    metavar="MODULE:FUNCTION",
    help="Sees every round, and may end the training; tensorboard and mlflow are ours.",
)
@backend_option
@workers_option
@_address
@_superlink
@_federation
@_relay
@data_dir_option
@set_option
@json_option
def train(
    system: str | None,
    out: str | None,
    resumed: str | None,
    accept: tuple[str, ...],
    start: str | None,
    callbacks: tuple[str, ...],
    as_json: bool,
    backend: str,
    workers: int | None,
    address: str | None,
    superlink: str | None,
    federation: str,
    relay: str | None,
    **changes: Any,
) -> None:
    """Train SYSTEM with Algorithm 1 into the directory RUN; or go on with a run that was cut off.

    \b
    Example:
      exitflow train campus.toml --out runs/campus --weighting balanced-adj --seed 42
      exitflow train paper-7:80-15-5 --out runs/short --rounds 5 --set training.batch_size=64
      exitflow train --resume runs/campus
    """
    from exitflow.runs import training
    from exitflow.runs.runs import Run
    from exitflow.system.system import load_system

    where = _where(backend, workers, address, superlink=superlink, federation=federation, relay=relay)
    where["callbacks"] = callbacks
    if accept and not resumed:
        raise ConfigError("is for --resume", key="--accept")
    if resumed:
        if (
            system
            or out
            or start
            or any(value not in (None, {}) for key, value in changes.items() if key != "data_dir")
        ):
            raise ConfigError(
                "goes on with a run as it was begun: only options that say where to train, and --data-dir, fit",
                key="--resume",
            )
        run = Run(resumed)
        with progress_bar(run.system.training.rounds) as show:
            label = run.system.training.weighting_name
            where |= {"accept": accept, "dataset": dataset_for(run, changes["data_dir"])}
            run = training.resume(resumed, **where, **_watching(show, label))
    else:
        if not system or not out:
            raise ConfigError("give a SYSTEM and --out RUN, or --resume RUN", key="train")
        loaded = load_system(system, as_overrides(**changes))
        with progress_bar(loaded.training.rounds) as show:
            label = loaded.training.weighting_name
            run = training.train(loaded, out, start=start, **where, **_watching(show, label))
    print_training(run, as_json)


def _where(
    backend: str,
    workers: int | None,
    address: str | None,
    *,
    superlink: str | None,
    federation: str,
    relay: str | None,
) -> dict[str, Any]:
    """The options that say where to train."""
    if address and backend != "ray":
        raise ConfigError("is for --backend ray", key="--address")
    if superlink is None and relay is None:
        return {"backend": backend, "workers": workers, "address": address}
    if backend != "flower":
        raise ConfigError("is for --backend flower", key="--superlink")
    from exitflow.flower.folders import check_address, server_folder
    from exitflow.flower.joining import Membership

    if relay:
        membership = Membership(server_folder(federation) if federation else None, relay=Path(relay))
    else:
        membership = Membership(server_folder(federation), check_address(str(superlink)))
    return {"backend": backend, "federation": membership}


def _watching(show: Callable[..., None], label: str) -> dict[str, Any]:
    """Rounds done so far, and what is being waited for."""
    done = [0.0]

    def observe(rounds: float) -> None:
        done[0] = rounds
        show(label, rounds)

    return {"observer": observe, "status": lambda text: show(f"{label}: {text}" if text else label, done[0])}


def print_training(run: Run, as_json: bool) -> None:
    """What came out, what was lost on the way, and what to do next."""
    last = run.last_record
    losses = run.losses
    validation = last.validation
    if as_json:
        found = {"run": str(run.path), "rounds": last.round, "validation": validation and encode(validation)}
        print_json(found | losses.to_json())
        return
    click.echo(f"{run.path}: trained for {last.round} rounds with {run.system.training.weighting_name}.")
    if not run.finished:
        total = run.system.training.rounds
        click.echo(f"A callback has ended it before round {total:,}; exitflow train --resume {run.path} goes on.")
    if validation is None:
        return
    exits = ", ".join(percent(accuracy) for accuracy in validation.exit_accuracy)
    click.echo(f"On validation data: {percent(validation.accuracy)} % as served; exits on all samples {exits} %.")
    for sentence in losses.sentences():
        click.echo(sentence)
    say_next("evaluate", str(run.path))


@click.command(cls=Command, short_help="How accurately the system of RUN answers.")
@click.argument("run", type=FOLDER)
@click.option("--serving", multiple=True, metavar="X-Y-Z", help="Another serving setting; may be given more than once.")
@click.option(
    "--confidence",
    metavar="NAME",
    default="entropy",
    show_default=True,
    help=f"How nodes rank: {', '.join(RANKINGS)}, or your own module:function.",
)
@data_dir_option
@json_option
def evaluate(run: str, serving: tuple[str, ...], confidence: str, data_dir: str | None, as_json: bool) -> None:
    """How accurately the system of RUN answers on test data: each exit, each node on what it serves, and the whole.

    \b
    Example:
      exitflow evaluate runs/campus
      exitflow evaluate runs/campus --serving 60-30-10 --serving 5-15-80 --json
    """
    check_part("--confidence", confidence, RANKINGS, "confidence")
    with waiting(f"Computing what every exit of {run} says to the test data"):
        from exitflow.runs import runs
        from exitflow.runs.measured_accuracy import keep_accuracy

        loaded = runs.Run(run)
        outputs = loaded.outputs(dataset_for(loaded, data_dir))
    results = [
        (setting, runs.evaluate(loaded, serving=setting, confidence=confidence, outputs=outputs))
        for setting in serving or (None,)
    ]
    if not serving and confidence == "entropy":
        with suppress(OSError):  # a run that cannot be written to can still be evaluated
            keep_accuracy(loaded.path, results[0][1])
    if as_json:
        answers = "blended" if loaded.system.training.blends_answers else "own"
        objects = [{"run": run, "serving": setting, "answers": answers, **each.to_json()} for setting, each in results]
        print_json(objects[0] if len(objects) == 1 else objects)
        return
    for setting, result in results:
        _print_evaluation(loaded, setting, result)
    if loaded.system.training.blends_answers:
        click.echo("Every exit answers together with those before it: training.answers.")


def _print_evaluation(run: Run, setting: str | None, result: Evaluation) -> None:
    title = f"{run.system.name} ({run.system.training.weighting_name}), served as {setting or 'planned'}: accuracy in %"
    exits = enumerate(zip(result.exit_accuracy, result.exits, strict=True), start=1)
    rows = [
        [f"exit {exit}", percent(on_all), rate(served.rate), percent(served.accuracy)]
        for exit, (on_all, served) in exits
    ]
    total = sum(served.rate for served in result.exits)
    rows.append(["whole system", "", rate(total), percent(result.accuracy)])
    rows += [[name, "", rate(served.rate), percent(served.accuracy)] for name, served in result.nodes.items()]
    print_table(title, ["", "on all samples", "serves/s", "on what it serves"], rows)


@click.command(cls=Command, short_help="Train SYSTEM in several ways, and compare.")
@click.argument("system", type=SYSTEM)
@click.option(
    "--weightings", type=some_of(WEIGHTINGS), metavar="A,B", help=f"What to compare; {COMPARED} if nothing is said."
)
@click.option("--methods", type=some_of(METHODS), metavar="A,B", help=f"More to compare: {', '.join(METHODS)}.")
@click.option("--seeds", metavar="N,N", help="Each of them is trained with each seed; the system's own if not given.")
@click.option(
    "--out", type=FOLDER, metavar="DIR", help="Where the runs are kept; a folder for the system in runs/ if not given."
)
@backend_option
@workers_option
@data_dir_option
@set_option
@json_option
def compare(
    system: str,
    weightings: str | None,
    methods: str | None,
    seeds: str | None,
    out: str | None,
    backend: str,
    workers: int | None,
    data_dir: str | None,
    overrides: dict[str, Any],
    as_json: bool,
) -> None:
    """The same SYSTEM trained in several ways: accuracy of each exit and as served, mean ± deviation over the seeds.

    A weighting changes how much each exit counts; a method may change the model's family, what nodes train and how
    the server adds it up, and docs/methods.md says what each does. Beside methods stands what their training takes:
    bytes over all links, and multiply-adds of the forward passes. Weights that SYSTEM itself gives
    (training.exit_weights) are compared too. Runs that are already there are used again,
    unfinished ones are gone on with.

    \b
    Example:
      exitflow compare campus.toml --weightings serving-rate,balanced-adj --seeds 9,42,67
      exitflow compare campus.toml --methods exitflow,fjord,depthfl,fedavg,local-only
    """
    from exitflow.runs import comparison
    from exitflow.system.system import load_system

    chosen_methods = split_names(methods) if methods else []
    chosen_weightings = split_names(weightings or COMPARED) if weightings or not chosen_methods else []
    for name in chosen_weightings:
        if name not in (GIVEN, *WEIGHTINGS) and not is_own(name):
            raise ConfigError(f"there is no weighting {name!r}{suggestion(name, WEIGHTINGS)}", key="--weightings")
    loaded = load_system(system, as_overrides(data_dir=data_dir, overrides=overrides))
    numbers = split_seeds(seeds) if seeds else [loaded.training.seed]
    names = [*comparison.compared(loaded.training, chosen_weightings), *chosen_methods]
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
        print_json(result.to_json())
        return
    _print_comparison(loaded.name, result, names, with_costs=bool(chosen_methods))


def _print_comparison(name: str, result: Comparison, trainings: list[str], *, with_costs: bool) -> None:
    rows = []
    for training in trainings:
        accuracies = (*result.exit_accuracy(training), result.accuracy(training))
        rows.append([training, *(spread(each.mean, each.std) if each else "-" for each in accuracies)])
    exits = [f"exit {exit}" for exit in range(1, len(rows[0]) - 1)]
    columns = ["weighting", *exits, "as served"]
    if with_costs:
        columns = ["training", *exits, "as served", "bytes\nsent", "multiply-\nadds"]
        rows = [[*row, amount(result.bytes_sent(row[0])), amount(result.multiply_adds(row[0]))] for row in rows]
    count = f"{len(result.seeds)} seed{'s' if len(result.seeds) > 1 else ''}"
    print_table(f"{name}: test accuracy in %, {count}", columns, rows)
