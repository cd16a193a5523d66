"""A Trainer of Lightning with validation."""

import lightning
import torch
from torch import nn


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def training_step(self, batch, index):
        loss = (self.layers(batch) - batch.sum(1, keepdim=True)).pow(2).mean()
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, index):
        self.log("val_loss", (self.layers(batch) - batch.sum(1, keepdim=True)).pow(2).mean())

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 1e-2)


lightning.seed_everything(0)
module = Module()
loaders = [torch.utils.data.DataLoader(torch.randn(rows, 4), 4) for rows in (24, 8)]
quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
lightning.Trainer(max_epochs=2, accelerator="cpu", **quiet).fit(module, *loaders)
print([each.sum().item() for each in module.parameters()])
