"""The same small training in many parallel layouts, recorded or not."""

from __future__ import annotations

import contextlib
import hashlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import sonde

ROWS = 8
"""Samples in the global batch of a step."""
STEPS = 4


class Block(nn.Module):
    """Two layers with a norm between, whose sizes divide by no number of ranks."""

    def __init__(self, size: int = 7, hidden: int = 10) -> None:
        super().__init__()
        self.up = nn.Linear(size, hidden)
        self.norm = nn.LayerNorm(hidden)
        self.down = nn.Linear(hidden, size)

    def forward(self, x):
        return x + self.down(torch.relu(self.norm(self.up(x))))


class Model(nn.Module):
    """Blocks and a head."""

    def __init__(self, hidden: int = 10) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(hidden=hidden), Block(hidden=hidden)])
        self.head = nn.Linear(7, 3)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def device():
    """Return where this process trains: on its GPU if its ranks talk over NCCL."""
    is_nccl = dist.is_initialized() and dist.get_backend() == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if is_nccl else torch.device("cpu")


def make(hidden: int = 10, dtype=torch.float64) -> Model:
    torch.manual_seed(0)
    return Model(hidden).to(dtype).to(device())


def batch(step: int, dtype=torch.float64):
    maker = torch.Generator().manual_seed(100 + step)
    x = torch.randn(ROWS, 7, generator=maker, dtype=torch.float64)
    return x.to(device(), dtype), (x[:, :3] * 2 + 1).to(device(), dtype)


def whole(tensor):
    """Return the batch as it is: for one process, or ranks that work on the same samples."""
    return tensor


def mine(tensor):
    """Return this rank's part of a batch."""
    return tensor.chunk(dist.get_world_size())[dist.get_rank()]


def mesh(*shape, names=None):
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(device().type, shape, mesh_dim_names=names)


# ---------------------------------------------------------------------- layouts: model, parameters, and a loss's data


def ddp(**options):
    return DistributedDataParallel(make(), **options)


def ddp_frozen():
    model = make()
    model.blocks[0].requires_grad_(False)
    return DistributedDataParallel(model)


def fsdp2(*, nested=True, over=None, policy=None):
    from torch.distributed.fsdp import fully_shard

    model = make()
    options = {} if policy is None else {"mp_policy": policy}
    over = over or mesh(dist.get_world_size())
    for block in model.blocks if nested else ():
        fully_shard(block, mesh=over, **options)
    return fully_shard(model, mesh=over, **options)


def fsdp2_bf16():
    from torch.distributed.fsdp import MixedPrecisionPolicy

    return fsdp2(policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))


