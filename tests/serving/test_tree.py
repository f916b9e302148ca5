"""A real tree of processes answers what the offline evaluation says it will."""

import asyncio
from collections import Counter

import numpy as np
import tritonclient.grpc.aio as triton

from exitflow.routing import confidence, serves


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


def test_a_tree_of_seven_answers_thousands_of_requests_as_the_evaluation_does(bundle, tree):
    samples = bundle.samples()

    async def everywhere():
        devices = [node.name for node in bundle.topology.nodes if node.arrival_rate > 0]
        return dict(
            zip(
                devices,
                await asyncio.gather(
                    *(ask_all(tree.places[name].grpc, bundle.manifest.name, samples.inputs) for name in devices)
                ),
                strict=True,
            )
        )

    found = asyncio.run(everywhere())
    assert sum(map(len, found.values())) == 1600
    for device, answers in found.items():
        assert answers == expected(bundle, device, samples)
    shares = Counter(exit for answers in found.values() for _, exit, _ in answers)
    assert np.allclose([shares[exit] / 1600 for exit in (1, 2, 3)], bundle.plan.exit_share, atol=0.06)
