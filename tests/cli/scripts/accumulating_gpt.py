"""In the style of nanoGPT: argparse, tied weights, parameter groups, a schedule, accumulation, clipping, evaluation."""

import argparse

import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        batch, time, width = x.shape
        parts = self.attn(self.ln_1(x)).split(width, 2)
        q, k, v = (each.view(batch, time, self.heads, -1).transpose(1, 2) for each in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, time, width)
        x = x + self.proj(y)
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, vocabulary=32, time=16, width=32, layers=2, heads=2):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(time, width)
        self.h = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.ln_f, self.lm_head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, tokens, targets):
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1]))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def get_batch():
    tokens = (torch.randint(0, 1000, (8, 1)) + torch.arange(17)) % 32
    return tokens[:, :-1], tokens[:, 1:]


@torch.no_grad()
def estimate_loss(model):
    model.eval()
    loss = sum(model(*get_batch()).item() for _ in range(3)) / 3
    model.train()
    return loss


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--max_iters", type=int, default=20)
    options = parser.parse_args()
    torch.manual_seed(1337)
    model = GPT()
    decayed = [each for each in model.parameters() if each.dim() >= 2]
    others = [each for each in model.parameters() if each.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=options.lr, betas=(0.9, 0.95))
    for iteration in range(options.max_iters):
        for group in optimizer.param_groups:
            group["lr"] = options.lr * min(1, (iteration + 1) / 10)
        if iteration % 10 == 0:
            print(estimate_loss(model))
        for _ in range(2):
            (model(*get_batch()) / 2).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    print(sum(each.double().sum() for each in model.parameters()).item())


if __name__ == "__main__":
    main()
