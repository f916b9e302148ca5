"""Widths at which one family costs what another does, so that both fit the same nodes. Needs no PyTorch."""

from __future__ import annotations

from collections.abc import Sequence

from exitflow.models.specs import EarlyExitResNet

_SIZE, _INPUT_CHANNELS = 32, 3  # of the images that costs are compared on; their ratios hardly depend on it


def trunk_multiply_adds(spec: EarlyExitResNet, channels: int, num_blocks: int) -> int:
    """The cost of the first blocks for one image, if the first stage had `channels` instead of `spec.width`."""
    size = -(-_SIZE // spec.stem_stride)
    total, before = 9 * _INPUT_CHANNELS * channels * size**2, channels
    for full, stride in list(spec.block_shapes())[:num_blocks]:
        after = channels * (full // spec.width)
        size = -(-size // stride)
        projection = before * after if stride != 1 or before != after else 0
        total += (9 * before * after + 9 * after * after + projection) * size**2
        before = after
    return total


def matched_widths(spec: EarlyExitResNet, exit_blocks: Sequence[int]) -> tuple[float, ...]:
    """The greatest widths at which an exit behind `exit_blocks` costs at most what the exit of `spec` does.

    In whole channels of the first stage, rising to 1: where two exits would meet, the shallower is one narrower. Where
    there are too few channels to tell the exits apart, 1/E, 2/E, ..., 1.
    """
    num_exits = len(exit_blocks)
    if spec.width < num_exits:
        return tuple(exit / num_exits for exit in range(1, num_exits + 1))
    widths = [spec.width]
    for exit in reversed(range(1, num_exits)):
        budget = trunk_multiply_adds(spec, spec.width, spec.exit_blocks[exit - 1])
        candidates = range(exit, widths[0])
        blocks = exit_blocks[exit - 1]
        affordable = [width for width in candidates if trunk_multiply_adds(spec, width, blocks) <= budget]
        widths.insert(0, max(affordable, default=exit))
    return tuple(width / spec.width for width in widths)
