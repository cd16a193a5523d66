"""Small real trainings, written as a newcomer writes them, each with one thing planted that the viewer must tell."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

import sonde

SPIKE_STEP = 301
SPIKE_FACTOR = 60.0


class LanguageModel(nn.Module):
    """Characters in, the next character out."""

    def __init__(self, size: int = 16, vocabulary: int = 24) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, size)
        self.blocks = nn.ModuleList(Block(size) for _ in range(2))
        self.norm = nn.LayerNorm(size)
        self.head = nn.Linear(size, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


class Block(nn.Module):
    """Attention over what came before, then a small network."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(size), nn.LayerNorm(size)
        self.qkv, self.proj = nn.Linear(size, 3 * size), nn.Linear(size, size)
        self.mlp = nn.Sequential(nn.Linear(size, 2 * size), nn.GELU(), nn.Linear(2 * size, size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm1(x)).chunk(3, -1)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attended)
        changed: torch.Tensor = x + self.mlp(self.norm2(x))
        return changed


def text_batches(steps: int, vocabulary: int = 24) -> Iterator[torch.Tensor]:
    """Yield batches of a language in which each character depends on the two before it."""
    table = torch.randint(0, vocabulary, (vocabulary, vocabulary), generator=torch.Generator().manual_seed(1))
    draw = torch.Generator().manual_seed(2)
    for _ in range(steps):
        rows = [torch.randint(0, vocabulary, (2, 16), generator=draw)]
        rows = list(rows[0])
        while len(rows) < 14:
            usual = table[rows[-2] % 4, rows[-1]]
            odd = torch.randint(0, vocabulary, (16,), generator=draw)
            rows.append(torch.where(torch.rand(16, generator=draw) < 0.85, usual, odd))
        yield torch.stack(rows, 1)


def language_model_with_a_spike(folder: Path, steps: int = 420) -> Path:
    """Train a language model whose learning rate is 60 times too high at step 301, and right again after it."""
    torch.manual_seed(0)
    model = LanguageModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    with sonde.watch(model, optimizer, run=folder / "language", tape=False) as session:
        for step, tokens in enumerate(text_batches(steps), 1):
            optimizer.param_groups[0]["lr"] = 3e-3 * (SPIKE_FACTOR if step == SPIKE_STEP else 1.0)
            logits = model(tokens[:, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss)
    return folder / "language"


def healthy_cnn(folder: Path, epochs: int = 5) -> Path:
    """Train a small network on pictures of stripes, with a validation after each epoch."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(2),
        nn.Flatten(), nn.Linear(64, 4),
    )  # fmt: skip
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    x, y = stripes(640)
    x_val, y_val = stripes(128, seed=5)
    with sonde.watch(model, optimizer, run=folder / "cnn") as session:
        for epoch in range(epochs):
            model.train()
            for batch in torch.randperm(640).split(16):
                loss = nn.functional.cross_entropy(model(x[batch]), y[batch])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                session.log(loss=loss, epoch=epoch)
            model.eval()
            with torch.no_grad():
                logits = model(x_val)
            session.log(val_loss=nn.functional.cross_entropy(logits, y_val),
                        val_accuracy=(logits.argmax(1) == y_val).float().mean())  # fmt: skip
    return folder / "cnn"


def stripes(number: int, seed: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    """Return pictures of stripes of four directions, and which of them each shows."""
    draw = torch.Generator().manual_seed(seed)
    label = torch.randint(0, 4, (number,), generator=draw)
    angle = label * torch.pi / 4
    phase = 6.28 * torch.rand(number, 1, 1, generator=draw)
    rows, columns = torch.meshgrid(torch.arange(12.0), torch.arange(12.0), indexing="ij")
    along = rows * torch.cos(angle)[:, None, None] + columns * torch.sin(angle)[:, None, None]
    pictures = torch.sin(1.2 * along + phase) + 0.6 * torch.randn(number, 12, 12, generator=draw)
    return pictures[:, None], label


def gan(folder: Path, steps: int = 150) -> Path:
    """Train a generator against a discriminator, each with a loss and an optimizer of its own."""
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(4, 24), nn.ReLU(), nn.Linear(24, 2))
    critic = nn.Sequential(nn.Linear(2, 24), nn.LeakyReLU(0.2), nn.Linear(24, 1))
    model = nn.ModuleDict({"generator": generator, "critic": critic})
    first = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.99))
    second = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.5, 0.99))
    judge = nn.functional.binary_cross_entropy_with_logits
    with sonde.watch(model, [first, second], run=folder / "gan") as session:
        for _ in range(steps):
            real = torch.randn(32, 2) * 0.5 + 1.0
            fake = generator(torch.randn(32, 4))
            d_loss = judge(critic(real), torch.ones(32, 1)) + judge(critic(fake.detach()), torch.zeros(32, 1))
            second.zero_grad()
            d_loss.backward()
            second.step()
            g_loss = judge(critic(fake), torch.ones(32, 1))
            first.zero_grad()
            g_loss.backward()
            first.step()
            session.log(d_loss=d_loss, g_loss=g_loss)
    return folder / "gan"


def nan_between_model_and_loss(folder: Path, steps: int = 60, bad: int = 41) -> Path:
    """Train a regression whose loop divides the scores of the model by a temperature, which becomes zero."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with sonde.watch(model, optimizer, run=folder / "nan") as session:
        for step in range(1, steps + 1):
            scores = model(torch.randn(32, 6))  # its output is finite
            scores = (scores - scores.mean()) / (1.0 if step < bad else 0.0)
            loss = nn.functional.mse_loss(scores, torch.ones(32, 1))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss)
    return folder / "nan"


