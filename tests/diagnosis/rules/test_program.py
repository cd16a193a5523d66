"""What a program does between its steps: each fault, and a healthy program that looks alike."""

from __future__ import annotations

import copy
import functools
import gc
import io
import weakref
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from programs import classify, data, perceptron
from torch import nn
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    ExponentialLR,
    LambdaLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)
from torch.optim.swa_utils import AveragedModel, update_bn
from torch.utils.data import DataLoader, TensorDataset

import sonde
from sonde.core.facts import CallFacts
from sonde.sensors.program import MAX_ENTRIES, MAX_STEPS
from sonde.testing import MemorySink

X, Y = data(samples=96)


def watched(folder, model, optimizer, **options):
    return sonde.watch(model, optimizer, run=folder / "run", on_error="raise", tape=False, **options)


def step(model, optimizer, session, x=X[:16], y=Y[:16]):
    loss = classify(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    session.log(loss=loss)


def made(lr=0.1):
    model = perceptron()
    return model, SGD(model.parameters(), lr=lr, momentum=0.9)


def found(session, kind):
    return next((each for each in session.findings if each.kind == kind and each.severity != "info"), None)


# ---------------------------------------------------------------------- schedules


@pytest.mark.filterwarnings("ignore:Detected call of")
@pytest.mark.parametrize("ill", [True, False])
def test_a_scheduler_of_an_optimizer_that_never_steps(tmp_path, ill):
    model, optimizer = made()
    scheduler = ExponentialLR(SGD(model.parameters(), lr=0.1) if ill else optimizer, 0.99)
    with watched(tmp_path, model, optimizer) as session:
        for _ in range(8):
            step(model, optimizer, session)
            scheduler.step()
    finding = found(session, "scheduler_never_called")
    assert (finding is not None) is ill
    assert not ill or "test_program.py:" in finding.cause


@pytest.mark.parametrize("ill", [True, False])
def test_a_rate_that_is_written_into_a_copy(tmp_path, ill):
    model, optimizer = made()
    with watched(tmp_path, model, optimizer) as session:
        for epoch in range(4):
            for group in (optimizer.state_dict() if ill else vars(optimizer))["param_groups"]:
                group["lr"] = 0.1 * 0.5**epoch
            state = optimizer.state_dict()  # a program that saves it, as it is
            for _ in range(3):
                step(model, optimizer, session)
    assert state
    assert (found(session, "scheduler_never_called") is not None) is ill


@pytest.mark.parametrize(("every", "total", "ill"), [(6, 24, True), (1, 24, False), (6, 5, False)])
def test_a_schedule_for_batches_that_is_stepped_by_the_epoch(tmp_path, every, total, ill):
    model, optimizer = made()
    scheduler = OneCycleLR(optimizer, max_lr=0.1, total_steps=total)
    with watched(tmp_path, model, optimizer) as session:
        for number in range(1, 24):
            step(model, optimizer, session)
            if number % every == 0:
                scheduler.step()
    assert (found(session, "scheduler_never_called") is not None) is ill


@pytest.mark.parametrize(("per_batch", "total"), [(False, 24), (True, 24), (False, 4)])
@pytest.mark.parametrize("form", ["closure", "partial"])
def test_a_function_for_batches_that_is_called_by_the_epoch(tmp_path, form, per_batch, total):
    session = decay(tmp_path, form, per_batch=per_batch, total=total, num_epochs=4)
    assert (found(session, "scheduler_never_called") is not None) is (not per_batch and total == 24)


def decay(folder, form, *, per_batch, total, num_epochs):
    def given(num_training_steps):
        return lambda step: linear_decay(step, num_training_steps=num_training_steps)

    model, optimizer = made()
    function = given(total) if form == "closure" else functools.partial(linear_decay, num_training_steps=total)
    scheduler = LambdaLR(optimizer, function)
    with watched(folder, model, optimizer) as session:
        for _ in range(num_epochs):
            for _ in range(6):
                step(model, optimizer, session)
                if per_batch:
                    scheduler.step()
            if not per_batch:
                scheduler.step()
    return session


def test_a_function_that_uses_a_variable_without_a_value_yet_is_no_fault(tmp_path, caplog):
    model, optimizer = made()
    early = 0
    scheduler = LambdaLR(optimizer, lambda step: 1.0 if step <= early else 1 / num_training_steps)
    with watched(tmp_path, model, optimizer) as session:
        for _ in range(4):
            early += 1
            step(model, optimizer, session)
            scheduler.step()
        num_training_steps = 4
    assert not [record for record in caplog.records if " failed" in record.getMessage()]


def linear_decay(step, *, num_training_steps):
    return max(0.0, 1 - step / num_training_steps)


class Settings:
    """What a program was told."""

    def __init__(self, epochs):
        self.num_epochs = epochs


def anneal(folder, unit, *, per_batch, plan=6, batches=4):
    settings = Settings(plan)
    model, optimizer = made()
    length = {"epochs": plan, "batches": plan * batches, "cycle": 5}[unit]
    scheduler = CosineAnnealingLR(optimizer, T_max=length)
    with watched(folder, model, optimizer) as session:
        for _epoch in range(settings.num_epochs):
            for _ in range(batches):
                step(model, optimizer, session)
                if per_batch:
                    scheduler.step()
            if not per_batch:
                scheduler.step()
    return {each.kind for each in session.findings if each.severity != "info"}


@pytest.mark.parametrize("per_batch", [True, False])
@pytest.mark.parametrize("unit", ["epochs", "batches", "cycle"])
def test_a_cosine_counts_what_it_is_stepped_by(tmp_path, unit, per_batch):
    kinds = anneal(tmp_path, unit, per_batch=per_batch)
    assert ("lr_schedule_collapse" in kinds) is (unit == "epochs" and per_batch)
    assert ("scheduler_never_called" in kinds) is (unit == "batches" and not per_batch)


def follow_accuracy(folder, mode):
    """Train with a rate that follows the accuracy; not in a test, whose assertions look at its variables."""
    model, optimizer = made()
    scheduler = ReduceLROnPlateau(optimizer, mode=mode, patience=1)
    with watched(folder, model, optimizer) as session:
        for epoch in range(9):
            step(model, optimizer, session)
            accuracy = 0.5 + 0.05 * epoch
            scheduler.step(accuracy)
    return found(session, "lr_schedule_collapse")


def test_a_plateau_scheduler_that_waits_for_the_accuracy_to_fall(tmp_path):
    assert "`accuracy`" in follow_accuracy(tmp_path / "ill", "min").cause
    assert follow_accuracy(tmp_path / "healthy", "max") is None


@pytest.mark.parametrize("ill", [True, False])
def test_two_schedulers_of_one_optimizer_while_the_other_has_none(tmp_path, ill):
    first, second = made(), made()
    schedulers = [StepLR(first[1], 2), StepLR((first if ill else second)[1], 2)]
    models = {"first": first[0], "second": second[0]}
    with watched(tmp_path, models, [first[1], second[1]]) as session:
        for _ in range(8):
            step(*first, session)
            step(*second, session)
            for scheduler in schedulers:
                scheduler.step()
    finding = found(session, "scheduler_never_called")
    assert (finding is not None) is ill
    assert not ill or "Two StepLR" in finding.cause


@pytest.mark.parametrize("betas", [(0.999, 0.9), (0.9, 0.999), (0.0, 0.9), (0.95, 0.95), (0.5, 0.999)])
def test_the_betas_of_adam_in_the_wrong_order(tmp_path, betas):
    model = perceptron()
    optimizer = Adam(model.parameters(), betas=betas)
    with watched(tmp_path, model, optimizer) as session:
        for _ in range(4):
            step(model, optimizer, session)
    finding = found(session, "arguments_swapped")
    assert (finding is not None) is (betas == (0.999, 0.9))
    assert finding is None or "betas=(0.9, 0.999)" in finding.fix


@pytest.mark.parametrize("ill", [True, False])
def test_a_scheduler_that_is_made_in_every_epoch(tmp_path, ill):
    model, optimizer = made()
    scheduler = StepLR(optimizer, 2)
    with watched(tmp_path, model, optimizer) as session:
        for _ in range(6):
            scheduler = StepLR(optimizer, 2) if ill else scheduler
            step(model, optimizer, session)
            scheduler.step()
    assert (found(session, "scheduler_never_called") is not None) is ill


def forget_the_scheduler(folder, ill):
    model, optimizer = made()
    scheduler = ExponentialLR(optimizer, 0.99)
    with watched(folder, model, optimizer) as session:
        for _ in range(32):
            step(model, optimizer, session)
            if not ill:
                scheduler.step()
    return found(session, "scheduler_never_called")


@pytest.mark.parametrize("ill", [True, False])
def test_a_scheduler_that_nobody_passed_in_and_nobody_steps(tmp_path, ill):
    assert (forget_the_scheduler(tmp_path, ill) is not None) is ill


def train_two(folder, *, step_second, made, steps=40):
    """Train with two optimizers, whose schedulers are gone when the session ends; they are `made` before or within."""
    model = perceptron()
    first, second = SGD(model[0].parameters(), lr=0.1), SGD(model[2:].parameters(), lr=0.1)
    session = None

    def fit():
        nonlocal session
        schedulers = [ExponentialLR(each, 0.99) for each in (first, second)] if made == "before" else []
        session = watched(folder, model, [first, second])
        schedulers = schedulers or [ExponentialLR(each, 0.99) for each in (first, second)]
        for number in range(steps):
            loss = classify(model(X[:16]), Y[:16])
            first.zero_grad()
            second.zero_grad()
            loss.backward()
            first.step()
            second.step()
            if number % 4 == 3:
                schedulers[0].step()
                if step_second:
                    schedulers[1].step()

    fit()
    gc.collect()
    session.close()
    return found(session, "scheduler_never_called")


@pytest.mark.parametrize("made", ["before", "within"])
@pytest.mark.parametrize("ill", [True, False])
def test_the_scheduler_of_one_of_two_optimizers_is_forgotten(tmp_path, ill, made):
    finding = train_two(tmp_path, step_second=not ill, made=made)
    assert (finding is not None) is ill


@pytest.mark.parametrize(("size", "ill"), [(2, False), (3, True)])
def test_an_epoch_that_is_not_over_needs_no_step_of_a_scheduler(tmp_path, size, ill):
    assert (stop_early(tmp_path, size) is not None) is ill


def stop_early(folder, size):
    model, optimizer = made()
    scheduler = StepLR(optimizer, 1)
    loader = DataLoader(TensorDataset(X, Y), batch_size=size)
    with watched(folder, model, optimizer) as session:
        for number, (x, y) in enumerate(loader):
            step(model, optimizer, session, x, y)
            if number == 40:
                break
    return found(session, "scheduler_never_called") if scheduler.last_epoch == 0 else None


def hide_the_scheduler(folder, *, steps_it, resumed=False):
    model, optimizer = made()
    if resumed:
        StepLR(optimizer, 1000)
        step(model, optimizer, _Quiet())  # the groups of a checkpoint tell of its scheduler
    hidden = {"trainer": [{"configs": [ExponentialLR(optimizer, 0.99)] if not resumed else []}]}
    with watched(folder, model, optimizer) as session:
        for _ in range(32):
            step(model, optimizer, session)
            if steps_it:
                hidden["trainer"][0]["configs"][0].step()
    return [each.severity for each in session.findings if each.kind == "scheduler_never_called"]


@pytest.mark.parametrize(("steps_it", "resumed"), [(False, False), (True, False), (False, True)])
def test_a_scheduler_that_only_its_optimizer_tells_of(tmp_path, steps_it, resumed):
    found = hide_the_scheduler(tmp_path, steps_it=steps_it, resumed=resumed)
    assert found == ([] if steps_it or resumed else ["info"])  # it may be one of another library, that acts later


def schedule_in_turn(folder):
    model, optimizer = made()
    warm_up, decay = ExponentialLR(optimizer, 1.01), ExponentialLR(optimizer, 0.99)
    scheduler = SequentialLR(optimizer, [warm_up, decay], milestones=[1000])
    with watched(folder, model, optimizer) as session:
        for _ in range(32):
            step(model, optimizer, session)
            scheduler.step()
    return decay, found(session, "scheduler_never_called")


def test_a_scheduler_whose_turn_has_not_come_is_not_forgotten(tmp_path):
    assert schedule_in_turn(tmp_path)[1] is None


@pytest.mark.parametrize("ill", [True, False])
def test_a_checkpoint_that_brings_its_rate_back(tmp_path, ill):
    model, optimizer = made(lr=1e-7)
    step(model, optimizer, _Quiet())
    resumed = SGD(model.parameters(), lr=0.1, momentum=0.9)
    resumed.load_state_dict(optimizer.state_dict())
    for group in resumed.param_groups:
        group["lr"] = group["lr"] if ill else 0.1
    with watched(tmp_path, model, resumed) as session:
        for _ in range(40):
            step(model, resumed, session)
    assert (found(session, "resume_overrides_lr") is not None) is ill


class _Quiet:
    def log(self, **scalars):
        """Log nothing."""


# ---------------------------------------------------------------------- checkpoints


# pytest has functions with assertions look at their variables, and such functions are left alone.
def load_checkpoint(folder, when, ill):
    model, optimizer = made()
    torch.manual_seed(1)
    checkpoint = {f"net.{name}": torch.randn_like(value) for name, value in model.state_dict().items()}
    given = checkpoint if ill else {name.removeprefix("net."): value for name, value in checkpoint.items()}
    if when == "before":
        model.load_state_dict(given, strict=False)
        del given
    with watched(folder, model, optimizer) as session:
        if when == "within":
            model.load_state_dict(given, strict=False)
        step(model, optimizer, session)
    return found(session, "checkpoint_not_loaded")


@pytest.mark.parametrize("when", ["before", "within"])
@pytest.mark.parametrize("ill", [True, False])
def test_a_checkpoint_of_which_nothing_is_loaded(tmp_path, ill, when):
    finding = load_checkpoint(tmp_path, when, ill)
    assert (finding is not None) is ill
    assert not ill or when == "within" or "`net.`" in finding.cause


def load_into_a_part(folder, prefix, frozen):
    torch.manual_seed(1)
    part = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU())
    model = torch.nn.ModuleDict({"body": part, "head": torch.nn.Linear(8, 3)})
    state = {f"{prefix}{name}": torch.randn_like(value) for name, value in part.state_dict().items()}
    part.load_state_dict(state, strict=False)
    part.requires_grad_(not frozen)
    optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.1)
    with watched(folder, model, optimizer) as session:
        loss = model["head"](part(torch.randn(6, 4))).square().mean()
        loss.backward()
        optimizer.step()
    return found(session, "checkpoint_not_loaded")


