"""What integrations do beyond the examples on their pages: resume, fail, report findings, leave others alone."""

from __future__ import annotations

import importlib
import logging
import sys

import pytest
import torch
from torch import nn

import sonde
from sonde.integrations.recorder import Recorder, plain_settings

pytestmark = [pytest.mark.filterwarnings("ignore")]
PACKAGES = ("transformers", "lightning", "pytorch_lightning", "accelerate", "ignite")


def small_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))


def train(model, optimizer, steps, *, forget=False):
    for _ in range(steps):
        model(torch.randn(16, 4)).pow(2).mean().backward()
        optimizer.step()
        if not forget:
            optimizer.zero_grad()


@pytest.fixture
def recorder(tmp_path):
    return Recorder(tmp_path / "run", logging.getLogger("framework").warning)


def test_new_findings_are_reported_once_as_they_are_made(recorder, caplog):
    model = small_model()
    optimizer = torch.optim.Adam(model.parameters())
    recorder.open(model, [optimizer])
    for _ in range(12):
        train(model, optimizer, 1, forget=True)
        recorder.session.flush()
        recorder.report_findings()
    during = [record.getMessage() for record in caplog.records]
    recorder.close()
    assert sum("missing_zero_grad" in line for line in during) == 1
    assert sum("missing_zero_grad" in record.getMessage() for record in caplog.records) == 1
    assert any(each.kind == "missing_zero_grad" for each in recorder.findings)


def test_a_training_that_continues_continues_the_run(tmp_path):
    model = small_model()
    optimizer = torch.optim.Adam(model.parameters())
    for before in (0, 4):
        recorder = Recorder(tmp_path / "run", print)
        recorder.open(model, [optimizer], steps_before=before)
        train(model, optimizer, 6)
        recorder.close()
    assert sonde.open_run(tmp_path / "run").steps.tolist() == list(range(11))


def test_a_second_training_by_the_same_callback_follows_the_first(recorder):
    model = small_model()
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(2):
        recorder.open(model, [optimizer])
        train(model, optimizer, 3)
        recorder.close()
    assert sonde.open_run(recorder.session.path).steps.tolist() == list(range(7))


def test_a_run_that_exists_is_refused_before_training(recorder, tmp_path):
    with sonde.open_session(run=tmp_path / "run"):
        pass
    with pytest.raises(sonde.RunExists):
        recorder.open(small_model(), [])


def test_a_fault_in_a_callback_never_reaches_the_framework(recorder, caplog, monkeypatch):
    model = small_model()
    recorder.open(model, [])
    monkeypatch.setattr(recorder.session, "log", lambda values: 1 / 0)
    recorder.log({"loss": 1.0})
    recorder.close()
    assert "ZeroDivisionError" in caplog.text


def test_an_exception_is_kept_in_the_run(recorder):
    model = small_model()
    recorder.open(model, [])
    recorder.close(ValueError("too long"))
    run = sonde.open_run(recorder.session.path)
    assert run.status == "failed"
    assert any("ValueError: too long" in event.message for event in run.events)


def test_only_numbers_are_logged(recorder):
    model = small_model()
    recorder.open(model, [])
    recorder.log({"a": 1, "b": 2.0, "c": torch.tensor(3.0), "d": "words", "e": None, "f": torch.ones(2), "g": True})
    recorder.close()
    run = sonde.open_run(recorder.session.path)
    assert {site.name for site in run.sites if site.quantity == "scalar"} >= {"a", "b", "c"}
    assert not {site.name for site in run.sites} & {"d", "e", "f", "g"}


def test_settings_that_a_run_cannot_keep_are_left_out():
    given = {"lr": 0.1, "name": "a", "sizes": [1, 2], "nested": {"x": None}, "object": object(), "nan": float("nan")}
    assert plain_settings(given) == {"lr": 0.1, "name": "a", "sizes": [1, 2], "nested": {"x": None}}


@pytest.mark.parametrize("package", PACKAGES)
def test_each_integration_names_the_extra_it_needs(package, monkeypatch):
    for name in [package, *(each for each in sys.modules if each.startswith(f"{package}."))]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, f"sonde.integrations.{package}", raising=False)
    with pytest.raises(sonde.MissingExtra, match=r"pip install 'sonde\["):
        importlib.import_module(f"sonde.integrations.{package}")


def test_lightning_continues_from_a_checkpoint_and_keeps_a_failure(tmp_path):
    lightning = pytest.importorskip("lightning")
    from sonde.integrations.lightning import SondeCallback

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = small_model()

        def training_step(self, batch, index):
            if self.global_step == 6:
                raise ValueError("in the middle")
            return self.model(batch).pow(2).mean()

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters())

    loader = torch.utils.data.DataLoader(torch.randn(8, 4), 2)

    def fit(epochs, **more):
        callback = SondeCallback(run=tmp_path / "run")
        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
        trainer = lightning.Trainer(max_epochs=epochs, callbacks=[callback], default_root_dir=tmp_path, **quiet)
        try:
            trainer.fit(Module(), loader, **more)
        finally:
            assert callback.session.is_closed
        return trainer

    fit(1).save_checkpoint(tmp_path / "kept.ckpt")
    with pytest.raises(ValueError, match="in the middle"):
        fit(3, ckpt_path=tmp_path / "kept.ckpt")
    run = sonde.open_run(tmp_path / "run")
    assert run.steps.tolist() == list(range(7))
    assert run.status == "failed"


