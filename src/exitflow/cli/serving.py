"""Export, serve, up and what goes with them: read options, call the package, print."""

from __future__ import annotations

import contextlib
import signal
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from exitflow import logs
from exitflow.cli.completion import FILE, FOLDER, SYSTEM
from exitflow.cli.options import data_dir_option, dataset_for, json_option, log_options, print_json, say_next
from exitflow.cli.program import Command
from exitflow.errors import MissingExtraError
from exitflow.report.terminal import live_table, percent, print_table, rate, waiting
from exitflow.routing import RANKINGS

if TYPE_CHECKING:
    from exitflow.serving.bundle.bundle import Manifest
    from exitflow.serving.traffic.load_report import LoadReport

_set = click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="Change how it serves: codec=u8.")


@click.command(cls=Command, short_help="Turn a trained RUN into a BUNDLE to serve.")
@click.argument("run", type=FOLDER)
@click.option("--out", required=True, type=FOLDER, metavar="BUNDLE", help="The new directory of the bundle.")
@click.option("--quantize", type=click.Choice(["int8"]), help="Static quantisation, calibrated on validation data.")
@click.option("--confidence", type=click.Choice(RANKINGS), default="entropy", show_default=True, help="How nodes rank.")
@click.option("--replace", is_flag=True, help="Put it in the place of the bundle that is there.")
@data_dir_option
@json_option
def export(
    run: str,
    out: str,
    quantize: str | None,
    confidence: str,
    replace: bool,
    data_dir: str | None,
    as_json: bool,
) -> None:
    """The trained network of RUN as a bundle that nodes can serve: ONNX segments, thresholds, plan, hashes.

    \b
    Example:
      exitflow export runs/campus --out bundles/campus
      exitflow export runs/campus --out bundles/campus-int8 --quantize int8
    """
    try:
        from exitflow.runs.runs import Run
        from exitflow.serving.bundle.export import Trained, export_bundle
    except ModuleNotFoundError as error:
        raise MissingExtraError(str(error.name), "export") from None

    with waiting(f"Exporting {run}, and answering the test data with both engines"):
        loaded = Run(run)
        system, dataset = loaded.system, dataset_for(loaded, data_dir)
        trained = Trained(
            system.name,
            loaded.model(dataset),
            dataset,
            system.topology,
            system.to_toml(),
            blends_answers=system.training.blends_answers,
        )
        manifest = export_bundle(trained, out, precision=quantize or "fp32", confidence=confidence, replace=replace)
    if as_json:
        blends, codecs = ([asdict(each) for each in part] for part in (manifest.blends, manifest.codecs))
        print_json({"bundle": out, "report": asdict(manifest.report), "blends": blends, "codecs": codecs})
        return
    _print_export(out, manifest)


@click.command(cls=Command, short_help="Turn ONNX models of anybody's into a BUNDLE to serve.")
@click.argument("models", type=FILE, nargs=-1, required=True, metavar="MODEL.onnx...")
@click.option(
    "--plan", required=True, type=SYSTEM, metavar="SYSTEM", help="Who holds which model, and how much arrives."
)
@click.option(
    "--calibrate", required=True, type=FILE, metavar="FILE.npz", help="Inputs as clients send them, and their labels."
)
@click.option("--out", required=True, type=FOLDER, metavar="BUNDLE", help="The new directory of the bundle.")
@click.option("--confidence", type=click.Choice(RANKINGS), default="entropy", show_default=True, help="How nodes rank.")
@click.option("--replace", is_flag=True, help="Put it in the place of the bundle that is there.")
@json_option
def cascade(
    models: tuple[str, ...], plan: str, calibrate: str, out: str, confidence: str, replace: bool, as_json: bool
) -> None:
    """A bundle of networks that were not trained together, the smallest first: one for each exit of SYSTEM.

    They tell the same classes apart, and take the same inputs, each with its own preprocessing inside. A node that is
    not sure sends the input to its parent. Half of FILE.npz calibrates, the other half says how good the answers are.

    \b
    Example:
      exitflow cascade small.onnx large.onnx --plan campus.toml --calibrate held_out.npz --out bundles/campus
    """
    try:
        from exitflow.serving.bundle.cascade import cascade_bundle
    except ModuleNotFoundError as error:
        raise MissingExtraError(str(error.name), "export") from None
    from exitflow.system.system import load_system

    manifest = cascade_bundle(models, load_system(plan), calibrate, out, confidence=confidence, replace=replace)
    if as_json:
        print_json({"bundle": out, "report": asdict(manifest.report), "accuracy": manifest.accuracy})
        return
    rows = [
        [f"exit {exit}", model, percent(accuracy)]
        for exit, (model, accuracy) in enumerate(zip(models, manifest.report.exit_accuracy, strict=True), start=1)
    ]
    print_table("What each answers of the other half", ["", "model", "accuracy %"], rows)
    click.echo(f"As served: {percent(manifest.accuracy)} %.")
    say_next("up", out)


