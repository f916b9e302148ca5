"""A real tree of processes answers what the offline evaluation says it will."""

import asyncio
from collections import Counter

import numpy as np
import pytest

from tests.serving.asking import ask_all, expected

pytestmark = pytest.mark.heavy


def test_a_tree_of_seven_answers_thousands_of_requests_as_the_evaluation_does(bundle, tree):
    samples = bundle.samples()
    inputs = np.concatenate([samples.inputs] * 2)

    async def everywhere():
        devices = [node.name for node in bundle.topology.nodes if node.arrival_rate > 0]
        return dict(
            zip(
                devices,
                await asyncio.gather(
                    *(ask_all(tree.places[name].grpc, bundle.manifest.name, inputs) for name in devices)
                ),
                strict=True,
            )
        )

    found = asyncio.run(everywhere())
    assert sum(map(len, found.values())) == 3200
    for device, answers in found.items():
        assert answers == 2 * expected(bundle, device, samples)
    shares = Counter(exit for answers in found.values() for _, exit, _ in answers)
    assert np.allclose([shares[exit] / 3200 for exit in (1, 2, 3)], bundle.plan.exit_share, atol=0.06)
