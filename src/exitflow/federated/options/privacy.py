"""Differential privacy of what the server publishes, for each node as a whole (central, by a trusted server).

Every update, batch-norm statistics as changes included, is clipped to the norm C. The server's sum of them,
sum over (i,e) of w_{i,e} g_{i,e}, then changes by w_max C at most when one node's data are put in or taken out, and
gets Gaussian noise of z w_max C. Dividing by weights that do not depend on the data comes after.

The noise comes from a secret of the run that never leaves the server: whoever knew it could take it away again. A
round that is repeated after a crash gets the same noise, not a second look. What this does not protect against: the
server itself, the number of samples of each node, and attacks on the floating-point form of the noise (Mironov, 2012).
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.utils import get_total_norm

from exitflow.errors import RunError
from exitflow.federated.aggregation import Aggregation
from exitflow.federated.options.federation_spec import FederationSpec
from exitflow.federated.plan import TrainingPlan
from exitflow.federated.round_report import RoundReport
from exitflow.federated.types import Update
from exitflow.files import read_file, write_secret
from exitflow.models.nested import Coverage
from exitflow.tensors import Tensors, take

SECRET_BYTES = 32
_ORDERS = [*range(2, 65), 80, 128, 256, 512, 1024]  # of Renyi divergences; whole ones have a closed form


@dataclass(frozen=True)
class Privacy:
    """Clips and adds noise, as the specification says."""

    clip_norm: float  # C
    noise_multiplier: float  # z; 0: only clip
    secret: bytes

    @staticmethod
    def of(spec: FederationSpec, secret: bytes) -> Privacy | None:
        """None where the user did not ask for any."""
        return None if spec.clip_norm is None else Privacy(spec.clip_norm, spec.noise_multiplier or 0.0, secret)

    def clipped(self, update: Update) -> Update:
        """The update, shortened to norm C if it is longer; its buffers must be changes."""
        norm = float(get_total_norm([t.double() for t in (*update.delta.values(), *update.buffers.values())]))
        if norm <= self.clip_norm:
            return update
        factor = self.clip_norm / norm
        delta = {name: tensor * factor for name, tensor in update.delta.items()}
        return replace(update, delta=delta, buffers={name: tensor * factor for name, tensor in update.buffers.items()})

    def private(
        self, updates: Iterator[Update], buffers: Tensors, coverage: Callable[..., Coverage]
    ) -> Iterator[Update]:
        """The updates clipped, their buffers as changes of the server's."""
        for update in updates:
            yield self.clipped(changes(update, take(buffers, coverage(*update.task.exits))))

    def noisy(
        self,
        rule: Aggregation,
        plan: TrainingPlan,
        report: RoundReport,
        arrival: Callable[[str], float] | None = None,
    ) -> Aggregation:
        """The rule with noise on its sums; `arrival` is the probability of each node by which updates are divided."""
        most = largest_weight(plan, report.exit_weights, arrival)
        return replace(rule, noise=partial(self.add_noise, largest_weight=most, round=report.round))

    def add_noise(self, sums: Tensors, largest_weight: float, round: int) -> None:
        """In place, to sums of clipped updates whose weights are `largest_weight` at most."""
        deviation = self.noise_multiplier * self.clip_norm * largest_weight
        for name, total in sums.items():
            noise = torch.from_numpy(_normal(total.numel(), self.secret + f"{round} {name}".encode()))
            total += (deviation * noise).to(total.dtype).view(total.shape)


def _normal(count: int, key: bytes) -> npt.NDArray[np.float64]:
    """(count,) standard normal numbers that nobody can guess without the key: PyTorch's have seeds of 32 bits."""
    pairs = -(-count // 2)
    words = np.frombuffer(hashlib.shake_256(key).digest(16 * pairs), dtype="<u8").reshape(2, pairs)
    uniform = ((words >> np.uint64(11)) + 0.5) / 2**53  # above 0
    radius, angle = np.sqrt(-2 * np.log(uniform[0])), 2 * np.pi * uniform[1]  # Box and Muller
    return np.concatenate((radius * np.cos(angle), radius * np.sin(angle)))[:count]


def largest_weight(
    plan: TrainingPlan, exit_weights: npt.NDArray[np.float64], arrival: Callable[[str], float] | None = None
) -> float:
    """The most that any element of any node's update may count in a round."""
    profile = plan.profile
    drawn = profile.probabilities > 0  # (N, E)
    weights = exit_weights * profile.samples[:, None] / profile.exit_samples
    weights = np.divide(weights, profile.probabilities, out=np.zeros_like(weights), where=drawn)
    if arrival:
        weights /= np.array([arrival(node) for node in plan.nodes])[:, None]
    return float((weights.sum(axis=1) if plan.spec.trains_all_exits else weights).max())


def changes(update: Update, before: Tensors) -> Update:
    """The update with its buffers as what the node changed in them; `before` is what the task's exits cover."""
    return replace(update, buffers={name: after - before[name] for name, after in update.buffers.items()})


@dataclass(frozen=True)
class PrivacyLoss:
    """What the rounds so far may have told about a node, as (epsilon, delta)."""

    epsilon: float  # if everyone knows which nodes took part in which round
    epsilon_secret_sampling: float  # if nobody does; nodes know of themselves, so this is against outsiders
    delta: float

    @staticmethod
    def after(spec: FederationSpec, rounds_of_node: int, num_rounds: int, probability: float) -> PrivacyLoss | None:
        """For the node that was drawn most often, and for the largest probability to be drawn."""
        if spec.noise_multiplier is None:
            return None
        known = _epsilon(spec.noise_multiplier, rounds_of_node, 1.0, spec.delta)
        secret = _epsilon(spec.noise_multiplier, num_rounds, probability, spec.delta)
        return PrivacyLoss(known, min(known, secret), spec.delta)


def run_secret(path: Path) -> bytes:
    """The secret of a run, drawn once and kept in a file that only its owner may read."""
    if not path.is_file():
        write_secret(path, secrets.token_bytes(SECRET_BYTES))
    secret = read_file(path)
    if len(secret) != SECRET_BYTES:
        raise RunError(f"{path}: is damaged, and without it a round could not be repeated with the same noise")
    return secret


def _epsilon(noise_multiplier: float, num_rounds: int, probability: float, delta: float) -> float:
    import dp_accounting
    from dp_accounting.rdp import RdpAccountant

    if num_rounds == 0:
        return 0.0
    event = dp_accounting.GaussianDpEvent(noise_multiplier)
    if probability < 1:
        event = dp_accounting.PoissonSampledDpEvent(probability, event)
    accountant = RdpAccountant(_ORDERS, dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE)
    accountant.compose(event, num_rounds)
    return float(accountant.get_epsilon(delta))
