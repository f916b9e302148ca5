"""Images in folders and tables of images or texts become the arrays that .npz files hold."""

import io
import json

import numpy as np
import pytest
import torch

from exitflow.data.own_files import load_own
from exitflow.errors import DataError, ExitflowError

Image = pytest.importorskip("PIL.Image")
pyarrow = pytest.importorskip("pyarrow")
from pyarrow import ipc, parquet  # noqa: E402

GREY = "num_classes = 2\nmean = [127.5]\nstd = [127.5]\nsize = 4\n"
RGB = "num_classes = 2\nmean = [0.0, 0.0, 0.0]\nstd = [1.0, 1.0, 1.0]\nsize = 2\n"
TEXT = 'num_classes = 2\ntokenizer = "tokenizer.json"\nlength = 4\n'


def image(value, size=(4, 4), mode="L"):
    file = io.BytesIO()
    Image.new(mode, size, value).save(file, "PNG")
    return file.getvalue()


def described(folder, text):
    (folder / "dataset.toml").write_text(text)
    return folder


def write_folders(folder, part="train"):
    for name, values in {"b": (10, 20), "a": (30,)}.items():
        (folder / part / name).mkdir(parents=True)
        for number, value in enumerate(values):
            (folder / part / name / f"{number}.png").write_bytes(image(value, size=(9, 7)))
    (folder / part / "a" / "notes.txt").write_text("no image")


def test_images_lie_in_folders_of_their_classes_in_sorted_order(tmp_path):
    write_folders(described(tmp_path, GREY))
    data = load_own(tmp_path)
    assert data.train.labels.tolist() == [0, 1, 1]
    assert data.train.inputs.shape == (3, 1, 4, 4)
    assert data.train.inputs[:, 0, 0, 0].tolist() == [30, 10, 20]
    assert not len(data.test)


def test_the_order_of_classes_can_be_said(tmp_path):
    write_folders(described(tmp_path, GREY + 'classes = ["b", "a"]\n'))
    assert load_own(tmp_path).train.labels.tolist() == [0, 0, 1]


def table(rows, **more):
    return pyarrow.table({**rows, **more})


@pytest.mark.parametrize("kind", ["parquet", "arrow stream", "arrow file", "folder of arrow"])
def test_images_of_a_table_with_their_labels(tmp_path, kind):
    described(tmp_path, RGB)
    encoded = [image((1, 2, 3), mode="RGB"), image((4, 5, 6), mode="RGB")]
    made = table({"image": [{"bytes": data, "path": None} for data in encoded], "label": [1, 0]})
    if kind == "parquet":
        parquet.write_table(made, tmp_path / "train.parquet")
    else:
        path = tmp_path / "train.arrow"
        if kind == "folder of arrow":
            (tmp_path / "train").mkdir()
            path = tmp_path / "train" / "data-00000-of-00001.arrow"
        with (ipc.new_file if kind == "arrow file" else ipc.new_stream)(str(path), made.schema) as writer:
            writer.write_table(made)
    data = load_own(tmp_path)
    assert data.train.labels.tolist() == [1, 0]
    assert data.train.inputs[:, :, 0, 0].tolist() == [[1, 2, 3], [4, 5, 6]]
    assert data.train.inputs.dtype == torch.uint8


def write_tokenizer(folder):
    words = {"[PAD]": 0, "[UNK]": 1, "ja": 2, "nein": 3}
    model = {"type": "WordLevel", "vocab": words, "unk_token": "[UNK]"}
    (folder / "tokenizer.json").write_text(
        json.dumps({"version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "Whitespace"}, "model": model})
    )


def test_texts_of_a_table_become_tokens_of_one_length(tmp_path):
    write_tokenizer(described(tmp_path, TEXT))
    parquet.write_table(
        table({"text": ["ja nein", "nein nein ja ja ja", "oh"], "label": [0, 1, 1]}), tmp_path / "train.parquet"
    )
    data = load_own(tmp_path)
    assert data.train.inputs.tolist() == [[2, 3, 0, 0], [3, 3, 2, 2], [1, 0, 0, 0]]
    assert data.preparation(data.train.inputs).tolist() == data.train.inputs.tolist()


def test_columns_can_have_other_names(tmp_path):
    write_tokenizer(described(tmp_path, TEXT + 'input_column = "said"\nlabel_column = "meant"\n'))
    parquet.write_table(table({"said": ["ja"], "meant": [1]}), tmp_path / "train.parquet")
    assert load_own(tmp_path).train.labels.tolist() == [1]


def cases(folder):
    """What is wrong -> what is said of it."""
    (folder / "train" / "a").mkdir(parents=True)
    bad = folder / "train" / "a" / "0.png"
    described(folder, GREY)
    yield r"has 1 folders of images, dataset.toml says 2 classes"
    (folder / "train" / "b").mkdir()
    yield "holds no images"
    bad.write_bytes(b"no image")
    yield r"0.png: cannot be read as an image"
    bad.write_bytes(image(3)[:40])
    yield r"0.png: cannot be read as an image"
    bad.write_bytes(image(3, size=(20_000, 20_000)))
    yield r"0.png: cannot be read as an image.*pixels"
    described(folder, GREY.replace("[127.5]", "[1.0, 1.0]"))
    yield "images have 1 or 3 channels, dataset.toml has 2 means"
    described(folder, GREY)
    parquet.write_table(table({"image": [b"x"], "label": [0]}), folder / "train.parquet")
    yield r"train.parquet, row 0: cannot be read as an image"
    parquet.write_table(table({"picture": [b"x"], "label": [0]}), folder / "train.parquet")
    yield r"has no column 'image', but picture, label"
    parquet.write_table(table({"image": [image(1)], "label": ["one"]}), folder / "train.parquet")
    yield "column 'label' must hold whole numbers"
    parquet.write_table(table({"image": [image(1)], "label": [2]}), folder / "train.parquet")
    yield "labels are from 2 to 2, not 0 to 1"
    (folder / "train.parquet").write_bytes(b"PAR1")
    yield r"train.parquet: cannot be read as Arrow or Parquet"
    described(folder, TEXT)
    parquet.write_table(table({"text": ["ja"], "label": [0]}), folder / "train.parquet")
    yield r"tokenizer.json: cannot be read as a tokenizer file"
    write_tokenizer(folder)
    parquet.write_table(table({"text": [None], "label": [0]}), folder / "train.parquet")
    yield "row 0 is no text"


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_what_is_wrong_is_one_sentence_that_names_the_file(tmp_path):
    for expected in cases(tmp_path):
        with pytest.raises(DataError, match=expected):
            load_own(tmp_path)


@pytest.mark.parametrize("key", ["size = 0", "length = 0", 'mean = "x"'])
def test_a_description_that_is_none_is_refused(tmp_path, key):
    described(tmp_path, f"num_classes = 2\nstd = [1.0]\n{'mean = [1.0]' if 'mean' not in key else ''}\n{key}\n")
    with pytest.raises(ExitflowError, match=f"dataset.toml: {key.split()[0]}"):
        load_own(tmp_path)


def test_images_of_a_folder_have_the_bytes_of_the_same_array(tmp_path):
    pixels = np.arange(16, dtype=np.uint8).reshape(4, 4)
    for name in ("a", "b"):
        (tmp_path / "train" / name).mkdir(parents=True)
        Image.fromarray(pixels).save(tmp_path / "train" / name / "x.png")
    data = load_own(described(tmp_path, GREY))
    assert (data.train.inputs[0, 0].numpy() == pixels).all()
