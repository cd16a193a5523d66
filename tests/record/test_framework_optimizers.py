"""The optimizer objects that frameworks hand out, with the real frameworks where they are installed."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import sonde
from sonde.testing import tiny_mlp


def check(session, path, steps):
    run = sonde.open_run(path)
    assert run.steps.tolist() == list(range(steps + 1))
    assert session.optimizer_steps == {"optimizer": steps}
    assert [each.kind for each in session.findings if each.severity != "info"] == []
    return run.series("loss").values.tolist()


@pytest.mark.filterwarnings("ignore")
def test_the_optimizer_of_a_hugging_face_callback_and_the_models_own_loss(tmp_path):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    sessions = []

    class Watching(transformers.TrainerCallback):
        def on_train_begin(self, args, state, control, model=None, optimizer=None, **_):
            sessions.append(sonde.watch(model, optimizer, run=tmp_path / "run", budget=None))

        def on_train_end(self, *_, **__):
            sessions[0].close()

    config = {"n_layer": 1, "n_head": 2, "n_embd": 16, "vocab_size": 64, "n_positions": 16}
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**config, **ends))
    rows = [torch.randint(0, 64, (12,)) for _ in range(48)]
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path / "out"),
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        max_steps=6,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        save_strategy="no",
    )
    dataset = [{"input_ids": row, "labels": row} for row in rows]
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=dataset, callbacks=[Watching()])
    trainer.train()
    logged = [each["loss"] for each in trainer.state.log_history if "loss" in each]
    assert check(sessions[0], tmp_path / "run", steps=6) == pytest.approx(logged, rel=1e-3)


@pytest.mark.filterwarnings("ignore")
def test_what_self_optimizers_returns_in_a_lightning_module(tmp_path):
    lightning = pytest.importorskip("lightning")
    losses = []

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = tiny_mlp()

        def training_step(self, batch, index):
            loss = F.cross_entropy(self.net(batch[0]), batch[1])
            losses.append(loss.item())
            return loss

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), lr=1e-2)

        def on_train_start(self):
            self.session = sonde.watch(self, self.optimizers(), run=tmp_path / "run", budget=None)

    x = torch.randn(96, 8)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, x[:, :4].argmax(1)), batch_size=8)
    module = Module()
    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    trainer = lightning.Trainer(
        max_epochs=1, accelerator="cpu", accumulate_grad_batches=2, **dict.fromkeys(quiet, False)
    )
    trainer.fit(module, loader)
    module.session.close()
    expected = [(first + second) / 2 for first, second in zip(losses[::2], losses[1::2], strict=True)]
    assert check(module.session, tmp_path / "run", steps=6) == pytest.approx(expected, rel=1e-5)
