"""Algorithm 1, whatever the backend."""

from __future__ import annotations

from collections.abc import Iterator

from exitflow.federated.options.around import Options
from exitflow.federated.plan import TrainingPlan
from exitflow.federated.round_report import RoundReport
from exitflow.federated.types import Backend, ServerState


def run_rounds(
    plan: TrainingPlan, state: ServerState, backend: Backend, options: Options | None = None
) -> Iterator[tuple[ServerState, RoundReport]]:
    """Train from `state` to the last round; yields the state after each round, and what happened in it."""
    around = (options or Options()).around(plan, after=state.round)
    for round in range(state.round + 1, plan.spec.rounds + 1):
        exit_weights = plan.weighting(plan.profile, round)  # Lambda-tilde
        tasks = plan.tasks(round, exit_weights)  # lines 2 and 3: who trains what
        updates = backend.run(state, tasks)  # lines 4 to 10: the nodes train, wherever they are
        rule = plan.rule(exit_weights)
        report = RoundReport(round, exit_weights, tasks)
        updates, rule = around(updates, rule, state, report)
        state = plan.aggregate(state, updates, rule)  # lines 11 and 12: the server updates its global model
        yield state, report.ended(state)
