"""Mistakes in the wiring of loop, parameters and optimizer, each beside a look-alike that is well."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from handmade import UNKNOWN, ask, found, model, module, optimizer, patient, weight
from torch import nn

import sonde
from sonde.core.facts import Facts
from sonde.diagnosis.fresh import looks_fresh
from sonde.records import summarise

ONE, NO = [1.0] * 8, [0.0] * 8
RATE = {"optimizer.group0.lr:scalar": [0.1] * 12}
rng = np.random.default_rng(0)
RANDOM = rng.uniform(-0.25, 0.25, (16, 16))  # as torch draws for 16 inputs
TRAINED = rng.standard_t(3, (16, 16)) * 0.3


def cleared(missing, backwards):
    readings = {"optimizer:vital.no_gradient": [missing] * 4, "optimizer:vital.backwards_seen": [backwards] * 4}
    return patient(readings, model("a.weight", "b.weight"))


def test_gradients_cleared_before_the_step_are_reported_from_the_second_step_on():
    finding = found("zero_grad_misplaced", cleared(2, 1))
    assert (finding.severity, finding.sites, finding.step) == ("critical", ("optimizer", "(loop)"), 1)


@pytest.mark.parametrize(("missing", "backwards"), [(0, 1), (1, 1), (2, 0)])
def test_steps_with_gradients_or_without_a_backward_pass_are_not_called_cleared(missing, backwards):
    assert ask("zero_grad_misplaced", cleared(missing, backwards)) is None


def test_without_the_vital_sign_there_is_no_verdict():
    assert ask("zero_grad_misplaced", patient({"loss:scalar": ONE}, model("a.weight"))) == UNKNOWN


@pytest.mark.parametrize(
    ("shares", "ill"),
    [([1.0] * 4, True), (([0.0] + [1.0] * 9) * 4, True), ([0.0] * 8, False), ([1.0, 1.0, 0.0] * 4, False)],
)
def test_left_over_gradients_count_if_most_steps_have_them_in_stretches(shares, ill):
    case = patient({"optimizer:vital.leftover": shares})
    assert (ask("missing_zero_grad", case) is not None) is ill


def orphaned(**head):
    return Facts(
        parameters=(weight("body.weight"), weight("head.weight", **{"owners": ()} | head)),
        modules=(module("body", "Linear"), module("head", "Linear")),
        optimizers=(optimizer("body.weight"),),
        order=("body", "head"),
    )


def test_a_gradient_that_is_never_applied_is_named():
    case = patient({"head.weight:gradient": ONE, "head.weight:parameter": [0.5]}, orphaned())
    finding = found("params_not_in_optimizer", case)
    assert finding.sites == ("optimizer", "head.weight"), "the place to edit comes first"
    assert finding.severity == "critical"  # the output layer


@pytest.mark.parametrize(
    ("facts", "readings"),
    [
        (orphaned(), {"head.weight:parameter": [0.5]}),  # no gradient
        (orphaned(), {"head.weight:gradient": ONE, "head.weight:parameter": [0.5, 0.6, 0.7]}),  # trained by another
        (orphaned(owners=("optimizer2",)), {"head.weight:gradient": ONE}),
        (orphaned(trainable=False), {"head.weight:gradient": ONE}),
    ],
)
def test_parameters_that_are_trained_elsewhere_or_not_at_all_are_left_alone(facts, readings):
    assert ask("params_not_in_optimizer", patient({"loss:scalar": ONE} | readings, facts)) is None


@pytest.mark.parametrize(
    ("owners", "foreign", "ill"),
    [((), ("(10, 4)",), True), ((), (), False), (("optimizer",), ("(10, 4)",), False)],
)
def test_strangers_in_the_optimizer_count_only_if_the_model_lacks_an_owner(owners, foreign, ill):
    facts = Facts(
        parameters=(weight("body.weight"), weight("head.weight", owners=owners)),
        optimizers=(optimizer("body.weight", foreign=foreign),),
    )
    assert (ask("stale_params_in_optimizer", patient({"loss:scalar": ONE}, facts)) is not None) is ill


def frozen(names, values=TRAINED, *, handed=True):
    every = ("stem.weight", "body.weight", "head.weight")
    facts = Facts(
        parameters=tuple(weight(name, shape=(16, 16), trainable=name not in names) for name in every),
        optimizers=(optimizer(*(name for name in every if handed or name not in names)),),
        order=("stem", "body", "head"),
    )
    readings = {f"{name}:parameter": [values] for name in every}
    about = {key: {"shape": (16, 16)} for key in readings}
    return patient(readings | {"loss:scalar": ONE}, facts, about=about, first_step=0)


def test_a_frozen_output_layer_in_the_optimizer_is_critical():
    assert found("frozen_by_mistake", frozen(("head.weight",))).severity == "critical"


def test_weights_frozen_as_they_were_drawn_are_a_mistake():
    assert found("frozen_by_mistake", frozen(("body.weight",), RANDOM)).sites == ("body.weight",)


@pytest.mark.parametrize(
    ("values", "biases", "ill"),
    [(RANDOM, ("head",), True), (TRAINED, ("head",), False), (RANDOM, ("body", "head"), False)],
)
def test_a_new_layer_of_which_only_the_bias_is_trained_is_a_mistake(values, biases, ill):
    weights = [weight(f"{name}.weight", shape=(16, 16), trainable=False) for name in ("body", "head")]
    free = [weight(f"{name}.bias", shape=(16,)) for name in biases]
    facts = Facts(
        parameters=(*weights, *free), optimizers=(optimizer(*(each.name for each in free)),), order=("body", "head")
    )
    readings = {f"{each.name}:parameter": [values] for each in weights} | {"loss:scalar": ONE}
    about = {f"{each.name}:parameter": {"shape": (16, 16)} for each in weights}
    case = patient(readings, facts, about=about, first_step=0)
    assert (ask("frozen_by_mistake", case) is not None) is ill


@pytest.mark.parametrize(
    "case", [frozen(("stem.weight", "body.weight")), frozen((), RANDOM), frozen(("head.weight",), handed=False)]
)
def test_a_frozen_trained_backbone_is_usual(case):
    assert ask("frozen_by_mistake", case) is None


@pytest.mark.parametrize(("rank", "ill"), [(4, False), (16, True)])
def test_a_model_that_is_frozen_beside_low_rank_branches_is_usual(rank, ill):
    base = [weight(f"{name}.base.weight", shape=(16, 16), trainable=False) for name in ("body", "head")]
    branch = [weight("body.down.weight", shape=(rank, 16)), weight("body.up.weight", shape=(16, rank))]
    facts = Facts(
        parameters=(*base, *branch),
        optimizers=(optimizer(*(each.name for each in (*base, *branch))),),
        order=("body.base", "body.down", "body.up", "head.base"),
    )
    readings = {f"{each.name}:parameter": [TRAINED] for each in facts.parameters}
    about = {f"{each.name}:parameter": {"shape": each.shape} for each in facts.parameters}
    case = patient(readings | {"loss:scalar": ONE}, facts, about=about, first_step=0)
    assert (ask("frozen_by_mistake", case) is not None) is ill


def cut(reached, *, ran=("stem", "head"), values=RANDOM, steps=12):
    names = ("stem.weight", "stem.bias", "head.weight")
    readings = {f"{name}:update": [0.1] * steps for name in names}
    readings |= {f"{name}:gradient": [0.1] * steps for name in reached}
    readings |= {f"{name}:output": [1.0] * steps for name in ran}
    readings["stem.weight:parameter"] = [values]
    facts = model(*names, order=ran, parameters=tuple(weight(name, shape=(16, 16)) for name in names))
    return patient(readings, facts, about={"stem.weight:parameter": {"shape": (16, 16)}})


def test_a_module_that_runs_without_any_gradient_is_cut_off():
    finding = found("graph_break_detach", cut(("head.weight",)))
    assert finding.sites == ("stem.weight", "stem.bias")
    assert finding.data == {"behind": "stem"}
    assert ask("unused_parameters", cut(("head.weight",))) is None


def test_an_optimizer_that_no_backward_pass_reaches_is_cut_off_as_a_whole():
    names = ("g.weight", "d.weight")
    facts = Facts(
        parameters=tuple(weight(name, owners=(f"optimizer{at or ''}",)) for at, name in enumerate(names)),
        modules=(module("g", "Linear"), module("d", "Linear")),
        optimizers=(optimizer("g.weight"), optimizer("d.weight", name="optimizer1")),
        order=("g", "d"),
    )
    readings = {f"{name}:update": [0.0] * 10 for name in names} | {"d.weight:gradient": [0.1] * 10}
    never = patient(readings | {"optimizer:vital.backwards_seen": [0] * 10}, facts)
    assert found("graph_break_detach", never).sites == ("g.weight",)
    cleared_later = patient(readings | {"optimizer:vital.backwards_seen": [1] * 10}, facts)
    assert ask("graph_break_detach", cleared_later) is None


def test_trained_features_without_gradients_are_a_note():
    assert found("graph_break_detach", cut(("head.weight",), values=TRAINED)).severity == "info"


def test_a_trained_model_of_which_nothing_gets_a_gradient_is_no_feature_extractor():
    facts = model("stem.weight", order=("stem",), parameters=(weight("stem.weight", shape=(16, 16)),))
    readings = {
        "stem.weight:update": [0.1] * 12,
        "stem:output": [1.0] * 12,
        "stem.weight:parameter": [TRAINED],
        "optimizer:vital.backwards_seen": [0] * 12,
    }
    case = patient(readings, facts, about={"stem.weight:parameter": {"shape": (16, 16)}})
    assert found("graph_break_detach", case).severity == "critical"


def test_a_module_that_never_runs_is_unused_and_not_cut_off():
    case = cut(("head.weight",), ran=("head",))
    assert found("unused_parameters", case).sites == ("stem.weight", "stem.bias")
    assert ask("graph_break_detach", case) is None


def test_one_parameter_of_a_living_module_is_unused():
    case = cut(("stem.weight", "head.weight"))
    assert found("unused_parameters", case).sites == ("stem.bias",)
    assert ask("graph_break_detach", case) is None


def test_gradients_everywhere_are_well_and_a_few_steps_prove_nothing():
    for kind in ("graph_break_detach", "unused_parameters"):
        assert ask(kind, cut(("stem.weight", "stem.bias", "head.weight"))) is None
        assert ask(kind, cut(("head.weight",), steps=4)) is None


def stepping(update, *, gradient=0.5, dtype="float32", rate=0.1, kind="SGD", then="", skipped=()):
    facts = model("a.weight", kind=kind, parameters=(weight("a.weight", dtype=dtype),))
    if then:
        second = replace(facts.optimizers[0], name="optimizer2", kind=then)
        facts = replace(facts, optimizers=(*facts.optimizers, second))
    readings = {
        "a.weight:update": [[update] * 4] * 6,
        "a.weight:gradient": [[gradient] * 4] * 6,
        "a.weight:parameter": [[1.0] * 4] * 6,
        "optimizer.group0.lr:scalar": [rate] * 6,
    }
    return patient(readings, facts, skipped=skipped)


def test_steps_that_change_nothing_are_named():
    assert found("optimizer_step_noop", stepping(0.0)).severity == "critical"


@pytest.mark.parametrize(
    ("rates", "moved", "ill"),
    [([0.0] * 60, 0.0, True), ([0.0] * 30, 0.0, False), ([0.1] + [0.0] * 59, 0.0, False), ([0.0] * 60, 0.01, False)],
)
def test_a_rate_of_zero_in_every_step_of_many_is_named(rates, moved, ill):
    readings = {
        "a.weight:parameter": [[1.0] * 4] * len(rates),
        "a.weight:gradient": [[0.1] * 4] * len(rates),
        "a.weight:update": [[moved] * 4] * len(rates),  # an optimizer may have its own idea of a rate
        "optimizer.group0.lr:scalar": rates,
    }
    finding = ask("optimizer_step_noop", patient(readings, model("a.weight")))
    assert (finding is not None and "is 0 in every step" in finding.cause) is ill


@pytest.mark.parametrize(
    "case",
    [
        stepping(-0.05),
        stepping(0.0, gradient=0.0),
        stepping(0.0, rate=0.0),
        stepping(0.0, rate=1e-9),
        stepping(0.0, dtype="bfloat16"),
        stepping(0.0, kind="LBFGS"),
        stepping(0.0, then="LBFGS"),
        stepping(0.0, skipped=range(1, 7)),
    ],
    ids=["moves", "no gradient", "no rate", "too short to show", "coarse", "searches", "searches later", "held back"],
)
def test_steps_that_may_change_nothing_are_left_alone(case):
    assert ask("optimizer_step_noop", case) is None


@pytest.mark.parametrize(
    ("backwards", "missing", "ill"),
    [([1, 0] * 4, 0, True), ([1, 0, 0] * 3, 0, True), ([1] * 8, 0, False), ([0] * 8, 0, False), ([1, 0] * 4, 1, False)],
)
def test_a_step_without_a_backward_pass_repeats_the_one_before(backwards, missing, ill):
    readings = {"optimizer:vital.backwards_seen": backwards, "optimizer:vital.no_gradient": [missing] * len(backwards)}
    assert (ask("double_step", patient(readings, model("a.weight"))) is not None) is ill


@pytest.mark.parametrize(("passes", "final", "ill"), [(40, True, True), (40, False, False), (2, True, False)])
def test_a_run_that_ends_without_a_step_is_reported_at_its_end(passes, final, ill):
    case = patient({"(loop):vital.backwards": [float(passes)]}, model("a.weight"), final=final, first_step=0)
    assert isinstance(ask("step_not_called", case), type(None)) is not ill


def test_an_optimizer_that_rests_while_another_steps_for_long_is_named():
    facts = Facts(
        parameters=(weight("a.weight"), weight("b.weight", owners=("optimizer2",))),
        optimizers=(optimizer("a.weight"), optimizer("b.weight", name="optimizer2")),
    )
    case = patient({"optimizer:vital.backwards_seen": [1.0] * 60}, facts)
    assert found("step_not_called", case).sites == ("optimizer2", "(loop)")
    assert ask("step_not_called", patient({"optimizer:vital.backwards_seen": [1.0] * 20}, facts)) is None


@pytest.mark.parametrize(("duplicates", "ill"), [(("a.weight",), True), ((), False)])
def test_a_parameter_that_is_held_twice_is_named(duplicates, ill):
    facts = Facts(parameters=(weight("a.weight"),), optimizers=(optimizer("a.weight", duplicates=duplicates),))
    assert (ask("duplicate_param_in_groups", patient({}, facts)) is not None) is ill


def twins(kind="Linear", *, tied=(), steps=8, second=None):
    parameters = (weight("a.weight", equal_to=("b.weight",)), weight("b.weight", equal_to=("a.weight",), kind=kind))
    facts = Facts(parameters=parameters, optimizers=(optimizer("a.weight", "b.weight"),), tied=tied)
    moving = [np.array([0.1, 0.2]) * step for step in range(steps)]
    readings = {"a.weight:parameter": moving, "b.weight:parameter": second or moving}
    return patient(readings | {f"{name}.weight:update": [[0.1, 0.2]] * steps for name in "ab"}, facts, first_step=0)


def test_equal_weights_of_layers_of_another_class_were_meant_to_be_tied():
    assert found("tied_weights_broken", twins("Embedding")).sites == ("a.weight", "b.weight")
    assert ask("tied_weights_broken", twins("Linear")) is None
    assert found("tied_weights_broken", twins(tied=(("a.weight", "b.weight"),))).sites == ("a.weight", "b.weight")


def test_copies_that_never_part_are_one_layer():
    assert found("identical_layer_init", twins()).sites == ("a.weight", "b.weight")


def test_copies_that_part_or_have_had_no_time_to_are_well():
    apart = [np.array([0.1, 0.3]) * step for step in range(8)]
    assert ask("identical_layer_init", twins(second=apart)) is None
    assert ask("identical_layer_init", twins(steps=3)) is None


def test_biases_that_are_added_up_are_the_same_by_nature(tmp_path):
    """As in a residual network that was trained before: the last norm and that of the shortcut."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.main, self.shortcut, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)
            nn.init.zeros_(self.main.bias), nn.init.zeros_(self.shortcut.bias)

        def forward(self, x):
            return self.head(torch.relu(self.main(x) + self.shortcut(x)))

    torch.manual_seed(0)
    model = Block()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step():
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(torch.randn(16, 8)), torch.randint(3, (16,))).backward()
        optimizer.step()

    for _ in range(5):
        step()
    assert torch.equal(model.main.bias, model.shortcut.bias)
    with sonde.watch(model, optimizer, run=tmp_path / "run") as session:
        for _ in range(12):
            step()
    assert "identical_layer_init" not in {finding.kind for finding in session.findings}


