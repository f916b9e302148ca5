"""Features of frozen stages, computed once for each sample of a node, and kept on its disk.

A file for each exit holds the carry at that exit for every sample of the node, in the node's order, memory-mapped when
it is read. Its name is a digest of the frozen weights, of how inputs are prepared and of the inputs themselves, so what
changed is computed anew. A file gets its name when it is whole. Where there is no room, nothing is kept, and features
are computed in every step as if there were no cache.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from exitflow.data.dataset import Preparation
from exitflow.files import make_folder
from exitflow.models.nested import EarlyExitNetwork
from exitflow.models.tuning import frozen_exits

MAX_BYTES = 16 * 2**30  # of a node's features, and no more than half of what is free on the disk
_BATCH = 250  # samples that are computed at a time

Array = npt.NDArray[np.float32]


class FeatureCache:
    """The features of any number of nodes, below one folder."""

    def __init__(self, folder: Path, model: EarlyExitNetwork, preparation: Preparation) -> None:
        self._folder, self._model, self._preparation = folder, model, preparation
        self._depth = frozen_exits(model)
        self._known: dict[tuple[str, int], Array | None] = {}

    def features(
        self, node: str, inputs: Callable[[], Tensor], rows: Tensor, exits: Sequence[int]
    ) -> dict[int, Tensor]:
        """What frozen stages give at `exits`, or as deep as they go, for `rows` of a node's `inputs`; {}: not kept."""
        needed = {min(exit, self._depth) for exit in exits}
        if missing := [exit for exit in sorted(needed) if (node, exit) not in self._known]:
            self._known |= {(node, exit): array for exit, array in self._all(node, inputs(), missing).items()}
        kept = {exit: array for exit in needed if (array := self._known[node, exit]) is not None}
        if len(kept) < len(needed):
            return {}
        return {exit: torch.from_numpy(array[rows.numpy()]) for exit, array in kept.items()}

    def _all(self, node: str, inputs: Tensor, exits: Sequence[int]) -> Mapping[int, Array | None]:
        folder, digest = self._folder / node, self._digest(inputs)
        paths = {exit: folder / f"{digest}-{exit}.npy" for exit in exits}
        try:
            make_folder(folder)
            for old in folder.iterdir():
                if not old.name.startswith((digest, ".")):
                    old.unlink(missing_ok=True)
            if not all(path.is_file() for path in paths.values()):
                self._compute(inputs, paths)
            return {exit: np.load(path, mmap_mode="r", allow_pickle=False) for exit, path in paths.items()}
        except (OSError, ValueError):  # no room, or no file of ours: what is not kept is computed each time
            return dict.fromkeys(exits)

    @torch.no_grad()
    def _compute(self, inputs: Tensor, paths: Mapping[int, Path]) -> None:
        self._model.eval()
        temporary = {exit: path.with_name(f".{os.getpid()}-{path.name}") for exit, path in paths.items()}
        files = {exit: path.open("wb") for exit, path in temporary.items()}
        try:
            for start in range(0, len(inputs), _BATCH):
                carry = self._preparation(inputs[start : start + _BATCH])
                for exit in range(1, max(paths) + 1):
                    carry = self._model.advance(carry, exit - 1, exit)
                    if exit in files:
                        part = carry.numpy().astype(np.float32, copy=False)
                        if start == 0:
                            self._check_room(inputs, part)
                            header = {"descr": "<f4", "fortran_order": False, "shape": (len(inputs), *part.shape[1:])}
                            np.lib.format.write_array_header_1_0(files[exit], header)
                        files[exit].write(np.ascontiguousarray(part).tobytes())
            for exit, file in files.items():
                file.close()
                temporary[exit].replace(paths[exit])
        finally:
            for exit, file in files.items():
                file.close()
                temporary[exit].unlink(missing_ok=True)

    def _check_room(self, inputs: Tensor, part: Array) -> None:
        needed = part.nbytes // len(part) * len(inputs)
        if needed > min(MAX_BYTES, shutil.disk_usage(self._folder).free // 2):
            raise OSError("there is not enough room")

    def _digest(self, inputs: Tensor) -> str:
        digest = hashlib.sha256(repr((self._preparation, inputs.shape, inputs.dtype, self._model.stages)).encode())
        for exit in range(1, self._depth + 1):
            for tensor in self._model.stages[str(exit)].state_dict().values():
                digest.update(tensor.contiguous().numpy().data)
        digest.update(inputs.contiguous().numpy().data)
        return digest.hexdigest()[:32]
