"""Losses seen without the user's help, and the vital signs of what they compare."""

from __future__ import annotations

import inspect

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.sensors.watching import Watching
from torch import nn

import sonde
from sonde.sensors.loss_functions import NAMES
from sonde.testing import tiny_mlp


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


class Given(nn.Module):
    """Returns its input times a parameter that is 1, so that a test decides what the loss is given."""

    def __init__(self):
        super().__init__()
        self.one = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return x * self.one


def train(tmp_path, values, target, function, steps=1, **options):
    model = Given()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    losses = []
    with Watching(tmp_path, model, optimizer, **options) as seen:
        for _ in range(steps):
            optimizer.zero_grad()
            # By name where it is a function: one bound before the session began is seen below, with fewer settings.
            present = getattr(F, getattr(function, "__name__", ""), function)
            loss = present(model(values), target)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return seen, losses


CASES = [
    (F.cross_entropy, torch.randn(6, 4), torch.tensor([0, 1, 2, 3, 0, 1])),
    (nn.CrossEntropyLoss(label_smoothing=0.1), torch.randn(6, 4), torch.tensor([0, 1, 2, 3, 0, 1])),
    (nn.NLLLoss(), torch.randn(6, 4), torch.tensor([0, 1, 2, 3, 0, 1])),
    (F.binary_cross_entropy, torch.rand(6, 1), torch.rand(6, 1)),
    (nn.BCEWithLogitsLoss(), torch.randn(6), torch.rand(6)),
    (nn.MSELoss(), torch.randn(6, 2), torch.randn(6, 2)),
    (nn.L1Loss(), torch.randn(6, 2), torch.randn(6, 2)),
    (nn.SmoothL1Loss(), torch.randn(6, 2), torch.randn(6, 2)),
    (nn.HuberLoss(), torch.randn(6, 2), torch.randn(6, 2)),
    (nn.KLDivLoss(reduction="batchmean"), torch.randn(6, 3).log_softmax(1), torch.rand(6, 3)),
    (nn.PoissonNLLLoss(), torch.randn(6), torch.rand(6)),
    (nn.HingeEmbeddingLoss(), torch.randn(6), torch.tensor([1.0, -1, 1, -1, 1, -1])),
    (nn.MultiMarginLoss(), torch.randn(6, 4), torch.tensor([0, 1, 2, 3, 0, 1])),
    (nn.SoftMarginLoss(), torch.randn(6), torch.tensor([1.0, -1, 1, -1, 1, -1])),
]


@pytest.mark.parametrize(("loss_fn", "values", "target"), CASES, ids=lambda value: getattr(value, "__name__", ""))
def test_modules_and_functions_are_both_seen_with_their_inputs(tmp_path, loss_fn, values, target):
    seen, losses = train(tmp_path, values, target, loss_fn, steps=2)
    assert list(seen.means("loss_fn:output").values()) == pytest.approx(losses)
    assert seen["loss_fn:input.input"][1].mean == pytest.approx(values.mean().item(), abs=1e-6)
    assert seen["loss_fn:input.target"][1].mean == pytest.approx(target.double().mean().item(), abs=1e-6)
    (fact,) = seen.facts.losses
    assert fact.kind in NAMES
    assert fact.input_shape == tuple(values.shape)
    assert fact.target_shape == tuple(target.shape)
    assert fact.target_dtype == str(target.dtype).removeprefix("torch.")


def test_settings_of_a_call_are_facts(tmp_path):
    target = torch.tensor([0, 1, -7, 1])
    seen, _ = train(
        tmp_path, torch.randn(4, 3), target, lambda x, y: F.cross_entropy(x, y, torch.ones(3), ignore_index=-7)
    )
    (fact,) = seen.facts.losses
    assert fact.classes == 3
    assert fact.settings["ignore_index"] == -7
    assert fact.settings["reduction"] == "mean"
    assert fact.settings["weighted"] is True
    assert seen.means("loss_fn:vital.valid_targets") == {1: 3.0}


def test_a_loss_of_no_known_kind_is_seen_where_its_backward_starts(tmp_path):
    seen, losses = train(tmp_path, torch.randn(4, 3), None, lambda x, _: x.exp().sum(), steps=2)
    assert list(seen.means("loss_fn:output").values()) == pytest.approx(losses)
    assert not any(key.startswith("loss_fn:input") for key in seen.keys)