@pytest.mark.parametrize(("per_step", "ill"), [(1 << 20, True), (0, False), (1 << 12, False)])
def test_memory_that_grows_with_every_step_is_a_leak(per_step, ill):
    base = 500 << 20
    noise = rng.integers(0, 4096, 200)
    case = patient({"process.rss:scalar": [float(base + step * per_step + noise[step]) for step in range(200)]})
    assert (ask("retained_graph_leak", case) is not None) is ill


def test_what_sonde_holds_itself_is_not_a_leak_of_the_program():
    own = [float(step << 20) for step in range(200)]
    rss = [float((500 << 20) + each) for each in own]
    assert ask("retained_graph_leak", patient({"process.rss:scalar": rss})) is not None
    assert ask("retained_graph_leak", patient({"process.rss:scalar": rss, "process.sonde:scalar": own})) is None


@pytest.mark.parametrize(("kept", "ill"), [(0.0, False), (2.0, False), (None, True)])
def test_memory_of_a_process_that_keeps_few_graphs_may_grow_by_a_tenth(kept, ill):
    readings = {"process.rss:scalar": [float((500 << 20) + step * (1 << 18)) for step in range(200)]}
    if kept is not None:
        readings["(loop):vital.graphs_kept"] = [kept] * 200
    assert (ask("retained_graph_leak", patient(readings)) is not None) is ill


