"""Who is speaking? A 1-D convolution network on sound, for microphones, a hub and a cloud.

The data are the Japanese Vowels (Kudo et al., 1999): 640 utterances of nine speakers, as up to 29 frames of 12
coefficients. They ship inside the package sktime, of which nothing but these two files is used:

    pip install '.[examples]'      # in a checkout
    PYTHONPATH=examples python examples/speakers.py runs/speakers
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import nn

from exitflow import (
    CustomModel,
    Dataset,
    EarlyExitNetwork,
    Link,
    MissingExtraError,
    Node,
    Preparation,
    Split,
    System,
    Topology,
    TrainingSpec,
    evaluate,
    train,
)

FRAMES, COEFFICIENTS, SPEAKERS = 29, 12, 9


def build(input_shape: tuple[int, ...], num_classes: int) -> EarlyExitNetwork:
    """Three stages of convolutions over time, each with an exit; for inputs of (coefficients, frames)."""
    widths = (input_shape[0], 16, 32, 64)
    stages = [
        nn.Sequential(nn.Conv1d(before, after, 5, stride, padding=2), nn.BatchNorm1d(after), nn.ReLU())
        for before, after, stride in zip(widths, widths[1:], (1, 2, 2), strict=False)
    ]
    heads = [nn.Sequential(nn.AdaptiveAvgPool1d(4), nn.Flatten(), nn.Linear(4 * n, num_classes)) for n in widths[1:]]
    return EarlyExitNetwork(stages, heads)


def load() -> Dataset:
    """The published split; one in nine training utterances is for validation."""
    place = find_spec("sktime")
    if place is None or not place.submodule_search_locations:
        raise MissingExtraError("sktime", "examples")
    folder = Path(place.submodule_search_locations[0]) / "datasets" / "data" / "JapaneseVowels"
    train_split, test = read(folder / "JapaneseVowels_TRAIN.ts"), read(folder / "JapaneseVowels_TEST.ts")
    chosen = torch.arange(len(train_split)) % 9 == 4
    mean, std = train_split.inputs.mean((0, 2)).tolist(), train_split.inputs.std((0, 2)).tolist()
    preparation = Preparation(tuple(mean), tuple(std))
    return Dataset("japanese-vowels", train_split[~chosen], train_split[chosen], test, SPEAKERS, preparation)


def read(path: Path) -> Split:
    """A line is one utterance: the frames of each coefficient, then the speaker, all separated by colons."""
    _, _, text = path.read_text(encoding="utf-8").partition("@data\n")
    lines = [line.split(":") for line in text.splitlines()]
    inputs = torch.zeros(len(lines), COEFFICIENTS, FRAMES)
    for utterance, (*series, _) in zip(inputs, lines, strict=True):
        for coefficient, frames in zip(utterance, series, strict=True):
            values = torch.tensor([float(value) for value in frames.split(",")])
            coefficient[: len(values)] = values
    return Split(inputs, torch.tensor([int(line[-1]) - 1 for line in lines]))


def system(rounds: int = 30) -> System:
    """Four microphones that hear 10 utterances/s each, a hub that takes 4 of these, a cloud that takes 4 of all."""
    microphones = tuple(Node(f"microphone-{number}", 1, 10.0, (Link("hub", 4.0),)) for number in range(4))
    nodes = (*microphones, Node("hub", 2, parents=(Link("cloud", 4.0),)), Node("cloud", 3))
    training = TrainingSpec(rounds=rounds, local_steps=5, batch_size=16, learning_rate=0.05)
    return System("speakers", Topology(nodes), CustomModel(factory="speakers:build"), training=training)


if __name__ == "__main__":
    dataset = load()
    run = train(system(), sys.argv[1], dataset=dataset, backend="processes")
    result = evaluate(run, dataset=dataset)
    for number, (alone, served) in enumerate(zip(result.exit_accuracy, result.exits, strict=True), start=1):
        print(f"exit {number}: right for {alone:.1%} of all utterances, {served.accuracy:.1%} of those it serves")
    print(f"as served: {result.accuracy:.1%}")