def hsdp():
    return fsdp2(over=mesh(2, dist.get_world_size() // 2, names=("replicate", "shard")))


def fsdp1(*, original, nested=True):
    from torch.distributed.fsdp import FullyShardedDataParallel as Sharded
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    policy = ModuleWrapPolicy({Block}) if nested else None
    return Sharded(make(), use_orig_params=original, auto_wrap_policy=policy, device_id=device())


def tensor_parallel(over=None):
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model = make(hidden=12)
    for block in model.blocks:
        block.norm = nn.Identity()
    plan = {}
    for number in range(2):
        plan |= {f"blocks.{number}.up": ColwiseParallel(), f"blocks.{number}.down": RowwiseParallel()}
    return parallelize_module(model, over or mesh(dist.get_world_size()), plan)


def fsdp2_tensor_parallel():
    """Shard a model over groups of two ranks, each of which computes every layer together."""
    from torch.distributed.fsdp import fully_shard

    over = mesh(dist.get_world_size() // 2, 2, names=("data", "tensor"))
    model = tensor_parallel(over["tensor"])
    for block in model.blocks:
        fully_shard(block, mesh=over["data"])
    return fully_shard(model, mesh=over["data"])


def group_of_two(tensor):
    """Return the part of a batch that two ranks work on together."""
    return tensor.chunk(dist.get_world_size() // 2)[dist.get_rank() // 2]


def average(model):
    """Average the gradients over the ranks by hand."""
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


def stages(folder=None):
    """Train a pipeline of one stage a rank, whose modules have the same names; return a digest."""
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(nn.Linear(7, 7), nn.Tanh(), nn.Linear(7, 7)).to(device())
    stage = PipelineStage(model, dist.get_rank(), dist.get_world_size(), device())
    schedule = ScheduleGPipe(stage, n_microbatches=2, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    session = None if folder is None else sonde.watch(model, optimizer, run=folder, on_error="raise")
    # Torch calls each stage on memory that nobody has filled to learn its shapes, again after an evaluation. In
    # deterministic mode that memory is filled with NaN.
    torch.use_deterministic_algorithms(True)
    for step in range(STEPS):
        x, _ = batch(step, torch.float32)
        given, wanted = ((x,), {}) if stage.is_first else ((), {"target": x})
        optimizer.zero_grad()
        schedule.step(*given, **wanted)
        optimizer.step()
        if step == 1:
            schedule.eval(*given, **wanted)
    torch.use_deterministic_algorithms(False)
    if session is not None:
        session.close()
    return hashlib.sha256(b"".join(each.detach().cpu().numpy().tobytes() for each in model.parameters())).hexdigest()


def train(model, folder=None, *, optimizer=None, data=mine, micro=1, reduce=None, dtype=torch.float64, **options):
    """Train; return a digest of everything that came of it."""
    optimizer = optimizer or torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05, momentum=0.9)
    session = None if folder is None else sonde.watch(model, optimizer, run=folder, on_error="raise", **options)
    digest = hashlib.sha256()
    for step in range(STEPS):
        x, y = (data(each) for each in batch(step, dtype))
        optimizer.zero_grad()
        for number, (some_x, some_y) in enumerate(zip(x.chunk(micro), y.chunk(micro), strict=True)):
            is_last = number == micro - 1
            holds = hasattr(model, "no_sync") and not is_last
            with model.no_sync() if holds else contextlib.nullcontext():
                loss = nn.functional.mse_loss(model(some_x).to(dtype), some_y) / micro
                loss.backward()
        if reduce is not None:
            reduce(model)
        optimizer.step()
        digest.update(loss.detach().cpu().numpy().tobytes())
        if session is not None:
            session.log(loss=loss)
    if session is not None:
        session.close()
    for parameter in model.parameters():
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        digest.update(local.detach().contiguous().cpu().numpy().tobytes())
    return digest.hexdigest()


LAYOUTS = {
    "plain": lambda folder: train(make(), folder, reduce=average),
    "ddp": lambda folder: train(ddp(), folder),
    "ddp_no_sync": lambda folder: train(ddp(gradient_as_bucket_view=True), folder, micro=2),
    "ddp_static_graph": lambda folder: train(ddp(static_graph=True), folder),
    "ddp_frozen": lambda folder: train(ddp_frozen(), folder),
    "fsdp2": lambda folder: train(fsdp2(), folder),
    "fsdp2_not_nested": lambda folder: train(fsdp2(nested=False), folder),
    "fsdp2_bf16": lambda folder: train(fsdp2_bf16(), folder),
    "hsdp": lambda folder: train(hsdp(), folder),
    "fsdp1_flat": lambda folder: train(fsdp1(original=False), folder),
    "fsdp1_original": lambda folder: train(fsdp1(original=True), folder),
    "tensor_parallel": lambda folder: train(tensor_parallel(), folder, data=whole),
    "fsdp2_tensor_parallel": lambda folder: train(fsdp2_tensor_parallel(), folder, data=group_of_two),
    "stages": stages,
}


def run_layouts(folder, names) -> None:
    """Train each layout without Sonde and with it; fail if they differ."""
    for name in names:
        assert LAYOUTS[name](None) == LAYOUTS[name](f"{folder}/{name}"), name
