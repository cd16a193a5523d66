"""A DistributedSampler that is never given its epoch; healthy programs that look alike."""

from __future__ import annotations

import pytest
from programs import classify, data, kinds, perceptron
from torch.optim import SGD
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import sonde

KIND = "same_order_every_epoch"


class ByHand(DistributedSampler):
    """Counts its epochs itself."""

    def __iter__(self):
        yield from super().__iter__()
        self.set_epoch(self.epoch + 1)


def findings(folder, *, set_epoch, epochs=3, size=32, sampler_class=DistributedSampler, accumulate=1, evaluate=False):
    """Train over ranks' shares of the data, as rank 0 of 2; the order of a rank needs no other ranks."""
    x, y = data(samples=256)
    set_of = TensorDataset(x, y)
    sampler, others = (kind(set_of, num_replicas=2, rank=0) for kind in (sampler_class, DistributedSampler))
    loader = DataLoader(set_of, batch_size=size, sampler=sampler)
    model = perceptron()
    optimizer = SGD(model.parameters(), lr=0.1)
    passes = []
    with sonde.watch(model, optimizer, run=folder / "run", on_error="raise", tape=False) as session:
        next(iter(loader))  # a first look
        for epoch in range(epochs):
            if set_epoch:
                sampler.set_epoch(epoch)
            for number, (a, b) in enumerate(loader):
                loss = classify(model(a), b)
                loss.backward()
                if number % accumulate == accumulate - 1:
                    optimizer.step()
                    optimizer.zero_grad()
                    session.log(loss=loss)
            if evaluate:
                passes.append(iter(DataLoader(set_of, batch_size=64, sampler=others)))  # kept: no other gets its id
                for _ in passes[-1]:
                    pass
    return session.findings


@pytest.mark.parametrize("options", [{"epochs": 2}, {"accumulate": 3, "size": 8}, {"evaluate": True}])
def test_a_forgotten_set_epoch_is_found(tmp_path, options):
    found = {each.kind: each for each in findings(tmp_path, set_epoch=False, **options)}
    assert KIND in found
    assert found[KIND].evidence[0].value >= 2


@pytest.mark.parametrize(
    "options",
    [
        {"set_epoch": True, "evaluate": True},
        {"set_epoch": True, "accumulate": 3, "size": 8},
        {"set_epoch": False, "epochs": 1},
        {"set_epoch": False, "size": 128},  # one step per epoch
        {"set_epoch": False, "sampler_class": ByHand},
        {"set_epoch": False, "sampler_class": lambda *args, **named: DistributedSampler(*args, shuffle=False, **named)},
    ],
)
def test_programs_with_an_order_for_each_epoch_or_none_on_purpose_are_silent(tmp_path, options):
    assert KIND not in kinds(findings(tmp_path, **options))
