"""A node against its own engine in-process, against other servers with the same ONNX file, and a chain of three.

Besides, the device's part as a function in a program of its own, and the chain with that at its leaf. $EXITFLOW_BEFORE
names the `src` directory of another checkout, whose chain is measured as well.

All in one interleaved run: every round measures everything for a moment, and ratios are taken within the round.
CPU is that of the serving processes, from /proc. The client, the same for all, is a process of its own: one in Python,
which takes about as much of the machine as a server does, and h2load, where it is installed, which takes little.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w
import torch

from benchmarks.serving_client import INPUT_SHAPE, flood
from exitflow.config import encode
from exitflow.data.dataset import Preparation
from exitflow.free_ports import free_ports
from exitflow.models.build import build_model
from exitflow.models.specs import EarlyExitResNet
from exitflow.routing import confidence
from exitflow.serving.bundle.assembling import LabelledInputs, Parts, assemble
from exitflow.serving.bundle.bundle import Bundle, load_bundle
from exitflow.serving.bundle.engine import Engine
from exitflow.serving.bundle.onnx_segments import export_segments
from exitflow.topology.graph import Link, Node, Topology

CLIENTS = ["Python", *(["h2load"] if shutil.which("h2load") else [])]  # Debian: nghttp2-client
ROUNDS = 5
SECONDS = 2.0
SERVERS = Path(__file__).parent / "servers"
HOME = Path(__file__).parents[1] / ".venv-bench"
LONE = Topology((Node("server", 1, 100.0),))
CHAIN = Topology(
    (
        Node("device", 1, 100.0, (Link("edge", 20.0),)),
        Node("edge", 2, 0.0, (Link("cloud", 5.0),)),
        Node("cloud", 3),
    )
)


@dataclass(frozen=True)
class Model:
    """A network to serve, untrained: speed does not ask for sense."""

    name: str
    width: int
    blocks: tuple[int, ...]
    strides: tuple[int, ...]


MODELS = (
    Model("tiny", 8, (1, 1, 1), (1, 2, 2)),  # about 0.2 ms: the worst case, where the protocol is all
    Model("small", 16, (2, 2, 2, 2), (1, 2, 2, 2)),  # exitflow's default ResNet-18
)


def make_bundle(model: Model, topology: Topology, out: Path) -> Bundle:
    exits = topology.num_exits
    spec = EarlyExitResNet(width=model.width, blocks=model.blocks, strides=model.strides, heads="gap").resolve(exits)
    network = build_model(spec, INPUT_SHAPE, 10, seed=0)
    inputs = torch.randint(256, (256, *INPUT_SHAPE), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    segments = export_segments(network, inputs, Preparation((128.0,) * 3, (64.0,) * 3))
    data = LabelledInputs(inputs.numpy(), np.zeros(len(inputs), dtype=np.int64))
    system = tomli_w.dumps({"nodes": [encode(node) for node in topology.nodes]})
    serialised = [segment.SerializeToString() for segment in segments]
    assemble(Parts("bench", topology, system, serialised, [1] * exits, data, data), out)
    return load_bundle(out)


@dataclass(frozen=True)
class Server:
    """A running server and how to ask it."""

    name: str
    process: subprocess.Popen[str]
    kind: str
    address: str
    others: tuple[int, ...] = ()  # process ids of the rest of a tree

    @property
    def pids(self) -> list[int]:
        """All its processes."""
        found = [self.process.pid, *self.others]
        for pid in found:
            for task in Path(f"/proc/{pid}/task").glob("*/children"):
                found += [int(child) for child in task.read_text().split() if int(child) not in found]
        return found

    def cpu_seconds(self) -> float:
        ticks = 0
        for pid in self.pids:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    def megabytes(self) -> float:
        lines = [Path(f"/proc/{pid}/status").read_text().splitlines() for pid in self.pids]
        return sum(int(line.split()[1]) for text in lines for line in text if line.startswith("VmRSS")) / 1024


@contextmanager
def serving(name: str, command: list[str], kind: str, port: int, **options: Any) -> Iterator[Server]:
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, text=True, start_new_session=True, **options)
        try:
            _wait_for(port, process, log)
            yield Server(name, process, kind, f"127.0.0.1:{port}")
        finally:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(10)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # workers that outlive their server
            process.wait()


def _wait_for(port: int, process: subprocess.Popen[str], log: Any) -> None:
    for _ in range(600):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                time.sleep(1.0)
                return
        if process.poll() is not None:
            break
        time.sleep(0.1)
    log.seek(0)
    raise RuntimeError(f"{process.args!r} does not listen:\n{log.read().decode()[-2000:]}")


def node_command(bundle: Bundle, node: str, port: int, *more: str) -> list[str]:
    address = f"127.0.0.1:{port}"
    return [sys.executable, "-m", "exitflow", "serve", str(bundle.path), "--node", node, "--listen", address, *more]


def other_servers(model: Path, stack: ExitStack, folder: Path) -> list[Server]:
    """Those whose environment is there."""
    found = []
    if (python := HOME / "kserve/bin/python").exists():
        grpc_port, http_port = free_ports(2)
        command = [str(python), str(SERVERS / "kserve_server.py"), str(model), str(grpc_port), str(http_port)]
        found.append(stack.enter_context(serving("KServe gRPC", command, "grpc", grpc_port)))
    if (python := HOME / "mlserver/bin/python").exists():
        grpc_port, http_port, metrics_port = free_ports(3)
        settings = {"http_port": http_port, "grpc_port": grpc_port, "metrics_port": metrics_port}
        (folder / "settings.json").write_text(json.dumps(settings | {"host": "127.0.0.1", "parallel_workers": 0}))
        model_settings = {"name": "bench", "implementation": "mlserver_model.OnnxModel"}
        model_settings |= {"parameters": {"uri": str(model)}}  # type: ignore[dict-item]
        (folder / "model-settings.json").write_text(json.dumps(model_settings))
        command = [str(python.with_name("mlserver")), "start", str(folder)]
        environment = os.environ | {"PYTHONPATH": str(SERVERS)}
        found.append(stack.enter_context(serving("MLServer gRPC", command, "grpc", grpc_port, env=environment)))
    if (python := HOME / "litserve/bin/python").exists():
        (port,) = free_ports(1)
        command = [str(python), str(SERVERS / "litserve_server.py"), str(model), str(port)]
        found.append(stack.enter_context(serving("LitServe HTTP", command, "http", port)))
    return found


def drive(server: Server, concurrency: int, *, by_h2load: bool = False) -> dict[str, float]:
    """Rate, CPU and latency of one moment."""
    before = server.cpu_seconds()
    if by_h2load:
        found = flood(server.kind, server.address, concurrency, int(SECONDS))
    else:
        program = [sys.executable, "-m", "benchmarks.serving_client", server.kind, server.address, str(concurrency)]
        result = subprocess.run([*program, str(SECONDS)], check=True, stdout=subprocess.PIPE, text=True)
        found = json.loads(result.stdout)
    return found | {"cpu": (server.cpu_seconds() - before) / found["requests"]}


def in_process(answer: Callable[[], object]) -> dict[str, float]:
    """One request after the other, without any protocol."""
    latencies: list[float] = []
    end, cpu = time.perf_counter() + SECONDS, time.process_time()
    while (started := time.perf_counter()) < end:
        answer()
        latencies.append(time.perf_counter() - started)
    cpu = (time.process_time() - cpu) / len(latencies)
    return {"rate": len(latencies) / SECONDS, "p50": statistics.median(latencies), "cpu": cpu}


def early_exit(bundle: Bundle, rows: Iterator[int]) -> Callable[[], object]:
    """The chain's work in one process: exit by exit until one is sure."""
    engines = [Engine([segment]) for segment in bundle.segments]
    cuts = [bundle.manifest.nodes[name].cut for name in ("device", "edge", "cloud")]
    inputs = bundle.samples().inputs

    def answer() -> object:
        row = next(rows)
        carry: Any = inputs[row : row + 1]
        for engine, cut in zip(engines, cuts, strict=True):
            carry, logits = engine.run({0: carry})
            if confidence(logits)[0] >= cut:
                break
        return logits

    return answer