def test_the_scaled_loss_is_not_taken_for_the_loss(tmp_path):
    model = tiny_mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    with Watching(tmp_path, model, optimizer, scaler=scaler) as seen:
        scaler.scale(model(torch.randn(2, 8)).square().sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert "loss_fn:output" not in seen.keys


def test_metrics_and_evaluation_are_kept_apart_from_the_training_loss(tmp_path):
    model = tiny_mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = torch.randn(8, 8), torch.randint(4, (8,))
    with Watching(tmp_path, model, optimizer) as seen:
        optimizer.zero_grad()
        out = model(x)
        loss = F.cross_entropy(out, y)
        F.mse_loss(out.detach(), torch.zeros(8, 4))
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            later = F.cross_entropy(model(x), y)
    assert seen.means("loss_fn:output") == {1: pytest.approx(loss.item())}
    assert seen.means("loss_fn:output@eval") == {1: pytest.approx(later.item())}
    assert [fact.kind for fact in seen.facts.losses] == ["cross_entropy"]
    assert not any(key.startswith("loss_fn:vital") and key.endswith("@eval") for key in seen.keys)


def test_the_users_own_loss_module_is_not_recorded_twice(tmp_path):
    loss_fn = nn.MSELoss()
    seen, losses = train(
        tmp_path, torch.randn(4, 2), torch.randn(4, 2), loss_fn, loss_fn=loss_fn, what=["outputs", "gradients"]
    )
    assert seen["loss_fn:output"][1].count == 1
    assert seen.means("loss_fn:output") == {1: pytest.approx(losses[0])}
    assert "loss_fn:input.target" in seen.keys


def test_several_losses_of_a_step_are_numbered_and_micro_batches_merged(tmp_path):
    model = tiny_mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    x, y = torch.randn(8, 8), torch.randint(4, (8,))
    with Watching(tmp_path, model, optimizer) as seen:
        for _ in range(2):
            out = model(x)
            one, two = F.cross_entropy(out, y), F.mse_loss(out, torch.zeros(8, 4))
            (one + two).backward()
        optimizer.step()
    assert seen["loss_fn:output"][1].count == 2
    assert seen.means("loss_fn:output") == {1: pytest.approx(one.item())}
    assert seen.means("loss_fn:output#1") == {1: pytest.approx(two.item())}
    assert [fact.kind for fact in seen.facts.losses] == ["cross_entropy", "mse_loss"]


# ---------------------------------------------------------------------- vital signs against numpy


@pytest.mark.parametrize(
    ("values", "loss_fn", "target", "dim"),
    [
        (torch.randn(12, 5).softmax(1), F.cross_entropy, torch.randint(5, (12,)), 1),
        (torch.randn(12, 5).relu(), F.cross_entropy, torch.randint(5, (12,)), 1),
        (torch.randn(4, 5, 3), F.cross_entropy, torch.randint(5, (4, 3)), 1),
        (torch.rand(12, 5), F.binary_cross_entropy, torch.rand(12, 5), 1),
        (torch.randn(2, 3, 7), F.l1_loss, torch.rand(2, 3, 7), 2),
    ],
)
def test_rows_and_columns_of_the_input_are_those_of_numpy(tmp_path, values, loss_fn, target, dim):
    seen, _ = train(tmp_path, values, target, loss_fn)
    rows = np.moveaxis(values.double().numpy(), dim, -1).reshape(-1, values.shape[dim])
    sums = seen["loss_fn:vital.row_sum"][1]
    assert sums.count == len(rows)
    expected = (rows.sum(1).mean(), rows.sum(1).min(), rows.sum(1).max())
    assert (sums.mean, sums.min, sums.max) == pytest.approx(expected, abs=1e-6)
    assert seen.means("loss_fn:vital.row_min") == {1: pytest.approx(rows.min(1).mean(), abs=1e-6)}
    assert seen.means("loss_fn:vital.zero_share") == {1: pytest.approx((rows == 0).mean())}
    flat = values.double().numpy().reshape(len(values), -1)
    assert seen.means("loss_fn:vital.sample_spread") == {1: pytest.approx(flat.var(0).mean(), rel=1e-5)}
    if values.dim() == 2:
        columns = seen["loss_fn:vital.column_sum"][1]
        assert columns.count == values.shape[1]
        assert columns.max == pytest.approx(flat.sum(0).max(), rel=1e-5)
    else:
        assert "loss_fn:vital.column_sum" not in seen.keys
    if loss_fn is F.cross_entropy:
        largest = np.log(np.exp(rows).sum(1))
        assert seen.means("loss_fn:vital.log_z") == {1: pytest.approx(largest.mean(), rel=1e-5)}
        counts = np.bincount(rows.argmax(1), minlength=5)
        assert seen.means("loss_fn:vital.predicted_entropy") == {1: pytest.approx(entropy(counts), abs=1e-6)}
    else:
        assert "loss_fn:vital.log_z" not in seen.keys
        assert "loss_fn:vital.predicted_entropy" not in seen.keys


def entropy(counts):
    share = counts[counts > 0] / counts.sum()
    return -(share * np.log(share)).sum()


def test_labels_are_counted_by_batch_and_so_far(tmp_path):
    model = Given()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    batches = [torch.tensor([0, 0, 1, -100]), torch.tensor([2, 2, 2, 2]), torch.tensor([0, 1, 2, 1])]
    with Watching(tmp_path, model, optimizer) as seen:
        for labels in batches:
            F.cross_entropy(model(torch.randn(4, 4)), labels).backward()
            optimizer.step()
    valid = [labels[labels >= 0].numpy() for labels in batches]
    counts = np.stack([np.bincount(labels, minlength=4) for labels in valid])
    for index, labels in enumerate(batches):
        step = index + 1
        found = seen["loss_fn:vital.label_counts"][step]
        assert (found.count, found.max, found.mean) == (4, counts[index].max(), pytest.approx(counts[index].mean()))
        assert seen.means("loss_fn:vital.label_entropy")[step] == pytest.approx(entropy(counts[index]), abs=1e-6)
        so_far = entropy(counts[:step].sum(0))
        assert seen.means("loss_fn:vital.running_label_entropy")[step] == pytest.approx(so_far, abs=1e-6)
        assert seen.means("loss_fn:vital.valid_targets")[step] == len(valid[index])
        same = np.mean(labels.numpy()[1:] == labels.numpy()[:-1])
        assert seen.means("loss_fn:vital.label_run")[step] == pytest.approx(same)


def test_regression_has_a_target_spread_and_no_labels(tmp_path):
    target = torch.randn(6, 2)
    seen, _ = train(tmp_path, torch.randn(6, 2), target, F.mse_loss)
    assert seen.means("loss_fn:vital.target_spread") == {1: pytest.approx(target.double().numpy().var(0).mean())}
    assert not any("label" in key or "valid" in key for key in seen.keys)


def test_a_single_sample_has_no_spread(tmp_path):
    seen, _ = train(tmp_path, torch.randn(1, 3), torch.randn(1, 3), F.mse_loss)
    assert "loss_fn:vital.sample_spread" not in seen.keys
    assert "loss_fn:vital.target_spread" not in seen.keys


def test_large_inputs_are_sampled(tmp_path):
    values = torch.randn(3000, 400)
    seen, _ = train(tmp_path, values, torch.randint(400, (3000,)), F.cross_entropy)
    assert 100 <= seen["loss_fn:vital.row_sum"][1].count <= 256
    assert 1 << 16 <= seen["loss_fn:input.input"][1].count <= 1 << 18
    assert "loss_fn:vital.column_sum" not in seen.keys, "the sum over part of a batch says nothing"


def test_looks_get_rarer_after_the_first_ten(tmp_path):
    seen, _ = train(tmp_path, torch.randn(4, 3), torch.tensor([0, 1, 2, 0]), F.cross_entropy, steps=30)
    assert list(seen["loss_fn:vital.row_sum"]) == [*range(1, 11), 22]
    assert list(seen["loss_fn:vital.label_entropy"]) == [*range(1, 11), 11, 16, 21, 26]
    assert len(seen["loss_fn:output"]) == 30


# ---------------------------------------------------------------------- neighbours


@pytest.mark.parametrize(("shuffled", "low", "high"), [(False, 1.0, 1.0), (True, 0.1, 0.45)])
def test_neighbours_agree_unless_labels_were_shuffled(tmp_path, shuffled, low, high):
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    centres = torch.eye(4).repeat_interleave(3, 1).reshape(4, 3, 4) * 20
    with Watching(tmp_path, model, optimizer) as seen:
        for _ in range(8):
            labels = torch.randint(4, (64,))
            x = centres[labels] + torch.randn(64, 3, 4)
            given = labels[torch.randperm(64)] if shuffled else labels
            F.cross_entropy(model(x), given).backward()
            optimizer.step()
    found = seen["loss_fn:vital.neighbour_agreement"]
    assert list(found) == [8]
    assert found[8].count == 512
    assert low <= found[8].mean <= high


@pytest.mark.parametrize(("spread", "low", "high"), [(0.0, 1.0, 1.0), (1.0, 0.1, 0.45)])
def test_rows_that_are_all_equally_far_have_no_neighbours_that_disagree(tmp_path, spread, low, high):
    model = nn.Linear(12, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Watching(tmp_path, model, optimizer) as seen:
        for _ in range(8):
            words = F.one_hot(torch.randint(12, (64,)), 12) + spread * torch.randn(64, 12)
            F.cross_entropy(model(words), torch.randint(4, (64,))).backward()
            optimizer.step()
    assert low <= seen["loss_fn:vital.neighbour_agreement"][8].mean <= high


# ---------------------------------------------------------------------- what torch and the user see


def test_functions_are_put_back_exactly_whatever_the_order_of_closing(tmp_path):
    before = {name: getattr(F, name) for name in NAMES}
    model = tiny_mlp()
    first = sonde.watch(model, run=tmp_path / "a")
    second = sonde.watch(model, run=tmp_path / "b")
    assert F.cross_entropy is not before["cross_entropy"]
    assert inspect.signature(F.cross_entropy) == inspect.signature(before["cross_entropy"])
    first.close()
    assert F.cross_entropy is not before["cross_entropy"]
    second.close()
    assert {name: getattr(F, name) for name in NAMES} == before


def test_without_diagnosis_nothing_is_replaced_and_nothing_more_is_recorded(tmp_path):
    before = F.cross_entropy
    model = tiny_mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Watching(tmp_path, model, optimizer, diagnose=False) as seen:
        assert F.cross_entropy is before
        F.cross_entropy(model(torch.randn(2, 8)), torch.tensor([0, 1])).backward()
        optimizer.step()
    assert not any(":vital" in key or ":input" in key or key.startswith("loss_fn") for key in seen.keys)
    assert not [event for event in seen.sink.events if event.event_type == "facts"]


def test_what_overrides_torch_functions_is_handed_the_original(tmp_path):
    original = F.cross_entropy
    asked = []

    class Own(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            asked.append(func)
            return super().__torch_function__(func, types, args, kwargs or {})

    model = tiny_mlp()
    with Watching(tmp_path, model):
        result = F.cross_entropy(torch.randn(2, 3).as_subclass(Own), torch.tensor([0, 1]))
    assert original in asked
    assert isinstance(result, Own)


def test_a_loss_that_raises_raises_as_ever(tmp_path):
    with Watching(tmp_path, tiny_mlp()), pytest.raises(IndexError, match="out of bounds"):
        F.cross_entropy(torch.randn(2, 3, requires_grad=True), torch.tensor([0, 3]))


@pytest.mark.filterwarnings("ignore")
def test_a_scripted_loss_still_compiles(tmp_path):
    with Watching(tmp_path, tiny_mlp()):
        scripted = torch.jit.script(nn.CrossEntropyLoss())
        x, y = torch.randn(2, 3), torch.tensor([0, 1])
        assert scripted(x, y) == F.cross_entropy(x, y)


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_loss_has_no_graph_break(tmp_path):
    class WithLoss(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(8, 4)

        def forward(self, x, y):
            return F.cross_entropy(self.fc(x), y)

    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    model = torch.compile(WithLoss(), backend="eager", fullgraph=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Watching(tmp_path, model, optimizer) as seen:
        for _ in range(3):
            optimizer.zero_grad()
            loss = model(torch.randn(4, 8), torch.randint(4, (4,)))
            loss.backward()
            optimizer.step()
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] == 1
    assert seen.means("loss_fn:output")[3] == pytest.approx(loss.item()), "seen where its backward starts"
    torch._dynamo.reset()


def test_yes_and_no_are_counted_like_labels(tmp_path):
    target = torch.tensor([1.0, 0.0, 0.0, 0.0])
    seen, _ = train(tmp_path, torch.tensor([2.0, -1.0, 3.0, -4.0]), target, F.binary_cross_entropy_with_logits, steps=2)
    counts = seen["loss_fn:vital.label_counts"][2]
    assert (counts.count, counts.min, counts.max) == (2, 1, 3)
    expected = -(0.25 * np.log(0.25) + 0.75 * np.log(0.75))
    assert seen.means("loss_fn:vital.running_label_entropy")[2] == pytest.approx(expected, rel=1e-6)
    assert seen.means("loss_fn:vital.predicted_entropy")[2] == pytest.approx(np.log(2), rel=1e-6)


def test_a_picture_is_not_a_single_question(tmp_path):
    seen, _ = train(tmp_path, torch.rand(4, 9), torch.rand(4, 9), F.binary_cross_entropy)
    assert "loss_fn:vital.label_counts" not in seen.keys
