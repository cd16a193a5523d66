"""The garbage collector while Sonde makes many objects."""

import gc
import threading

import pytest

from sonde.core.collector import fewer_collections


@pytest.fixture(autouse=True)
def thresholds():
    before = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    yield
    gc.set_threshold(*before)


def collections_of(generation: int) -> int:
    return gc.get_stats()[generation]["collections"]


def test_many_new_objects_make_no_full_collection_in_a_block():
    before = collections_of(2)
    with fewer_collections:
        kept = [[each] for each in range(300_000)]
    assert collections_of(2) == before
    assert len(kept) == 300_000


def test_the_programs_own_garbage_is_still_collected_in_a_block():
    before = collections_of(0)
    with fewer_collections:
        kept = [[each] for each in range(100_000)]
    assert collections_of(0) > before
    assert len(kept) == 100_000


def test_overlapping_blocks_of_two_threads_restore_the_thresholds_once():
    entered, leave = threading.Event(), threading.Event()

    def other():
        with fewer_collections:
            entered.set()
            leave.wait(10)

    thread = threading.Thread(target=other)
    with fewer_collections:
        thread.start()
        assert entered.wait(10)
    assert gc.get_threshold() != (700, 10, 10)
    leave.set()
    thread.join(10)
    assert gc.get_threshold() == (700, 10, 10)


def test_thresholds_that_the_program_sets_meanwhile_stay():
    with fewer_collections:
        gc.set_threshold(5000, 5, 5)
    assert gc.get_threshold() == (5000, 5, 5)


def test_a_collector_that_the_program_has_switched_off_stays_off():
    gc.set_threshold(0)
    with fewer_collections:
        assert gc.get_threshold()[0] == 0
    assert gc.get_threshold()[0] == 0
