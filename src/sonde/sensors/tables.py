"""Data that a program holds as whole tables: arrays, tensors, columns and texts in its variables and data sets.

Batches show a few rows at a time; a whole table shows what was done to all of them at once. Three relations are read:
whether training data and data that is held out were each scaled by numbers of their own, whether they number the same
names in two ways, and whether the rows of one table were put into an order that those of its partner do not have.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice, permutations
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from sonde.core.facts import Plain
from sonde.core.metric_names import is_held_out
from sonde.sensors.copies import within
from sonde.sensors.data import marks_of
from sonde.sensors.tensors import is_plain

_LEAST_ROWS: Final = 20
_MOST_ROWS: Final = 1 << 18
_MOST_NUMBERS: Final = 1 << 20
_MOST_IN_ALL: Final = 1 << 21
_MAX_TABLES: Final = 64
_MAX_TEXTS: Final = 32
_DEPTH: Final = 2
_MAX_COLUMNS: Final = 4096
_PROBES: Final = 64
_MAX_STARTS: Final = 8
"""Rows at which a part of a table is looked for, after a few of its rows have been found at their distances."""
_FED_ROWS: Final = 4
_MAX_FED: Final = 64
_MEAN_OFF: Final = 2e-4
_DEVIATION_OFF: Final = 2e-3
"""How far the mean and the deviation of a scaled column may lie from 0 and 1: by rounding, and by a small `eps`."""
_CHANCE: Final = 0.02
"""The same in standard errors: columns that nobody scaled come so close in one case of a hundred."""
_AFFINE_OFF: Final = 1e-4
_SAME_MAP: Final = 0.02
"""Difference of two maps, in deviations of a column, that is worth nothing."""
_LOOKED_AT: Final = 256
"""Rows that are enough to see whether a column varies."""
_DISTINCT: Final = 10
"""Values that a column must have to count as numbers: flags and ranks have fewer."""
_LEAST_NAMES: Final = 3
_MOST_WORDS: Final = 512
_READ_ROWS: Final = 1000
_TRAINING: Final = frozenset({"train", "training", "tr", "fit"})
_WORD: Final = re.compile(r"[A-Z]+(?![a-z])\d*|[A-Z]?[a-z]+\d*|\d+")
_HELD_OUT: Final = frozenset({"te", "tst", "va", "ho"})
"""Short words for data that is held out, beside those of `is_held_out`."""

_Floats = NDArray[np.float64]
Texts = dict[str, Sequence[Any]]
"""Columns of names, texts or lists of words by the variable that holds them."""


@dataclass(eq=False)
class Table:
    """Rows of numbers under one name."""

    path: str
    values: Tensor

    @property
    def rows(self) -> int:
        """How many rows there are."""
        return len(self.values)

    @property
    def width(self) -> int:
        """How many numbers a row has."""
        return self.values.numel() // len(self.values)

    @cached_property
    def numbers(self) -> _Floats:
        """The rows in double precision."""
        flat: _Floats = self.values.detach().reshape(self.rows, -1).double().numpy()
        return flat

    @cached_property
    def marks(self) -> NDArray[np.int64]:
        """A whole number for each row, the same for rows of the same values in any precision."""
        return row_marks(self.values)

    @cached_property
    def standardised(self) -> NDArray[np.bool_]:
        """Which columns have the mean 0 and the deviation 1, as `standardised` finds it."""
        return standardised(self.numbers)

    @cached_property
    def between_0_and_1(self) -> NDArray[np.bool_]:
        """Which columns reach from 0 to 1, as `between_0_and_1` finds it."""
        return between_0_and_1(self.numbers)

    @property
    def is_real(self) -> bool:
        """Whether it holds real numbers."""
        return self.values.is_floating_point()

    @property
    def is_held_out(self) -> bool:
        """Whether its name is one of validation or test data."""
        return _is_held_out(self.path)

    @property
    def is_for_training(self) -> bool:
        """Whether its name is one of training data."""
        return not _TRAINING.isdisjoint(_words(self.path)) and not self.is_held_out

    def shares_memory(self, other: Table) -> bool:
        """Return whether two tables lie in one memory, as a part and its whole do."""
        return self.values.untyped_storage().data_ptr() == other.values.untyped_storage().data_ptr()


def row_marks(values: Tensor) -> NDArray[np.int64]:
    """Return a whole number for each row of a tensor."""
    rows = values.detach().reshape(len(values), -1).float()
    found: NDArray[np.int64] = marks_of(rows + 0.0).numpy()  # -0 is 0
    return found


def _words(path: str) -> set[str]:
    return {word.lower() for word in _WORD.findall(path)}


def _is_held_out(path: str) -> bool:
    return is_held_out(path) or not _HELD_OUT.isdisjoint(_words(path))


@dataclass(frozen=True)
class Relation:
    """What holds between tables of a program."""

    verb: str
    about: str
    data: dict[str, Plain]


class Tables:
    """Looks at the tables of a program, and remembers which rows its models were fed."""

    def __init__(self) -> None:
        self._fed: dict[str, list[tuple[int, NDArray[np.int64]]]] = {"train": [], "eval": []}
        """By phase: the width of rows, and their marks."""
        self._targets: list[Tensor] = []

    def feed(self, phase: str, inputs: Sequence[Tensor]) -> bool:
        """Remember a few rows that a model is given; return whether there was room for them."""
        known = self._fed[phase]
        if len(known) >= _MAX_FED:
            return False
        for each in inputs:
            if is_plain(each) and each.device.type == "cpu" and each.dim() > 1 and len(each) and not each.is_complex():
                known.append((each.numel() // len(each), row_marks(each[:_FED_ROWS])))
        return True

    def see_target(self, target: Tensor) -> None:
        """Remember what the first losses compare with."""
        if len(self._targets) < _FED_ROWS and is_plain(target) and target.device.type == "cpu" and target.dim():
            self._targets.append(target.detach())

    def look(self, scopes: Iterable[Mapping[str, Any]]) -> list[Relation]:
        """Return what holds between the tables in the variables of a program."""
        tables, texts = collect(scopes)
        with np.errstate(all="ignore"):
            return [
                *self._fitted_apart(tables),
                *_numbered_apart(tables, texts),
                *self._shuffled_apart(tables),
            ]

    def _is_fed(self, table: Table, phase: str) -> bool:
        return any(width == table.width and _has_rows(table, marks) for width, marks in self._fed[phase])

    # ------------------------------------------------------------------ scaled by numbers of their own

    def _fitted_apart(self, tables: list[Table]) -> list[Relation]:
        real = [each for each in tables if each.is_real and each.width <= _MAX_COLUMNS]
        held = [each for each in real if self._is_evaluated(each)]
        for evaluated in held:
            alike = [each for each in real if each.width == evaluated.width and not each.shares_memory(evaluated)]
            for train in (each for each in alike if self._is_trained_on(each)):
                relation = _fitted_apart(train, evaluated, real)
                if relation is not None:
                    return [relation]
        return []

    def _is_trained_on(self, table: Table) -> bool:
        return not table.is_held_out and (table.is_for_training or self._is_fed(table, "train"))

    def _is_evaluated(self, table: Table) -> bool:
        if self._is_fed(table, "train"):
            return False
        return table.is_held_out or (not table.is_for_training and self._is_fed(table, "eval"))

    # ------------------------------------------------------------------ in another order than its partner

    def _shuffled_apart(self, tables: list[Table]) -> list[Relation]:
        fed = [each for each in tables if self._is_fed(each, "train")]
        targets = [each for each in tables if any(_lies_in(one, each) for one in self._targets)]
        # Without targets other than places in the batch, pictures and texts are each other's partners.
        for target in fed if all(map(_counts_places, self._targets)) else targets:
            for whole in (each for each in tables if each.rows > target.rows and each.width == target.width):
                start = _part_of(target, whole)
                if start is None:
                    continue
                for inputs in (each for each in fed if each.rows == target.rows and each is not target):
                    for source in (each for each in tables if each.rows == whole.rows and each is not whole):
                        if source.width == inputs.width and _is_reordered(inputs, source, start):
                            # Rows that are fed in their own order, too, are partners, and these are others beside them.
                            if any(_part_of(each, source) == start for each in fed if each.rows == target.rows):
                                continue
                            data: dict[str, Plain] = {
                                "targets": target.path,
                                "of_targets": whole.path,
                                "of_inputs": source.path,
                                "rows": target.rows,
                            }
                            return [Relation("data.shuffled_apart", inputs.path, data)]
        return []


def _counts_places(target: Tensor) -> bool:
    """Return whether a target says no more than which row of the batch is whose."""
    return target.dim() == 1 and bool((target == torch.arange(len(target), device=target.device)).all())


def _lies_in(batch: Tensor, table: Table) -> bool:
    """Return whether the first rows of a batch are rows of a table."""
    if batch.numel() // max(1, len(batch)) != table.width or batch.is_floating_point() != table.is_real:
        return False
    return _has_rows(table, row_marks(batch[:_FED_ROWS]))


def _has_rows(table: Table, marks: NDArray[np.int64]) -> bool:
    """Return whether a table has all of a few rows."""
    return all(bool((table.marks == mark).any()) for mark in marks)


def _part_of(part: Table, whole: Table) -> int | None:
    """Return at which row of a table another one is found, in the same order."""
    if (part.marks == part.marks[0]).all():
        return None
    starts = np.arange(whole.rows - part.rows + 1)
    for place in np.linspace(0, part.rows - 1, min(part.rows, _PROBES)).astype(int):
        starts = starts[whole.marks[starts + place] == part.marks[place]]
    for start in starts[:_MAX_STARTS]:
        if np.array_equal(whole.marks[start : start + part.rows], part.marks):
            return int(start)
    return None


def _is_reordered(part: Table, whole: Table, start: int) -> bool:
    """Return whether a table has the rows of a range of another one in a different order."""
    wanted = whole.marks[start : start + part.rows]
    if not np.array_equal(np.sort(wanted), np.sort(part.marks)):
        return False
    moved = (wanted != part.marks).mean()
    return bool(moved > 0.5 and len(np.unique(wanted)) > 0.5 * len(wanted))


# ---------------------------------------------------------------------- scaling


def _fitted_apart(train: Table, evaluated: Table, tables: list[Table]) -> Relation | None:
    """Return how two tables were scaled if each was scaled by its own numbers, and that matters."""
    for way, one, two in (
        ("standardised", train.standardised, evaluated.standardised),
        ("between 0 and 1", train.between_0_and_1, evaluated.between_0_and_1),
    ):
        if len(one) != len(two) or not one.any() or not two[one].all():
            continue
        maps = [_maps(each, tables, one if len(one) == each.width else None) for each in (train, evaluated)]
        if maps[0] and maps[1]:
            apart = min(_distance(first, second) for first in maps[0] for second in maps[1])
            if apart < _SAME_MAP:
                return None
        else:
            apart = math.nan
        data: dict[str, Plain] = {
            "other": train.path,
            "way": way,
            "columns": int(one.sum()),
            "whole": len(one) != train.width,
            "apart": None if math.isnan(apart) else apart,
        }
        return Relation("data.fitted_apart", evaluated.path, data)
    return None


def standardised(values: _Floats) -> NDArray[np.bool_]:
    """Return which columns have the mean 0 and the deviation 1 but for rounding; of none, whether all numbers have.

    >>> even = np.linspace(-1, 1, 50)[:, None]
    >>> bool(standardised(even / even.std())[0]), bool(standardised(even)[0])
    (True, False)
    """
    columns = _is_standardised(values) & _varied(values)
    if columns.any() or values.shape[1] < 2:
        return columns
    return _is_standardised(values.reshape(-1, 1))


def _is_standardised(values: _Floats) -> NDArray[np.bool_]:
    count = len(values)
    mean, deviation = values.mean(0), values.std(0)
    least = np.minimum(np.abs(deviation - 1), np.abs(deviation * math.sqrt(count / (count - 1)) - 1))
    near_0 = np.abs(mean) < min(_MEAN_OFF, _CHANCE / math.sqrt(count))
    found: NDArray[np.bool_] = near_0 & (least < min(_DEVIATION_OFF, _CHANCE / math.sqrt(2 * count)))
    return found


def between_0_and_1(values: _Floats) -> NDArray[np.bool_]:
    """Return which columns of numbers reach from exactly 0 to exactly 1, each of which one row has.

    All columns of numbers must, and their values must not be evenly spaced as those of a grid are: then it is none.
    """
    low, high = values.min(0), values.max(0)
    varied = _varied(values)
    reaches = varied & (np.abs(low) < 1e-6) & (np.abs(high - 1) < 1e-6)
    if not varied.any() or not reaches[varied].all():
        return np.zeros_like(varied)
    single = np.array([(values[:, reaches] == end[reaches]).sum(0) == 1 for end in (low, high)])
    steps = np.diff(np.sort(values[:, reaches], axis=0), axis=0)
    even = np.ptp(steps, axis=0) < 1e-4 / len(values)
    return reaches if single.mean() > 0.5 and not even.any() else np.zeros_like(varied)


def _varied(values: _Floats) -> NDArray[np.bool_]:
    """Return which columns hold many different finite numbers."""
    some = values[:: max(1, len(values) // _LOOKED_AT)]
    counts = 1 + (np.diff(np.sort(some, axis=0), axis=0) > 0).sum(0)
    found: NDArray[np.bool_] = (counts >= _DISTINCT) & np.isfinite(values).all(0)
    return found


_Map = tuple[_Floats, _Floats]
"""The factor and the offset of each column."""


def _maps(scaled: Table, tables: list[Table], columns: NDArray[np.bool_] | None) -> list[_Map]:
    """Return how columns were made of those of other tables, where each is a multiple of one and an offset."""
    found = []
    for raw in tables:
        if raw is scaled or raw.rows != scaled.rows or raw.width != scaled.width:
            continue
        chosen = slice(None) if columns is None else columns
        before, after = raw.numbers[:, chosen], scaled.numbers[:, chosen]
        if before.shape != after.shape or not np.isfinite(before).all():
            continue
        spread = before.std(0)
        if (spread <= 0).any():
            continue
        factor = ((before - before.mean(0)) * (after - after.mean(0))).mean(0) / spread**2
        offset = after.mean(0) - factor * before.mean(0)
        off = np.abs(factor * before + offset - after).max(0)
        is_copy = np.abs(factor - 1).max() < _SAME_MAP and np.abs(offset).max() < _SAME_MAP
        if not is_copy and (off < _AFFINE_OFF * np.abs(after).max(0)).all():
            found.append((factor, offset))
    return found


def _distance(one: _Map, two: _Map) -> float:
    """Return how far two maps take the same number apart, at most, where the first makes deviations of 1 or less.

    Of numbers around the middle of the training data, and of those one deviation away.
    """
    ratio = two[0] / one[0]
    middle = np.abs(two[1] - ratio * one[1])
    return float(np.max(np.maximum(middle, np.abs(ratio - 1))))


# ---------------------------------------------------------------------- names that are numbered


def _numbered_apart(tables: list[Table], texts: Texts) -> list[Relation]:
    """Find names that have one number in training data and another one in data that is held out."""
    codes = [each for each in tables if not each.is_real and each.width <= _MOST_WORDS]
    books = [
        (path, table.path, book)
        for path, names in texts.items()
        for table in codes
        if len(names) == table.rows and (book := _book_of(names, table)) is not None
    ]
    for (path, coded, book), (path_2, coded_2, book_2) in permutations(books, 2):
        if _is_held_out(path) or _is_held_out(coded) or not (_is_held_out(path_2) and _is_held_out(coded_2)):
            continue
        # Questions and answers, or two languages, may well have vocabularies of their own.
        if _core(path) != _core(path_2) and _core(coded) != _core(coded_2):
            continue
        shared = book.keys() & book_2.keys()
        other = sorted(name for name in shared if book[name] != book_2[name])
        # Columns of two kinds have few names in common.
        if len(shared) >= _LEAST_NAMES and 2 * len(shared) >= min(len(book), len(book_2)) and other:
            name = other[0]
            data: dict[str, Plain] = {
                "other": coded,
                "names": len(shared),
                "differ": len(other),
                "name": name[:60],
                "number": book_2[name],
                "in_training": book[name],
            }
            return [Relation("data.numbered_apart", coded_2, data)]
    return []


def _core(path: str) -> set[str]:
    """Return the words of a name without those that say what the data is for.

    >>> _core("x_train") == _core("test['x']"), _core("x_train") == _core("y_test")
    (True, False)
    """
    return {word for word in _words(path) if not _says(word)}


def _book_of(names: Sequence[Any], table: Table) -> dict[str, int] | None:
    """Return the numbers that a table has for names in its rows, or for the words of its rows."""
    if table.width == 1:
        plain = [each for each in names if isinstance(each, str)]
        return _book(plain, table.values.reshape(-1).tolist()) if len(plain) == len(names) else None
    rows = table.values.reshape(table.rows, -1)[:_READ_ROWS].tolist()
    words = [(each.split() if isinstance(each, str) else each)[:_MOST_WORDS] for each in names[:_READ_ROWS]]
    if max(map(len, words)) < 2:
        words = [list(word[0]) if word else [] for word in words]  # names that are read letter by letter
    found = (_book_of_words(words, [row[skipped:] for row in rows]) for skipped in (0, 1))
    return next((book for book in found if book is not None), None)


def _book_of_words(words: list[list[str]], rows: list[list[int]]) -> dict[str, int] | None:
    """Return the number of each word, if it is the same in all rows; without the number of several, the unknown ones.

    >>> _book_of_words([["a", "b", "c"], ["c", "a"]], [[2, 1, 3, 0], [3, 2, 0, 0]])
    {'a': 2, 'b': 1, 'c': 3}
    """
    book: dict[str, int] = {}
    for some, row in zip(words, rows, strict=True):
        for word, number in zip(some, row, strict=False):
            if book.setdefault(word, number) != number:
                return None
    times = Counter(book.values())
    single = {word: number for word, number in book.items() if times[number] == 1}
    return single if len(single) >= _LEAST_NAMES else None


def _book(names: list[str], numbers: list[int]) -> dict[str, int] | None:
    """Return the number of each name, if each has one of its own, counted from 0 or 1 without a gap."""
    book: dict[str, int] = {}
    for name, number in zip(names, numbers, strict=True):
        if book.setdefault(name, number) != number:
            return None
    used = set(book.values())
    is_counted = len(used) == len(book) >= _LEAST_NAMES and min(used) in (0, 1) and max(used) - min(used) < len(used)
    return book if is_counted else None


# ---------------------------------------------------------------------- what there is


def collect(scopes: Iterable[Mapping[str, Any]]) -> tuple[list[Table], Texts]:
    """Return the tables of numbers in the variables of a program, and the columns of names, each once."""
    tables: list[Table] = []
    texts: Texts = {}
    held: dict[int, tuple[str, Any]] = {}  # what was made for us must live on, or another one gets its number
    for path, value in _held(scopes):
        # The loop may call `x` what the program calls `x_test`; of names that say as much, the program's own counts.
        if id(value) not in held or _says(path) or not _says(held[id(value)][0]):
            held[id(value)] = path, value
    left = _MOST_IN_ALL
    for path, value in held.values():
        values = _numbers(value)
        if values is not None and len(tables) < _MAX_TABLES and values.numel() <= left:
            tables.append(Table(path, values))
            left -= values.numel()
        elif values is None and len(texts) < _MAX_TEXTS and (names := _texts(value)) is not None:
            texts[path] = names
    return tables, texts


def _says(path: str) -> bool:
    """Return whether a name says what data is for."""
    return _is_held_out(path) or not _TRAINING.isdisjoint(_words(path))


def _held(scopes: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, Any]]:
    for scope in scopes:
        for path, value in within(scope, _DEPTH):
            yield from _opened(path, value)


def _opened(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield a value, or what a loader, a data set or a frame of columns holds."""
    if isinstance(value, DataLoader):
        yield from _opened(path, value.dataset)
    elif isinstance(value, TensorDataset):
        yield from ((f"{path}[{at}]", each) for at, each in enumerate(value.tensors))
    elif isinstance(value, Subset) and isinstance(value.dataset, TensorDataset):
        indices = torch.as_tensor(list(value.indices) if len(value.indices) <= _MOST_ROWS else [], device="cpu").long()
        small = (each for each in value.dataset.tensors if each.device.type == "cpu" and each.numel() <= _MOST_NUMBERS)
        yield from ((f"{path}[{at}]", each[indices]) for at, each in enumerate(small))
    elif isinstance(value, Dataset):
        own = getattr(value, "__dict__", {})
        yield from ((f"{path}.{name}", each) for name, each in islice(own.items(), _MAX_TABLES))
    elif _is_frame(value) and value.size <= _MOST_NUMBERS:
        names = list(value.columns)[:_MAX_TABLES]
        yield from ((f"{path}[{name!r}]", value[name].to_numpy()) for name in names if list(names).count(name) == 1)
        if all(each.kind in "fiu" for each in value.dtypes):
            yield path, value.to_numpy()
    else:
        yield path, value


