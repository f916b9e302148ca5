"""Export, serve, up and what goes with them: read options, call the package, print."""

from __future__ import annotations

import logging
import signal
import time
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import click

from exitflow.commands.options import data_dir_option, json_option, print_json
from exitflow.report.terminal import percent, print_table, rate
from exitflow.routing import CONFIDENCES

if TYPE_CHECKING:
    from exitflow.serving.bundle import Manifest

_set = click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="Change how it serves: codec=u8.")


@click.command()
@click.argument("run")
@click.option("--out", required=True, metavar="BUNDLE", help="The new directory of the bundle.")
@click.option("--quantize", type=click.Choice(["int8"]), help="Static quantisation, calibrated on validation data.")
@click.option(
    "--confidence", type=click.Choice(list(CONFIDENCES)), default="entropy", show_default=True, help="How nodes rank."
)
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
    from exitflow.experiments.runs import Run
    from exitflow.serving.export import Trained, export_bundle

    loaded = Run(run)
    system, dataset = loaded.system, _dataset(loaded, data_dir)
    trained = Trained(system.name, loaded.model(dataset), dataset, system.topology, system.to_toml())
    manifest = export_bundle(trained, out, precision=quantize or "fp32", confidence=confidence, replace=replace)
    if as_json:
        print_json({"bundle": out, "report": asdict(manifest.report), "codecs": [asdict(c) for c in manifest.codecs]})
        return
    _print_export(out, manifest)


def _dataset(run: Any, data_dir: str | None) -> Any:
    from exitflow.experiments.assembly import dataset_of

    system = run.system
    return dataset_of(replace(system, data=replace(system.data, dir=data_dir)) if data_dir else system)


def _print_export(out: str, manifest: Manifest) -> None:
    report = manifest.report
    exits = zip(report.torch_exit_accuracy, report.exit_accuracy, report.changed, strict=True)
    rows = [[f"exit {exit}", *map(percent, values)] for exit, values in enumerate(exits, start=1)]
    rows.append(["as served", percent(report.torch_accuracy), percent(report.accuracy), ""])
    title = f"{manifest.name}: accuracy in % on test data, as {report.precision} segments"
    print_table(title, ["", "PyTorch", "bundle", "answers that differ"], rows)
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
    click.echo(f"{out}: next: exitflow up {out}")


@click.command()
@click.argument("bundle")
@click.option("--node", required=True, metavar="NAME", help="Which node of the bundle this is.")
@click.option("--listen", default="127.0.0.1:8001", show_default=True, metavar="HOST:PORT", help="gRPC.")
@click.option("--http", metavar="HOST:PORT", help="REST, health and metrics.")
@click.option("--clients", metavar="HOST:PORT", help="With --certs: gRPC for clients that have no certificate.")
@click.option("--parent", "parents", multiple=True, metavar="NODE=HOST:PORT", help="Where a parent listens.")
@click.option("--certs", metavar="DIR", help="This node's directory made by exitflow certs: TLS, mutual between nodes.")
@click.option("--token", metavar="TOKEN", envvar="EXITFLOW_TOKEN", help="Clients must send it; also $EXITFLOW_TOKEN.")
@click.option("--insecure", is_flag=True, help="Listen beyond this machine without TLS.")
@click.option("--until-stdin-closes", is_flag=True, hidden=True)
@_set
def serve(bundle: str, node: str, parents: tuple[str, ...], settings: tuple[str, ...], **options: Any) -> None:
    """Serve one node of BUNDLE until Ctrl-C; SIGHUP loads the bundle again.

    \b
    Example:
      exitflow serve bundles/campus --node edge-0 --listen 127.0.0.1:8001 --parent cloud-0=127.0.0.1:8002
    """
    from exitflow.serving.addresses import parse_parent
    from exitflow.serving.security import Security
    from exitflow.serving.server import ServeOptions, serve
    from exitflow.serving.spec import serving_spec

    logging.basicConfig(format=f"%(asctime)s {node} %(levelname)s %(message)s", level=logging.INFO)
    security = Security(options.pop("certs"), options.pop("token"), options.pop("insecure"))
    serve(
        ServeOptions(
            bundle,
            node,
            parents=dict(map(parse_parent, parents)),
            spec=serving_spec(settings),
            security=security,
            **options,
        )
    )


@click.command()
@click.argument("bundle")
@_set
@json_option
def up(bundle: str, settings: tuple[str, ...], as_json: bool) -> None:
    """Start every node of BUNDLE as a process on this machine, and stop them all on Ctrl-C.

    \b
    Example:
      exitflow up bundles/campus
      exitflow up bundles/campus --set codec=u8 --set forward=feature
    """
    from exitflow.serving.bundle import load_bundle
    from exitflow.serving.cluster import LocalCluster
    from exitflow.serving.spec import serving_spec

    serving_spec(settings)
    loaded = load_bundle(bundle)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    cluster = LocalCluster(loaded, options=[f"--set={text}" for text in settings])
    with cluster:
        _print_places(cluster, as_json)
        try:
            while True:
                for name, code in cluster.ended():
                    click.echo(f"exitflow: node {name} ended with exit code {code}", err=True)
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


COMMANDS = (export, serve, up)
