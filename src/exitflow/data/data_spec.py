"""The [data] table. Needs no PyTorch, so that planning does not either."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from exitflow.config import check_fields, require
from exitflow.data.partition import layer_shares
from exitflow.errors import suggestion

DATASETS = ("digits", "cifar10", "cifar100", "mnist", "fashion-mnist", "own")


@dataclass(frozen=True)
class DataSpec:
    """The [data] table of a system file."""

    name: str = "digits"
    dir: str | None = None  # where the files lie; also --data-dir or $EXITFLOW_DATA_DIR
    verify: bool = True  # compare the published checksums
    augment: bool = True  # where the data set has an augmentation
    crop: bool = True  # shift images too, not only mirror them; short trainings learn faster without
    partition: Literal["equal", "biased", "highly-biased"] = "equal"
    layer_shares: tuple[float, ...] = ()  # relative amounts of data of layers 1..E, instead of a named partition
    dirichlet_alpha: float | None = None  # label mix of a node; absent: IID

    def __post_init__(self) -> None:
        check_fields(self)
        known = self.name in DATASETS
        require(known, "name", f"there is no data set {self.name!r}{suggestion(self.name, DATASETS)}")
        shares = self.layer_shares
        valid = all(math.isfinite(share) and share >= 0 for share in shares) and (not shares or sum(shares) > 0)
        require(valid, "layer_shares", f"must be 0 or more, and not all 0, got {list(shares)}")
        alpha = self.dirichlet_alpha
        positive = alpha is None or (math.isfinite(alpha) and alpha > 0)
        require(positive, "dirichlet_alpha", f"must be above 0, got {alpha}")

    def shares(self, num_exits: int) -> tuple[float, ...]:
        """Relative amounts of data of layers 1..E."""
        if not self.layer_shares:
            return layer_shares(self.partition, num_exits)
        given = len(self.layer_shares)
        require(given == num_exits, "layer_shares", f"one for each of the {num_exits} exits, got {given}")
        return self.layer_shares