@pytest.mark.parametrize(
    ("prefix", "frozen", "ill"), [("module.", True, True), ("", True, False), ("module.", False, False)]
)
def test_a_checkpoint_of_which_a_frozen_part_has_nothing(tmp_path, prefix, frozen, ill):
    assert (load_into_a_part(tmp_path, prefix, frozen) is not None) is ill


def keep(state, ill):
    return state if ill else copy.deepcopy(state)


def keep_weights(folder, use, ill):
    model, optimizer = made()
    with watched(folder, model, optimizer) as session:
        kept, best, best_model = [], None, None
        for number in range(10):
            step(model, optimizer, session)
            if use == "list":
                kept.append(keep(model.state_dict(), ill))
            elif use == "name" and number == 2:
                best_model = model if ill else copy.deepcopy(model)
            elif use == "shallow" and number == 2:
                best_model = copy.copy(model) if ill else copy.deepcopy(model)
            elif number in (2, 4):
                best = keep(model.state_dict(), ill)
        if use == "load":
            model.load_state_dict(best)
        elif use == "save":
            torch.save({"model": best, "other": best_model is None}, io.BytesIO())
    return found(session, "best_state_shares_memory")


@pytest.mark.parametrize("use", ["load", "save", "list", "name", "shallow"])
@pytest.mark.parametrize("ill", [True, False])
def test_weights_that_are_kept_without_a_copy(tmp_path, ill, use):
    assert (keep_weights(tmp_path, use, ill) is not None) is ill


