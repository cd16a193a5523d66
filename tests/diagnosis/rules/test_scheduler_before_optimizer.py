from __future__ import annotations

from patients import asked, patient

from sonde.core.facts import Facts, SchedulerFacts
from sonde.diagnosis.rules.rates import scheduler_before_optimizer


def run(counts):
    facts = Facts(scheduler=SchedulerFacts(kind="StepLR", settings={"last_epoch": 0}))
    return asked(scheduler_before_optimizer, patient({"scheduler.last_epoch:scalar": counts}, facts))


def test_the_counter_shows_which_came_first():
    assert run([1, 2, 3]).sites == ("scheduler",)
    assert run([0, 1, 2]) is None
