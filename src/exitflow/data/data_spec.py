"""The [data] table. Needs no PyTorch, so that planning does not either."""

from __future__ import annotations

import math
from dataclasses import dataclass

from exitflow.config import check_fields, require
from exitflow.data.partition import layer_shares
from exitflow.parts import Part, is_own, take_part

PARTITIONS = ("equal", "biased", "highly-biased")
DATASETS = ("digits", "cifar10", "cifar100", "mnist", "fashion-mnist", "own")


@dataclass(frozen=True)
class DataSpec:
    """The [data] table of a system file."""

    name: Part = "digits"
    dir: str | None = None  # where the files lie; also --data-dir or $EXITFLOW_DATA_DIR
    verify: bool = True  # compare the published checksums
    augment: bool = True  # where the data set has an augmentation
    crop: bool = True  # shift images too, not only mirror them; short trainings learn faster without
    partition: Part = "equal"
    layer_shares: tuple[float, ...] = ()  # relative amounts of data of layers 1..E, instead of a named partition
    dirichlet_alpha: float | None = None  # label mix of a node; absent: IID

    def __post_init__(self) -> None:
        take_part(self, "name", DATASETS, "data set")
        take_part(self, "partition", PARTITIONS, "partition")
        check_fields(self)
        shares = self.layer_shares
        valid = all(math.isfinite(share) and share >= 0 for share in shares) and (not shares or sum(shares) > 0)
        require(valid, "layer_shares", f"must be 0 or more, and not all 0, got {list(shares)}")
        alpha = self.dirichlet_alpha
        said = bool(shares) or alpha is not None
        problem = "of your own says which samples each node holds; it needs no layer_shares and no dirichlet_alpha"
        require(not (said and is_own(self.partition)), "partition", problem)
        positive = alpha is None or (math.isfinite(alpha) and alpha > 0)
        require(positive, "dirichlet_alpha", f"must be above 0, got {alpha}")

    def shares(self, num_exits: int) -> tuple[float, ...]:
        """Relative amounts of data of layers 1..E; a partition of the user's own may give any."""
        if is_own(self.partition):
            return (1.0,) * num_exits
        if not self.layer_shares:
            return layer_shares(self.partition, num_exits)
        given = len(self.layer_shares)
        require(given == num_exits, "layer_shares", f"one for each of the {num_exits} exits, got {given}")
        return self.layer_shares
