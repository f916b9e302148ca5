"""Which language is it? A small transformer with exits, for snippets of 24 letters.

    python examples/languages.py data/languages
    exitflow train examples/languages.toml --data-dir data/languages --out runs/languages
    exitflow evaluate runs/languages

The text is the Universal Declaration of Human Rights in nine languages; `languages.json` names its source and licence.
This file cuts it into snippets, trains a tokenizer on them, and writes both as a data set of one's own.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pyarrow as pa
from pyarrow import parquet
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

LETTERS, STEP = 24, 8  # of a snippet, and from one to the next


def snippets(text: str) -> list[str]:
    """Overlapping pieces of a paragraph."""
    return [text[start : start + LETTERS] for start in range(0, max(len(text) - LETTERS, 1), STEP)]


def write(folder: Path) -> None:
    """Every fifth paragraph is for tests, every fifth for validation: no snippet overlaps one of another part."""
    paragraphs = json.loads(Path(__file__).with_name("languages.json").read_text("utf-8"))["paragraphs"]
    folder.mkdir(parents=True, exist_ok=True)
    parts: dict[str, list[tuple[str, int]]] = {"test": [], "validation": [], "train": []}
    for label, texts in enumerate(paragraphs.values()):
        for number, text in enumerate(texts):
            part = ("test", "validation", "train", "train", "train")[number % 5]
            parts[part] += [(snippet, label) for snippet in snippets(text)]
    for part, rows in parts.items():
        columns = pa.table({"text": [text for text, _ in rows], "label": [label for _, label in rows]})
        parquet.write_table(columns, folder / f"{part}.parquet")
    tokenizer = Tokenizer(models.BPE(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.BpeTrainer(vocab_size=800, special_tokens=["[PAD]", "[UNK]"], show_progress=False)
    tokenizer.train_from_iterator([text for text, _ in parts["train"]], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "dataset.toml").write_text(
        f'num_classes = {len(paragraphs)}\ntokenizer = "tokenizer.json"\nlength = 16\n'
    )


if __name__ == "__main__":
    write(Path(sys.argv[1]))
