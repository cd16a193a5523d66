"""`sonde import-pages SRC DST --trust`: convert pickled pages of an older tool into pages that are safe to open."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

from sonde.errors import MissingExtra, OptionError, RunDamaged, RunNotFound

EXAMPLES = """
sonde import-pages old/epoch_4/debugger new/epoch_4/debugger --trust
"""

_PAGE = re.compile(r"page_(\d{1,9})\.pkl")

Source = Annotated[Path, typer.Argument(metavar="SRC", help="A folder with page_0.pkl, page_1.pkl, ...")]
Target = Annotated[Path, typer.Argument(metavar="DST", help="The folder for the new pages; may be SRC itself.")]
Trust = Annotated[bool, typer.Option("--trust", help="I trust the author of SRC: loading it can run any code.")]
PageSize = Annotated[float, typer.Option("--page-size-mb", min=0.001, metavar="MB", help="How large a page grows.")]


def import_pages(source: Source, target: Target, trust: Trust = False, page_size_mb: PageSize = 100.0) -> None:
    """Convert pickled debugger pages into pages that are safe to open.

    A pickle is a program: loading one runs whatever code is in it, with your rights. So this command loads none without
    --trust. What it writes is plain data, and runs no code when it is opened.
    """
    pages = _find(source)
    if not trust:
        raise OptionError(
            f"{source} holds {len(pages)} pickled pages. Loading a pickle runs whatever code is in it. "
            "If you trust their author, add --trust."
        )
    from sonde.store import PageWriter

    with PageWriter(target, page_bytes=int(page_size_mb * 1024**2)) as writer:
        count = 0
        for datapoint, outputs in _captures(pages):
            writer.add(datapoint, outputs)
            count += 1
    typer.echo(f"{target}: {count} datapoints from {len(pages)} pickled pages, now in {writer.pages_written} pages")


def _find(source: Path) -> list[Path]:
    if not source.is_dir():
        raise RunNotFound(f"There is no folder {source}.")
    numbered = sorted((int(match[1]), path) for path in source.iterdir() if (match := _PAGE.fullmatch(path.name)))
    if not numbered:
        raise RunNotFound(f"{source} has no page_N.pkl.")
    return [path for _, path in numbered]


def _captures(pages: list[Path]) -> Iterator[tuple[Any, dict[str, Any]]]:
    load = _loader()
    # Tensors need torch, which the pages themselves bring in; the command line as such does without it.
    plain = import_module("sonde.capture").to_plain_outputs
    for path in pages:
        try:
            page = load(path)
        except Exception as error:
            raise RunDamaged(f"{path} cannot be loaded: {type(error).__name__}: {error}") from error
        if not isinstance(page, dict):
            raise RunDamaged(f"{path} holds a {type(page).__name__}, not captures by datapoint.")
        for datapoint, outputs in page.items():
            yield datapoint, plain(outputs if isinstance(outputs, dict) else {"output": outputs})


def _loader() -> Any:
    try:
        return import_module("joblib").load
    except ImportError:
        raise MissingExtra("joblib", "legacy", "Reading pickled pages") from None
