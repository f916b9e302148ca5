"""Whether results are what their names say, and all of one scale: else figures of different systems would be mixed."""

from __future__ import annotations

from functools import cache

from exitflow.errors import RunError
from exitflow.system.system import System, same_training
from paper import tables
from paper.results import Result, Results


def check_systems(results: Results, scale: tables.Scale | None = None) -> None:
    """Refuse a result of another system than its name stands for at `scale`, or at that of the first result.

    Gradient variances have no system beside them; they say their scale.
    """

    @cache
    def named(scale: tables.Scale) -> dict[str, System]:
        jobs = tables.distinct_trainings([*tables.TABLES.values()], results.seeds(), scale)
        return {job.name: job.system for job in jobs}

    def is_right(result: Result, scale: tables.Scale) -> bool:
        return result.name not in named(scale) or same_training(result.system, named(scale)[result.name])

    found = results.all()
    if found and scale is None:
        scale = next((each for each in tables.SCALES if is_right(found[0], each)), None)
    for result in found:
        if scale is None or not is_right(result, scale):
            problem = f"is of another system than {scale or 'any'} {result.name} is now"
            raise RunError(f"{result.folder}: {problem}; choose another folder for results, or delete this one")
    for path, measured in results.gradient_variance_scales().items():
        scale = scale or measured
        if measured != scale:
            problem = f"is of the scale {measured}, not {scale}"
            raise RunError(f"{path}: {problem}; choose another folder for results, or delete this file")
