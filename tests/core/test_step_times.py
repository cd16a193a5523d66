"""The times of ranks: the file is bounded and aligned, and waits are told from a rank's own time."""

from __future__ import annotations

import numpy as np
import pytest

from sonde.core import step_times
from sonde.core.step_times import PHASES, StepTimesFile, align, read, scores, slowest
from sonde.errors import RunDamaged


def write(folder, steps, capacity=step_times.CAPACITY):
    folder.mkdir(parents=True, exist_ok=True)
    file = StepTimesFile(folder, capacity)
    for first in range(0, len(steps), 7):  # in parts, as a heartbeat does
        file.append(steps[first : first + 7])
    file.close()
    return read(folder)


def phases(**seconds):
    return {phase: seconds.get(phase, 0.0) for phase in PHASES}


def test_what_is_written_is_read_back(tmp_path):
    times = write(tmp_path, [(step, 1000.0 + step, phases(forward=0.25, other=0.5)) for step in range(2, 30)])
    assert times.stride == 1
    assert times.records["step"].tolist() == list(range(2, 30))
    assert times.records["seconds"][:, PHASES.index("forward")].tolist() == [0.25] * 28
    assert times.records["longest"].tolist() == [0.75] * 28


def test_a_full_file_halves_its_resolution_and_loses_no_time(tmp_path):
    times = write(tmp_path, [(step, float(step), phases(backward=1.0)) for step in range(1, 1001)], capacity=64)
    assert len(times.records) < 64
    assert times.stride == 32
    assert times.records["steps"].sum() == times.records["seconds"].sum() == 1000
    assert (np.diff(times.records["step"] // times.stride) == 1).all()


def test_a_run_that_is_continued_goes_on_in_its_resolution(tmp_path):
    write(tmp_path, [(step, 0.0, phases(other=1.0)) for step in range(100)], capacity=64)
    times = write(tmp_path, [(step, 0.0, phases(other=1.0)) for step in range(100, 120)], capacity=64)
    assert times.stride == 2
    assert times.records["steps"].sum() == 120


def test_another_file_is_refused_and_a_torn_tail_is_left_out(tmp_path):
    assert read(tmp_path) is None
    write(tmp_path, [(step, 0.0, phases(other=1.0)) for step in range(10)])
    with (tmp_path / step_times.FILE).open("ab") as file:
        file.write(b"half a record")
    assert len(read(tmp_path).records) == 10
    (tmp_path / step_times.FILE).write_bytes(b"something else, and long enough")
    with pytest.raises(RunDamaged, match="times of steps"):
        read(tmp_path)


def simulate(tmp_path, own, *, steps=64, sync="communication", seed=0):
    """Write the times of ranks that leave `sync` together; `own(rank, step)` returns their own seconds by phase."""
    noise = np.random.default_rng(seed)
    ranks = 4
    found = {}
    plans = [[dict(own(rank, step)) for step in range(steps)] for rank in range(ranks)]
    for step in range(steps):
        for rank in range(ranks):
            for phase in plans[rank][step]:
                plans[rank][step][phase] += abs(noise.normal(0, 2e-4))
        if sync:
            before = PHASES[: PHASES.index(sync)]
            entered = [sum(plans[rank][step].get(phase, 0.0) for phase in before) for rank in range(ranks)]
            for rank in range(ranks):
                waited = max(entered) - entered[rank]
                plans[rank][step][sync] = plans[rank][step].get(sync, 0.0) + 0.003 + waited
    for rank in range(ranks):
        rows = [(step + 1, float(step), plans[rank][step]) for step in range(steps)]
        found[rank] = write(tmp_path / str(rank), rows)
    return align(found)


USUAL = {"optimizer": 0.002, "data_wait": 0.001, "forward": 0.03, "backward": 0.06}


@pytest.mark.parametrize("phase", ["optimizer", "data_wait", "forward", "backward"])
def test_the_slow_phase_of_one_rank_is_distinguished_from_the_others_waiting(tmp_path, phase):
    times = simulate(tmp_path, lambda rank, step: USUAL | ({phase: USUAL[phase] + 0.05} if rank == 2 else {}))
    slow = slowest(times, 0.03, 0.002)
    assert (slow.rank, slow.phase, slow.slow_steps) == (2, phase, 64)
    assert slow.is_constant
    assert slow.saved_s == pytest.approx(0.05, abs=0.002)
    assert slow.step_s == pytest.approx(0.146, abs=0.003)
    assert slow.phase_s - slow.others_s == pytest.approx(0.05, abs=0.001)
    waits = times.waits()
    assert waits[2].sum(1).mean() < 1e-3
    assert waits[0, :, PHASES.index("communication")].mean() == pytest.approx(0.05, abs=0.002)
    assert times.own()[0].mean() == pytest.approx(0.096, abs=0.003)


def test_a_rank_that_is_late_now_and_then_is_called_intermittent(tmp_path):
    late = {"other": 0.4}
    times = simulate(tmp_path, lambda rank, step: USUAL | (late if rank == 1 and step % 8 == 3 else {}))
    slow = slowest(times, 0.03, 0.002)
    assert (slow.rank, slow.phase, slow.slow_steps, slow.late_steps) == (1, "other", 8, 8)
    assert not slow.is_constant
    assert slow.saved_s == pytest.approx(0.05, abs=0.002)


def test_ranks_that_wait_inside_their_forward_are_seen_too(tmp_path):
    """As with sharded parameters, whose gathering is a part of the forward."""
    times = simulate(
        tmp_path, lambda rank, step: USUAL | ({"data_wait": 0.05} if rank == 0 else {}), sync="forward", steps=32
    )
    slow = slowest(times, 0.03, 0.002)
    assert (slow.rank, slow.phase) == (0, "data_wait")
    assert slow.saved_s == pytest.approx(0.049, abs=0.002)


def test_a_slow_rank_that_no_other_waits_for_costs_nothing(tmp_path):
    times = simulate(tmp_path, lambda rank, step: USUAL | ({"forward": 0.08} if rank == 2 else {}), sync="")
    assert slowest(times, 0.03, 0.002) is None


def test_scores_compare_a_rank_with_the_others_and_with_its_own_best(tmp_path):
    def own(rank, step):
        return USUAL | ({"forward": 0.03 + 0.093 * (step >= 64)} if rank == 3 else {})

    first, *_, last = scores(simulate(tmp_path, own, steps=128))
    assert first.relative == pytest.approx(1.0, abs=0.02)
    assert first.individual == pytest.approx(1.0, abs=0.05)
    assert last.individual == pytest.approx(0.5, abs=0.02)
    assert last.wait_s < 0.001 < first.wait_s + 0.05


def test_ranks_with_different_resolutions_are_aligned(tmp_path):
    fine = write(tmp_path / "0", [(step, 0.0, phases(forward=1.0)) for step in range(64)])
    coarse = write(tmp_path / "1", [(step, 0.0, phases(forward=2.0)) for step in range(64)], capacity=33)
    times = align({0: fine, 5: coarse})
    assert times.ranks.tolist() == [0, 5]
    assert times.stride == coarse.stride > 1
    assert (times.step_time == [[1.0], [2.0]]).all()
    assert len(align({0: fine, 5: coarse}, most=4).steps) == 4
