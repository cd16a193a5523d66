"""What `sonde.watch` costs on models that other people wrote, on a CUDA device or on the CPU.

    PYTHONPATH=src python benchmarks/public_models.py [--device cpu|cuda] [--only NAME ...] [--rounds 3] [--settle 0]
        [--json FILE]

Every round builds each model anew for every variant and runs it for 24 steps, then for `--steps` more; variants whose
cost does not change while they run take `--fixed-steps`. A ratio is the mean step over the mean step of the bare loop
in the same round; the table shows the median over the rounds. "First 24" are the steps in which the diagnosis looks
closest; before the first round the bare loop runs once, untimed. CPU time is that of the whole process, all threads.
Steps of a few milliseconds are recorded in full until that has taken a second: `--settle 2000` leaves
so many steps out, and "beginning" is what they and the first 24 took beyond the bare loop.
"Bare again" is a second bare loop: its distance from 1 is the noise. Models come from their packages' configurations
with random weights and random data; a package that is not installed gives a row that says so.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.util
import json
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sonde

WARM_UP = 24
Step = Callable[[], Tensor]
Built = tuple[nn.Module, torch.optim.Optimizer, Step]


# ------------------------------------------------------------------ models


@dataclass(frozen=True)
class Model:
    """A public model: which package it needs, and how to build it on a device."""

    package: str
    build: Callable[[str], Built]


def language_model(
    model: nn.Module, batch: dict[str, Tensor], device: str, *, autocast: bool, clip: bool = False
) -> Built:
    optimizer = torch.optim.AdamW(model.parameters(), 3e-4, fused=device == "cuda")

    def step() -> Tensor:
        with torch.autocast(device, torch.bfloat16, enabled=autocast):
            loss = model(**batch).loss
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return model, optimizer, step


def classifier(
    model: nn.Module, x: Tensor, classes: int, optimizer: torch.optim.Optimizer, device: str, *, autocast: bool
) -> Built:
    y = torch.randint(classes, (len(x),), device=device)

    def step() -> Tensor:
        with torch.autocast(device, torch.bfloat16, enabled=autocast):
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return model, optimizer, step


def tokens(device: str, vocabulary: int, cuda: tuple[int, int], cpu: tuple[int, int]) -> Tensor:
    return torch.randint(vocabulary, cuda if device == "cuda" else cpu, device=device)


def gpt2(device: str) -> Built:
    from transformers import GPT2Config, GPT2LMHeadModel

    small = {} if device == "cuda" else {"n_layer": 4, "n_embd": 256, "n_head": 4, "vocab_size": 5000}
    config = GPT2Config(attn_implementation="sdpa", use_cache=False, **small)
    x = tokens(device, config.vocab_size, (8, 1024), (4, 128))
    return language_model(
        GPT2LMHeadModel(config).to(device), {"input_ids": x, "labels": x}, device, autocast=device == "cuda"
    )


def llama(device: str) -> Built:
    from transformers import LlamaConfig, LlamaForCausalLM

    size = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 16, "num_attention_heads": 16}
    if device == "cpu":
        size = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4, "num_attention_heads": 8}
    heads = size["num_attention_heads"] // 2
    config = LlamaConfig(
        **size, num_key_value_heads=heads, vocab_size=32000 if device == "cuda" else 5000, use_cache=False
    )
    model = LlamaForCausalLM(config).to(device, torch.bfloat16 if device == "cuda" else torch.float32)
    x = tokens(device, config.vocab_size, (8, 1024), (4, 128))
    return language_model(model, {"input_ids": x, "labels": x}, device, autocast=False, clip=True)


def bert(device: str) -> Built:
    from transformers import BertConfig, BertForMaskedLM

    small = {"num_hidden_layers": 4, "hidden_size": 256, "num_attention_heads": 4, "intermediate_size": 1024}
    config = BertConfig(**(small | {"vocab_size": 5000} if device == "cpu" else {}))
    x = tokens(device, config.vocab_size, (16, 256), (4, 128))
    return language_model(
        BertForMaskedLM(config).to(device), {"input_ids": x, "labels": x}, device, autocast=device == "cuda"
    )


def t5(device: str) -> Built:
    from transformers import T5Config, T5ForConditionalGeneration

    small = {} if device == "cuda" else {"num_layers": 3, "d_model": 256, "d_ff": 1024, "vocab_size": 5000}
    config = T5Config(use_cache=False, decoder_start_token_id=0, **small)
    x = tokens(device, config.vocab_size, (16, 256), (4, 64))
    return language_model(
        T5ForConditionalGeneration(config).to(device), {"input_ids": x, "labels": x}, device, autocast=False
    )


def resnet50(device: str) -> Built:
    import torchvision

    model = torchvision.models.resnet50().to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    x = torch.randn(128 if device == "cuda" else 4, 3, 224, 224, device=device).to(memory_format=torch.channels_last)
    return classifier(model, x, 1000, optimizer, device, autocast=device == "cuda")


def vit(device: str) -> Built:
    import torchvision

    model = torchvision.models.vit_b_16().to(device)
    x = torch.randn(64 if device == "cuda" else 2, 3, 224, 224, device=device)
    return classifier(model, x, 1000, torch.optim.AdamW(model.parameters(), 1e-4), device, autocast=device == "cuda")


def mobilenet(device: str) -> Built:
    import torchvision

    model = torchvision.models.mobilenet_v3_small().to(device)
    x = torch.randn(32 if device == "cuda" else 8, 3, 128, 128, device=device)
    return classifier(model, x, 1000, torch.optim.AdamW(model.parameters(), 1e-3), device, autocast=False)


def unet(device: str) -> Built:
    from diffusers import UNet2DModel

    channels = (128, 256, 256) if device == "cuda" else (32, 64)
    model = UNet2DModel(
        sample_size=32, block_out_channels=channels, norm_num_groups=8,
        down_block_types=("DownBlock2D",) * len(channels), up_block_types=("UpBlock2D",) * len(channels),
    ).to(device)  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    x = torch.randn(64 if device == "cuda" else 4, 3, 32, 32, device=device)
    when = torch.randint(1000, (len(x),), device=device)

    def step() -> Tensor:
        noise = torch.randn_like(x)
        loss = F.mse_loss(model(x + noise, when).sample, noise)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return model, optimizer, step


def gcn(device: str) -> Built:
    from torch_geometric.nn import GCN

    nodes, edges = (100_000, 1_000_000) if device == "cuda" else (5_000, 30_000)
    model = GCN(64, 128, num_layers=4, out_channels=16).to(device)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    x, y = torch.randn(nodes, 64, device=device), torch.randint(16, (nodes,), device=device)
    links = torch.randint(nodes, (2, edges), device=device)

    def step() -> Tensor:
        loss = F.cross_entropy(model(x, links), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return model, optimizer, step


class Lstm(nn.Module):
    """Embedding, two recurrent layers, a head: the word-level language model of PyTorch's examples."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, 2, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(self.embed(x))[0])


