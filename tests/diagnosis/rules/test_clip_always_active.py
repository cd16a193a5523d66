from __future__ import annotations

from patients import asked, patient

from sonde.core.facts import Facts, OptimizerFacts
from sonde.diagnosis.rules.optimizers import clip_always_active


def run(norms, losses, kind="SGD", pace=None):
    moved = {} if pace is None else {"a.weight:parameter": [[1.0, -1.0]] * 60, "a.weight:update": [[pace, -pace]] * 60}
    sites = moved | {
        "optimizer:vital.clip_norm": norms,
        "optimizer:vital.clip_max": [1.0] * len(norms),
        "loss:scalar": losses,
    }
    shapes = dict.fromkeys(moved, (2, 1))
    return asked(
        clip_always_active,
        patient(sites, Facts(optimizers=(OptimizerFacts(name="optimizer", kind=kind),)), shapes=shapes),
    )


FLAT, FALLING = [2.3] * 60, [2.3 - 0.03 * step for step in range(60)]


def test_clipping_far_below_the_norm_in_a_run_that_stands_still_is_a_warning():
    assert run([50.0] * 60, FLAT).severity == "warning"


def test_it_is_a_note_where_the_run_learns_or_adam_undoes_it_and_nothing_where_it_is_rare():
    assert run([50.0] * 60, FALLING).severity == "info"
    assert run([50.0] * 60, FLAT, "AdamW").severity == "info"
    assert run([0.5, 0.5, 50.0] * 20, FLAT) is None


def test_a_run_that_crawls_by_clipped_steps_is_warned_of():
    crawling = [2.3 - 0.005 * step for step in range(60)]
    assert run([50.0] * 60, crawling, pace=2e-4).severity == "warning"
    assert run([50.0] * 60, crawling, pace=5e-3).severity == "info"
    assert run([50.0] * 60, FALLING, pace=2e-4).severity == "info"  # it has halved all the same
    assert run([50.0] * 60, crawling, "AdamW", pace=2e-4).severity == "info"
