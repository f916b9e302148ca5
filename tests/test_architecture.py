"""Imports point only downward, and what planning needs does not load PyTorch."""

import ast
import re
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "exitflow"

# From the top to the bottom; a module may import from its own layer and from those below it.
LAYERS = (
    "cli",
    "report",
    "flower",
    "runs",
    "serving",
    "planning",
    "evaluation",
    "system",
    "federated",
    "theory",
    "routing",
    "data",
    "models",
    "topology",
    "tensors",
    "certificates",
    "files",
    "logs",
    "free_ports",
    "config",
    "seeds",
    "errors",
)


# What still points upward, until the rooms are cleared; nothing may be added.
LEFT_OVERS = {
    ("federated/places/__init__.py", "exitflow.flower.backend"),
    ("runs/training.py", "exitflow.flower.deployment"),
}


def layer(module: str) -> str:
    return module.split(".")[1]


def imports(path: Path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("exitflow."):
            yield node.module
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names if name.name.startswith("exitflow."))


MODULES = sorted(path for path in SOURCE.rglob("*.py") if path.parent != SOURCE or not path.name.startswith("__"))


def test_every_module_has_a_layer():
    assert {layer("exitflow." + path.relative_to(SOURCE).parts[0].removesuffix(".py")) for path in MODULES} == set(
        LAYERS
    )


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_point_downward(path):
    own = LAYERS.index(path.relative_to(SOURCE).parts[0].removesuffix(".py"))
    for module in imports(path):
        if (str(path.relative_to(SOURCE)), module) in LEFT_OVERS:
            continue
        assert LAYERS.index(layer(module)) >= own, f"{path.name} imports {module}, which lies above it"


def test_nothing_is_unpickled():
    for path in MODULES:
        text = path.read_text()
        assert "import pickle" not in text, path
        assert "torch.load" not in text, path


def test_the_library_knows_nothing_of_the_bench_of_one_paper():
    for path in SOURCE.rglob("*.py"):
        assert not re.search(r"^\s*(from|import) paper\b", path.read_text(), re.MULTILINE), path
        assert not re.search(r"""["']paper\.\w""", path.read_text()), path  # a module named as a string