def fill(folder, is_best, ill):
    model, optimizer = made()
    best_model = model if is_best else None
    target_model = None if is_best else model
    with watched(folder, model, optimizer) as session:
        for number in range(20):
            step(model, optimizer, session)
            if number == 10 and not ill:
                best_model, target_model = copy.deepcopy(best_model), copy.deepcopy(target_model)
    return found(session, "best_state_shares_memory")


@pytest.mark.parametrize("is_best", [True, False])
@pytest.mark.parametrize("ill", [True, False])
def test_a_variable_for_the_best_model_may_hold_the_model_itself_until_there_is_a_best(tmp_path, is_best, ill):
    assert (fill(tmp_path, is_best, ill) is not None) is (ill or not is_best)


@pytest.mark.filterwarnings("ignore:Positional args are being deprecated")
@pytest.mark.parametrize("use", ["state_dict", "by name", "load_state_dict", "two parts"])
def test_a_state_that_is_handed_to_state_dict(tmp_path, use):
    model, optimizer = made()
    with watched(tmp_path, model, optimizer) as session:
        step(model, optimizer, session)
        best = copy.deepcopy(model.state_dict())
        step(model, optimizer, session)
        if use == "state_dict":
            model.state_dict(best)
        elif use == "by name":
            model.state_dict(destination=best)
        elif use == "load_state_dict":
            model.load_state_dict(best)
        else:
            whole = model[0].state_dict(prefix="first.")
            model[2].state_dict(destination=whole, prefix="second.")
    assert (found(session, "result_discarded") is not None) is (use in ("state_dict", "by name"))