def test_memory_that_fills_a_cache_is_not_a_leak():
    values = [float((500 << 20) + min(step, 30) * (4 << 20)) for step in range(200)]
    assert ask("retained_graph_leak", patient({"process.rss:scalar": values})) is None


def averaged(copy_values):
    facts = Facts(
        parameters=(
            weight("model.weight", equal_to=("ema.weight",)),
            weight("ema.weight", equal_to=("model.weight",), owners=(), trainable=False),
        ),
        optimizers=(optimizer("model.weight"),),
    )
    return patient({"ema.weight:parameter": copy_values, "model.weight:update": [0.1] * 20}, facts)


def test_an_average_that_is_written_to_and_never_changes_is_named():
    assert found("ema_not_updated", averaged([1.0] * 20)).sites == ("ema.weight",)


def test_an_average_that_moves_and_a_copy_that_is_never_written_are_well():
    assert ask("ema_not_updated", averaged([1.0 + 0.01 * step for step in range(20)])) is None
    assert ask("ema_not_updated", averaged([1.0])) is None


@pytest.mark.parametrize("draw", [torch.nn.init.kaiming_uniform_, torch.nn.init.xavier_uniform_,
                                  torch.nn.init.xavier_normal_, torch.nn.init.kaiming_normal_])  # fmt: skip