def _print_export(out: str, manifest: Manifest) -> None:
    report = manifest.report
    exits = zip(report.torch_exit_accuracy, report.exit_accuracy, report.changed, strict=True)
    rows = [[f"exit {exit}", *map(percent, values)] for exit, values in enumerate(exits, start=1)]
    rows.append(["as served", percent(report.torch_accuracy), percent(report.accuracy), ""])
    title = f"{manifest.name}: accuracy in % on test data, as {report.precision} segments"
    print_table(title, ["", "PyTorch", "bundle", "answers that differ"], rows)
    for exit, blend in enumerate(manifest.blends[1:], start=2):
        click.echo(
            f"Exit {exit} answers {blend.before:.2f} x the answer of exit {exit - 1} + {blend.own:.2f} x its own."
        )
    click.echo(f"Largest difference of a logit: {report.largest_difference:.1e} of the largest logit.")
    columns = ["features of", "codec", "bytes", "answers that differ %", "accuracy change"]
    codecs = [
        [
            f"exit {cost.exit}",
            cost.codec + (" + zlib" if cost.compress else ""),
            f"{cost.bytes:,.0f}",
            percent(cost.changed),
            f"{100 * cost.accuracy_change:+.1f}",
        ]
        for cost in manifest.codecs
    ]
    print_table("What sending features to the next exit costs", columns, codecs)
    say_next("up", out)


@click.command(cls=Command, short_help="Serve one node of BUNDLE.")
@click.argument("bundle", type=FOLDER)
@click.option("--node", required=True, metavar="NAME", help="Which node of the bundle this is.")
@click.option("--listen", default="127.0.0.1:8001", show_default=True, metavar="HOST:PORT", help="gRPC.")
@click.option("--http", metavar="HOST:PORT", help="REST, health and metrics.")
@click.option("--clients", metavar="HOST:PORT", help="With --certs: gRPC for clients that have no certificate.")
@click.option(
    "--parent", "parents", multiple=True, metavar="NODE=HOST:PORT", help="Where a parent listens; repeatable."
)
@click.option(
    "--certs",
    type=FOLDER,
    metavar="DIR",
    help="This node's directory made by exitflow certs: TLS, mutual between nodes.",
)
@click.option("--token", metavar="TOKEN", envvar="EXITFLOW_TOKEN", help="Clients must send it; also $EXITFLOW_TOKEN.")
@click.option(
    "--open", "open_", is_flag=True, help="With --certs: --http and --clients answer everybody, without a token."
)
@click.option("--insecure", is_flag=True, help="Listen beyond this machine without TLS.")
@click.option(
    "--drain",
    type=float,
    default=0.0,
    metavar="SECONDS",
    help="When told to stop, say that it is not ready, and go on answering for so long.",
)
@click.option("--until-stdin-closes", is_flag=True, hidden=True)
@log_options
@_set
def serve(bundle: str, node: str, parents: tuple[str, ...], settings: tuple[str, ...], **options: Any) -> None:
    """Serve one node of BUNDLE until Ctrl-C; SIGHUP loads the bundle again.

    \b
    Example:
      exitflow serve bundles/campus --node edge-0 --listen 127.0.0.1:8001 --parent cloud-0=127.0.0.1:8002
    """
    logs.set_up(options.pop("log_level"), options.pop("log_format"), who=node)  # before grpc is imported

    from exitflow.serving.node.node_settings import serving_spec
    from exitflow.serving.ports.server import ServeOptions, serve
    from exitflow.serving.wire.addresses import parse_parents
    from exitflow.serving.wire.security import Security

    security = Security(*(options.pop(name) for name in ("certs", "token", "insecure", "open_")))
    serve(
        ServeOptions(
            bundle,
            node,
            parents=parse_parents(parents),
            spec=serving_spec(settings),
            security=security,
            **options,
        )
    )