def ask_device(bundle: Bundle, edge: str, threads: int) -> dict[str, float]:
    program = [sys.executable, "-m", "benchmarks.serving_device", str(bundle.path), edge, str(threads), str(SECONDS)]
    result = subprocess.run(program, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, float] = json.loads(result.stdout)
    return found


def main() -> None:
    for model in MODELS:
        with tempfile.TemporaryDirectory() as name:
            _device(model, Path(name))
        with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
            _compare(model, Path(name), stack)
        with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
            _chain(model, Path(name), stack)


def _compare(model: Model, folder: Path, stack: ExitStack) -> None:
    bundle = make_bundle(model, LONE, folder / "bundle")
    (port,) = free_ports(1)
    ours = stack.enter_context(serving("exitflow", node_command(bundle, "server", port), "grpc", port))
    servers = [ours, *other_servers(bundle.path / "segment-1.onnx", stack, folder)]
    engine, inputs = Engine(bundle.segments), bundle.samples().inputs[:1]
    ratios: dict[tuple[str, str], list[float]] = defaultdict(list)
    drive(ours, 16)
    for _ in range(ROUNDS):
        base = in_process(lambda: engine.run({0: inputs}))
        for server in servers:
            for client in CLIENTS:
                many = drive(server, 16, by_h2load=client == "h2load")
                ratios[server.name, f"requests/s, 16 at once by {client}"].append(many["rate"] / base["rate"])
                ratios[server.name, f"CPU a request, 16 at once by {client}"].append(many["cpu"] / base["cpu"])
                alone = drive(server, 1, by_h2load=client == "h2load")
                ratios[server.name, f"p50 alone by {client}"].append(alone["p50"] / base["p50"])
    print(f"{model.name} model, {1e3 * base['p50']:.2f} ms in-process; ratios to the engine in-process")
    for server in servers:
        figures = ", ".join(
            f"{what} {statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"
            for (name, what), values in ratios.items()
            if name == server.name
        )
        print(f"  {server.name}: {figures}; {server.megabytes():.0f} MB", flush=True)


