"""Real launchers: torchrun with a plain DDP program always; frameworks where SONDE_ALL_PROGRAMS is set."""

from __future__ import annotations

import os
import sys

import numpy as np
import pytest
from tests.waiting import run_to_end

import sonde

HEAD = """
import hashlib, sys, torch, sonde
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
torch.set_num_threads(1)
x = torch.randn(64, 7); y = x[:, :3]
data = TensorDataset(x, y)
net = nn.Sequential(nn.Linear(7, 10), nn.ReLU(), nn.Linear(10, 3))

def watch(*what):
    return sonde.watch(*what, run=sys.argv[1], budget=None)

def digest(rank, model):
    mine = [each.to_local() if hasattr(each, "to_local") else each for each in model.parameters()]
    content = b"".join(each.detach().numpy().tobytes() for each in mine)
    sys.stdout.write(f"DIGEST {rank} {hashlib.sha256(content).hexdigest()}\\n")  # at once: ranks share the stream
    sys.stdout.flush()
"""
PROGRAMS = {
    "ddp": """
import torch.distributed as dist
# Before the ranks are connected: both must come to the same number by themselves.
session = watch(net) if sys.argv[1] != "-" else None
dist.init_process_group("gloo")
model = nn.parallel.DistributedDataParallel(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
sampler = torch.utils.data.DistributedSampler(data)
for a, b in DataLoader(data, batch_size=4, sampler=sampler):
    optimizer.zero_grad()
    nn.functional.mse_loss(model(a), b).backward()
    optimizer.step()
if session: session.close()
digest(dist.get_rank(), model)
dist.destroy_process_group()
""",
    "accelerate": """
from accelerate import Accelerator
accelerator = Accelerator(cpu=True)
optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
model, optimizer, loader = accelerator.prepare(net, optimizer, DataLoader(data, batch_size=4, shuffle=True))
session = watch(model, optimizer) if sys.argv[1] != "-" else None
for a, b in loader:
    optimizer.zero_grad()
    accelerator.backward(nn.functional.mse_loss(model(a), b))
    optimizer.step()
if session: session.close()
digest(accelerator.process_index, model)
""",
    "transformers": """
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
class Tokens(torch.utils.data.Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, number):
        ids = torch.randint(0, 50, (16,), generator=torch.Generator().manual_seed(number))
        return {"input_ids": ids, "labels": ids}
model = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_positions=16, n_embd=16, n_layer=2, n_head=2))
args = TrainingArguments(output_dir=sys.argv[2], per_device_train_batch_size=4, max_steps=8, report_to=[], use_cpu=True,
                         save_strategy="no", disable_tqdm=True, logging_strategy="no")
session = watch(model) if sys.argv[1] != "-" else None
Trainer(model=model, args=args, train_dataset=Tokens()).train()
if session: session.close()
digest(args.process_index, model)
""",
    "lightning": """
import lightning
class Lit(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = net
    def training_step(self, batch, number):
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)
model = Lit()
session = watch(model) if sys.argv[1] != "-" else None
trainer = lightning.Trainer(max_epochs=1, accelerator="cpu", devices=2, strategy="ddp", logger=False,
    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
trainer.fit(model, DataLoader(data, batch_size=4))
if session: session.close()
digest(trainer.global_rank, model)
""",
    # Lightning's strategy "fsdp" demands GPUs; this one shards with FSDP2 on any device.
    "lightning_fsdp2": """
import lightning
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
class Lit(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = net
    def configure_model(self):
        for layer in (self.net[0], self.net[2], self.net):
            fully_shard(layer, mesh=self.device_mesh["data_parallel"])
    def training_step(self, batch, number):
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)
    def on_train_start(self):
        if sys.argv[1] != "-": self.session = watch(self, self.trainer.optimizers[0])
model = Lit()
strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
trainer = lightning.Trainer(max_epochs=1, accelerator="cpu", devices=2, strategy=strategy, logger=False,
    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
trainer.fit(model, DataLoader(data, batch_size=4))
if sys.argv[1] != "-": model.session.close()
digest(trainer.global_rank, model)
""",
}
ALWAYS = ("ddp",)


def launch(name, folder, run):
    program = folder / f"train_{name}.py"
    program.write_text(HEAD + PROGRAMS[name])
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command = [sys.executable, *([] if "lightning" in name else torchrun), str(program), str(run), str(folder / "out")]
    done = run_to_end(command, text=True)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return sorted(line for line in done.stdout.splitlines() if line.startswith("DIGEST"))


@pytest.mark.parametrize("name", list(PROGRAMS))
def test_a_launched_program_is_recorded_as_one_run_and_trains_as_before(tmp_path, name):
    if name not in ALWAYS:
        if not os.environ.get("SONDE_ALL_PROGRAMS"):
            pytest.skip("a framework; set SONDE_ALL_PROGRAMS")
        pytest.importorskip(name.partition("_")[0])
    watched = launch(name, tmp_path, tmp_path / "runs" / "x-*")
    assert len(watched) == 2
    if name not in ALWAYS:  # test_merging.py compares DDP with and without Sonde
        assert launch(name, tmp_path, "-") == watched
    (run,) = map(sonde.open_run, (tmp_path / "runs").glob("x-*"))
    assert (run.path.name, run.ranks, run.status) == ("x-1", [0, 1], "finished")
    assert run.steps.tolist() == list(range(9))
    assert not [finding.kind for finding in sonde.diagnose(run).findings if finding.severity == "critical"]
    assert not [event for event in run.events if event.event_type == "fault"]
    gradient = next(site for site in run.sites if site.quantity == "gradient")
    both, *each = (run.series(gradient, "norm", rank=rank) for rank in (None, 0, 1))
    if name == "lightning_fsdp2":
        np.testing.assert_allclose(both.values, np.hypot(*(one.values for one in each)), rtol=1e-6)
    else:
        assert both.values.tolist() == each[1].values.tolist(), "reduced gradients are copies: they count once"