@click.command(cls=Command, short_help="Serve every node of BUNDLE on this machine.")
@click.argument("bundle", type=FOLDER)
@click.option(
    "--base-port",
    type=int,
    metavar="PORT",
    help="The nodes listen from here on, two ports each, gRPC and HTTP; any free ones if not given.",
)
@log_options
@_set
@json_option
def up(
    bundle: str, base_port: int | None, settings: tuple[str, ...], as_json: bool, log_level: str, log_format: str
) -> None:
    """Start every node of BUNDLE as a process on this machine, and stop them all on Ctrl-C.

    A node that ends by itself is started again.

    \b
    Example:
      exitflow up bundles/campus --base-port 8000
      exitflow up bundles/campus --set codec=u8 --set forward=feature
    """
    from exitflow.serving.bundle.bundle import load_bundle
    from exitflow.serving.node.node_settings import check_links, serving_spec
    from exitflow.serving.traffic.cluster import LocalCluster

    spec, loaded = serving_spec(settings), load_bundle(bundle)
    check_links(spec, loaded)
    for number in (signal.SIGTERM, signal.SIGINT):  # SIGINT too: a shell's background jobs ignore it
        signal.signal(number, signal.default_int_handler)
    options = [f"--log-level={log_level}", f"--log-format={log_format}", *(f"--set={text}" for text in settings)]
    logs.set_up(log_level, log_format, who="up")
    cluster = LocalCluster(loaded, options=options, base_port=base_port)
    with cluster, cluster.announced():
        _print_places(cluster, as_json)
        try:
            while True:
                cluster.keep_running(time.monotonic())
                time.sleep(0.2)
        except KeyboardInterrupt:
            click.echo("stopping", err=True)


def _print_places(cluster: Any, as_json: bool) -> None:
    places, plan = cluster.places, cluster.bundle.plan
    if as_json:
        print_json({"bundle": cluster.bundle.version, "nodes": {name: asdict(place) for name, place in places.items()}})
        return
    rows = [
        [name, str(plan.nodes[name].exit), place.grpc, f"http://{place.http}", rate(plan.nodes[name].received_rate)]
        for name, place in places.items()
    ]
    print_table(
        f"{cluster.bundle.manifest.name}: {len(rows)} nodes are ready; Ctrl-C stops them",
        ["node", "exit", "gRPC", "HTTP", "planned requests/s"],
        rows,
    )


def _access(command: Any) -> Any:
    """Options for who may ask."""
    for option in (
        click.option("--token", metavar="TOKEN", envvar="EXITFLOW_TOKEN", help="Of the nodes; also $EXITFLOW_TOKEN."),
        click.option(
            "--certs", type=FOLDER, metavar="DIR", help="A directory made by exitflow certs, such as certs/client."
        ),
    ):
        command = option(command)
    return command


_DRIFT = (
    "What changes half-way: only the harder half of the samples; only half of the devices, with twice the traffic; "
    "all requests of a second in its first half."
)


