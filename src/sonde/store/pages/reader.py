"""Read pages: the index is held in memory, everything else is read on demand."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import Any, Literal

from sonde.errors import RunDamaged, RunNotFound
from sonde.store.pages import names, nodes, preview
from sonde.store.pages.dtypes import to_torch
from sonde.store.pages.page import Page, Restore
from sonde.store.pages.record import Datapoint, Entry, Place


def load_debug_outputs(folder: str | Path, *, tensors: Literal["numpy", "torch"] = "numpy") -> DebugOutputs:
    """Open what was captured into a folder (`epoch_4/debugger`), also while it is written.

    Args:
        folder: Holds pages.
        tensors: What torch tensors come back as. Numpy arrays are always numpy arrays.

    Raises:
        RunNotFound: There is no such folder, or it holds only pickled pages (`page_N.pkl`), which are not opened. The
            message has the command that converts them.

    """
    path = Path(folder)
    if not path.is_dir():
        raise RunNotFound(f"There is no folder {path}. Captures lie in `debugger` or `epoch_N/debugger` of a run.")
    if notice := notice_of_pickles(path):
        raise RunNotFound(notice)
    return DebugOutputs(path, restore=to_torch if tensors == "torch" else None)


def notice_of_pickles(folder: Path) -> str:
    """Return how to read the pickled pages of a folder, if it holds no others."""
    pickled = names.pickled_pages(folder)
    if not pickled or names.list_pages(folder):
        return ""
    pages = pickled[0] if len(pickled) == 1 else f"{pickled[0]} to {pickled[-1]}"
    return (
        f"{folder} holds pickled pages ({pages}). Loading a pickle runs the code in it, so they are not opened. "
        f"If you trust their author, convert them: sonde import-pages {folder} {folder} --trust"
    )


class DebugOutputs(Mapping[Datapoint, Mapping[str, Any]]):
    """Captures by datapoint: `outputs[17]["features"]`.

    Only an index is held in memory. `outputs[17]` reads the structure of one datapoint, `outputs[17]["features"]` the
    tensors of one debugger, and `outputs.tensor(17, "features", "layer1/0")` one tensor. Datapoints come in order:
    numbers first, then names. Of two captures of one datapoint the later counts.
    """

    def __init__(self, folder: Path, *, restore: Restore | None = None, ranks: bool = True) -> None:
        self.folder = folder
        self.problems: list[str] = []
        """What could not be read; everything else can."""
        self._restore = restore
        self._ranks = ranks
        self._lock = Lock()
        self._pages: dict[tuple[Path, int], Page] = {}
        self._where: dict[Datapoint, tuple[Page, int | Entry]] = {}
        self.refresh()

    def refresh(self) -> None:
        """Take in what was written since."""
        with self._lock:
            self.problems = []
            for folder in names.rank_folders(self.folder) if self._ranks else [self.folder]:
                for page in names.list_pages(folder):
                    self._take(folder, page)
            if notice := notice_of_pickles(self.folder):
                self.problems.append(notice)
            ordered = sorted(self._where.items(), key=lambda item: (isinstance(item[0], str), item[0]))
            self._where = dict(ordered)

    def __getitem__(self, datapoint: Datapoint) -> Mapping[str, Any]:
        """Return the outputs of a datapoint, by debugger.

        Raises:
            KeyError: Nothing was captured for it.
            RunDamaged: Its record cannot be read.

        """
        page, entry = self._entry(datapoint)
        return _Outputs(page, entry, self._restore)

    def __iter__(self) -> Iterator[Datapoint]:
        return iter(self._where)

    def __len__(self) -> int:
        return len(self._where)

    def __contains__(self, datapoint: object) -> bool:
        return datapoint in self._where

    def __repr__(self) -> str:
        return f"<DebugOutputs of {len(self)} datapoints in {len(self._pages)} pages at {self.folder}>"

    def tensor(self, datapoint: Datapoint, debugger: str, path: str | Sequence[str | int] = "") -> Any:
        """Read one tensor, or any other part of a debugger's output, and nothing else.

        Args:
            datapoint: Its number or name.
            debugger: The name of the debugger.
            path: Where in the output: `"layer1/0"` or `("layer1", 0)`. Nothing means all of it.

        Raises:
            KeyError: There is no such part.
            RunDamaged: It cannot be read.

        """
        page, entry = self._entry(datapoint)
        keys = nodes.path_from_text(path) if isinstance(path, str) else tuple(path)
        try:
            node = nodes.find_node(entry.outputs[debugger], keys)
        except KeyError:
            known = [_label(name, where) for name, where, _ in _tensors(entry)]
            raise KeyError(
                f"{datapoint!r} has no {_label(debugger, keys)!r}; its tensors: {', '.join(known)}"
            ) from None
        return page.decode(entry, node, self._restore)

    def previews(self, datapoint: Datapoint) -> dict[str, dict[str, preview.Preview]]:
        """Return previews of a datapoint's tensors, by debugger and path. Opens no page."""
        page, entry = self._entry(datapoint)
        found: dict[str, dict[str, preview.Preview]] = {name: {} for name in entry.outputs}
        for debugger, path, number in _tensors(entry):
            found[debugger][nodes.path_to_text(path)] = page.preview(entry, number)
        return found

    def info(self, datapoint: Datapoint) -> dict[str, Any]:
        """Return what was noted about a datapoint when it was captured."""
        page, entry = self._entry(datapoint)
        value = page.decode(entry, entry.info, self._restore)
        return value if isinstance(value, dict) else {}

    def entry(self, datapoint: Datapoint) -> tuple[Entry, Callable[[Place], memoryview]]:
        """Return a datapoint as it is stored, and what reads its tensors as bytes."""
        page, entry = self._entry(datapoint)
        return entry, page.read_raw

    def _entry(self, datapoint: Datapoint) -> tuple[Page, Entry]:
        page, where = self._where[datapoint]
        return page, where if isinstance(where, Entry) else page.entry(datapoint, where)

    def _take(self, folder: Path, files: names.Page) -> None:
        page = self._pages.setdefault((folder, files.number), Page(folder, files.number))
        try:
            for datapoint, where in page.refresh():
                self._where[datapoint] = (page, where)
            if files.is_sealed and not page.is_whole:
                for entry in {each.datapoint: each for each in page.read_header()}.values():
                    if not _is_found(self._where.get(entry.datapoint), page):
                        self._where[entry.datapoint] = (page, entry)
        except (RunDamaged, OSError) as error:
            if str(error) not in page.problems:
                page.problems.append(str(error))
        self.problems += page.problems


