"""A page as a browser has it."""

import shutil
import subprocess

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")

PROBE = """
<script>
addEventListener("load", async () => {
  const broken = [];
  for (const image of document.images) {
    try { await image.decode(); if (!image.naturalWidth) broken.push(image.alt); } catch { broken.push(image.alt); }
  }
  const loaded = performance.getEntriesByType("resource").map(each => each.name).filter(each => !each.startsWith("data:"));
  const wide = document.documentElement.scrollWidth > innerWidth;
  const covered = [...document.querySelectorAll(".scroll")].filter(each =>
    [...each.querySelectorAll("tbody th")].some(label => Math.max(label.offsetWidth, label.scrollWidth) > 0.55 * each.clientWidth)).length;
  document.title = JSON.stringify({images: document.images.length, broken, loaded, wide, covered,
    tables: document.querySelectorAll("table").length});
});
</script>
"""


def browse(path, *options):
    """The page as the browser has it, and what it wrote on its console."""
    command = [
        CHROMIUM,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--no-first-run",
        "--disable-background-networking",
    ]
    command += ["--enable-logging=stderr", "--virtual-time-budget=20000", *options, "--dump-dom", path.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]
