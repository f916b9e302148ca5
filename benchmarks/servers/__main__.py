"""`python -m benchmarks.servers`: make the environments of the other servers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
HOME = HERE.parents[1] / ".venv-bench"

for requirements in sorted(HERE.glob("*.txt")):
    place = HOME / requirements.stem
    if (place / ".installed").exists():
        continue
    print(f"== {requirements.stem}", flush=True)
    subprocess.run([sys.executable, "-m", "venv", str(place)], check=True)
    subprocess.run([str(place / "bin" / "pip"), "install", "--quiet", "--requirement", str(requirements)], check=True)
    (place / ".installed").touch()
