"""Write docs/cookbook.md: record every program of examples/cookbook and print what is found.

python docs/make_cookbook.py [--pictures]        with --pictures: only draw the loss of every program
"""

import contextlib
import io
import os
import re
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

import sonde
from sonde.integrations.discovery import Discovery

ROOT = Path(__file__).parents[1]
HEAD = """# Cookbook: twelve failures, from the symptom to the line

Each program is one file in `examples/cookbook` with one fault in it. None of them imports Sonde: `sonde run` records
them as they are. `tests/docs/test_cookbook.py` runs all of them; `python docs/make_cookbook.py` writes this page.
"""


def record(program: Path) -> str:
    """Record a program in a process of its own and return the first finding as `sonde diagnose` prints it."""
    with tempfile.TemporaryDirectory() as folder:
        sonde = [sys.executable, "-m", "sonde"]
        settings = {**os.environ, "SONDE_BUDGET": "none", "COLUMNS": "80"}
        place = {"cwd": folder, "env": settings, "capture_output": True, "text": True}
        subprocess.run([*sonde, "run", "--run", "runs/it", program], check=True, **place)
        printed = subprocess.run([*sonde, "diagnose", "runs/it", "--no-examine"], check=False, **place).stdout
    found = re.search(r"^(● .*?)(?:\n\n|\n(?=● )|\Z)", printed, flags=re.S | re.M)
    return "\n".join(line.rstrip() for line in found[1].replace(f"{program.parent}/", "").splitlines())


# --------------------------------------------------------------------------------
# Pictures: the loss of every program, and the step at which the fault was found.


def draw(program: Path) -> str:
    """Record a program in this process and return its loss over the steps as SVG."""
    with tempfile.TemporaryDirectory() as folder:
        discovery = Discovery(f"{folder}/run", {})
        discovery.install()
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                runpy.run_path(str(program))
        finally:
            discovery.finish()
        run = sonde.open_run(sonde.list_runs(folder)[0].path)
        (site, *_) = run.find("loss*:scalar")
        series = run.series(site, "value")
        first = sonde.diagnose(run).findings[0]
    return svg(np.asarray(series.steps), np.asarray(series.values), first)


def svg(steps: np.ndarray, values: np.ndarray, finding: sonde.Finding) -> str:
    """Return a curve with its range, NaN left out, and a line where the finding begins."""
    width, height, left, top = 640, 200, 70, 30
    known = np.isfinite(values)
    low, high = values[known].min(), values[known].max()
    x = left + (steps - steps[0]) / max(1, steps[-1] - steps[0]) * (width - left - 20)
    y = top + (high - values) / (high - low or 1) * (height - top - 40)
    points = " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(x[known], y[known], strict=True))
    since = left if finding.step is None else float(np.interp(finding.step, steps, x))
    grey, ink = 'fill="#777"', 'stroke="#00897b" stroke-width="2" fill="none"'
    red = 'stroke="#c62828" stroke-dasharray="4 3"'
    label = "middle" if since > width / 2 else "start"
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"
 font-family="sans-serif" font-size="13">
<rect width="{width}" height="{height}" fill="#fff"/>
<polyline points="{points}" {ink}/>
<line x1="{since:.1f}" y1="{top - 8}" x2="{since:.1f}" y2="{height - 38}" {red}/>
<text x="{since:.1f}" y="{top - 13}" text-anchor="{label}" fill="#c62828">{finding.kind}</text>
<text x="{left - 8}" y="{top + 5}" text-anchor="end" {grey}>{high:.3g}</text>
<text x="{left - 8}" y="{height - 40}" text-anchor="end" {grey}>{low:.3g}</text>
<text x="{left}" y="{height - 14}" {grey}>step {steps[0]}</text>
<text x="{width - 20}" y="{height - 14}" text-anchor="end" {grey}>step {steps[-1]}</text>
<text x="{width / 2}" y="{height - 14}" text-anchor="middle" {grey}>loss</text>
</svg>
"""


def section(program: Path) -> str:
    code = program.read_text()
    symptom, kind = re.match(r'"""(.*?)\n\nFinding: (\w+)', code, flags=re.S).groups()
    (line,) = [line.strip() for line in code.splitlines() if "# the fault" in line]
    title = program.stem.replace("_", " ").capitalize()
    return f"""
## {title}

**Symptom.** {symptom}

![The loss of this program over its steps](images/cookbook-{program.stem}.svg)

    sonde run examples/cookbook/{program.name}

```text
{record(program)}
```

**The line.** `{line}`

More about it: [{kind}](findings/{kind}.md).
"""


def main() -> None:
    programs = sorted(ROOT.glob("examples/cookbook/*.py"))
    if "--pictures" in sys.argv:
        os.environ["SONDE_BUDGET"] = "none"
        for program in programs:
            (ROOT / "docs" / "images" / f"cookbook-{program.stem}.svg").write_text(draw(program))
            print(program.stem, flush=True)
        return
    (ROOT / "docs" / "cookbook.md").write_text(HEAD + "".join(map(section, programs)))


if __name__ == "__main__":
    main()
