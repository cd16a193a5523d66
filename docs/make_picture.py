"""Draw the README's picture: the page that `sonde show` prints, as an SVG without outside references.

python docs/make_picture.py runs/digits docs/images/summary.svg
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
from sonde.views.terminal import print_summary


def main() -> None:
    source, target = sys.argv[1:]
    console = Console(
        record=True, width=112, force_terminal=True, color_system="truecolor", file=StringIO(), legacy_windows=False
    )
    print_summary(sonde.open_run(source), console)
    # The usual format loads a web font; a picture in a repository must stand alone.
    plain = re.sub(r"@font-face \{\{.*?\}\}", "", CONSOLE_SVG_FORMAT, flags=re.S)
    plain = re.sub(r"<!--.*?-->", "", plain, flags=re.S)
    plain = plain.replace("font-family: Fira Code, monospace", "font-family: DejaVu Sans Mono, Menlo, monospace")
    Path(target).write_text(console.export_svg(title=f"sonde show {source}", theme=MONOKAI, code_format=plain))


if __name__ == "__main__":
    main()
