from __future__ import annotations

from patients import asked, patient

from sonde.diagnosis.rules.rates import missing_warmup
from sonde.facts import Facts, ModuleFacts, OptimizerFacts

FACTS = Facts(
    modules=(ModuleFacts(name="attn", kind="MultiheadAttention"),),
    optimizers=(OptimizerFacts(name="optimizer", kind="AdamW"),),
)
RISE = [2.0, 3.0, 4.0, 3.5, 3.0, 2.5] + [2.0 - 0.03 * step for step in range(54)]


def run(losses, rates):
    return asked(missing_warmup, patient({"loss:scalar": losses, "optimizer.group0.lr:scalar": rates}, FACTS))


def test_an_early_rise_at_the_full_rate_is_worth_a_note():
    assert run(RISE, [1e-3] * 60).severity == "info"


def test_a_warm_up_or_a_steady_fall_is_not():
    assert run(RISE, [1e-5 * (step + 1) for step in range(60)]) is None
    assert run([2.0 - 0.03 * step for step in range(60)], [1e-3] * 60) is None
