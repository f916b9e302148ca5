"""`python -m benchmarks.serving_client KIND ADDRESS CONCURRENCY SECONDS`: drives a server, prints figures as JSON.

KIND is grpc (the Open Inference Protocol) or http (base64 in JSON to /predict). The client is the same for all servers.
`flood` does the same by h2load.
"""

from __future__ import annotations

import asyncio
import base64
import json
import re
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from itertools import cycle

import numpy as np

from exitflow.serving.ports.server import event_loop_factory
from exitflow.serving.wire.messages import SERVICE, ModelInferRequest

INPUT_SHAPE = (3, 32, 32)
Call = Callable[[], Awaitable[object]]


def _samples(count: int = 256) -> list[bytes]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, 256, size=INPUT_SHAPE, dtype=np.uint8).tobytes() for _ in range(count)]


def _message(sample: bytes) -> bytes:
    request = ModelInferRequest(model_name="bench", id="1")
    request.inputs.add(name="input", datatype="UINT8", shape=[1, *INPUT_SHAPE])
    request.raw_input_contents.append(sample)
    data: bytes = request.SerializeToString()
    return data


def _json(sample: bytes) -> bytes:
    return json.dumps({"image": base64.b64encode(sample).decode()}).encode()


def flood(kind: str, address: str, concurrency: int, seconds: int) -> dict[str, float]:
    """By h2load, which leaves the machine to the server, but always sends the same sample."""
    sample = _samples(1)[0]
    if kind == "grpc":
        message = _message(sample)
        body, path = struct.pack(">BI", 0, len(message)) + message, f"/{SERVICE}/ModelInfer"
        how = ["-c1", f"-m{concurrency}", "-Hcontent-type: application/grpc", "-Hte: trailers"]
    else:
        body, path = _json(sample), "/predict"
        how = ["--h1", f"-c{concurrency}", "-m1", "-Hcontent-type: application/json"]
    with tempfile.NamedTemporaryFile() as file, tempfile.NamedTemporaryFile("r") as log:
        file.write(body)
        file.flush()
        how += [f"-D{seconds}", f"-d{file.name}", f"--log-file={log.name}"]
        text = subprocess.run(
            ["h2load", *how, f"http://{address}{path}"], check=True, stdout=subprocess.PIPE, text=True
        ).stdout
        latencies = [int(line.split()[2]) / 1e6 for line in log]
    (succeeded,) = re.findall(r"(\d+) succeeded, 0 failed, 0 errored", text)
    return {"requests": int(succeeded), "rate": int(succeeded) / seconds} | _percentiles(latencies)


async def _drive(calls: list[Call], seconds: float) -> dict[str, float]:
    latencies: list[float] = []
    end = time.perf_counter() + seconds

    async def work(call: Call) -> None:
        while (started := time.perf_counter()) < end:
            await call()
            latencies.append(time.perf_counter() - started)

    began = time.perf_counter()
    await asyncio.gather(*map(work, calls))
    elapsed = time.perf_counter() - began
    return {"requests": len(latencies), "rate": len(latencies) / elapsed} | _percentiles(latencies)


def _percentiles(latencies: list[float]) -> dict[str, float]:
    p50, p99 = np.percentile(latencies, [50, 99])
    return {"p50": float(p50), "p99": float(p99)}


async def _grpc(address: str, concurrency: int, seconds: float) -> dict[str, float]:
    import grpc.aio

    next_message = cycle([_message(sample) for sample in _samples()]).__next__
    async with grpc.aio.insecure_channel(address) as channel:
        call = channel.unary_unary(f"/{SERVICE}/ModelInfer")
        return await _drive([lambda: call(next_message())] * concurrency, seconds)


async def _http(address: str, concurrency: int, seconds: float) -> dict[str, float]:
    """Keep-alive connections, one for each caller, and as little client as can be."""
    host, _, port = address.rpartition(":")
    bodies = [_json(sample) for sample in _samples()]
    length = len(bodies[0])
    head = f"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {length}"
    next_message = cycle([head.encode() + b"\r\n\r\n" + body for body in bodies]).__next__
    streams = [await asyncio.open_connection(host, int(port)) for _ in range(concurrency)]

    def caller(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Call:
        async def call() -> object:
            writer.write(next_message())
            answer = await reader.readuntil(b"\r\n\r\n")
            if not answer.startswith(b"HTTP/1.1 200"):
                raise RuntimeError(answer.decode())
            length = int(answer.lower().split(b"content-length:")[1].split(b"\r\n")[0])
            return await reader.readexactly(length)

        return call

    return await _drive([caller(*stream) for stream in streams], seconds)


if __name__ == "__main__":
    kind, address, concurrency, seconds = sys.argv[1:]
    work = {"grpc": _grpc, "http": _http}[kind](address, int(concurrency), float(seconds))
    with asyncio.Runner(loop_factory=event_loop_factory()) as runner:
        print(json.dumps(runner.run(work)))