def lstm(device: str) -> Built:
    vocabulary = 1000
    model = Lstm(vocabulary, 512 if device == "cuda" else 64).to(device)
    x = tokens(device, vocabulary, (64, 128), (16, 32))
    return next_token(model, x, vocabulary, torch.optim.SGD(model.parameters(), 0.5))


class Block(nn.Module):
    """A block as nanoGPT writes it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, -1).transpose(1, 2) for part in self.c_attn(self.ln_1(x)).chunk(3, 2)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.ln_2(x))


class NanoGpt(nn.Module):
    """A GPT as nanoGPT writes it."""

    def __init__(self, vocabulary: int, length: int, width: int, depth: int, heads: int) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.h = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.ln_f, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1], device=x.device)
        return self.head(self.ln_f(self.h(self.wte(x) + self.wpe(places))))


def nanogpt(device: str) -> Built:
    vocabulary = 5000
    size = (1024, 768, 12, 12) if device == "cuda" else (64, 128, 4, 4)
    model = NanoGpt(vocabulary, *size).to(device)
    x = tokens(device, vocabulary, (16, 1024), (12, 64))
    return next_token(model, x, vocabulary, torch.optim.AdamW(model.parameters(), 3e-4))


def gpt_like(device: str) -> Built:
    """The step of benchmarks/overhead.py: 10 M parameters, about half a second on two cores."""
    vocabulary = 5000
    model = NanoGpt(vocabulary, 128, 320, 6, 5).to(device)
    return next_token(
        model, tokens(device, vocabulary, (16, 128), (8, 128)), vocabulary, torch.optim.AdamW(model.parameters())
    )


def next_token(model: nn.Module, x: Tensor, vocabulary: int, optimizer: torch.optim.Optimizer) -> Built:
    def step() -> Tensor:
        loss = F.cross_entropy(model(x[:, :-1]).reshape(-1, vocabulary), x[:, 1:].reshape(-1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return model, optimizer, step


def tiny_mlp(device: str) -> Built:
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 5)).to(device)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    return classifier(model, torch.randn(32, 20, device=device), 5, optimizer, device, autocast=False)


def small_cnn(device: str) -> Built:
    layers: list[nn.Module] = []
    for inner, outer in ((3, 32), (32, 64), (64, 128)):
        layers += [nn.Conv2d(inner, outer, 3, padding=1), nn.BatchNorm2d(outer), nn.ReLU(), nn.MaxPool2d(2)]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(128 * 16, 10)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    return classifier(model, torch.randn(64, 3, 32, 32, device=device), 10, optimizer, device, autocast=False)


MODELS: dict[str, Model] = {
    "transformers GPT-2": Model("transformers", gpt2),
    "transformers Llama": Model("transformers", llama),
    "transformers BERT": Model("transformers", bert),
    "transformers T5": Model("transformers", t5),
    "torchvision ResNet-50": Model("torchvision", resnet50),
    "torchvision ViT-B/16": Model("torchvision", vit),
    "torchvision MobileNetV3-small": Model("torchvision", mobilenet),
    "diffusers UNet2D": Model("diffusers", unet),
    "PyG GCN": Model("torch_geometric", gcn),
    "LSTM": Model("torch", lstm),
    "nanoGPT-like": Model("torch", nanogpt),
    "GPT-like 10 M": Model("torch", gpt_like),
    "CNN": Model("torch", small_cnn),
    "tiny MLP": Model("torch", tiny_mlp),
}


# ------------------------------------------------------------------ variants and timing

PARAMETERS = ("parameters", "gradients")
VARIANTS: dict[str, dict[str, Any] | None] = {
    "bare": None,
    "bare again": None,
    "no-op hooks": None,
    "as it comes": {},
    "budget=None": {"budget": None},
    "parameters + gradients": {"what": PARAMETERS, "diagnose": False},
    "every=10": {"every": 10},
}
GOVERNED = ("bare", "bare again", "as it comes", "every=10", "budget=None")
"""Variants that run for `--steps`: the governor needs time to settle, and steps are taped and judged now and then."""


@dataclass
class Timed:
    """Means per step, in milliseconds, the loss after the first 24 steps, and the peak memory in MiB."""

    wall_ms: float
    cpu_ms: float
    first_ms: float
    loss: float
    peak_mib: float = 0.0
    beginning_s: float = 0.0
    """Seconds that the first 24 steps and those of `--settle` took together."""
    cost: dict[str, Any] | None = None


@contextlib.contextmanager
def put_around(model: nn.Module, optimizer: torch.optim.Optimizer, variant: str, folder: Path) -> Any:
    options = VARIANTS[variant]
    if options is not None:
        with sonde.watch(model, optimizer, run=folder / "run", **options) as session:
            yield session
        return
    handles = []
    if variant == "no-op hooks":
        handles = [module.register_forward_hook(lambda m, a, o: None) for module in model.modules()]
    yield None
    for handle in handles:
        handle.remove()


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def run_steps(step: Step, count: int, session: Any, device: str) -> tuple[float, float, float]:
    """Return wall-clock and CPU time per step in milliseconds, and the last loss."""
    wait(device)
    began, began_cpu = time.perf_counter(), time.process_time()
    for _ in range(count):
        loss = step()
        if session is not None:
            session.log(loss=loss)
    wait(device)
    wall, cpu = time.perf_counter() - began, time.process_time() - began_cpu
    return wall * 1e3 / count, cpu * 1e3 / count, float(loss)


def measure(model: Model, variant: str, device: str, steps: int, settle: int = 0) -> Timed:
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    torch.manual_seed(0)
    with torch.device(device):  # weights are made where they are used, which is faster
        network, optimizer, step = model.build(device)
    with (
        tempfile.TemporaryDirectory(prefix="sonde-bench-") as scratch,
        put_around(network, optimizer, variant, Path(scratch)) as session,
    ):
        first, _, loss = run_steps(step, WARM_UP, session, device)
        settling = run_steps(step, settle, session, device)[0] if settle else 0.0
        wall, cpu, _ = run_steps(step, steps, session, device)
        cost = session.cost if hasattr(session, "cost") else None
    peak = torch.cuda.max_memory_allocated() / 2**20 if device == "cuda" else 0.0
    beginning = (first * WARM_UP + settling * settle) / 1e3
    return Timed(wall, cpu, first, loss, peak, beginning, cost.to_json() if cost is not None else None)


def examine(name: str, options: argparse.Namespace) -> dict[str, list[Timed]]:
    variants = [variant for variant in VARIANTS if not options.variants or variant in options.variants]
    if "bare" not in variants:
        variants = ["bare", *variants]
    found: dict[str, list[Timed]] = {variant: [] for variant in variants}
    measure(MODELS[name], "bare", options.device, 1)  # the first use of each operation is slow
    for number in range(options.rounds):
        turn = number % len(variants)
        for variant in variants[turn:] + variants[:turn]:
            steps = options.steps if variant in GOVERNED else min(options.steps, options.fixed_steps)
            found[variant].append(measure(MODELS[name], variant, options.device, steps, options.settle))
    return found


def ratio(found: dict[str, list[Timed]], variant: str, field: str) -> float:
    pairs = zip(found[variant], found["bare"], strict=True)
    return statistics.median(getattr(ours, field) / getattr(bare, field) for ours, bare in pairs)


def show(name: str, found: dict[str, list[Timed]]) -> None:
    bare = statistics.median(timed.wall_ms for timed in found["bare"])
    print(f"\n{name}: bare {bare:.2f} ms a step", flush=True)
    print(f"  {'':24s} {'wall':>7s} {'CPU':>7s} {'first 24':>9s} {'beginning':>10s} {'peak MiB':>9s}  loss")
    for variant, timings in found.items():
        same = "same" if {t.loss for t in timings} == {found["bare"][0].loss} else "DIFFERENT"
        cells = [ratio(found, variant, field) for field in ("wall_ms", "cpu_ms", "first_ms")]
        peak = max(timed.peak_mib for timed in timings)
        pairs = zip(timings, found["bare"], strict=True)
        more = statistics.median(timed.beginning_s - base.beginning_s for timed, base in pairs)
        print(
            f"  {variant:24s} {cells[0]:7.3f} {cells[1]:7.3f} {cells[2]:9.3f} {more:+9.2f}s {peak:9.0f}  {same}",
            flush=True,
        )
        if timings[-1].cost:
            print(f"  {'':24s} {timings[-1].cost}", flush=True)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", nargs="*", default=[], help="names of models")
    parser.add_argument("--variants", nargs="*", default=[], help="names of variants; bare is always there")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=176, help="after the first 24, of variants that adapt")
    parser.add_argument("--settle", type=int, default=0, help="steps after the first 24 that are not timed")
    parser.add_argument("--fixed-steps", type=int, default=40, help="the same of all others")
    parser.add_argument("--json", type=Path, default=None, help="also write every timing to this file")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    torch.backends.cuda.matmul.allow_tf32 = True
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name() if options.device == 'cuda' else 'CPU'}")
    results: dict[str, Any] = {}
    for name, model in MODELS.items():
        if options.only and name not in options.only:
            continue
        if importlib.util.find_spec(model.package) is None:
            print(f"\n{name}: not measured, {model.package} is not installed", flush=True)
            continue
        try:
            found = examine(name, options)
        except (ImportError, RuntimeError) as error:
            print(f"\n{name}: not measured: {error}", flush=True)
            continue
        show(name, found)
        results[name] = {variant: [asdict(timed) for timed in timings] for variant, timings in found.items()}
        if options.json is not None:
            options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
