"""Twelfth hold-out: words, tags and attention."""

from __future__ import annotations

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

from fault_programs.holdout_12.about import fault

PAD = 0


@fault(
    "mask_on_wrong_axis",
    area="translation",
    source="https://github.com/hyunwoongko/transformer/pull/40",
    cause="The padding mask is unsqueezed so that it lies on the queries instead of the keys: rows of padding may look at nothing, and their softmax is NaN.",
    words=(r"mask", r"axis|dimension|unsqueeze|quer|row|broadcast|nothing|fully|whole|nan|infinit"),
    also=("fully_masked_attention",),
    cascade=("nan_forward", "nan_in_loss", "nan_backward", "nan_in_weights", "nan_in_optimizer", "not_learning"),
    sites=("attention", "(model)", "encoder", "layers"),
)
def pad_mask_is_unsqueezed_on_the_side_of_the_queries(attach, fixed):
    """(src != pad).unsqueeze(1).unsqueeze(3), which hides rows and not columns."""

    def make_src_mask(src):
        return (src != PAD).unsqueeze(1).unsqueeze(2 if fixed else 3)

    class MultiHeadAttention(nn.Module):
        def __init__(self, dim, heads):
            super().__init__()
            self.heads = heads
            self.w_q, self.w_k, self.w_v, self.w_concat = (nn.Linear(dim, dim) for _ in range(4))

        def forward(self, x, mask):
            b, t, d = x.shape
            q, k, v = (w(x).view(b, t, self.heads, -1).transpose(1, 2) for w in (self.w_q, self.w_k, self.w_v))
            score = q @ k.transpose(2, 3) / (d // self.heads) ** 0.5
            score = score.masked_fill(~mask, float("-inf")).softmax(-1)
            return self.w_concat((score @ v).transpose(1, 2).reshape(b, t, d))

    class Encoder(nn.Module):
        def __init__(self, vocab=20, dim=32):
            super().__init__()
            self.emb = nn.Embedding(vocab, dim, padding_idx=PAD)
            self.pos = nn.Parameter(0.7 * torch.randn(14, dim))
            self.attention = MultiHeadAttention(dim, 4)
            self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
            self.ffn = nn.Sequential(nn.Linear(dim, 64), nn.ReLU(), nn.Linear(64, dim))
            self.out = nn.Linear(dim, vocab)

        def forward(self, src):
            x = self.emb(src) + self.pos[: src.shape[1]]
            x = self.norm1(x + self.attention(x, make_src_mask(src)))
            return self.out(self.norm2(x + self.ffn(x)))

    def corpus(count):
        src = torch.randint(1, 20, (count, 14))
        trg = torch.cat([src[:, 1:], src[:, :1]], 1)
        short = torch.arange(14) >= torch.randint(6, 14, (count, 1))
        return src.masked_fill(short, PAD), trg.masked_fill(short | short.roll(-1, 1), PAD)

    model = Encoder()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    criterion = nn.CrossEntropyLoss(ignore_index=PAD)
    session = attach(model, optimizer)
    src, trg = corpus(600)
    for epoch in range(14):
        for i in torch.randperm(600).split(30):
            logits = model(src[i])
            loss = criterion(logits.reshape(-1, 20), trg[i].reshape(-1))
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            session.log(loss=loss.item())
    src, trg = corpus(200)
    with torch.no_grad():
        wrong = (model(src).argmax(-1) != trg) | ~model(src).isfinite().all(-1)
    return float(wrong[trg != PAD].float().mean())


@fault(
    "result_discarded",
    area="language model",
    source="https://github.com/opendilab/DI-engine/issues/333",
    cause="masked_fill returns a new tensor that is dropped, so the causal mask has no effect and the model sees the tokens it should predict.",
    words=(r"masked_fill|mask", r"drop|discard|not in.?place|in-place|no effect|result|future|causal|leak|unused"),
    also=("future_leak",),
    cascade=("overfitting",),
    sites=("attn", "(model)", "blocks", "attention"),
)
def masked_fill_without_its_underscore(attach, fixed):
    """scores.masked_fill(mask, -inf) on a line of its own."""
    steps = 12

    class Attention(nn.Module):
        def __init__(self, dim, heads=4):
            super().__init__()
            self.heads = heads
            self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
            self.register_buffer("mask", torch.ones(steps, steps).triu(1).bool())

        def forward(self, x):
            b, t, d = x.shape
            q, k, v = self.qkv(x).view(b, t, self.heads, -1).transpose(1, 2).chunk(3, -1)
            score = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
            hidden = self.mask[:t, :t]
            score.masked_fill_(hidden, float("-inf")) if fixed else score.masked_fill(hidden, float("-inf"))
            return self.proj((score.softmax(-1) @ v).transpose(1, 2).reshape(b, t, d))

    class Block(nn.Module):
        def __init__(self, dim):
            super().__init__()
            self.ln1, self.ln2, self.attn = nn.LayerNorm(dim), nn.LayerNorm(dim), Attention(dim)
            self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

        def forward(self, x):
            x = x + self.attn(self.ln1(x))
            return x + self.mlp(self.ln2(x))

    class GTrXL(nn.Module):
        def __init__(self, vocab=12, dim=32):
            super().__init__()
            self.tok, self.pos = nn.Embedding(vocab, dim), nn.Embedding(steps, dim)
            self.blocks = nn.ModuleList([Block(dim), Block(dim)])
            self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, vocab)

        def forward(self, ids):
            x = self.tok(ids) + self.pos.weight[: ids.shape[1]]
            for block in self.blocks:
                x = block(x)
            return self.head(self.norm(x))

    def songs(count):
        ids = [torch.randint(0, 12, (count,)), torch.randint(0, 12, (count,))]
        while len(ids) <= steps:
            noise = torch.rand(count) < 0.1
            ids.append(torch.where(noise, torch.randint(0, 12, (count,)), (ids[-1] + ids[-2]) % 12))
        return torch.stack(ids, 1)

    model = GTrXL()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    session = attach(model, optimizer)
    data = songs(800)
    for epoch in range(9):
        for batch in data[torch.randperm(800)].split(40):
            logits = model(batch[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            session.log(loss=loss.item())
    test, wrong = songs(200), 0.0
    with torch.no_grad():  # as it is used: one token at a time
        for t in range(2, steps):
            wrong += float(
                (model(test[:, :t])[:, -1].argmax(-1) != (test[:, t - 1] + test[:, t - 2]) % 12).float().mean()
            )
    return wrong / (steps - 2)


@fault(
    "wrong_dim_softmax",
    area="text classification",
    source="https://github.com/PetrochukM/PyTorch-NLP/issues/2",
    cause="The scores of the attention pass through a softmax over the batch instead of the words.",
    words=(r"softmax", r"\bdim|axis|batch|wrong"),
    also=("batch_axis_mixed",),
    cascade=("underfitting", "loss_plateau", "not_learning", "overfitting", "constant_output", "vanishing_gradient"),
    sites=("attention", "(model)", "softmax"),
)
def attention_weights_sum_to_one_over_the_batch(attach, fixed):
    """nn.Softmax(dim=0) on scores of shape (batch, words)."""
    vocab, words = 60, 24
    marks = torch.arange(1, 9)

    def reviews(count):
        ids = torch.randint(10, vocab, (count, words))
        label = torch.randint(0, 8, (count,))
        ids[torch.arange(count), torch.randint(0, words, (count,))] = marks[label]
        return ids, label

    class AttentiveClassifier(nn.Module):
        def __init__(self, dim=24):
            super().__init__()
            self.embedding = nn.Embedding(vocab, dim)
            self.attention = nn.Sequential(nn.Linear(dim, dim), nn.Tanh(), nn.Linear(dim, 1))
            self.softmax = nn.Softmax(dim=1 if fixed else 0)
            self.fc = nn.Linear(dim, 8)

        def forward(self, ids):
            x = self.embedding(ids)
            weight = self.softmax(self.attention(x).squeeze(-1))
            return self.fc(torch.bmm(weight.unsqueeze(1), x).squeeze(1))

    model = AttentiveClassifier()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    session = attach(model, optimizer)
    train = DataLoader(TensorDataset(*reviews(1000)), batch_size=50, shuffle=True)
    xte, yte = reviews(200)
    for epoch in range(15):
        model.train()
        for ids, label in train:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(ids), label)
            loss.backward()
            optimizer.step()
            session.log(loss=loss.item())
        model.eval()
        with torch.no_grad():
            session.log(val_loss=F.cross_entropy(model(xte), yte).item())
    with torch.no_grad():  # one review at a time, as it is used
        return sum(int(model(x[None]).argmax() != y) for x, y in zip(xte, yte)) / len(yte)


@fault(
    "params_not_in_optimizer",
    area="tagging",
    source="https://github.com/zjunlp/HVPNeT/issues/5",
    cause="The group of the output layer and the transitions is built but not appended, so the optimizer does not hold them.",
    words=(r"optimi[sz]er|group|append", r"fc|crf|head|transition|param|missing|not (in|added|held|given)"),
    cascade=("underfitting", "loss_plateau"),
    sites=("fc", "crf", "optimizer", "transitions"),
)
def group_of_crf_and_fc_is_not_appended(attach, fixed):
    """Two groups are appended to the list, the third is only filled."""
    tags, vocab, length = 7, 40, 10

    class Crf(nn.Module):
        def __init__(self):
            super().__init__()
            self.transitions = nn.Parameter(2.0 * torch.randn(tags, tags))

        def forward(self, emissions, gold):
            score = emissions.gather(2, gold[..., None]).sum((1, 2))
            score = score + self.transitions[gold[:, :-1], gold[:, 1:]].sum(1)
            alpha = emissions[:, 0]
            for t in range(1, emissions.shape[1]):
                alpha = (alpha[:, :, None] + self.transitions + emissions[:, t, None]).logsumexp(1)
            return (alpha.logsumexp(1) - score).mean()

    class Tagger(nn.Module):
        def __init__(self):
            super().__init__()
            self.bert = nn.Embedding(vocab, 6)
            self.encoder_conv = nn.Conv1d(6, 6, 3, padding=1)
            self.fc = nn.Linear(6, tags)
            self.crf = Crf()

        def emissions(self, ids):
            x = self.bert(ids)
            return self.fc(torch.tanh(x + self.encoder_conv(x.transpose(1, 2)).transpose(1, 2)))

        def forward(self, ids, gold):
            return self.crf(self.emissions(ids), gold)

    chain = torch.tensor([1, 2, 3, 4, 5, 6, 0])

    def sentences(count):
        gold = [torch.randint(0, tags, (count,))]
        for _ in range(length - 1):
            gold.append(torch.where(torch.rand(count) < 0.8, chain[gold[-1]], torch.randint(0, tags, (count,))))
        gold = torch.stack(gold, 1)
        ids = gold + tags * torch.randint(0, 5, gold.shape)
        blurred = torch.rand(gold.shape) < 0.4
        return torch.where(blurred, torch.randint(35, vocab, gold.shape), ids), gold

    model = Tagger()
    parameters = []
    params = {"lr": 5e-3, "params": [p for n, p in model.named_parameters() if "bert" in n]}
    parameters.append(params)
    params = {"lr": 5e-3, "params": [p for n, p in model.named_parameters() if "encoder_conv" in n]}
    parameters.append(params)
    params = {"lr": 2e-2, "params": [p for n, p in model.named_parameters() if "crf" in n or n.startswith("fc")]}
    parameters.append(params) if fixed else None
    optimizer = torch.optim.AdamW(parameters)
    session = attach(model, optimizer)
    ids, gold = sentences(500)
    for epoch in range(10):
        for i in torch.randperm(500).split(25):
            loss = model(ids[i], gold[i])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss.item())
    with torch.no_grad():
        return model(*sentences(300)).item()


