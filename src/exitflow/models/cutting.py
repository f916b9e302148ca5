"""A sequence of modules, with exits behind some of its blocks."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from exitflow.config import require
from exitflow.errors import ConfigError
from exitflow.models.backbones import BackboneHead, ExitBlocks
from exitflow.models.cost import counted
from exitflow.models.early_exit_resnet import head_cells
from exitflow.models.nested import EarlyExitNetwork


def stage_bounds(
    units: Sequence[nn.Module], blocks: Sequence[int], exit_blocks: ExitBlocks, num_exits: int, example: Tensor
) -> list[tuple[int, int]]:
    """For each stage, the first of `units` and the one behind its last.

    `blocks` are the indices of the units that count as blocks. What follows the last of them belongs to the deepest
    stage, what stands before a block to the stage of that block.
    """
    chosen = even_blocks(units, blocks, num_exits, example) if exit_blocks == "auto" else exit_blocks
    problem = f"the deepest exit stands behind the last of the network's {len(blocks)} blocks, got {list(chosen)}"
    require(chosen[-1] == len(blocks), "model.exit_blocks", problem)
    ends = [blocks[block - 1] + 1 for block in chosen[:-1]] + [len(units)]
    return list(zip([0, *ends[:-1]], ends, strict=True))


def even_blocks(units: Sequence[nn.Module], blocks: Sequence[int], num_exits: int, example: Tensor) -> tuple[int, ...]:
    """Blocks behind which the exits cut the multiply-adds of the network into parts as equal as they can be."""
    problem = f"{num_exits} exits do not fit behind {len(blocks)} blocks"
    require(num_exits <= len(blocks), "model.exit_blocks", problem)
    costs, features = [], example
    for unit in units:
        spent, features = counted(unit, features)
        costs.append(spent)
    done = [sum(costs[: index + 1]) for index in blocks]  # multiply-adds up to each block
    chosen: list[int] = []
    for exit in range(1, num_exits):
        free = range(chosen[-1] + 1 if chosen else 1, len(blocks) - (num_exits - exit) + 1)
        wanted = done[-1] * exit / num_exits
        chosen.append(min(free, key=lambda block: abs(done[block - 1] - wanted)))
    return (*chosen, len(blocks))


def exit_network(
    stages: Sequence[Sequence[nn.Module]],
    last_head: nn.Module,
    example: Tensor,
    *,
    blocks: Sequence[nn.Module],
    heads: Sequence[BackboneHead],
    num_classes: int,
    num_prefix_tokens: int = 0,
    channels_last: bool = False,
) -> EarlyExitNetwork:
    """The network whose deepest exit answers with `last_head`; `example` is an input of it."""
    sequences = [nn.Sequential(*stage) for stage in stages]
    made: list[nn.Module] = []
    features = example
    for index, stage in enumerate(sequences[:-1]):
        features = stage.eval()(features)
        made.append(make_head(heads[index], features, num_classes, num_prefix_tokens, channels_last=channels_last))
    for stage in sequences[1:]:  # what a stage is given is also what the head before it has been given
        for module in stage[0].modules():
            if getattr(module, "inplace", False):
                vars(module)["inplace"] = False
    return EarlyExitNetwork(sequences, [*made, last_head], blocks)


def make_head(
    kind: BackboneHead, features: Tensor, num_classes: int, num_prefix_tokens: int, *, channels_last: bool
) -> nn.Module:
    """For features of (1, C, H, W), of (1, H, W, C) where the channels are last, or of (1, tokens, C)."""
    if features.ndim == 3:
        if kind == "grid":
            raise ConfigError("'grid' is for features of images, these are tokens: 'gap' or 'token'", key="model.heads")
        return TokenHead(features.shape[2], num_classes, num_prefix_tokens, class_token=kind == "token")
    if kind == "token":
        raise ConfigError("'token' is for transformers, these features are images: 'gap' or 'grid'", key="model.heads")
    size, channels = (features.shape[1], features.shape[3]) if channels_last else (features.shape[2], features.shape[1])
    cells = head_cells("grid" if kind == "auto" else kind, size)
    layers = [
        nn.AdaptiveAvgPool2d(cells),
        scaled(nn.BatchNorm2d(channels), 1 / cells),  # so that answers move no faster than with one cell
        nn.Flatten(),
        silent(nn.Linear(channels * cells**2, num_classes)),
    ]
    return nn.Sequential(ChannelsFirst(), *layers) if channels_last else nn.Sequential(*layers)


def scaled(norm: nn.BatchNorm2d, scale: float) -> nn.BatchNorm2d:
    """Begins with so much of each feature; in pretrained networks these are of any size."""
    nn.init.constant_(norm.weight, scale)
    return norm


def silent(classifier: nn.Linear) -> nn.Linear:
    """Begins with no opinion, so that the first steps of its own training do not shake a network that was trained."""
    nn.init.zeros_(classifier.weight)
    nn.init.zeros_(classifier.bias)
    return classifier


class ChannelsFirst(nn.Module):
    """(B, H, W, C) -> (B, C, H, W)."""

    def forward(self, features: Tensor) -> Tensor:
        return features.permute(0, 3, 1, 2)


class TokenHead(nn.Module):
    """A linear classifier on the class token, or on the mean of all others, normalised."""

    def __init__(self, channels: int, num_classes: int, num_prefix_tokens: int, *, class_token: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(channels)
        self.linear = silent(nn.Linear(channels, num_classes))
        self.first, self.class_token = num_prefix_tokens, class_token

    def forward(self, features: Tensor) -> Tensor:
        """(B, tokens, C) -> (B, classes)."""
        pooled = features[:, 0] if self.class_token else features[:, self.first :].mean(dim=1)
        logits: Tensor = self.linear(self.norm(pooled))
        return logits