@pytest.mark.parametrize("shape", [(64, 32), (32, 16, 3, 3)])
def test_weights_as_torch_draws_them_look_fresh(draw, shape):
    torch.manual_seed(0)
    row, _ = summarise(draw(torch.empty(shape)).double().numpy())
    assert looks_fresh(row, shape)


@pytest.mark.parametrize("seed", range(3))
def test_weights_that_were_trained_for_a_while_do_not_look_fresh(seed):
    torch.manual_seed(seed)
    layer = torch.nn.Linear(32, 64)
    optimizer = torch.optim.Adam(layer.parameters(), lr=1e-2)
    for _ in range(40):
        x = torch.randn(32, 32)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(layer(x), x.argmax(1)).backward()
        optimizer.step()
    row, _ = summarise(layer.weight.detach().double().numpy())
    assert not looks_fresh(row, (64, 32))


def two_owners(backwards, owners=("optimizer", "optimizer2")):
    facts = Facts(
        parameters=(weight("body.weight", owners=owners), weight("head.weight")),
        modules=(module("body", "Linear"), module("head", "Linear")),
        optimizers=(optimizer("body.weight", "head.weight"), optimizer("body.weight", name="optimizer2")),
    )
    return patient({"loss:scalar": [1.0] * 40, "(loop):vital.backwards": backwards}, facts)


