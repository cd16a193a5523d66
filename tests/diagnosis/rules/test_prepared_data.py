"""Programs whose data, checkpoints, rates or averages were prepared wrongly, each with a sound twin."""

from __future__ import annotations

import copy
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import sonde

GENERATOR = np.random.default_rng(0)


def named(session, kind):
    return [each for each in session.findings if each.kind == kind and each.severity != "info"]


def network(inputs=4, outputs=3, width=16):
    return nn.Sequential(nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, outputs))


def fit(model, optimizer, x, y, *, steps=24, after=lambda: None, watch=None):
    for number in range(steps):
        at = torch.arange(16) + number % 10 * 16
        loss = F.cross_entropy(model(x[at]), y[at])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        after()


def scaled(values, of):
    return torch.tensor((values - of.mean(0)) / of.std(0), dtype=torch.float32)


@pytest.mark.parametrize("own", [True, False])
def test_a_test_set_that_is_scaled_by_its_own_numbers(tmp_path, own):
    summer, winter = GENERATOR.normal(size=(200, 4)), 1.4 * GENERATOR.normal(size=(80, 4)) + 0.3
    x_train, x_test = scaled(summer, summer), scaled(winter, winter if own else summer)
    y = torch.tensor(summer[:, :3].argmax(1))
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sonde.watch(model, optimizer, run=tmp_path / "run", on_error="raise") as session:
        fit(model, optimizer, x_train, y)
        with torch.no_grad():
            model(x_test)
    found = named(session, "train_val_preproc_mismatch")
    assert bool(found) is own
    assert not own or (found[0].exact and "`x_test`" in found[0].cause and "scaler.transform" in found[0].fix)