@click.command(cls=Command, short_help="Send requests to a tree, and report.")
@click.argument("targets", type=FOLDER, nargs=-1, required=True, metavar="BUNDLE|ADDRESS...")
@click.option("--rate", "total_rate", type=float, metavar="R", help="Requests/s in all; as planned if not given.")
@click.option("--concurrency", type=click.IntRange(min=1), metavar="N", help="N requests at once, instead of arrivals.")
@click.option("--duration", type=float, default=10.0, show_default=True, metavar="S", help="Seconds.")
@click.option("--drift", type=click.Choice(["difficulty", "traffic", "burst"]), help=_DRIFT)
@click.option("--seed", type=int, default=0, show_default=True, metavar="N", help="Of arrivals and samples.")
@click.option(
    "--trace", type=FILE, metavar="FILE", help="CSV or Parquet with seconds and requests: the shape over time."
)
@click.option(
    "--service", "services", multiple=True, metavar="NODE=MS", help="Let nodes take so long: 'edge-*=20', or declared."
)
@click.option(
    "--rtt", "trips", multiple=True, metavar="NODE=MS", help="Let links above nodes take so long; as --service."
)
@click.option("--remote", is_flag=True, help="Allow addresses that are not of this machine.")
@_set
@_access
@json_option
def load(targets: tuple[str, ...], settings: tuple[str, ...], as_json: bool, **options: Any) -> None:
    """Send requests from the bundle's samples, and compare what happens with the plan and the evaluation.

    With a BUNDLE, requests go to the tree that `exitflow up BUNDLE` runs, or to one that is started for them.
    With ADDRESSES of nodes, they go there. They arrive as a Poisson process at the devices' planned rates.

    \b
    Example:
      exitflow load bundles/campus --duration 20
      exitflow load bundles/campus --drift difficulty --json
      exitflow load bundles/campus --service 'device-*=20' --rtt 'edge-*=30' --duration 60
      exitflow load 127.0.0.1:8001 127.0.0.1:8002 --concurrency 16
    """
    from exitflow.serving.traffic.load_session import LoadOptions, run_load

    with contextlib.nullcontext() if as_json else live_table() as show:
        loaded = run_load(LoadOptions(targets, settings=settings, **options), show=show)
    if as_json:
        print_json(loaded.to_json())
        return
    _print_load(loaded)


def _print_load(found: LoadReport) -> None:
    rows = [
        [
            name,
            *(
                f"{rate(measured)}/{rate(planned)}"
                for measured, planned in (
                    (node.received, node.planned_received),
                    (node.served, node.planned_served),
                    (node.forwarded, node.planned_forwarded),
                )
            ),
            str(sum(node.fallbacks.values())),
            str(node.out_of_tokens),
            str(node.rejected),
        ]
        for name, node in found.nodes.items()
    ]
    columns = ["node", "received", "served", "forwarded", "fallbacks", "link full", "rejected"]
    print_table(f"{found.seconds:.1f} s: requests/s, measured / planned", columns, rows)
    links = [
        [
            name,
            f"{rate(link.forwarded)} / {'-' if link.limit is None else rate(link.limit)}",
            f"{link.bytes_sent:,}",
            f"{link.bytes_received:,}",
            str(link.audited),
        ]
        for name, link in found.links.items()
    ]
    print_table("Links", ["link", "requests/s / limit", "bytes up", "bytes down", "audits"], links)
    times = ", ".join(
        f"{name} {'-' if value is None else f'{value:.2f}'}" for name, value in found.milliseconds.items()
    )
    click.echo(f"{found.requests_per_second:.1f} requests/s answered; milliseconds: {times}.")
    if found.failures:
        click.echo(f"Not answered: {', '.join(f'{count} {code}' for code, count in found.failures.items())}.")
    if found.audit_agreement is not None:
        click.echo(f"Audits agree with {percent(found.audit_agreement)} % of the confident answers.")
    if found.rehearsed:
        columns = list(found.rehearsed["measured"])
        figures = [
            [name, *("-" if row[column] is None else f"{row[column]:.1f}" for column in columns)]
            for name, row in found.rehearsed.items()
        ]
        print_table("The rehearsal: measured and predicted", ["", *columns], figures)
    for sentence, good in found.verdicts:
        click.echo(f"{'as planned' if good else 'NOT AS PLANNED'}: {sentence}.")


@click.command(cls=Command, short_help="Turn observed rates into a system file.")
@click.argument("addresses", nargs=-1, required=True, metavar="ADDRESS...")
@click.option("--out", required=True, type=FILE, metavar="FILE", help="The new system file.")
@click.option("--window", type=click.FloatRange(min=1), metavar="S", help="Watch for S seconds; else since the start.")
@_access
@json_option
def observe(addresses: tuple[str, ...], out: str, window: float | None, as_json: bool, **access: Any) -> None:
    """Turn what the nodes at ADDRESSES have seen into a system file that `plan` and `train` take.

    \b
    Example:
      exitflow observe 127.0.0.1:8001 127.0.0.1:8002 --out observed.toml
      exitflow plan observed.toml
    """
    import asyncio
    from pathlib import Path

    from exitflow.errors import ConfigError
    from exitflow.files import write_atomically
    from exitflow.serving.traffic.observe import observe
    from exitflow.serving.wire.security import Security

    if Path(out).exists():
        raise ConfigError("is already there; choose another", key="--out", source=out)
    found = asyncio.run(observe(addresses, Security(**access), window=window))
    write_atomically(Path(out), found.to_toml().encode())
    if as_json:
        print_json({"system": out, "nodes": found.nodes, "unseen": found.unseen})
        return
    rows = [[name, *(rate(value) for value in rates.values())] for name, rates in found.nodes.items()]
    print_table("Observed requests/s", ["node", "arriving", "served", "forwarded"], rows)
    if found.unseen:
        click.echo(f"Not asked, so as planned: {', '.join(found.unseen)}.")
    say_next("plan", out)


