from __future__ import annotations

import pytest
from handmade import ask, found, loss, model, module, patient

FALLING, STUCK = [2.0 * 0.95**at for at in range(60)], [2.0 - 0.005 * at for at in range(60)]


def dropping(p, losses, *, kind="Dropout", ran=True):
    modules = (module("a", "Linear"), module("drop", kind, p=p))
    facts = model("a.weight", modules=modules, order=("a", "drop") if ran else ("a",))
    return patient({"loss:scalar": losses}, facts)


def test_a_share_to_keep_taken_for_the_share_to_drop_is_named():
    finding = found("dropout_too_high", dropping(0.9, STUCK))
    assert (finding.severity, finding.sites) == ("warning", ("drop",))
    assert "p=0.1" in finding.fix


def test_it_is_a_note_where_the_model_learns_well_all_the_same():
    assert found("dropout_too_high", dropping(0.9, FALLING)).severity == "info"


def test_it_is_no_note_where_the_loss_has_only_come_down_to_that_of_guessing():
    def severity(guess):
        modules = (module("a", "Linear"), module("drop", "Dropout", p=0.97))
        facts = model("a.weight", modules=modules, order=("a", "drop"), losses=(loss("cross_entropy", classes=3),))
        readings = {"loss:scalar": FALLING, "loss_fn:vital.running_label_entropy": [guess] * 60}
        return found("dropout_too_high", patient(readings, facts)).severity

    assert (severity(0.15), severity(1.1)) == ("warning", "info")


@pytest.mark.parametrize(
    "case", [dropping(0.5, STUCK), dropping(0.9, STUCK, ran=False), dropping(0.9, STUCK, kind="RandomCrop")]
)
def test_usual_shares_and_what_does_not_run_are_well(case):
    assert ask("dropout_too_high", case) is None
