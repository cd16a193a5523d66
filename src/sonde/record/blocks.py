"""Turn a packet into a block: plain arrays, sorted by site, with everything about one site merged."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from sonde.core import schema
from sonde.core.schema import Bins, Rows
from sonde.record.packets import Packet, PlainSteps, SiteBook
from sonde.records import Block, Numbers

_Part = tuple[NDArray[np.uint32], Rows, Bins, NDArray[np.bool_]]


def to_block(packet: Packet, book: SiteBook, *, histogram: bool) -> Block | None:
    """Wait for the packet's rows and return them as a block, or None if it holds no reading."""
    parts = [_from_arenas(packet, book, histogram)] if packet.holds else []
    numbers = [*packet.numbers, *((site, arrive()) for site, arrive in packet.arriving)]
    numbers += [number for late in packet.late for number in late()]
    parts += [_from_numbers(numbers)] if numbers else []
    parts += [_from_readings(packet)] if packet.readings else []
    sites, rows, bins, binned = _merge(parts)
    if packet.is_unused:
        kept = book.are_kept(sites)
        sites, rows, bins, binned = sites[kept], rows[kept], bins[kept], binned[kept]
    if not len(sites):
        return None
    for chosen, scale in packet.unscale:
        _unscale(sites, rows, bins, binned, chosen, scale)
    return Block(
        step=packet.step,
        time=packet.time,
        sites=sites,
        rows=rows,
        bins=bins,
        binned=binned,
        epoch=packet.epoch,
        skipped=packet.skipped or any(_number_at(sites, rows, flag) for flag in packet.skip_flags),
    )


def to_numbers(plain: PlainSteps, after: int) -> Numbers | None:
    """Return steps as arrays; None if one has to be merged, also with what is known of the step `after` already."""
    rising = sorted(set(plain.sites))
    are_new = plain.steps[0] > after and all(map(int.__lt__, plain.steps, plain.steps[1:]))
    if not are_new or len(rising) != len(plain.sites):
        return None
    values = np.array(plain.values).reshape(len(plain.steps), len(rising))
    return Numbers(
        steps=np.array(plain.steps, np.int64),
        times=np.array(plain.times),
        sites=np.array(rising, np.uint32),
        values=values[:, [plain.sites.index(site) for site in rising]],
        epoch=plain.epoch,
    )


def continue_block(before: Block, block: Block) -> tuple[Block, Block]:
    """Merge a block with what was sent about the same step before.

    Returns:
        The block to send, whose readings replace those sent before, and the step as a whole so far.

    """
    parts = [(part.sites, part.rows, part.bins, part.binned) for part in (before, block)]
    sites, rows, bins, binned = _merge(parts)
    skipped = before.skipped or block.skipped
    whole = replace(block, sites=sites, rows=rows, bins=bins, binned=binned, skipped=skipped)
    chosen = np.isin(sites, block.sites)
    return replace(whole, sites=sites[chosen], rows=rows[chosen], bins=bins[chosen], binned=binned[chosen]), whole


def _merge(parts: list[_Part]) -> _Part:
    """Sort by site, and merge what is about the same one."""
    sites, rows, bins, binned = _join(parts)
    if len(sites) < 2 or (sites[1:] > sites[:-1]).all():
        return sites, rows, bins, binned
    order = np.argsort(sites, kind="stable")
    sites, rows, bins, binned = sites[order], rows[order], bins[order], binned[order]
    starts = np.flatnonzero(np.r_[True, sites[1:] != sites[:-1]][: len(sites)])
    if len(starts) < len(sites):
        rows = schema.merge_groups(rows, starts)
        bins, binned = np.add.reduceat(bins, starts), np.logical_and.reduceat(binned, starts)
        sites = sites[starts]
    return sites, rows, bins, binned


def _join(parts: list[_Part]) -> _Part:
    filled = [part for part in parts if len(part[0])]
    if len(filled) <= 1:
        return filled[0] if filled else _empty()
    sites, rows, bins, binned = (np.concatenate(arrays) for arrays in zip(*filled, strict=True))
    return sites, rows, bins, binned


def _from_arenas(packet: Packet, book: SiteBook, histogram: bool) -> _Part:
    parts: list[_Part] = []
    for hold in packet.holds:
        assert hold.shipment is not None
        rows, bins = hold.shipment.take()
        used = np.flatnonzero(rows[:, schema.SEEN])
        sites = (used + hold.base).astype(np.uint32)
        binned = book.have_histograms(sites) if histogram else np.zeros(len(sites), np.bool_)
        parts.append((sites, rows[used], bins[used], binned))  # indexing copies: the arena can be used again
    return _join(parts)


def _from_numbers(numbers: list[tuple[int, float]]) -> _Part:
    sites = np.array([site for site, _ in numbers], dtype=np.uint32)
    rows = schema.rows_of_values(np.array([value for _, value in numbers]))
    return sites, rows, np.zeros((len(sites), schema.NUM_BINS), np.uint64), np.zeros(len(sites), np.bool_)


def _from_readings(packet: Packet) -> _Part:
    sites = np.array([site for site, _, _ in packet.readings], dtype=np.uint32)
    rows = np.stack([row for _, row, _ in packet.readings])
    return sites, rows, np.stack([bins for _, _, bins in packet.readings]), np.ones(len(sites), np.bool_)


def _empty() -> _Part:
    return (
        np.zeros(0, np.uint32),
        np.zeros((0, schema.NUM_COLUMNS)),
        np.zeros((0, schema.NUM_BINS), np.uint64),
        np.zeros(0, np.bool_),
    )


def _number_at(sites: NDArray[np.uint32], rows: Rows, site: int) -> float:
    index = int(np.searchsorted(sites, site))
    return float(rows[index, schema.MEAN]) if index < len(sites) and sites[index] == site else 0.0


def _unscale(
    sites: NDArray[np.uint32], rows: Rows, bins: Bins, binned: NDArray[np.bool_], chosen: list[int], scale_site: int
) -> None:
    """Divide the readings of `chosen` by a gradient scale.

    A scale is a power of two unless the user set it otherwise; then a histogram only shifts. If it is not, the
    histogram cannot be had exactly and is left out, and so is the count of magnitudes of at least one.
    """
    scale = _number_at(sites, rows, scale_site)
    if scale <= 0 or scale == 1:
        return
    index = np.flatnonzero(np.isin(sites, chosen))
    rows[index] = schema.scale_rows(rows[index], 1.0 / scale)
    shift = np.log2(scale)
    if shift == round(shift):
        bins[index] = _shift_down(bins[index], round(shift))
        has_bins = index[binned[index]]
        rows[has_bins, schema.GE_ONE] = bins[has_bins, schema.ONE_BIN :].sum(-1)
    else:
        binned[index] = False
        bins[index] = 0


def _shift_down(bins: Bins, places: int) -> Bins:
    """Move every count `places` bins down; what leaves an end gathers in the last bin there."""
    target = np.clip(np.arange(schema.NUM_BINS) - places, 0, schema.NUM_BINS - 1)
    shifted = np.zeros_like(bins)
    np.add.at(shifted.T, target, bins.T)
    return shifted
