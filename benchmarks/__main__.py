"""`python -m benchmarks [NAME...]`: all benchmarks, or those named; `training` stands for all whose name begins so."""

from __future__ import annotations

import sys

from benchmarks import federation, flower_simulation, planning, scale, serving, training

BENCHMARKS = {
    "planning": planning.main,
    "training-resnet": training.resnet,
    "training-short-rounds": training.short_rounds,
    "training-digits": training.digits,
    "scale": scale.main,
    "simulation-digits": flower_simulation.digits,
    "simulation-resnet": flower_simulation.resnet,
    "flower-tiny": federation.tiny,
    "flower-resnet": federation.realistic,
    "ray": federation.ray,
    "serving": serving.main,
}

chosen = {given: [name for name in BENCHMARKS if f"{name}-".startswith(f"{given}-")] for given in sys.argv[1:]}
names = [name for found in chosen.values() for name in found] or list(BENCHMARKS)
unknown = [given for given, found in chosen.items() if not found]
if unknown:
    sys.exit(f"there is no benchmark {unknown[0]!r}; known are: {', '.join(BENCHMARKS)}")
for name in names:
    print(f"== {name}", flush=True)
    BENCHMARKS[name]()