def test_a_parameter_that_two_optimizers_move_with_one_gradient_is_held_twice():
    finding = found("duplicate_param_in_groups", two_owners([1.0, 0.0] * 20))
    assert finding.sites == ("optimizer", "optimizer2", "body.weight")


@pytest.mark.parametrize("case", [two_owners([1.0] * 40), two_owners([1.0, 0.0] * 20, owners=("optimizer",))])
def test_optimizers_that_take_turns_may_share(case):
    assert ask("duplicate_param_in_groups", case) is None


class Stretched(torch.nn.Module):
    def __init__(self, make):
        super().__init__()
        self.stretch, self.layer = make(torch.ones(4)), torch.nn.Linear(4, 1)

    def forward(self, x):
        return self.layer(x * self.stretch)


@pytest.mark.parametrize(
    ("make", "owned", "ill"),
    [
        (lambda value: value.requires_grad_(), False, True),
        (lambda value: value.requires_grad_(), True, False),  # handed to the optimizer by name
        (torch.nn.Parameter, False, False),
        (lambda value: value, False, False),
    ],
)
def test_a_plain_tensor_with_a_gradient_is_not_a_parameter(tmp_path, make, owned, ill):
    torch.manual_seed(0)
    net = Stretched(make)
    every = [*net.parameters(), net.stretch] if owned else net.parameters()
    optimizer = torch.optim.SGD(every, lr=0.01)
    with sonde.watch(net, optimizer, run=tmp_path / "run", on_error="raise") as session:
        for _ in range(6):
            optimizer.zero_grad()
            net(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
    named = [finding.sites for finding in session.findings if finding.kind == "params_not_in_optimizer"]
    assert named == ([("stretch",)] if ill else [])