def test_states_that_are_used_at_once_need_no_copy(tmp_path):
    model, optimizer = made()
    target = copy.deepcopy(model)
    with watched(tmp_path, model, optimizer) as session:
        for _ in range(6):
            step(model, optimizer, session)
            state = model.state_dict()
            torch.save(state, io.BytesIO())
            target.load_state_dict(state)
    assert found(session, "best_state_shares_memory") is None


@pytest.mark.parametrize(("ill", "goes_on"), [(True, False), (True, True), (False, False)])
def test_the_weights_of_the_worst_validation_are_loaded_in_the_end(tmp_path, ill, goes_on):
    model, optimizer = made()
    best, kept = None, None
    with watched(tmp_path, model, optimizer) as session:
        for number in [3.0, 2.0, 2.5, 1.0, 1.5, 0.5]:
            step(model, optimizer, session)
            session.log(val_loss=number)
            if best is None or (number > best if ill else number < best):  # a score of -loss, and the wrong sign
                best, kept = number, copy.deepcopy(model.state_dict())
        model.load_state_dict(kept)
        if goes_on:  # weights that are rewound, to be trained again
            step(model, optimizer, session)
    assert (found(session, "best_selected_backwards") is not None) is (ill and not goes_on)


@pytest.mark.parametrize("name", ["val_loss", "val_acc"])
@pytest.mark.parametrize("ill", [True, False])
def test_the_worst_weights_are_kept_as_the_best(tmp_path, ill, name):
    model, optimizer = made()
    numbers = [3.0, 2.0, 4.0, 1.0, 5.0, 2.5, 0.5]
    higher_is_better = (name == "val_acc") is not ill
    best = -np.inf if higher_is_better else np.inf
    with watched(tmp_path, model, optimizer) as session:
        for number in numbers:
            step(model, optimizer, session)
            session.log(**{name: number})
            if (number > best) if higher_is_better else (number < best):
                best = number
                torch.save(model.state_dict(), io.BytesIO())
    assert (found(session, "best_selected_backwards") is not None) is ill


# ---------------------------------------------------------------------- seeds and data


@pytest.mark.parametrize("kind", ["ill", "another seed", "drawn aside", "nothing random"])
def test_a_seed_that_is_set_again_and_again(tmp_path, kind):
    model, optimizer = made()
    with watched(tmp_path, model, optimizer) as session:
        for epoch in range(6):
            with torch.random.fork_rng() if kind == "drawn aside" else nullcontext():
                torch.manual_seed(epoch if kind == "another seed" else 0)
            for _ in range(3):
                chosen = torch.arange(16) if kind == "nothing random" else torch.randperm(len(X))[:16]
                step(model, optimizer, session, X[chosen], Y[chosen])
    finding = found(session, "seed_reset_in_loop")
    assert (finding is not None) is (kind == "ill")
    assert kind != "ill" or "every 3 steps" in finding.cause


@pytest.mark.parametrize(("shuffle", "stop", "ill"), [(False, 3, True), (True, 3, False), (False, 6, False)])
def test_passes_that_stop_at_the_same_batch(tmp_path, shuffle, stop, ill):
    model, optimizer = made()
    loader = DataLoader(TensorDataset(X, Y), batch_size=16, shuffle=shuffle)
    with watched(tmp_path, model, optimizer) as session:
        for _ in range(3):
            for number, (x, y) in enumerate(loader, 1):
                step(model, optimizer, session, x, y)
                if number == stop:
                    break
    assert (found(session, "batches_never_seen") is not None) is ill