@click.command(cls=Command, short_help="Let nodes load a new bundle.")
@click.argument("addresses", nargs=-1, required=True, metavar="ADDRESS...")
@_access
@json_option
def reload(addresses: tuple[str, ...], as_json: bool, **access: Any) -> None:
    """Let the nodes at ADDRESSES load their bundle again, without dropping a request. Parents first.

    \b
    Example:
      exitflow export runs/better --out bundles/campus --replace
      exitflow reload 127.0.0.1:8003 127.0.0.1:8002 127.0.0.1:8001
    """
    import asyncio

    from exitflow.errors import ServingError
    from exitflow.serving.node.status import NodeStatus
    from exitflow.serving.traffic.client import NodeClient, ask_each
    from exitflow.serving.wire.security import Security

    found: list[NodeStatus] = []
    for address in addresses:  # one after the other, in the order given
        try:
            found += asyncio.run(ask_each([address], Security(**access), NodeClient.reload))
        except ServingError as error:
            before = ", ".join(f"{status.node} ({status.bundle[:12]})" for status in found)
            raise ServingError(f"{error}{f'; loaded before that: {before}' if before else ''}") from None
    if as_json:
        print_json({status.node: status.bundle for status in found})
        return
    print_table("Loaded", ["node", "bundle"], [[status.node, status.bundle[:12]] for status in found])


@click.command(cls=Command, short_help="Make a private CA and certificates for a tree.")
@click.argument("bundle", type=FOLDER)
@click.option(
    "--out", required=True, type=FOLDER, metavar="DIR", help="The new directory; keep its ca-key.pem to yourself."
)
@click.option("--renew", is_flag=True, help="DIR is there: new certificates, which running nodes take up.")
@click.option(
    "--host",
    "hosts",
    multiple=True,
    metavar="NODE=HOST",
    help="A name or address under which NODE is called; repeatable.",
)
@click.option("--days", type=click.IntRange(1, 3650), default=365, show_default=True, help="How long they are valid.")
def certs(bundle: str, out: str, hosts: tuple[str, ...], days: int, renew: bool) -> None:
    """Make a private CA with a certificate for every node of BUNDLE, and one for clients.

    \b
    Example:
      exitflow certs bundles/campus --out certs --host cloud-0=10.0.0.1 --host edge-0=edge.example
      exitflow serve bundles/campus --node cloud-0 --listen 10.0.0.1:8001 --certs certs/cloud-0
      exitflow certs bundles/campus --out certs --renew
    """
    from collections import defaultdict
    from pathlib import Path

    from exitflow.errors import ConfigError, suggestion
    from exitflow.serving.bundle.bundle import load_bundle

    try:
        from exitflow.serving.wire.node_certificates import make_certificates, renew_certificates
    except ModuleNotFoundError as error:
        raise MissingExtraError(str(error.name), "certs") from None

    names = [node.name for node in load_bundle(bundle, max_exit=0).topology.nodes]
    by_node: dict[str, list[str]] = defaultdict(list)
    for text in hosts:
        name, equals, host = text.partition("=")
        if not equals or not host or not host.isascii() or name not in (*names, "client"):
            known = "" if name in names else suggestion(name, names)
            raise ConfigError(f"expected NODE=HOST with a node of the bundle, got {text!r}{known}", key="--host")
        by_node[name].append(host)
    (renew_certificates if renew else make_certificates)(Path(out), names, by_node, days=days)
    click.echo(f"{out}: a CA, and a directory for each of {len(names)} nodes and for clients.")
    click.echo(f"Copy {out}/NODE to the node, and give it to exitflow serve --certs.")
