"""`python -m benchmarks [NAME...]`: all benchmarks, or those named."""

from __future__ import annotations

import sys

from benchmarks import federation, flower_simulation, planning, scale, serving, training

BENCHMARKS = {
    "planning": planning.main,
    "training-resnet": training.resnet,
    "training-digits": training.digits,
    "scale": scale.main,
    "simulation-digits": flower_simulation.digits,
    "simulation-resnet": flower_simulation.resnet,
    "flower-tiny": federation.tiny,
    "flower-resnet": federation.realistic,
    "ray": federation.ray,
    "serving": serving.main,
}

names = sys.argv[1:] or list(BENCHMARKS)
unknown = [name for name in names if name not in BENCHMARKS]
if unknown:
    sys.exit(f"there is no benchmark {unknown[0]!r}; known are: {', '.join(BENCHMARKS)}")
for name in names:
    print(f"== {name}", flush=True)
    BENCHMARKS[name]()
