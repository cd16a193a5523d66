"""Sites, blocks and runs to test the store with, and ways to wait and to compare."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from hypothesis import strategies as st

from sonde.core import schema
from sonde.records import Block, RunHeader, Site, summarise
from sonde.store import RunWriter

HEADER = RunHeader(
    schema_version=schema.SCHEMA_VERSION,
    created=1_700_000_000.0,
    sonde_version="0.1.0",
    model={"name": "Tiny"},
    config={"lr": 0.1},
)


class Clock:
    """A clock that moves only when told."""

    def __init__(self, now: float = 1_700_000_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def make_sites(count: int, first: int = 0) -> list[Site]:
    return [
        Site(id=first + i, name=f"layer{first + i}.weight", quantity="gradient", shape=(4, 2)) for i in range(count)
    ]


def make_block(step: int, num_sites: int = 3, *, hist: bool = True, seed: int | None = None, **fields) -> Block:
    rng = np.random.default_rng(step if seed is None else [seed, step])
    pairs = [summarise(rng.normal(size=8) * 10.0 ** rng.integers(-3, 3)) for _ in range(num_sites)]
    rows = np.array([row for row, _ in pairs]).reshape(num_sites, schema.NUM_COLUMNS)
    bins = np.array([b for _, b in pairs], dtype=np.uint64).reshape(num_sites, schema.NUM_BINS)
    binned = np.full(num_sites, hist)
    values = {
        "step": step,
        "time": 1000.0 + step,
        "sites": np.arange(num_sites, dtype=np.uint32),
        "rows": rows,
        "bins": bins * binned[:, None].astype(np.uint64),
        "binned": binned,
    }
    return Block(**{**values, **fields})


def write_run(path: Path, steps: range, num_sites: int = 3, *, close: bool = True, hist: bool = True, **options):
    """Write a run and return its (closed) writer."""
    writer = RunWriter(path, HEADER, **options)
    known = {site.id for site in writer.sites}
    writer.take_sites([site for site in make_sites(num_sites) if site.id not in known])
    for step in steps:
        writer.take_block(make_block(step, num_sites, hist=hist))
    if close:
        writer.close()
    return writer


def assert_same_block(left: Block, right: Block) -> None:
    assert (left.step, left.time, left.span, left.epoch, left.skipped) == (
        right.step,
        right.time,
        right.span,
        right.epoch,
        right.skipped,
    )
    for name in ("sites", "rows", "bins", "binned"):
        np.testing.assert_array_equal(getattr(left, name), getattr(right, name), strict=True)


numbers = st.floats(allow_nan=False, allow_infinity=False, width=32)
counts = st.one_of(st.just(0), st.integers(0, 9), st.integers(0, 2**63))


@st.composite
def blocks(draw: st.DrawFn, step: int | None = None, max_sites: int = 5) -> Block:
    """Any block: also one without sites, with empty histograms, and with counts that need 64 bits."""
    sites = sorted(draw(st.sets(st.integers(0, 2**32 - 1) | st.integers(0, 8), max_size=max_sites)))
    rows, bins, binned = [], [], []
    for _ in sites:
        rows.append(draw(st.lists(st.floats(width=64), min_size=12, max_size=12)))
        has = draw(st.booleans())
        spots = draw(st.dictionaries(st.integers(0, 63), counts, max_size=4)) if has else {}
        bins.append([spots.get(k, 0) for k in range(64)])
        binned.append(has)
    return Block(
        step=draw(st.integers(-(2**63), 2**63 - 1)) if step is None else step,
        time=draw(st.floats(allow_nan=False)),
        sites=np.array(sites, dtype=np.uint32),
        rows=np.array(rows, dtype=np.float64).reshape(len(sites), 12),
        bins=np.array(bins, dtype=np.uint64).reshape(len(sites), 64),
        binned=np.array(binned, dtype=np.bool_),
        span=draw(st.integers(1, 2**32 - 1)),
        epoch=draw(st.none() | st.integers(0, 2**40)),
        skipped=draw(st.booleans()),
    )


@st.composite
def measured_runs(draw: st.DrawFn) -> list[Block]:
    """Blocks of real elements at rising steps, with gaps; not every site is in every block."""
    steps = sorted(draw(st.sets(st.integers(0, 60), min_size=1, max_size=20)))
    elements = st.lists(st.floats(-1e6, 1e6) | st.sampled_from([0.0, np.nan, np.inf, -np.inf]), max_size=4)
    found = []
    for step in steps:
        sites = sorted(draw(st.sets(st.integers(0, 4), max_size=4)))
        pairs = [summarise(np.array(draw(elements), dtype=np.float64)) for _ in sites]
        binned = np.array([draw(st.booleans()) or draw(st.booleans()) for _ in sites], dtype=bool)
        bins = np.array([b for _, b in pairs], dtype=np.uint64).reshape(-1, 64)
        found.append(
            Block(
                step=step,
                time=float(step),
                sites=np.array(sites, dtype=np.uint32),
                rows=np.array([row for row, _ in pairs]).reshape(-1, 12),
                bins=bins * binned[:, None].astype(np.uint64),
                binned=binned,
                epoch=step // 10,
                skipped=step % 7 == 0,
            )
        )
    return found
