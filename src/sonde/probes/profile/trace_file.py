"""Trace files for Chrome, Perfetto and speedscope."""

from __future__ import annotations

import gzip
import json
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any, Final

_SPEEDSCOPE: Final = "https://www.speedscope.app/file-format-schema.json"


def write_trace(profiler: Any, path: Path) -> Path:
    """Write a finished recording as Chrome trace JSON, packed if the name ends with `.gz`. Returns the path.

    Torch writes some names as broken text, which no JSON reader takes; those characters are replaced.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".trace-") as scratch:
        raw, clean = Path(scratch, "raw.json"), Path(scratch, "clean")
        profiler.export_chrome_trace(str(raw))
        with (
            raw.open(encoding="utf-8", errors="replace") as source,
            _open(clean, packed=path.suffix == ".gz") as target,
        ):
            shutil.copyfileobj(source, target, 1 << 20)
        clean.replace(path)
    return path


def numbered(path: Path, number: int) -> Path:
    """Return where the n-th recording of a repeated schedule goes.

    >>> numbered(Path("a/trace.json.gz"), 2).name
    'trace.2.json.gz'
    """
    if number == 1:
        return path
    stem, dot, rest = path.name.partition(".")
    return path.with_name(f"{stem}.{number}{dot}{rest}")


def folded_lines(weights: Mapping[tuple[str, ...], float]) -> list[str]:
    """Return stacks, outermost first, as `a;b;c 123`: what flame-graph tools read. Weights are rounded, zeros left."""
    clean = {tuple(name.replace(";", ",") for name in stack): round(weight) for stack, weight in weights.items()}
    return [f"{';'.join(stack)} {weight}" for stack, weight in sorted(clean.items()) if weight > 0]


def speedscope(weights: Mapping[tuple[str, ...], float], *, name: str, unit: str = "microseconds") -> dict[str, Any]:
    """Return stacks, outermost first, as a sampled profile of speedscope's file format."""
    names = sorted({name for stack in weights for name in stack})
    index = {name: number for number, name in enumerate(names)}
    stacks = sorted(weights)
    values = [weights[stack] for stack in stacks]
    return {
        "$schema": _SPEEDSCOPE,
        "name": name,
        "exporter": "sonde",
        "activeProfileIndex": 0,
        "shared": {"frames": [{"name": each} for each in names]},
        "profiles": [
            {
                "type": "sampled",
                "name": name,
                "unit": unit,
                "startValue": 0,
                "endValue": sum(values),
                "samples": [[index[each] for each in stack] for stack in stacks],
                "weights": values,
            }
        ],
    }


def write_text(path: Path, lines: Iterable[str]) -> Path:
    """Write lines to a file, its folder included."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def write_json(path: Path, content: Any) -> Path:
    """Write strict JSON to a file, its folder included."""
    return write_text(path, [json.dumps(content, allow_nan=False)])


def _open(path: Path, *, packed: bool) -> IO[str]:
    return gzip.open(path, "wt", encoding="utf-8") if packed else path.open("w", encoding="utf-8")
