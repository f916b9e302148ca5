"""Encoders of Hugging Face's transformers on token ids, with exits behind some of their layers.

What passes between stages is (B, tokens, hidden + 1): the hidden states, and with them which tokens are no padding, so
that what forwards features forwards that too. As for timm, the cut network is compared with the original.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from exitflow.errors import ConfigError, MissingExtraError
from exitflow.models.backbones import TransformersNetwork
from exitflow.models.cutting import silent, stage_bounds
from exitflow.models.nested import EarlyExitNetwork
from exitflow.models.torchvision_operators import with_operators
from exitflow.models.weights import check_names, read_weights

_TOLERANCE = 1e-4
_HIDDEN = -1e4  # added to what attention gives to padding


def build(spec: TransformersNetwork, input_shape: tuple[int, ...], num_classes: int) -> EarlyExitNetwork:
    """The encoder with its weights, or from PyTorch's current random state, for (tokens,) ids."""
    if len(input_shape) != 1:
        raise ValueError(f"encoders take (tokens,) ids, got {input_shape}")
    whole = _create(spec)
    layers = next((module for module in whole.modules() if isinstance(module, nn.ModuleList)), None)
    if layers is None or not hasattr(whole, "embeddings"):
        raise _not_in_sequence(spec.name, "it has no embeddings and layers that can be told apart")
    padding = whole.config.pad_token_id or 0
    units = [_Embeddings(whole.embeddings, padding), *map(_Layer, layers)]
    example = (torch.arange(2 * input_shape[0]) % whole.config.vocab_size).view(2, -1).float()
    example[1, -(input_shape[0] // 2) :] = padding
    blocks = list(range(1, len(units)))
    try:
        with torch.no_grad():
            whole.eval()
            bounds = stage_bounds(units, blocks, spec.exit_blocks, spec.num_exits or 1, example)
            carry = nn.Sequential(*units)(example)
            expected = whole(input_ids=example.long(), attention_mask=(example != padding).long()).last_hidden_state
    except ConfigError:
        raise
    except Exception as error:
        raise _not_in_sequence(spec.name, f"{type(error).__name__}: {error}") from None
    kept = carry[..., -1:] * (carry[..., :-1] - expected)  # what is computed for padding does not matter
    if float(kept.abs().max()) > _TOLERANCE * float(expected.abs().max()):
        raise _not_in_sequence(spec.name, "cut behind its layers, it computes something else")
    stages = [nn.Sequential(*units[start:stop]) for start, stop in bounds]
    heads = [_Head(expected.shape[2], num_classes, class_token=spec.head == "token") for _ in stages]
    return EarlyExitNetwork(stages, heads, [units[index] for index in blocks])


def _create(spec: TransformersNetwork) -> Any:
    with_operators()
    try:
        import transformers
    except ImportError:
        raise MissingExtraError("transformers", "networks") from None
    auto: Any = transformers
    auto.utils.logging.set_verbosity_error()
    try:
        network = auto.AutoModel.from_config(auto.AutoConfig.for_model(spec.name, **spec.settings))
    except Exception as error:  # each kind refuses in its own way
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(
            f"transformers cannot make {spec.name!r} with these settings: {reason}", key="model"
        ) from None
    if hasattr(network, "pooler"):
        network.pooler = None
    if spec.weights:
        prefix = f"{network.base_model_prefix}."
        given = read_weights(Path(spec.weights), spec.weights_sha256)
        if any(name.startswith(prefix) for name in given):  # saved with a head, which is not wanted
            given = {name.removeprefix(prefix): value for name, value in given.items() if name.startswith(prefix)}
        given = {name: value for name, value in given.items() if not name.startswith(("pooler.", "cls."))}
        given.pop("embeddings.position_ids", None)  # of older versions
        check_names(network.state_dict(), given, source=spec.weights, but=("pooler.",))
        network.load_state_dict(given)
    return network


class _Embeddings(nn.Module):
    def __init__(self, embeddings: Any, padding: int) -> None:
        super().__init__()
        self.embeddings, self.padding = embeddings, padding

    def forward(self, ids: Tensor) -> Tensor:
        """(B, tokens) ids, as floats -> (B, tokens, hidden + 1)."""
        ids = ids.long()
        kept = (ids != self.padding).unsqueeze(2)
        hidden = self.embeddings(input_ids=ids)
        return torch.cat((hidden, kept.to(hidden.dtype)), dim=2)


class _Layer(nn.Module):
    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, carry: Tensor) -> Tensor:
        """(B, tokens, hidden + 1) -> the same."""
        hidden, kept = carry[..., :-1], carry[..., -1:]
        mask = (kept < 0.5).to(hidden.dtype).transpose(1, 2).unsqueeze(1) * _HIDDEN  # (B, 1, 1, tokens)
        given = self.layer(hidden, attention_mask=mask)
        return torch.cat((given[0] if isinstance(given, tuple) else given, kept), dim=2)


class _Head(nn.Module):
    """A linear classifier on the first token, or on the mean of all that are no padding, normalised."""

    def __init__(self, hidden: int, num_classes: int, *, class_token: bool) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(hidden), silent(nn.Linear(hidden, num_classes))
        self.class_token = class_token

    def forward(self, carry: Tensor) -> Tensor:
        """(B, tokens, hidden + 1) -> (B, classes)."""
        hidden, kept = carry[..., :-1], (carry[..., -1:] >= 0.5).to(carry.dtype)
        pooled = hidden[:, 0] if self.class_token else (hidden * kept).sum(dim=1) / kept.sum(dim=1).clamp(min=1)
        logits: Tensor = self.linear(self.norm(pooled))
        return logits


def _not_in_sequence(name: str, reason: str) -> ConfigError:
    problem = f"{name!r} is no encoder whose layers stand in one sequence behind its embeddings"
    return ConfigError(f"{problem} ({reason.splitlines()[0]})", key="model.name")