def test_ignite_raises_what_the_loop_raised_and_the_run_keeps_it(tmp_path):
    pytest.importorskip("ignite")
    from ignite.engine import Engine

    from sonde.integrations.ignite import SondeHandler

    def fail(engine, batch):
        raise ValueError("in the loop")

    engine = Engine(fail)
    handler = SondeHandler(small_model(), run=tmp_path / "run")
    handler.attach(engine)
    with pytest.raises(ValueError, match="in the loop"):
        engine.run([1])
    assert sonde.open_run(tmp_path / "run").status == "failed"


def test_lightning_records_the_loss_that_was_returned_also_when_it_accumulates(tmp_path):
    lightning = pytest.importorskip("lightning")
    from sonde.integrations.lightning import SondeCallback

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = small_model()
            self.losses = []

        def training_step(self, batch, index):
            loss = self.model(batch).pow(2).mean()
            self.losses.append(float(loss))
            return loss

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters())

    module = Module()
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    callbacks = [SondeCallback(run=tmp_path / "run")]
    trainer = lightning.Trainer(
        max_epochs=1, accumulate_grad_batches=2, callbacks=callbacks, enable_checkpointing=False, **quiet
    )
    trainer.fit(module, torch.utils.data.DataLoader(torch.randn(16, 4), 2))
    logged = sonde.open_run(tmp_path / "run").series("loss:scalar", "value").values
    means = [sum(pair) / 2 for pair in zip(module.losses[::2], module.losses[1::2], strict=True)]
    assert logged.tolist() == pytest.approx(means)


def test_ignite_continues_at_its_step_also_when_it_accumulates(tmp_path):
    pytest.importorskip("ignite")
    from ignite.engine import create_supervised_trainer

    from sonde.integrations.ignite import SondeHandler

    model = small_model()
    optimizer = torch.optim.Adam(model.parameters())
    batches = [(torch.randn(8, 4), torch.randn(8, 1)) for _ in range(8)]
    for epochs in (1, 2):
        engine = create_supervised_trainer(model, optimizer, nn.functional.mse_loss, gradient_accumulation_steps=2)
        if epochs == 2:
            engine.load_state_dict({"epoch_length": 8, "max_epochs": 2, "iteration": 8})
        SondeHandler(model, optimizer, run=tmp_path / "run").attach(engine)
        engine.run(batches, max_epochs=epochs)
    assert sonde.open_run(tmp_path / "run").steps.tolist() == list(range(9))


def test_two_trainings_that_take_turns_in_one_process_are_kept_apart(tmp_path):
    pytest.importorskip("ignite")
    from ignite.engine import Engine, Events

    from sonde.integrations.ignite import SondeHandler

    def train_both(folder=None):
        """Train one model in an engine, and after each of its iterations another one twice, in a loop of its own."""
        torch.manual_seed(0)
        first, second = nn.Linear(4, 1), nn.Linear(3, 1)
        optimizers = [torch.optim.SGD(each.parameters(), 0.01) for each in (first, second)]
        losses = [], []

        def step(which, model, inputs):
            loss = (model(inputs) - 1).pow(2).mean()
            optimizers[which].zero_grad()
            loss.backward()
            optimizers[which].step()
            losses[which].append(loss.item())
            return loss.item()

        engine = Engine(lambda engine, batch: step(0, first, batch))
        engine.add_event_handler(
            Events.ITERATION_COMPLETED, lambda _: [step(1, second, torch.randn(8, 3)) for _ in range(2)]
        )
        if folder is None:
            engine.run(torch.randn(6, 8, 4), max_epochs=2)
        else:
            SondeHandler(first, optimizers[0], run=folder / "engine", budget=None).attach(engine)
            with sonde.watch(second, optimizers[1], run=folder / "loop", budget=None):
                engine.run(torch.randn(6, 8, 4), max_epochs=2)
        return losses, [each.detach().tolist() for model in (first, second) for each in model.parameters()]

    bare, recorded = train_both(), train_both(tmp_path)
    assert recorded == bare
    for name, losses in zip(("engine", "loop"), bare[0], strict=True):
        run = sonde.open_run(tmp_path / name)
        assert run.steps.tolist() == list(range(len(losses) + 1))
        assert run.series("loss").values.tolist() == pytest.approx(losses)
        assert {each["name"] for each in run.header.model["parameters"]} == {"weight", "bias"}
        assert [each.kind for each in run.findings if each.severity != "info"] == []


def test_one_process_trains_with_one_framework_after_the_other(tmp_path):
    from tests.integrations.programs import PER_EPOCH, PROGRAMS, How

    for package in ("transformers", "accelerate", "lightning", "ignite"):
        pytest.importorskip(package)
    bare = [each(tmp_path / f"bare-{name}", How()).hash for name, each in PROGRAMS.items()]
    ours = [each(tmp_path / name, How(run=str(tmp_path / f"run-{name}"))).hash for name, each in PROGRAMS.items()]
    assert ours == bare
    for name in PROGRAMS:
        run = sonde.open_run(tmp_path / f"run-{name}")
        assert run.steps.tolist() == list(range(2 * PER_EPOCH + 1))
        assert [each.kind for each in run.findings if each.severity != "info"] == []