class Folder(TensorDataset):
    """Samples and the names of their classes, as torchvision's folders have them."""

    def __init__(self, names):
        super().__init__(X[:32], Y[:32])
        self.classes = names


class Asked(Folder):
    """Counts how often somebody asks for its classes."""

    asked = 0

    @property
    def class_to_idx(self):
        self.asked += 1
        return {}


def test_properties_of_a_data_set_are_not_asked_for(tmp_path):
    model, optimizer = made()
    data = Asked(["a", "b", "c"])
    with watched(tmp_path, model, optimizer) as session:
        for x, y in DataLoader(data, batch_size=16):
            step(model, optimizer, session, x, y)
    assert data.asked == 0


@pytest.mark.parametrize(
    ("evaluated", "trained_on", "ill"),
    [
        (["b", "a", "c"], False, True),
        (["b", "c"], False, True),
        (["a", "b", "c"], False, False),
        (["b", "x", "c"], False, False),
        (["b", "c"], True, False),
    ],
    ids=["another order", "one is missing", "the same", "another task", "another stage of training"],
)
def test_classes_that_have_other_numbers_in_the_evaluation(tmp_path, evaluated, trained_on, ill):
    model, optimizer = made()
    train, other = (DataLoader(Folder(names), batch_size=16) for names in (["a", "b", "c"], evaluated))
    with watched(tmp_path, model, optimizer) as session:
        for _ in range(3):
            for x, y in train:
                step(model, optimizer, session, x, y)
            for x, y in other:
                if trained_on:
                    step(model, optimizer, session, x, y)
                with torch.no_grad():
                    model(x)
    finding = found(session, "train_val_preproc_mismatch")
    assert (finding is not None) is ill
    assert not ill or (finding.cause.count("test_program.py:") == 2 and "there, and" in finding.cause)


@pytest.mark.parametrize("ill", [True, False])
def test_the_line_that_puts_a_model_into_evaluation_mode_for_good(tmp_path, ill):
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.Linear(16, 3))
    optimizer = SGD(model.parameters(), lr=0.1)
    with watched(tmp_path, model, optimizer) as session:
        for _ in range(3):
            for _ in range(4):
                step(model, optimizer, session)
            model.eval()
            model.train(not ill)
    finding = found(session, "eval_mode_in_training")
    assert (finding is not None) is ill
    assert not ill or ("after the eval() at test_program.py:" in finding.cause and finding.sites == ("(loop)", "1"))


@pytest.mark.parametrize("ill", [True, False])
def test_the_lines_from_which_an_optimizer_is_stepped_twice(tmp_path, ill):
    model, optimizer = made()
    with watched(tmp_path, model, optimizer) as session:
        for _ in range(6):
            step(model, optimizer, session)
            if ill:
                optimizer.step()
    finding = found(session, "double_step")
    assert (finding is not None) is ill
    assert not ill or finding.cause.count("test_program.py:") == 2


@pytest.mark.parametrize("ill", [True, False])
def test_a_loader_that_drops_all_it_has(tmp_path, ill):
    model, optimizer = made()
    with watched(tmp_path, model, optimizer) as session:
        step(model, optimizer, session)
        for _ in DataLoader(TensorDataset(X[:8], Y[:8]), batch_size=16, drop_last=ill):
            pass
    assert (found(session, "batches_never_seen") is not None) is ill


@pytest.mark.parametrize("ill", [True, False])
def test_a_running_sum_that_is_never_set_back(tmp_path, ill):
    model, optimizer = made(lr=0.02)
    with watched(tmp_path, model, optimizer) as session:
        total = 0.0
        for _ in range(6):
            total = total if ill else 0.0
            for start in range(0, 80, 16):
                loss = classify(model(X[start : start + 16]), Y[start : start + 16])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                total += loss.item()
            session.log(running_loss=total / 5)
    assert (found(session, "metric_not_reset") is not None) is ill


class Pairs(torch.utils.data.Dataset):
    def __init__(self, length):
        self.lists = (list(X), list(Y))
        self.length = length

    def __len__(self):
        return self.length(self.lists)

    def __getitem__(self, index):
        return self.lists[0][index], self.lists[1][index]


@pytest.mark.parametrize("ill", [True, False])
def test_a_dataset_whose_length_counts_its_lists(tmp_path, ill):
    model, optimizer = made()
    loader = DataLoader(Pairs(len if ill else lambda lists: len(lists[0])), batch_size=16, shuffle=True)
    with watched(tmp_path, model, optimizer) as session:
        for _ in range(4):
            for x, y in loader:
                step(model, optimizer, session, x, y)
    assert (found(session, "sampler_draws_few") is not None) is ill


@pytest.mark.parametrize(("held_out", "ill"), [(slice(0, 48), True), (slice(48, None), False)])
def test_a_loader_whose_name_claims_other_data(tmp_path, held_out, ill):
    model, optimizer = made()
    loader = DataLoader(TensorDataset(X[:48], Y[:48]), 8, shuffle=True)
    test_loader = DataLoader(TensorDataset(X[held_out], Y[held_out]), 16)
    with watched(tmp_path, model, optimizer) as session:
        for _ in range(4):
            model.train()
            for x, y in loader:
                step(model, optimizer, session, x, y)
            model.eval()
            with torch.no_grad():
                for x, _ in test_loader:
                    model(x)
    finding = found(session, "data_leakage")
    assert (finding is not None and finding.severity == "warning") is ill
    assert not ill or "test_loader" in finding.cause


