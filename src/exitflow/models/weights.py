"""Weights in files: safetensors, or state dicts of PyTorch, of which nothing but tensors is unpickled."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

import torch
from safetensors.torch import load, save
from torch import Tensor

from exitflow.errors import ConfigError
from exitflow.files import LARGE_FILE, read_file, write_atomically

ORDER = "exitflow.order"  # metadata: the names in the order of the network, which safetensors itself does not keep
_ADVICE = "weights come as files in packages or from the pages of those who trained them; nothing is fetched here"


def read_weights(path: Path, sha256: str | None = None) -> dict[str, Tensor]:
    """The tensors of a file by name, in the order of their network where the file knows it."""
    try:
        data = read_file(path, LARGE_FILE)
    except OSError as error:
        raise _refused(path, f"cannot be read: {error.strerror}; {_ADVICE}") from None
    found = hashlib.sha256(data).hexdigest()
    if sha256 and found != sha256:
        raise _refused(path, f"its sha256 is {found}, the system was made for weights with {sha256}")
    try:
        return _from_safetensors(data) if data[8:9] == b"{" else _from_state_dict(data)
    except Exception as error:  # whatever a stranger's file holds
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise _refused(path, f"is neither safetensors nor a state dict of PyTorch: {reason}") from None


def _refused(path: Path, problem: str) -> ConfigError:
    return ConfigError(f"{path}: {problem}", key="model.weights")


def _from_safetensors(data: bytes) -> dict[str, Tensor]:
    tensors = load(data)
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    order = json.loads((header.get("__metadata__") or {}).get(ORDER, "[]"))
    return {name: tensors[name] for name in order} if set(order) == tensors.keys() else tensors


def _from_state_dict(data: bytes) -> dict[str, Tensor]:
    values = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    for inside in ("state_dict", "model", "model_state_dict"):
        if isinstance(values, Mapping) and isinstance(values.get(inside), Mapping):
            values = values[inside]
    if not isinstance(values, Mapping) or not all(isinstance(value, Tensor) for value in values.values()):
        raise ValueError("it does not hold tensors by name")
    return {str(name): value for name, value in values.items()}


def named_as(own: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`given` under the names of the network's tensors `own`, where a package has them in the same order.

    Packages that hold the same network often name its tensors otherwise: `_blocks.0._bn1.weight` is timm's
    `blocks.0.0.bn1.weight`. Where no more than a few names agree, but the number of tensors, and of each, in order,
    the shape (but for the classifier, at the end) and the last word of the name, then they are the same tensors.
    """
    if len(own) != len(given) or len(own.keys() & given.keys()) > len(own) // 2:
        return dict(given)
    pairs = list(zip(own, given, strict=True))
    alike = all(
        mine.rpartition(".")[2] == theirs.rpartition(".")[2] and own[mine].shape[1:] == given[theirs].shape[1:]
        for mine, theirs in pairs
    )
    return {mine: given[theirs] for mine, theirs in pairs} if alike else dict(given)


def check_names(own: Mapping[str, Tensor], given: Mapping[str, Tensor], *, source: str, but: tuple[str, ...]) -> None:
    """Refuse tensors that the network lacks, or that have another shape; those whose names begin with `but` may."""
    wanted = {name: tensor for name, tensor in own.items() if not name.startswith(but)}
    problems = {
        "missing": [name for name in wanted if name not in given],
        "unexpected": [name for name in given if name not in own and not name.startswith(but)],
        "of another shape": [
            f"{name} {list(given[name].shape)} instead of {list(tensor.shape)}"
            for name, tensor in wanted.items()
            if name in given and given[name].shape != tensor.shape
        ],
    }
    found = [f"{what}: {', '.join(names[:8])}{', …' * (len(names) > 8)}" for what, names in problems.items() if names]
    if found:
        raise ConfigError(f"{source}: does not fit the network; {'; '.join(found)}", key="model.weights")


def find_weights(source: str) -> Path:
    """The file of that name, or the one that an installed package brings."""
    if Path(source).is_file():
        return Path(source)
    try:
        listed = metadata.files(source) or []
    except (metadata.PackageNotFoundError, ValueError):
        problem = f"{source!r} is neither a file nor an installed package; {_ADVICE}"
        raise ConfigError(problem, key="PACKAGE_OR_FILE") from None
    found = [Path(str(file.locate())) for file in listed if file.suffix in (".pth", ".pt", ".safetensors")]
    if len(found) != 1:
        problem = f"the package {source!r} has {len(found)} files of weights, name one of them as a file"
        raise ConfigError(problem, key="PACKAGE_OR_FILE")
    return found[0]


def convert(source: Path, out: Path) -> tuple[int, str]:
    """Write the tensors of a file as safetensors, with their order; gives their number and the new file's sha256."""
    tensors = read_weights(source)
    data = save({name: tensor.contiguous() for name, tensor in tensors.items()}, {ORDER: json.dumps(list(tensors))})
    try:
        write_atomically(out, data)
    except OSError as error:
        raise ConfigError(f"{out}: cannot be written: {error.strerror}", key="--out") from None
    return len(tensors), hashlib.sha256(data).hexdigest()
