"""The global model of a run, on disk and in a network."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch

from exitflow.config import parse_json
from exitflow.errors import RunError
from exitflow.federated.types import ServerState
from exitflow.models.layout import best_layout
from exitflow.models.nested import NestedModel
from exitflow.models.tuning import saved_tensors, trained_buffers, trained_parameters, trained_tensors
from exitflow.tensors import Tensors, copy_into, load_tensors, read_description, save_tensors

MEMORY = "server memory: "  # before the names of what a server step of one's own remembers; no module has such a name


def save_state(path: Path, state: ServerState, digests: Mapping[str, str] | None = None) -> None:
    """A state as a safetensors file that says which of its tensors are buffers, and what other files then were."""
    memory = {f"{MEMORY}{name}": tensor for name, tensor in state.memory.items()}
    description = {"round": state.round, "buffers": sorted(state.buffers), "digests": digests or {}}
    save_tensors(path, {**state.tensors, **memory}, json.dumps(description))


def load_state(path: Path) -> ServerState:
    """Read the state that `save_state` wrote."""
    tensors, description = load_tensors(path)
    try:
        known = parse_json(description.encode())
        buffers = {name: tensors.pop(name) for name in known["buffers"]}
        memory = {name: tensors.pop(name) for name in list(tensors) if name.startswith(MEMORY)}
        remembered = {name.removeprefix(MEMORY): tensor for name, tensor in memory.items()}
        return ServerState(known["round"], tensors, buffers, remembered)
    except (KeyError, ValueError, TypeError):
        raise _damaged(path) from None


def saved_digests(path: Path) -> dict[str, str]:
    """The digests that `save_state` was given; none in files of versions that kept none."""
    try:
        return dict(parse_json((read_description(path) or "{}").encode()).get("digests", {}))
    except (ValueError, TypeError, AttributeError):
        raise _damaged(path) from None


def _damaged(path: Path) -> RunError:
    return RunError(f"{path}: is damaged, or was not written by exitflow")


def check_fit(model: NestedModel, state: ServerState, *, source: str) -> None:
    """Refuse a state that is of another model: one has what is trained, and perhaps what is frozen too."""
    params, buffers = saved_tensors(model)
    if not _fits(trained_tensors(model), state.tensors) or not _fits(state.tensors, {**params, **buffers}):
        raise RunError(f"{source}: the weights do not fit the model in spec.toml")


def start_from(given: Tensors, model: NestedModel, *, source: str) -> ServerState:
    """Weights by name as what a training of `model` begins with."""
    params, buffers = trained_parameters(model), trained_buffers(model)
    if not _fits({**params, **buffers}, given):
        raise RunError(f"{source}: the weights to start with do not fit the model; they need its names and shapes")
    return ServerState(0, {name: given[name] for name in params}, {name: given[name] for name in buffers})


def _fits(wanted: Tensors, given: Tensors) -> bool:
    """Whether what is wanted is given, in its shape."""
    return all(name in given and given[name].shape == tensor.shape for name, tensor in wanted.items())


def whole(model: NestedModel, state: ServerState) -> ServerState:
    """A state with what is frozen too."""
    params, buffers = saved_tensors(model)
    return ServerState(state.round, {**params, **state.params}, {**buffers, **state.buffers})


@torch.no_grad()
def with_weights(model: NestedModel, state: ServerState, *, source: str) -> NestedModel:
    """`model` with the tensors of `state`, in the layout in which it computes fastest."""
    check_fit(model, state, source=source)
    own, buffers = saved_tensors(model)
    copy_into({name: tensor for name, tensor in {**own, **buffers}.items() if name in state.tensors}, state.tensors)
    return model.to(memory_format=best_layout(model))  # type: ignore[call-overload, no-any-return]
