"""A distributed training as torchrun starts it."""

import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group(
    "gloo", init_method=os.environ.get("MEETING", "env://"), rank=int(os.environ["RANK"]), world_size=2
)
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1)))
optimizer = torch.optim.SGD(model.parameters(), 0.05)
data = torch.Generator().manual_seed(dist.get_rank())
for _ in range(6):
    x = torch.randn(16, 8, generator=data)
    optimizer.zero_grad()
    (model(x)[:, 0] - x.sum(1)).pow(2).mean().backward()
    optimizer.step()
print(sum(each.double().sum() for each in model.parameters()).item())
dist.destroy_process_group()
