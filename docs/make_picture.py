"""Draw the README's pictures: what `sonde show` and `sonde diagnose` print, as SVGs without outside references.

python docs/make_picture.py show runs/digits docs/images/summary.svg
python docs/make_picture.py diagnose runs/broken docs/images/diagnosis.svg
"""

from __future__ import annotations

import re
import sys
from io import StringIO
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.terminal_theme import MONOKAI

import sonde
from sonde.views.terminal import Look, print_summary
from sonde.views.terminal.findings import render_diagnosis


def main() -> None:
    verb, source, target = sys.argv[1:]
    width = 112 if verb == "show" else 90
    console = Console(
        record=True, width=width, force_terminal=True, color_system="truecolor", file=StringIO(), legacy_windows=False
    )
    if verb == "show":
        print_summary(sonde.open_run(source), console)
    else:
        for part in render_diagnosis(sonde.diagnose(source), Look.of(console)):
            console.print(part)
    console.print()  # the last line would be cut
    # The usual format loads a web font; a picture in a repository must stand alone.
    plain = re.sub(r"@font-face \{\{.*?\}\}", "", CONSOLE_SVG_FORMAT, flags=re.S)
    plain = re.sub(r"<!--.*?-->", "", plain, flags=re.S)
    plain = plain.replace("font-family: Fira Code, monospace", "font-family: DejaVu Sans Mono, Menlo, monospace")
    Path(target).write_text(console.export_svg(title=f"sonde {verb} {source}", theme=MONOKAI, code_format=plain))


if __name__ == "__main__":
    main()
