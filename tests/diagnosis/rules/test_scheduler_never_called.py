from __future__ import annotations

from patients import asked, patient

from sonde.core.facts import Facts, LoaderFacts, SchedulerFacts
from sonde.diagnosis.rules.rates import scheduler_never_called


def run(counts, kind="StepLR", length=None, final=False):
    loader = None if length is None else LoaderFacts(kind="DataLoader", settings={"length": length})
    facts = Facts(scheduler=SchedulerFacts(kind=kind), loader=loader)
    sites = {"scheduler.last_epoch:scalar": counts, "optimizer.group0.lr:scalar": [0.1] * len(counts)}
    return asked(scheduler_never_called, patient(sites, facts, final=final))


def test_a_scheduler_that_never_moves_is_found():
    assert run([0] * 40, kind="OneCycleLR").severity == "warning"
    assert run([0] * 50, length=20).sites == ("scheduler",)
    assert run([0] * 50, final=True).severity == "warning"


def test_a_scheduler_whose_epoch_is_not_over_is_not():
    assert run([0] * 50) is None
    assert run([0] * 50, length=100) is None
    assert run([0] * 25 + [1] * 25, length=25) is None