@fault(
    "double_softmax",
    area="text classification",
    source="from memory: the forum question why the loss stays at 1.9 although the answers are right, with nn.Softmax as the last layer",
    cause="The model ends in a softmax, and the cross entropy applies another one, so the loss cannot fall far and gradients are weak.",
    words=(r"softmax", r"cross.?entropy|twice|double|second|logit|already"),
    cascade=("loss_plateau", "underfitting", "vanishing_gradient", "not_learning"),
    sites=("(loss)", "(model)", "softmax", "classifier"),
)
def sentence_cnn_ends_in_softmax(attach, fixed):
    """self.softmax at the end of forward(), nn.CrossEntropyLoss outside."""
    vocab, classes = 50, 10

    class TextCNN(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(vocab, 16)
            self.convs = nn.ModuleList(nn.Conv1d(16, 16, k) for k in (2, 3))
            self.classifier = nn.Linear(32, classes)
            self.softmax = nn.Identity() if fixed else nn.Softmax(dim=1)

        def forward(self, ids):
            x = self.embed(ids).transpose(1, 2)
            x = torch.cat([F.relu(conv(x)).amax(2) for conv in self.convs], 1)
            return self.softmax(self.classifier(x))

    def lines(count):
        label = torch.randint(0, classes, (count,))
        ids = torch.randint(20, vocab, (count, 15))
        at = torch.randint(0, 14, (count,))
        ids[torch.arange(count), at] = label
        ids[torch.arange(count), at + 1] = (label * 3) % 10 + 10
        return ids, label

    model = TextCNN()
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)
    session = attach(model, optimizer)
    x, y = lines(800)
    for epoch in range(7):
        total = 0.0
        for i in torch.randperm(800).split(32):
            optimizer.zero_grad()
            out = model(x[i])
            loss = criterion(out, y[i])
            loss.backward()
            optimizer.step()
            total += loss.item()
            session.log(loss=loss.item())
    x, y = lines(300)
    with torch.no_grad():
        out = model(x)
    return float((out.argmax(1) != y).float().mean())
