"""Requests to a running tree, and the answers that the offline evaluation gives to them."""

import asyncio

import tritonclient.grpc.aio as triton

from exitflow.routing import confidence, serves
from exitflow.serving.wire.messages import ModelInferRequest


def message(bundle, row=0, **changes):
    """A gRPC request for one sample."""
    request = ModelInferRequest(model_name=bundle.manifest.name, **changes)
    request.inputs.add(name="input", datatype="UINT8", shape=[1, *bundle.manifest.input_shape])
    request.raw_input_contents.append(bundle.samples().inputs[row].tobytes())
    return request


async def ask_all(place, model, inputs, *, at_once=32):
    """(class, exit, node) of every input, one a request."""
    found = [None] * len(inputs)
    rows = iter(range(len(inputs)))

    async with triton.InferenceServerClient(place) as client:

        async def work():
            for row in rows:
                tensor = triton.InferInput("input", [1, *inputs.shape[1:]], "UINT8")
                tensor.set_data_from_numpy(inputs[row : row + 1])
                answer = await client.infer(model, [tensor])
                found[row] = (
                    int(answer.as_numpy("scores").argmax()),
                    int(answer.as_numpy("exit")[0]),
                    answer.as_numpy("node")[0].decode(),
                )

        await asyncio.gather(*(work() for _ in range(at_once)))
    return found


def path_of(bundle, device):
    """device, edge, cloud."""
    names = [device]
    while parents := bundle.node(names[-1]).parents:
        names.append(parents[0].name)
    return names


def expected(bundle, device, samples):
    """What the evaluation's routing says: each exit's logits, each node's threshold."""
    found = []
    sure = [confidence(logits, bundle.manifest.confidence) for logits in samples.outputs.logits]
    for row in range(len(samples.inputs)):
        for name in path_of(bundle, device):
            exit = bundle.node(name).exit
            if serves(sure[exit - 1][row : row + 1], bundle.manifest.nodes[name].cut)[0]:
                found.append((int(samples.outputs.logits[exit - 1][row].argmax()), exit, name))
                break
    return found
