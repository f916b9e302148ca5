"""Widths that cost what early exits cost."""

import pytest

from exitflow.models.build import build_model
from exitflow.models.cost import exit_costs
from exitflow.models.matching import matched_widths, trunk_multiply_adds
from exitflow.models.specs import EarlyExitResNet, SlimResNet

PAPER = EarlyExitResNet(width=16, strides=(1, 1, 2, 2), exit_blocks=(1, 4, 8), heads="gap").resolve(3)


def test_the_reckoned_cost_is_the_counted_one():
    counted = exit_costs(build_model(PAPER, (3, 32, 32), 10, seed=0), (3, 32, 32))
    heads = (16 * 10, 32 * 10, 128 * 10)
    for cost, blocks, head in zip(counted, PAPER.exit_blocks, heads, strict=True):
        assert trunk_multiply_adds(PAPER, 16, blocks) == cost.multiply_adds - head


def test_a_width_costs_what_its_exit_costs_and_one_channel_more_would_not():
    widths = matched_widths(PAPER, (8, 8, 8))
    slim = SlimResNet(width=16, strides=(1, 1, 2, 2), widths=widths).resolve(3)
    own = exit_costs(build_model(PAPER, (3, 32, 32), 10, seed=0), (3, 32, 32))
    other = exit_costs(build_model(slim, (3, 32, 32), 10, seed=0), (3, 32, 32))
    for mine, theirs, width in zip(own, other, widths, strict=True):
        assert theirs.multiply_adds <= mine.multiply_adds * 1.01
        if width < 1:
            assert trunk_multiply_adds(PAPER, round(width * 16) + 1, 8) > mine.multiply_adds


@pytest.mark.parametrize("width", [1, 2, 3, 4, 64])
def test_widths_rise_to_1_however_few_channels_there_are(width):
    spec = EarlyExitResNet(width=width, exit_blocks=(1, 2, 8)).resolve(3)
    widths = matched_widths(spec, (8, 8, 8))
    assert list(widths) == sorted(set(widths))
    assert widths[-1] == 1