def _is_frame(value: Any) -> bool:
    kind = type(value)
    return kind.__name__ == "DataFrame" and str(kind.__module__).partition(".")[0] == "pandas"


def _numbers(value: Any) -> Tensor | None:
    """Return a table of numbers as a tensor that shares its memory; None for anything else."""
    if isinstance(value, np.ndarray) and value.dtype.kind in "fiu" and value.dtype.isnative:
        if not _fits(value.shape):
            return None
        try:
            return torch.from_numpy(np.asarray(value) if value.flags.writeable else value.copy())
        except (TypeError, ValueError):  # a kind of number that torch lacks, or strides that run backwards
            return None
    if type(value) is Tensor and not isinstance(value, nn.Parameter) and _fits(tuple(value.shape)):
        known = is_plain(value) and value.device.type == "cpu" and not value.is_complex()
        return value.detach() if known and value.dtype != torch.bool and not value.requires_grad else None
    return None


def _fits(shape: tuple[int, ...]) -> bool:
    return 1 <= len(shape) <= 4 and _LEAST_ROWS <= shape[0] <= _MOST_ROWS and 0 < math.prod(shape) <= _MOST_NUMBERS


def _texts(value: Any) -> Sequence[Any] | None:
    """Return a column of names, of texts or of lists of words, as its first rows show it."""
    if isinstance(value, np.ndarray) and value.dtype.kind in "UO" and value.ndim == 1:
        value = value[:_MOST_ROWS].tolist() if _LEAST_ROWS <= len(value) <= _MOST_ROWS else ()
    if type(value) not in (list, tuple) or not _LEAST_ROWS <= len(value) <= _MOST_ROWS:
        return None
    some = value[:_READ_ROWS]  # a corpus has millions of words
    lists = all(type(each) in (list, tuple) and all(type(word) is str for word in each[:_MOST_WORDS]) for each in some)
    return value if lists or all(type(each) is str for each in some) else None