def _device(model: Model, folder: Path) -> None:
    """A Device without parents, against its engine."""
    bundle = make_bundle(model, LONE, folder / "bundle")
    ratios: dict[str, list[float]] = defaultdict(list)
    for _ in range(ROUNDS):
        alone, many = ask_device(bundle, "-", 1), ask_device(bundle, "-", 16)
        ratios["p50 over the engine's"].append(alone["p50"] / alone["engine_p50"])
        ratios["microseconds above the engine's p50"].append(1e6 * (alone["p50"] - alone["engine_p50"]))
        ratios["requests/s of 16 threads over the engine's"].append(many["rate"] / many["engine_rate"])
    _print(f"{model.name}, Device", ratios)


def _print(who: str, ratios: dict[str, list[float]]) -> None:
    for what, values in ratios.items():
        spread = f"{min(values):.2f} to {max(values):.2f}"
        print(f"  {who}, {what}: {statistics.median(values):.2f} ({spread})", flush=True)


def _start_chain(bundle: Bundle, stack: ExitStack, **options: Any) -> Server:
    """The server to ask; the others are the edge and the cloud."""
    ports = dict(zip(("device", "edge", "cloud"), free_ports(3), strict=True))
    started = {}
    for name, parent in (("cloud", None), ("edge", "cloud"), ("device", "edge")):
        more = [f"--parent={parent}=127.0.0.1:{ports[parent]}"] if parent else []
        command = node_command(bundle, name, ports[name], "--set", "control=threshold", *more)
        started[name] = stack.enter_context(serving(name, command, "grpc", ports[name], **options))
    others = tuple(started[name].process.pid for name in ("edge", "cloud"))
    return Server("chain", started["device"].process, "grpc", started["device"].address, others)


def _chain(model: Model, folder: Path, stack: ExitStack) -> None:
    bundle = make_bundle(model, CHAIN, folder / "bundle")
    chain = _start_chain(bundle, stack)
    before = os.environ.get("EXITFLOW_BEFORE")
    earlier = _start_chain(bundle, stack, env=os.environ | {"PYTHONPATH": before}) if before else None
    ports = dict(zip(("edge", "cloud"), free_ports(2), strict=True))
    above = []
    for name, more in (("cloud", []), ("edge", [f"--parent=cloud=127.0.0.1:{ports['cloud']}"])):
        command = node_command(bundle, name, ports[name], "--set", "control=threshold", *more)
        above.append(stack.enter_context(serving(name, command, "grpc", ports[name])))
    whole, inputs = Engine(bundle.segments), bundle.samples().inputs[:1]
    bases: dict[str, Callable[[], object]] = {
        "the whole network in-process": lambda: whole.run({0: inputs}),
        "in-process exits until one is sure": early_exit(bundle, cycle(range(256))),
    }
    ratios: dict[str, list[float]] = defaultdict(list)
    for server in filter(None, (chain, earlier)):
        drive(server, 16)
    for _ in range(ROUNDS):
        measured = {what: in_process(answer) for what, answer in bases.items()}
        found = drive(chain, 16)
        for what, base in measured.items():
            ratios[f"CPU a request over {what}"].append(found["cpu"] / base["cpu"])
            ratios[f"requests/s over {what}"].append(found["rate"] / base["rate"])
        spent = sum(server.cpu_seconds() for server in above)
        leaf = ask_device(bundle, above[1].address, 16)
        leaf["cpu"] += (sum(server.cpu_seconds() for server in above) - spent) / leaf["requests"]
        for what, base in measured.items():
            ratios[f"CPU a request over {what}, Device at the leaf"].append(leaf["cpu"] / base["cpu"])
        if earlier:
            then = drive(earlier, 16)
            for who, now in (("serve", found), ("Device", leaf)):
                ratios[f"CPU a request over the other checkout, {who} at the leaf"].append(now["cpu"] / then["cpu"])
                ratios[f"requests/s over the other checkout, {who} at the leaf"].append(now["rate"] / then["rate"])
    _print(f"{model.name}, chain of 3", ratios)