def _is_found(known: tuple[Page, int | Entry] | None, page: Page) -> bool:
    return known is not None and known[0] is page


def _label(debugger: str, path: nodes.Path) -> str:
    return "/".join([debugger, nodes.path_to_text(path)]) if path else debugger


def _tensors(entry: Entry) -> Iterator[tuple[str, nodes.Path, int]]:
    for debugger, node in entry.outputs.items():
        for path, number in nodes.find_tensors(node):
            if type(number) is int and 0 <= number < len(entry.places):
                yield debugger, path, number


class _Outputs(Mapping[str, Any]):
    """The outputs of one datapoint. A debugger's are read when they are asked for."""

    def __init__(self, page: Page, entry: Entry, restore: Restore | None) -> None:
        self._page = page
        self._entry = entry
        self._restore = restore

    def __getitem__(self, debugger: str) -> Any:
        return self._page.decode(self._entry, self._entry.outputs[debugger], self._restore)

    def __iter__(self) -> Iterator[str]:
        return iter(self._entry.outputs)

    def __len__(self) -> int:
        return len(self._entry.outputs)

    def __contains__(self, debugger: object) -> bool:
        return debugger in self._entry.outputs

    def __repr__(self) -> str:
        return f"<outputs of datapoint {self._entry.datapoint!r}: {', '.join(self)}>"