# ---------------------------------------------------------------------- averages and parameters


@pytest.mark.parametrize("ill", [True, False])
def test_averaged_weights_with_the_statistics_of_others(tmp_path, ill):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    optimizer, average = SGD(model.parameters(), lr=0.1), AveragedModel(model)
    with watched(tmp_path, model, optimizer) as session:
        for _ in range(4):
            step(model, optimizer, session)
            average.update_parameters(model)
        if not ill:
            update_bn([(X, Y)], average)
        average.eval()(X)
    assert (found(session, "batchnorm_stats_stale") is not None) is ill


@pytest.mark.parametrize("ill", [True, False])
def test_averaged_weights_that_nothing_was_averaged_into(tmp_path, ill):
    model, optimizer = made()
    average = AveragedModel(model)
    with watched(tmp_path, model, optimizer) as session:
        for number in range(12):
            step(model, optimizer, session)
            with torch.no_grad():
                average.eval()(X)  # before the averages begin, too
            if number == 10 and not ill:
                average.update_parameters(model)
    assert (found(session, "ema_not_updated") is not None) is ill


@pytest.mark.parametrize("ill", [True, False])
def test_a_layer_that_is_replaced_in_the_course_of_training(tmp_path, ill):
    model, optimizer = made()
    with watched(tmp_path, model, optimizer) as session:
        for number in range(12):
            if number == 3:
                model[4] = nn.Linear(16, 3)
                if not ill:
                    optimizer.add_param_group({"params": list(model[4].parameters())})
            step(model, optimizer, session)
    assert (found(session, "stale_params_in_optimizer") is not None) is ill


@pytest.mark.parametrize("ill", [True, False])
def test_parameters_that_are_unfrozen_and_not_trained(tmp_path, ill):
    model = perceptron()
    model[0].requires_grad_(False)
    optimizer = SGD([each for each in model.parameters() if each.requires_grad], lr=0.1)
    with watched(tmp_path, model, optimizer) as session:
        for number in range(12):
            if number == 3:
                model[0].requires_grad_(True)
                if not ill:
                    optimizer.add_param_group({"params": list(model[0].parameters())})
            step(model, optimizer, session)
    assert (found(session, "params_not_in_optimizer") is not None) is ill


@pytest.mark.parametrize("paints", [False, True])
def test_an_optimizer_of_another_network_is_found_and_one_of_a_picture_is_not(tmp_path, paints):
    model, picture = perceptron(), nn.Parameter(torch.randn(8, 8))
    optimizer = SGD([picture] if paints else nn.Linear(3, 5).parameters(), lr=0.1)
    with sonde.watch(model, optimizer, run=tmp_path / "run", on_error="raise") as session:
        for _ in range(12):
            optimizer.zero_grad()
            model(picture if paints else torch.randn(8, 8)).square().mean().backward()
            optimizer.step()
    assert (found(session, "params_not_in_optimizer") is not None) is not paints


@pytest.mark.parametrize("kind", ["ill", "once", "folds"])
def test_weights_that_are_initialised_in_the_loop(tmp_path, kind):
    model, optimizer = made()
    with watched(tmp_path, model, optimizer) as session:
        for epoch in range(4):
            if kind != "once" or not epoch:
                model[0].reset_parameters()
                optimizer = SGD(model.parameters(), lr=0.1) if kind == "folds" else optimizer
            for _ in range(3):
                step(model, optimizer, session)
    assert (found(session, "weights_reset_in_loop") is not None) is (kind == "ill")


@pytest.mark.filterwarnings("ignore:Detected call of")
@pytest.mark.parametrize("ill", [True, False])
def test_a_scheduler_that_is_stepped_first(tmp_path, ill):
    model, optimizer = made()
    scheduler = ExponentialLR(optimizer, 0.9)
    with watched(tmp_path, model, optimizer) as session:
        for _ in range(4):
            if ill:
                scheduler.step()
            step(model, optimizer, session)
            if not ill:
                scheduler.step()
    assert (found(session, "scheduler_before_optimizer") is not None) is ill


# ---------------------------------------------------------------------- the timeline itself


def run_of_everything(folder, watch):
    """Use all that is listened to, and return the weights."""
    torch.manual_seed(3)
    model, optimizer = made()
    scheduler = ExponentialLR(optimizer, 0.9)
    loader = DataLoader(TensorDataset(X, Y), batch_size=16, shuffle=True)
    session = watched(folder, model, optimizer) if watch else nullcontext(_Quiet())
    with session as session:
        for epoch in range(3):
            torch.manual_seed(epoch)
            for x, y in loader:
                step(model, optimizer, session, x, y)
            scheduler.step()
            model.load_state_dict(copy.deepcopy(model.state_dict()))
            torch.save(optimizer.state_dict(), io.BytesIO())
    return torch.cat([each.detach().flatten() for each in model.parameters()])


def test_training_is_the_same_bit_by_bit(tmp_path):
    assert torch.equal(run_of_everything(tmp_path, watch=True), run_of_everything(tmp_path, watch=False))


