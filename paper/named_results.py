"""Whether results are of the systems that their names stand for, and all of one scale: else figures would be mixed."""

from __future__ import annotations

from exitflow.errors import RunError
from exitflow.system.system import System
from paper.results import Line, Results, TrainingResult
from paper.tables import Scale, system_for_variance
from paper.training import system_digest

ADVICE = "choose another file for results, or remove this line"


def check_systems(results: Results, scale: Scale | None = None) -> None:
    """Refuse a result of another scale, or of another system than tables ask for under its name.

    What no table asks for is nobody's business.
    """
    scale = scale or results.scale
    for line in results.lines.values():
        name = line.training.name if isinstance(line, TrainingResult) else f"the gradient variance of {line.name}"
        if line.scale != scale:
            raise RunError(f"{results.path}: {name} is of the scale {line.scale}, not {scale}; {ADVICE}")
        system = _system(line, results)
        if system and line.system != system_digest(system):
            raise RunError(f"{results.path}: {name} is of another system than it stands for now at {scale}; {ADVICE}")
        if system and isinstance(line, TrainingResult):
            _check_exits(line, system.topology.num_exits, results)


def _system(line: Line, results: Results) -> System | None:
    if not isinstance(line, TrainingResult):
        return system_for_variance(line.gradients_of, line.seed, line.scale)
    job = results.jobs.get(line.training)
    return job.system if job else None


def _check_exits(line: TrainingResult, num_exits: int, results: Results) -> None:
    for answers in (line.answers, line.own_answers):
        if answers and len(answers.exit_accuracy) != num_exits:
            problem = f"exit_accuracy: expected {num_exits} numbers, got {list(answers.exit_accuracy)}"
            raise RunError(f"{results.path}: {line.training.name}: {problem}")