@pytest.mark.parametrize("anew", [True, False])
def test_a_test_set_whose_names_are_numbered_anew(tmp_path, anew):
    names = [f"film {number}" for number in GENERATOR.integers(0, 30, 200)]
    test_names = [f"film {number}" for number in GENERATOR.integers(0, 20, 60)]
    book = {name: at for at, name in enumerate(sorted(set(names)))}
    test_book = {name: at for at, name in enumerate(sorted(set(test_names)))} if anew else book
    item, test_item = (
        torch.tensor([book[each] for each in names]),
        torch.tensor([test_book[each] for each in test_names]),
    )
    model = nn.Sequential(nn.Embedding(30, 8), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sonde.watch(model, optimizer, run=tmp_path / "run", on_error="raise") as session:
        fit(model, optimizer, item, item % 3)
        with torch.no_grad():
            model(test_item)
    found = named(session, "train_val_preproc_mismatch")
    assert [each.exact for each in found] == [True] * anew


@pytest.mark.parametrize("both", [True, False])
def test_inputs_that_are_shuffled_without_their_targets(tmp_path, both):
    inputs = torch.randn(300, 4)
    labels = inputs[:, :3].argmax(1)
    order = torch.randperm(200)
    x_train, y_train = inputs[:200][order], labels[:200][order] if both else labels[:200]
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sonde.watch(model, optimizer, run=tmp_path / "run", on_error="raise") as session:
        fit(model, optimizer, x_train, y_train)
    found = named(session, "label_shuffle_mismatch")
    assert bool(found) is not both
    assert both or "x_train[order]" in found[0].fix


def checkpoint_of(optimizer_class, x, y, **settings):
    model = network()
    optimizer = optimizer_class(model.parameters(), **settings)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    fit(model, optimizer, x, y, after=schedule.step)
    parts = {"model": model, "optimizer": optimizer, "schedule": schedule}
    return {name: copy.deepcopy(part.state_dict()) for name, part in parts.items()}


@pytest.mark.parametrize(
    ("how", "left"),
    [
        ("nothing of it", ["optimizer"]),
        ("all of it", []),
        ("an optimizer that is made anew", ["optimizer"]),
        ("another rate", []),
        ("other weights", []),
        ("other parameters", []),
    ],
)
@pytest.mark.parametrize("kind", [torch.optim.Adagrad, torch.optim.AdamW])
def test_the_state_of_an_optimizer_that_is_left_in_a_checkpoint(tmp_path, kind, how, left):
    x = torch.randn(200, 4)
    y = x[:, :3].argmax(1)
    checkpoint = checkpoint_of(kind, x, y, lr=0.01)
    model = network()
    if how != "other weights":
        model.load_state_dict(checkpoint["model"])
    parameters = list(model.parameters())[2 * (how == "other parameters") :]
    optimizer = kind(parameters, lr=0.001 if how == "another rate" else 0.01)
    if how in ("all of it", "an optimizer that is made anew"):
        optimizer.load_state_dict(checkpoint["optimizer"])
    if how == "an optimizer that is made anew":
        optimizer = kind(parameters, lr=0.01)
    with sonde.watch(model, optimizer, run=tmp_path / "run", on_error="raise") as session:
        fit(model, optimizer, x, y)
    assert [list(each.sites) for each in named(session, "resume_incomplete")] == [each and [each] for each in left]


@pytest.mark.parametrize("loads", [True, False])
def test_the_state_of_a_schedule_that_is_left_in_a_checkpoint(tmp_path, loads):
    x = torch.randn(200, 4)
    y = x[:, :3].argmax(1)
    checkpoint = checkpoint_of(torch.optim.SGD, x, y, lr=0.01)
    model = network()
    model.load_state_dict(checkpoint["model"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    if loads:
        optimizer.load_state_dict(checkpoint["optimizer"])
        schedule.load_state_dict(checkpoint["schedule"])
    with sonde.watch(model, optimizer, run=tmp_path / "run", on_error="raise") as session:
        fit(model, optimizer, x, y, after=schedule.step)
    found = named(session, "resume_incomplete")
    assert bool(found) is not loads
    assert loads or "scheduler" in found[0].sites


@pytest.mark.parametrize("how", ["left", "loaded", "none is stored", "none is kept"])
def test_an_average_that_is_left_in_a_checkpoint(tmp_path, how):
    x = torch.randn(200, 4)
    model, stored_ema = network(), network().state_dict()
    checkpoint = {"model": copy.deepcopy(model.state_dict()), "ema": stored_ema}
    if how == "none is stored":
        del checkpoint["ema"]
    del stored_ema
    ema = None if how == "none is kept" else copy.deepcopy(model).requires_grad_(False)
    if how == "loaded":
        ema.load_state_dict(checkpoint["ema"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with sonde.watch(model, optimizer, run=tmp_path / "run", on_error="raise") as session:
        fit(model, optimizer, x, x[:, :3].argmax(1))
    assert ["average" in each.sites for each in named(session, "resume_incomplete")] == [True] * (how == "left")


class Wrapped(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = network(width=32)

    def forward(self, x):
        return self.model(x)


@pytest.mark.parametrize("how", ["no prefix", "prefix", "none", "another state of the student"])
def test_a_teacher_that_takes_nothing_of_its_checkpoint(tmp_path, how):
    x = torch.randn(200, 4)
    teacher, student = Wrapped().requires_grad_(False).eval(), network(width=32 if how.startswith("another") else 8)
    published = network(width=32).state_dict() if not how.startswith("another") else copy.deepcopy(student.state_dict())
    if how == "prefix":
        teacher.load_state_dict({f"model.{name}": each for name, each in published.items()}, strict=False)
    elif how == "no prefix":
        teacher.load_state_dict(published, strict=False)
    elif how == "none":
        del published
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
    with sonde.watch(student, optimizer, run=tmp_path / "run", on_error="raise") as session:
        fit(student, optimizer, x, teacher(x).argmax(1))
    assert [each.sites for each in named(session, "checkpoint_not_loaded")] == [("teacher",)] * (how == "no prefix")


@pytest.mark.parametrize(
    ("share", "found"),
    [
        (lambda step: 0.001, True),
        (lambda step: 0.001 * (1 + step), False),
        (lambda step: 0.5, False),
        (lambda step: 1e-4 if step < 100 else 1.0, False),
    ],
)
def test_a_rate_that_never_leaves_its_warm_up(tmp_path, share, found):
    x = torch.randn(200, 4)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, share)
    with sonde.watch(model, optimizer, run=tmp_path / "run", on_error="raise", tape=False) as session:
        fit(model, optimizer, x, x[:, :3].argmax(1), steps=120, after=schedule.step)
    said = [each for each in named(session, "lr_too_low") if each.sites[0] == "scheduler"]
    assert bool(said) is found


@pytest.mark.parametrize(
    ("name", "decay", "found"),
    [
        ("ema", lambda step: 0.999, True),
        ("averaged_model", lambda step: 0.9995, True),
        ("ema", lambda step: 0.95, False),
        ("ema", lambda step: min(0.999, (1 + step) / (10 + step)), False),
        ("target", lambda step: 0.999, False),
    ],
)
def test_an_average_that_lags_behind_the_whole_run(tmp_path, name, decay, found):
    x = torch.randn(200, 4)
    model = network()
    kept = {name: copy.deepcopy(model).requires_grad_(False)}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps = 0

    @torch.no_grad()
    def follow():
        nonlocal steps
        steps += 1
        for mean, new in zip(kept[name].parameters(), model.parameters(), strict=True):
            mean.mul_(decay(steps)).add_(new, alpha=1 - decay(steps))

    with sonde.watch(model, optimizer, run=tmp_path / "run", on_error="raise") as session:
        fit(model, optimizer, x, x[:, :3].argmax(1), steps=130, after=follow)
    assert bool(named(session, "ema_not_updated")) is found


@pytest.mark.parametrize(("decay", "found"), [(0.9995, True), (0.95, False)])
def test_an_average_of_torch_that_lags_behind_the_whole_run(tmp_path, decay, found):
    x = torch.randn(200, 4)
    model = network()
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sonde.watch(model, optimizer, run=tmp_path / "run", on_error="raise") as session:
        follow = partial(averaged.update_parameters, model)
        fit(model, optimizer, x, x[:, :3].argmax(1), steps=130, after=follow)
    assert bool(named(session, "ema_not_updated")) is found


class Scaled:
    """A transform with numbers of its own, or a data set's."""

    def __init__(self, mean, std):
        self.mean, self.std = mean, std

    def __call__(self, row):
        return (row - self.mean) / self.std


class Table(torch.utils.data.Dataset):
    def __init__(self, rows, transform=None, vocabulary=None):
        self.rows, self.vocabulary = rows, vocabulary
        self.mean, self.std = (rows.mean(0), rows.std(0)) if transform is None else (None, None)
        self.transforms = [] if transform is None else [transform]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, at):
        row = self.rows[at]
        for transform in self.transforms or [Scaled(self.mean, self.std)]:
            row = transform(row)
        return row, int(self.rows[at, :3].argmax())


def book(words):
    return {word: at for at, word in enumerate(words)}


LIKE, WIDE, SHIFTED = torch.randn(160, 4), torch.randn(40, 4) * 1.3, torch.randn(40, 4) + 0.4
SETS = {
    "each by its own mean": (Table(LIKE), Table(SHIFTED), True),
    "each by its own deviation": (Table(LIKE), Table(WIDE), True),
    "transforms with other numbers": (Table(LIKE, Scaled(0.5, 0.5)), Table(WIDE, Scaled(0.0, 1.0)), True),
    "one transform": (Table(LIKE, Scaled(0.0, 1.0)), Table(WIDE, Scaled(0.0, 1.0)), False),
    "nearly the same numbers": (Table(LIKE, Scaled(0.0, 1.0)), Table(LIKE[:40], Scaled(0.01, 1.02)), False),
    "vocabularies": (
        Table(LIKE, Scaled(0.0, 1.0), book("abcdef")), Table(LIKE[:40], Scaled(0.0, 1.0), book("bcdea")), True),
    "one vocabulary": (
        Table(LIKE, Scaled(0.0, 1.0), book("abcdef")), Table(LIKE[:40], Scaled(0.0, 1.0), book("abcd")), False),
    "words of two languages": (
        Table(LIKE, Scaled(0.0, 1.0), book("abcdefghi")), Table(LIKE[:40], Scaled(0.0, 1.0), book("xyzuvb")), False),
}  # fmt: skip


@pytest.mark.parametrize("name", SETS)
def test_data_sets_that_prepare_samples_by_numbers_of_their_own(tmp_path, name):
    train, evaluated, ill = SETS[name]
    one, two = (torch.utils.data.DataLoader(each, 20) for each in (train, evaluated))
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sonde.watch(model, optimizer, run=tmp_path / "run", on_error="raise", tape=False) as session:
        for _ in range(2):
            for x, y in one:
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
            with torch.no_grad():
                for x, _ in two:
                    model(x)
    found = [each for each in named(session, "train_val_preproc_mismatch") if each.exact]
    assert bool(found) is ill


@pytest.mark.parametrize("how", ["shared", "copied"])
def test_a_transform_that_is_set_for_one_part_of_a_split_data_set(tmp_path, how):
    whole = Table(LIKE, Scaled(0.0, 1.0))
    train, held = torch.utils.data.random_split(whole, [120, 40])
    held.dataset = copy.copy(whole) if how == "copied" else whole
    held.dataset.transforms = [Scaled(0.1, 1.0)]
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sonde.watch(model, optimizer, run=tmp_path / "run", on_error="raise", tape=False) as session:
        for x, y in torch.utils.data.DataLoader(train, 20):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    found = named(session, "transform_of_all_parts")
    assert bool(found) is (how == "shared")
    assert not found or (found[0].sites[-1] == "held" and "test_prepared_data.py" in found[0].cause)