def test_the_timeline_is_bounded_and_functions_are_restored(tmp_path):
    functions = [torch.save, torch.manual_seed, np.random.seed, nn.Module.state_dict, DataLoader.__iter__]
    model, optimizer = made()
    with watched(tmp_path, model, optimizer) as session:
        sensor = next(each for each in session._pipeline._observer._sensors if type(each).__name__ == "ProgramCalls")
        step(model, optimizer, session)
        for _ in range(2 * MAX_STEPS):
            torch.manual_seed(0)
        for number in range(2 * MAX_ENTRIES):
            sensor._note("torch.save", str(number))
    assert len(sensor._entries) == MAX_ENTRIES
    assert max(len(each.steps) for each in sensor._entries.values()) == MAX_STEPS
    assert [torch.save, torch.manual_seed, np.random.seed, nn.Module.state_dict, DataLoader.__iter__] == functions


def forget_a_tensor(folder):
    model, optimizer = made()
    large = torch.ones(3)
    with watched(folder, model, optimizer) as session:
        gone = weakref.ref(large)
        step(model, optimizer, session)
        del large
        gc.collect()
        is_gone = gone() is None
        step(model, optimizer, session)
    return is_gone


def test_variables_of_the_users_functions_are_not_kept_alive(tmp_path):
    assert forget_a_tensor(tmp_path)


def test_what_locals_returned_stays_as_it_was(tmp_path):
    model, optimizer = made()
    settings = locals()
    names = list(settings)
    with watched(tmp_path, model, optimizer) as session:
        step(model, optimizer, session)
    assert list(settings) == names


def test_facts_are_not_stated_again_at_each_step_of_a_scheduler(tmp_path):
    model, optimizer = made()
    scheduler, sink = ExponentialLR(optimizer, 0.99), MemorySink()
    with watched(tmp_path, model, optimizer) as session:
        session.subscribe(sink)
        for _ in range(20):
            step(model, optimizer, session)
            scheduler.step()
    stated = [event.step for event in sink.events if event.event_type in ("facts", "program")]
    assert stated
    assert not [each for each in stated if 8 < each < 16]


def test_a_place_is_short():
    assert CallFacts(verb="seed", line="/a/b/train.py:7").place == " at train.py:7"
    assert CallFacts(verb="seed").place == ""


# ---------------------------------------------------------------------- evaluations, adapters


class Attending(nn.Module):
    """Attention that drops values in training, or always."""

    def __init__(self, drops):
        super().__init__()
        self.drops = drops
        self.into, self.out = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x):
        hidden = self.into(x.view(len(x), 2, 4))
        if self.drops == "always" or (self.drops == "in training" and self.training):
            hidden = nn.functional.scaled_dot_product_attention(hidden, hidden, hidden, dropout_p=0.2)
        elif self.drops == "channels":
            hidden = nn.functional.dropout1d(hidden, 0.2)
        else:
            hidden = nn.functional.scaled_dot_product_attention(hidden, hidden, hidden, None, 0.0)
        return self.out(hidden.mean(1))


@pytest.mark.parametrize(
    ("drops", "ill"), [("always", True), ("channels", True), ("in training", False), ("never", False)]
)
def test_attention_that_drops_values_in_evaluation(tmp_path, drops, ill):
    model = Attending(drops)
    optimizer = SGD(model.parameters(), lr=0.1)
    with watched(tmp_path, model, optimizer) as session:
        for _ in range(3):
            step(model, optimizer, session)
            model.eval()
            with torch.no_grad():
                model(X[16:])
            model.train()
    assert (found(session, "dropout_ignores_mode") is not None) is ill


@pytest.mark.parametrize("ill", [True, False])
def test_a_function_that_drops_values_in_an_evaluation_in_training_mode(tmp_path, ill):
    model = Attending("in training")
    optimizer = SGD(model.parameters(), lr=0.1)
    with watched(tmp_path, model, optimizer) as session:
        for _ in range(3):
            model.train()
            step(model, optimizer, session)
            if not ill:
                model.eval()
            with torch.no_grad():
                model(X[16:])
    assert (found(session, "train_mode_in_eval") is not None) is ill


class Adapted(nn.Module):
    """A pretrained layer, adapters beside or behind it, and a head."""

    def __init__(self, form, rank=2):
        super().__init__()
        self.base, self.head, self.form = nn.Linear(8, 16), nn.Linear(16, 3), form
        self.norm = nn.LayerNorm(16)
        if form == "beside":
            self.down, self.up = nn.Parameter(torch.randn(rank, 8)), nn.Parameter(torch.zeros(16, rank))
        else:
            self.down, self.up = nn.Linear(16, rank), nn.Linear(rank, 16)
            nn.init.zeros_(self.up.weight)

    def forward(self, x):
        hidden = self.base(x)
        if self.form == "beside":
            hidden = hidden + x @ self.down.T @ self.up.T
        else:
            hidden = hidden + self.up(self.down(hidden).relu())
        return self.head(self.norm(hidden.relu()))


def freeze(model, what):
    for name, each in model.named_parameters():
        adapts = name.startswith(("up", "down"))
        each.requires_grad_(name.startswith(("head", "norm")) or (adapts and what == "base"))
        if adapts and what == "trained adapters":
            nn.init.normal_(each)


