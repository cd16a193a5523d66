import numpy as np
import pytest

from sonde.analysis import History, mark_all, peer_group
from sonde.analysis.unusual import largest_jump
from sonde.records import Site

rng = np.random.default_rng(0)


def history(scale=1.0, *, name="a.weight", quantity="gradient", steps=100, shape=(4, 4)):
    values = scale * np.exp(rng.normal(0, 0.1, steps))
    site = Site(id=0, name=name, quantity=quantity, shape=shape)
    return History(site, np.arange(steps), values, np.zeros(steps))


def healthy(number=8):
    return [history(0.5 + 0.1 * i) for i in range(number)]


def test_healthy_peers_have_nothing_to_say():
    assert all(mark.level == "fine" and mark.reason == "" for mark in mark_all(healthy()))


def test_a_non_finite_reading_is_worst_and_names_its_step():
    bad = history()
    bad.nonfinite[30] = 5
    mark = mark_all([*healthy(), bad])[-1]
    assert (mark.level, mark.reason, mark.step) == ("bad", "non-finite at step 30", 30)
    bad.nonfinite[30:] = 5
    assert mark_all([bad])[0].reason == "non-finite since step 30"


@pytest.mark.parametrize(("quantity", "level"), [("gradient", "bad"), ("parameter", "odd")])
def test_all_zero_is_told_with_the_step_it_began(quantity, level):
    dead = history(quantity=quantity)
    dead.values[60:] = 0
    mark = mark_all([dead])[0]
    assert (mark.level, mark.reason, mark.step) == (level, "all zero since step 60", 60)
    dead.values[:] = 0
    assert mark_all([dead])[0].reason == "all zero"


def test_a_layer_far_from_its_peers_is_told_by_how_much():
    marks = mark_all([*healthy(), history(120.0), history(0.008)])
    assert marks[-2].reason.endswith("above its peers")
    assert 80 < float(marks[-2].reason.split("\N{MULTIPLICATION SIGN}")[0]) < 200
    assert marks[-1].reason.endswith("below its peers")


def test_peers_are_judged_apart_by_quantity_and_sort_of_tensor():
    biases = [history(1e-4, name=f"{i}.bias", shape=(4,)) for i in range(5)]
    outputs = [history(1e3, name=str(i), quantity="output") for i in range(5)]
    assert all(mark.level == "fine" for mark in mark_all([*healthy(), *biases, *outputs]))


def test_three_are_too_few_to_tell_who_is_odd():
    assert all(mark.level == "fine" for mark in mark_all([history(1.0), history(1.0), history(1e4)]))


def test_a_jump_is_told_with_its_step():
    jumped = history(steps=400)
    jumped.values[310:] *= 40
    mark = mark_all([*healthy(), jumped])[-1]
    assert (mark.level, mark.step) == ("odd", 310)
    assert mark.reason.startswith("jumped ")
    assert mark.reason.endswith("at step 310")
    fell = history(steps=400)
    fell.values[200] /= 1000
    assert mark_all([fell])[0].reason.startswith("fell ")


def test_noise_and_slow_decay_are_no_jump():
    logs = np.log10(np.exp(rng.normal(0, 0.3, 500)) * np.exp(-np.arange(500) / 100))
    found = largest_jump(logs)
    assert found is not None
    assert abs(found[1]) < 1
    assert largest_jump(logs[:15]) is None
    assert largest_jump(np.full(100, np.nan)) is None


def test_a_gradient_that_fades_while_its_peers_do_not_is_told():
    fading = history(steps=500)
    fading.values[200:] *= np.exp(-np.arange(300) / 30)
    mark = mark_all([*[history(steps=500) for _ in range(5)], fading])[-1]
    assert mark.reason.startswith("faded ")
    assert 200 <= mark.step <= 260


def test_fading_together_is_training_and_no_oddity():
    together = [history(steps=500) for _ in range(6)]
    for each in together:
        each.values[:] *= np.exp(-np.arange(500) / 80)
    assert all(mark.level == "fine" for mark in mark_all(together))


def test_a_loss_that_falls_far_below_the_outputs_of_layers_is_nothing_odd():
    layers = [history(1.0, name=f"layer{i}", quantity="output") for i in range(8)]
    falling = history(np.geomspace(2.0, 0.001, 100), name="loss_fn", quantity="output", shape=())
    marks = mark_all([*layers, falling])
    assert [mark.level for mark in marks] == ["fine"] * 9
    other = history(np.geomspace(2.0, 0.001, 100), name="layer8", quantity="output", shape=())
    assert mark_all([*layers, other])[-1].level == "odd"


def test_scalars_have_no_peers_and_may_jump():
    rate = history(1e-3, name="optimizer.group0.lr", quantity="scalar", shape=())
    rate.values[50:] /= 100
    losses = [history(1.0, name=f"loss{i}", quantity="scalar", shape=()) for i in range(6)]
    assert all(mark.level == "fine" for mark in mark_all([*losses, rate]))
    assert peer_group(rate.site) != peer_group(losses[0].site)


def test_an_empty_history_is_fine():
    empty = History(Site(id=0, name="a", quantity="output"), np.zeros(0, int), np.zeros(0), np.zeros(0))
    assert mark_all([empty])[0].level == "fine"
    assert mark_all([]) == []


def test_a_learning_rate_schedule_that_moves_all_updates_is_no_news_of_a_layer():
    updates = [history(quantity="update", name=f"{i}.weight") for i in range(5)]
    for update in updates:
        update.values[80:] *= 1e-4
    assert all(mark.level == "fine" for mark in mark_all(updates))
    updates[2].values[90:] *= 1e3
    marks = mark_all(updates)
    assert marks[2].reason.startswith("jumped")
    assert marks[2].step == 90
    assert all(mark.level == "fine" for mark in marks[:2] + marks[3:])
