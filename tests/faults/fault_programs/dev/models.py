"""Models that several programs train."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Perceptron(nn.Module):
    """Three layers, with functional rectifiers."""

    def __init__(self, inside: int = 64, hidden: int = 64, outside: int = 10) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(inside, hidden), nn.Linear(hidden, hidden)
        self.fc3 = nn.Linear(hidden, outside)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc3(F.relu(self.fc2(F.relu(self.fc1(x)))))


class SmallCNN(nn.Module):
    """Two convolutions and a classifier, as in every first tutorial."""

    def __init__(self, width: int = 8, classes: int = 10) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(width, 2 * width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        )  # fmt: skip
        self.classifier = nn.Sequential(nn.Flatten(), nn.Linear(8 * width, 32), nn.ReLU(), nn.Linear(32, classes))

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x))


class Residual(nn.Module):
    def __init__(self, width: int, momentum: float = 0.1) -> None:
        super().__init__()
        self.conv1, self.bn1 = (
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width, momentum=momentum),
        )
        self.conv2, self.bn2 = (
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width, momentum=momentum),
        )

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)))
        return F.relu(x + self.bn2(self.conv2(out)))


class TinyResNet(nn.Module):
    """A stem and two residual blocks with batch norm."""

    def __init__(self, width: int = 8, classes: int = 10, dropout: float = 0.0, momentum: float = 0.1) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1, bias=False), nn.BatchNorm2d(width, momentum=momentum), nn.ReLU()
        )
        self.layer1, self.layer2 = Residual(width, momentum), Residual(width, momentum)
        self.pool, self.drop = nn.MaxPool2d(2), nn.Dropout(dropout)
        self.fc = nn.Linear(width * 4, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer2(self.pool(self.layer1(self.stem(x))))
        return self.fc(self.drop(self.pool(x).flatten(1)))


class Recurrent(nn.Module):
    """A recurrent net over a sequence, and a head on the mean of its states."""

    def __init__(self, cell: type[nn.RNNBase] = nn.LSTM, inside: int = 1, hidden: int = 24, outside: int = 4) -> None:
        super().__init__()
        self.rnn = cell(inside, hidden, batch_first=True)
        self.head = nn.Linear(hidden, outside)

    def forward(self, x: Tensor) -> Tensor:
        out, _ = self.rnn(x)
        return self.head(out.mean(1))


class Block(nn.Module):
    """A transformer block with the norm inside the residual."""

    def __init__(self, dim: int, heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = nn.MultiheadAttention(dim, heads, dropout=dropout, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        h = self.ln1(x)
        x = x + self.attn(h, h, h, attn_mask=mask, need_weights=False)[0]
        return x + self.mlp(self.ln2(x))


class TinyLM(nn.Module):
    """A language model of two blocks that looks back only."""

    def __init__(self, vocab: int = 16, dim: int = 32, length: int = 16, depth: int = 2) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(vocab, dim), nn.Embedding(length, dim)
        self.blocks = nn.ModuleList(Block(dim, 2) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, vocab, bias=False)
        self.register_buffer("mask", torch.triu(torch.full((length, length), float("-inf")), 1), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.position(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x, self.mask[: ids.shape[1], : ids.shape[1]])
        return self.head(self.norm(x))


class SentenceEncoder(nn.Module):
    """Torch's own transformer encoder over tokens, averaged, with a head."""

    def __init__(self, vocab: int = 20, dim: int = 32, classes: int = 2, dropout: float = 0.1) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, dim, padding_idx=0)
        layer = nn.TransformerEncoderLayer(dim, 2, 64, dropout, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(dim, classes)

    def forward(self, ids: Tensor, padded: Tensor | None = None) -> Tensor:
        out = self.encoder(self.embed(ids), src_key_padding_mask=padded)
        return self.head(out.mean(1))


class AutoEncoder(nn.Module):
    def __init__(self, inside: int = 64, code: int = 12) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(inside, 48), nn.ReLU(), nn.Linear(48, code))
        self.decoder = nn.Sequential(nn.Linear(code, 48), nn.ReLU(), nn.Linear(48, inside))

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.encoder(x))


class VAE(nn.Module):
    def __init__(self, inside: int = 64, code: int = 8) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(inside, 64), nn.ReLU())
        self.mean, self.log_var = nn.Linear(64, code), nn.Linear(64, code)
        self.decoder = nn.Sequential(nn.Linear(code, 64), nn.ReLU(), nn.Linear(64, inside))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = self.encoder(x)
        mean, log_var = self.mean(h), self.log_var(h)
        z = mean + torch.randn_like(mean) * torch.exp(0.5 * log_var)
        return self.decoder(z), mean, log_var


class Mixture(nn.Module):
    """Four experts, of which a gate picks two for each sample."""

    def __init__(self, inside: int = 64, hidden: int = 32, outside: int = 10, experts: int = 4) -> None:
        super().__init__()
        self.gate = nn.Linear(inside, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(inside, hidden), nn.ReLU(), nn.Linear(hidden, outside)) for _ in range(experts)
        )

    def forward(self, x: Tensor) -> Tensor:
        weight, picked = self.gate(x).softmax(-1).topk(2, -1)
        out = x.new_zeros(len(x), self.experts[0][-1].out_features)
        for number, expert in enumerate(self.experts):
            rows, slot = torch.where(picked == number)
            if len(rows):
                out = out.index_add(0, rows, weight[rows, slot, None] * expert(x[rows]))
        return out