@pytest.mark.parametrize("form", ["beside", "behind"])
@pytest.mark.parametrize("handed", ["all", "trainable"])
@pytest.mark.parametrize("what", ["base and adapters", "base", "trained adapters"])
def test_adapters_that_are_frozen_before_they_learnt(tmp_path, what, handed, form):
    part = Adapted(form)
    freeze(part, what)
    model = nn.Sequential(part)
    given = [each for each in model.parameters() if handed == "all" or each.requires_grad]
    optimizer = SGD(given, lr=0.1)
    with watched(tmp_path, model, optimizer) as session:
        for _ in range(6):
            step(model, optimizer, session)
    finding = found(session, "frozen_by_mistake")
    zeros = finding is not None and "all values 0" in finding.cause
    assert zeros is (what == "base and adapters")


@torch.no_grad()
def evaluate(model, how):
    if how == "uncertain":
        model.eval()
        model[1].train()
    elif how != "as in training":
        model.train(how == "statistics first")
        model(X[:48])
        model.eval()
    model(X[48:])


@pytest.mark.parametrize(
    ("between", "last", "ill"),
    [
        ("as in training", "as in training", True),
        ("as in training", "right", True),
        ("right", "right", False),
        ("statistics first", "right", False),
        ("uncertain", "right", False),
        (None, "as in training", False),
    ],
)
def test_evaluations_in_training_mode_before_one_that_is_right(tmp_path, between, last, ill):
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.ReLU(), nn.Linear(16, 3))
    optimizer = SGD(model.parameters(), lr=0.1)
    with watched(tmp_path, model, optimizer) as session:
        for _ in range(3):
            model.train()
            for _ in range(4):
                step(model, optimizer, session)
            if between is not None:
                evaluate(model, between)
        evaluate(model.train(), last)
    assert (found(session, "train_mode_in_eval") is not None) is ill


# ---------------------------------------------------------------------- things that are used up


def clip(folder, given):
    model, optimizer = made()
    other = perceptron()
    used_up = model.parameters()
    with watched(folder, model, optimizer) as session:
        for _ in range(6):
            loss = classify(model(X[:16]), Y[:16])
            optimizer.zero_grad()
            loss.backward()
            if given == "both":
                nn.utils.clip_grad_norm_(other.parameters(), 1.0)
            chosen = {"used up": used_up, "other": other.parameters()}.get(given, model.parameters())
            nn.utils.clip_grad_norm_(chosen, 1.0)
            optimizer.step()
            session.log(loss=loss)
    return found(session, "clip_after_step")


@pytest.mark.filterwarnings("ignore:.*empty generator")
@pytest.mark.parametrize(("given", "ill"), [("used up", True), ("other", True), ("own", False), ("both", False)])
def test_clipping_that_is_given_nothing_to_clip(tmp_path, given, ill):
    finding = clip(tmp_path, given)
    assert (finding is not None) is ill
    assert not ill or "test_program.py:" in finding.cause


@pytest.mark.parametrize("kind", ["used up", "made anew", "restarted", "loader"])
def test_an_iterator_that_is_used_up(tmp_path, kind):
    model, optimizer = made()
    loader = DataLoader(TensorDataset(X, Y), batch_size=32, shuffle=True)
    with watched(tmp_path, model, optimizer) as session:
        batches = iter(loader)
        for _epoch in range(4):
            if kind == "restarted":
                for _ in range(5):
                    try:
                        x, y = next(batches)
                    except StopIteration:
                        batches = iter(loader)
                        x, y = next(batches)
                    step(model, optimizer, session, x, y)
                continue
            for x, y in batches if kind == "used up" else iter(loader) if kind == "made anew" else loader:
                step(model, optimizer, session, x, y)
    assert (found(session, "batches_never_seen") is not None) is (kind == "used up")


class Wrapped(nn.Module):
    """A backbone under a name of its own, and a head."""

    def __init__(self, classes=3):
        super().__init__()
        self.backbone, self.head = perceptron(), nn.Linear(3, classes)

    def forward(self, x):
        return self.head(self.backbone(x))


@pytest.mark.parametrize(("part", "ill"), [("encoder", True), ("backbone", False)])
def test_a_checkpoint_whose_backbone_has_another_name(tmp_path, part, ill):
    model = Wrapped()
    optimizer = SGD(model.parameters(), lr=0.1)
    given = {name.replace("backbone", part): torch.randn_like(each) for name, each in model.state_dict().items()}
    given["old_head.weight"] = given.pop("head.weight")  # a head that is meant to be new
    with watched(tmp_path, model, optimizer) as session:
        model.load_state_dict(given, strict=False)
        step(model, optimizer, session)
    finding = found(session, "checkpoint_not_loaded")
    assert (finding is not None) is ill
    assert not ill or "6 of them have the names and shapes" in finding.cause


# ---------------------------------------------------------------------- folds


@pytest.mark.parametrize("runs_second", [True, False])
def test_the_optimizer_of_the_next_fold_need_not_step_yet(tmp_path, runs_second):
    models = {f"fold{number}": perceptron() for number in range(2)}
    optimizers = [SGD(each.parameters(), lr=0.1) for each in models.values()]
    with watched(tmp_path, models, optimizers) as session:
        for _ in range(56):
            loss = classify(models["fold0"](X[:16]), Y[:16])
            if runs_second:
                loss = loss + classify(models["fold1"](X[:16]), Y[:16])
            for each in optimizers:
                each.zero_grad()
            loss.backward()
            optimizers[0].step()
    assert (found(session, "step_not_called") is not None) is runs_second
