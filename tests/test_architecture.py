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
    "runs",
    "flower",
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
    "npz",
    "logs",
    "free_ports",
    "addresses",
    "parts",
    "config",
    "files",
    "seeds",
    "errors",
)


def layer(module: str) -> str:
    return module.split(".")[1]


def imports(path: Path):
    """The modules of exitflow that a file imports, or names in a string: whatever reads that string imports them."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from re.findall(r"(?<![\w./])exitflow\.\w+(?:\.\w+)*", node.value)


MODULES = sorted(path for path in SOURCE.rglob("*.py") if path.parent != SOURCE or not path.name.startswith("__"))


def test_every_module_has_a_layer():
    assert {layer("exitflow." + path.relative_to(SOURCE).parts[0].removesuffix(".py")) for path in MODULES} == set(
        LAYERS
    )


def upward(path: Path) -> list[str]:
    """What a file imports from above its own layer."""
    own = LAYERS.index(path.relative_to(SOURCE).parts[0].removesuffix(".py"))
    ours = [module for module in imports(path) if module.startswith("exitflow.") and layer(module) in LAYERS]
    return [module for module in ours if LAYERS.index(layer(module)) < own]


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_point_downward(path):
    assert not upward(path)


@pytest.mark.parametrize(
    "line",
    [
        "from exitflow.runs.training import train",
        "import exitflow.cli.main",
        "importlib.import_module('exitflow.runs.training')",
        "APP = 'exitflow.cli.app:main'",
        "f'exitflow.report.{name}'",
        "['-m', 'exitflow.runs.training']",
    ],
)
def test_an_import_that_points_upward_is_seen_also_in_a_string(line, tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "SOURCE", tmp_path)
    path = tmp_path / "flower" / "module.py"
    path.parent.mkdir()
    path.write_text(f"import exitflow.errors\n{line}\n")
    assert len(upward(path)) == 1


SERVING_ROOMS = ("traffic", "ports", "node", "bundle", "wire")  # from the top to the bottom


@pytest.mark.parametrize("room", SERVING_ROOMS)
def test_the_rooms_of_serving_import_one_way(room):
    below = SERVING_ROOMS[SERVING_ROOMS.index(room) :]
    for path in (SOURCE / "serving" / room).glob("*.py"):
        found = {module.split(".")[2] for module in imports(path) if module.startswith("exitflow.serving.")}
        assert found & set(SERVING_ROOMS) <= set(below), path


def test_nothing_is_unpickled():
    for path in MODULES:
        text = path.read_text()
        assert "import pickle" not in text, path
        loads = re.findall(r"torch\.load\(.*", text)
        assert all("weights_only=True" in load for load in loads), path  # of which nothing but tensors is unpickled
        assert not loads or path.name == "weights.py", path


def test_the_library_knows_nothing_of_the_bench_of_one_paper():
    for path in SOURCE.rglob("*.py"):
        assert not re.search(r"^\s*(from|import) paper\b", path.read_text(), re.MULTILINE), path
        assert not re.search(r"""["']paper\.\w""", path.read_text()), path  # a module named as a string