def check_shapes(logits: torch.Tensor, labels: torch.Tensor) -> None:
    """Refuse a batch, as users' own checks do."""
    if len(labels) % 2:
        raise ValueError(f"expected an even batch, got {len(labels)} labels")


def raises_in_users_code(folder: Path) -> Path:
    """Train until a check of the user's own raises, inside a function that the loop calls."""
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        with sonde.watch(model, optimizer, run=folder / "raises") as session:
            for step in range(1, 30):
                x = torch.randn(33 if step == 20 else 32, 6)
                logits, labels = model(x), x.argmax(1) % 3
                check_shapes(logits, labels)
                loss = nn.functional.cross_entropy(logits, labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                session.log(loss=loss)
    except ValueError:
        pass
    return folder / "raises"


BAD_BATCH = 1001


def long_regression(folder: Path, steps: int = 2500) -> Path:
    """Train until nothing moves any more, over more steps than a chart has points, with one bad batch on the way.

    The exponential of the loss, which the program logs too, is infinite in the first steps.
    """
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    nn.init.constant_(model.weight, 8.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    with sonde.watch(model, optimizer, run=folder / "long", tape=False) as session:
        for step in range(1, steps + 1):
            x = torch.randn(64, 4)
            noise = 0.3 * torch.randn(64, 1)
            target = x.sum(1, keepdim=True) + noise + (4.0 if step == BAD_BATCH else 0.0)
            loss = nn.functional.mse_loss(model(x), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss, perplexity=torch.exp(loss.detach()))
    return folder / "long"


def gradients_not_cleared_at_first(folder: Path, steps: int = 220, cleared_from: int = 80) -> Path:
    """Train without clearing gradients until the program does: what is found holds for some steps only."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=2e-3)
    with sonde.watch(model, optimizer, run=folder / "mended", tape=False, budget=None) as session:
        for step in range(1, steps + 1):
            x = torch.randn(32, 6)
            loss = nn.functional.mse_loss(model(x), x[:, :1].sin() + x[:, 1:2])
            if step >= cleared_from:
                optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss)
    return folder / "mended"


ALL = (
    language_model_with_a_spike,
    healthy_cnn,
    gan,
    nan_between_model_and_loss,
    raises_in_users_code,
    long_regression,
    gradients_not_cleared_at_first,
)
