import contextlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.store.making import assert_same_block, blocks, make_block

from sonde.store import framing
from sonde.store.log import codec


@given(st.lists(blocks(), max_size=4))
def test_blocks_come_back_as_they_were(originals):
    written = b"".join(codec.encode_block(i, codec.pack(block)) for i, block in enumerate(originals))
    records = list(framing.scan(written))
    assert [record.sequence for record in records] == list(range(len(originals)))
    for record, original in zip(records, originals, strict=True):
        assert_same_block(codec.unpack(codec.decode_block(record.step, record.payload)), original)


def test_an_empty_histogram_is_not_a_missing_one():
    block = make_block(0, 2, bins=np.zeros((2, 64), np.uint64), binned=np.array([True, False]))
    packed = codec.pack(block)
    assert packed.hist_len.tolist() == [1, 0]
    assert codec.unpack(packed).binned.tolist() == [True, False]


def test_counts_take_four_bytes_unless_one_needs_eight():
    bins = np.zeros((1, 64), np.uint64)
    bins[0, 5] = 2**32 - 1
    assert codec.pack_bins(bins, np.array([True]))[2].dtype == np.uint32
    bins[0, 5] = 2**32
    assert codec.pack_bins(bins, np.array([True]))[2].dtype == np.uint64


@given(st.binary(max_size=400))
def test_any_payload_is_a_block_or_refused(payload):
    with contextlib.suppress(codec.BadPayload):
        codec.decode_block(0, memoryview(payload))


def test_sizes_that_do_not_fit_are_refused():
    whole = codec.encode_block(0, codec.pack(make_block(0)))
    payload = memoryview(whole)[framing.HEADER.size :]
    with pytest.raises(codec.BadPayload, match="does not fill"):
        codec.decode_block(0, payload[:-8])
    with pytest.raises(codec.BadPayload, match="too short"):
        codec.decode_block(0, payload[:8])
