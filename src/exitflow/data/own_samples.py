"""Parts of one's own data that are no arrays yet: images in folders, and tables of Arrow or Parquet.

    train/CLASS/*.jpg        images, as PNG, WebP or BMP too
    train.parquet            or train.arrow, or a folder train/ with *.arrow, as Hugging Face's `datasets` saves them

A table has a column of images (encoded, or as `datasets` keeps them) or of texts, and one of labels, from 0. Images
become bytes of (channels, size, size), texts the ids of a tokenizer file.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from exitflow.data.dataset import Split
from exitflow.errors import DataError, MissingExtraError
from exitflow.files import LARGE_FILE, MEDIUM_FILE, read_file

_IMAGES = {".jpg": "JPEG", ".jpeg": "JPEG", ".png": "PNG", ".webp": "WEBP", ".bmp": "BMP"}
_MAX_PIXELS = 100_000_000  # of an image before it is resized
_MAX_BYTES = LARGE_FILE  # of all images of a part after that


def read_folder(folder: Path, classes: Sequence[str], num_classes: int, *, size: int, channels: int) -> Split:
    """Images whose labels are the folders that they lie in; these are sorted, unless `classes` says their order."""
    names = list(classes) or sorted(path.name for path in folder.iterdir() if path.is_dir())
    if len(names) != num_classes:
        raise DataError(f"{folder}: has {len(names)} folders of images, dataset.toml says {num_classes} classes")
    paths: list[Path] = []
    labels: list[int] = []
    for label, name in enumerate(names):
        inside = sorted((folder / name).glob("*")) if (folder / name).is_dir() else []
        found = [path for path in inside if path.suffix.lower() in _IMAGES]
        paths += found
        labels += [label] * len(found)
    if not paths:
        raise DataError(f"{folder}: holds no images ({', '.join(_IMAGES)}) in folders named by their classes")
    images = ((str(path), path) for path in paths)
    return Split(_images(images, len(paths), size=size, channels=channels), torch.tensor(labels))


def read_table(paths: Sequence[Path], input_column: str, label_column: str) -> tuple[list[Any], torch.Tensor]:
    """(inputs, labels) of a Parquet file, or of files of Arrow one after the other."""
    try:
        import pyarrow
        from pyarrow import ipc, parquet
    except ImportError:
        raise MissingExtraError("pyarrow", "networks") from None
    inputs: list[Any] = []
    labels: list[Any] = []
    for path in paths:
        try:
            if path.suffix == ".parquet":
                table = parquet.read_table(path)
            else:
                data = pyarrow.memory_map(str(path))
                try:
                    table = ipc.open_stream(data).read_all()
                except pyarrow.ArrowInvalid:
                    table = ipc.open_file(data).read_all()
        except (OSError, pyarrow.ArrowException) as error:
            raise DataError(f"{path}: cannot be read as Arrow or Parquet: {str(error).splitlines()[0]}") from None
        for column in (input_column, label_column):
            if column not in table.column_names:
                known = ", ".join(table.column_names)
                raise DataError(f"{path}: has no column {column!r}, but {known}; dataset.toml can name others")
        inputs += table[input_column].to_pylist()
        labels += table[label_column].to_pylist()
    if not labels or not all(type(label) is int for label in labels):
        raise DataError(f"{paths[0]}: column {label_column!r} must hold whole numbers from 0, one for each sample")
    return inputs, torch.tensor(labels, dtype=torch.int64)


def images_of(values: Sequence[Any], source: Path, *, size: int, channels: int) -> torch.Tensor:
    """Encoded images of a table as (N, channels, size, size) bytes."""
    encoded = [value.get("bytes") if isinstance(value, dict) else value for value in values]
    named = ((f"{source}, row {row}", data) for row, data in enumerate(encoded))
    return _images(named, len(encoded), size=size, channels=channels)


def _images(images: Iterable[tuple[str, Any]], count: int, *, size: int, channels: int) -> torch.Tensor:
    """The pixels of images that are paths or encoded bytes, each with a name for errors."""
    if count * channels * size**2 > _MAX_BYTES:
        problem = f"{count:,} images of {size}x{size} pixels take more than {_MAX_BYTES:,} bytes"
        raise DataError(f"{problem}; a smaller size, or data from Python (exitflow.from_torch)")
    decoded = torch.empty(count, channels, size, size, dtype=torch.uint8)
    for row, (where, source) in enumerate(images):
        decoded[row] = torch.from_numpy(_decoded(where, source, size, channels))
    return decoded


def _decoded(where: str, source: Path | bytes, size: int, channels: int) -> np.ndarray:
    try:
        from PIL import Image
    except ImportError:
        raise MissingExtraError("pillow", "networks") from None
    try:
        data = read_file(source, MEDIUM_FILE) if isinstance(source, Path) else bytes(source)
        with Image.open(io.BytesIO(data), formats=sorted(set(_IMAGES.values()))) as image:
            if image.width * image.height > _MAX_PIXELS:
                raise ValueError(f"it has {image.width}x{image.height} pixels, {_MAX_PIXELS:,} at most are read")
            resized = image.convert("L" if channels == 1 else "RGB").resize((size, size))
    except Exception as error:  # decoders fail in many ways
        raise DataError(f"{where}: cannot be read as an image: {error}") from None
    return np.asarray(resized).reshape(size, size, channels).transpose(2, 0, 1).copy()


def tokens_of(texts: Sequence[Any], source: Path, tokenizer: Path, length: int) -> torch.Tensor:
    """(N, length) ids, cut off or filled up with padding."""
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise MissingExtraError("tokenizers", "networks") from None
    try:
        made = Tokenizer.from_str(read_file(tokenizer, MEDIUM_FILE).decode())
    except Exception as error:  # the library raises plain ones
        raise DataError(f"{tokenizer}: cannot be read as a tokenizer file (tokenizer.json): {error}") from None
    if wrong := [row for row, text in enumerate(texts) if not isinstance(text, str)]:
        raise DataError(f"{source}: row {wrong[0]} is no text")
    padding = (made.padding or {}).get("pad_id", made.token_to_id("[PAD]") or 0)
    made.enable_truncation(length)
    made.enable_padding(length=length, pad_id=padding)
    return torch.tensor([each.ids for each in made.encode_batch(list(texts))], dtype=torch.float32)
