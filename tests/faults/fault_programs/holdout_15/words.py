"""Fifteenth hold-out: words, masks and language models."""

from __future__ import annotations

import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

from fault_programs.holdout_15.about import fault
from fault_programs.holdout_15.material import sentences, wrong

PAD, BOS = 0, 1


@fault(
    "padding_dominates",
    area="formula to text",
    source="https://github.com/lukas-blecher/LaTeX-OCR/issues/305",
    cause="The loss ignores the index -100 while the padding has the index 0, so most of the loss is about the padding.",
    words=(r"pad|ignore_index|-100", r"loss|ignore|dominat|mask|mean|most|cross"),
    also=("mask_not_applied",),
    cascade=("underfitting", "loss_plateau", "lr_too_low", "single_class_output", "constant_output"),
    sites=("(loss)", "criterion", "(data)"),
    exact=False,
)
def padded_formulas_count_in_the_loss(attach, fixed):
    """ignore_index = -100 by default, while the tokenizer pads with 0."""
    vocab, longest = 24, 40

    def formulas(count):
        first = torch.randint(2, vocab, (count, 1))
        step = torch.randint(1, 4, (count, 1))
        ids = 2 + (first - 2 + step * torch.arange(longest)) % (vocab - 2)
        lengths = torch.randint(4, 8, (count, 1))
        lengths[torch.rand(count, 1) < 0.02] = longest
        return ids.masked_fill(torch.arange(longest) >= lengths, PAD)

    class Decoder(nn.Module):
        def __init__(self, dim=32):
            super().__init__()
            self.emb = nn.Embedding(vocab, dim, padding_idx=PAD)
            self.gru, self.to_logits = nn.GRU(dim, 64, batch_first=True), nn.Linear(64, vocab)

        def forward(self, ids):
            return self.to_logits(self.gru(self.emb(ids))[0])

    class AutoregressiveWrapper(nn.Module):
        def __init__(self, net, ignore_index=-100):
            super().__init__()
            self.net, self.ignore_index = net, ignore_index

        def forward(self, x):
            logits = self.net(x[:, :-1])
            return F.cross_entropy(logits.transpose(1, 2), x[:, 1:], ignore_index=self.ignore_index)

    model = AutoregressiveWrapper(Decoder(), ignore_index=PAD if fixed else -100)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    session = attach(model, optimizer)
    train, test = formulas(800), formulas(200)
    for epoch in range(8):
        for i in torch.randperm(800).split(40):
            loss = model(train[i])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss.item())
    with torch.no_grad():
        answer, real = model.net(test[:, :-1]).argmax(2), test[:, 1:]
    return float((answer != real)[(real != PAD) & (torch.arange(longest - 1) > 0)].float().mean())


@fault(
    "future_leak",
    area="language model",
    source="https://github.com/pytorch/tutorials/issues/2478",
    cause="The encoder of the language model gets no causal mask, so each position sees the word it is to foretell.",
    words=(r"causal|mask|future|leak|look.?ahead|next (word|token)", r"mask|future|see|attend|cheat|copy|next"),
    also=("mask_not_applied", "target_is_input"),
    cascade=("train_val_preproc_mismatch",),
    sites=("encoder", "(model)", "transformer_encoder", "(loop)"),
)
def word_model_runs_without_its_source_mask(attach, fixed):
    """self.transformer_encoder(src, src_mask) with src_mask = None."""
    vocab, bptt = 12, 16

    def text(count):
        ids = [torch.randint(0, vocab, (count,)), torch.randint(0, vocab, (count,))]
        for _ in range(bptt - 1):
            surprise = torch.rand(count) < 0.02
            ids.append(torch.where(surprise, torch.randint(0, vocab, (count,)), (ids[-1] + ids[-2] + 1) % vocab))
        return torch.stack(ids, 1)

    class TransformerModel(nn.Module):
        def __init__(self, dim=48):
            super().__init__()
            self.embedding = nn.Embedding(vocab, dim)
            self.position = nn.Parameter(0.5 * torch.randn(bptt, dim))
            layer = nn.TransformerEncoderLayer(dim, 4, 96, dropout=0.0, batch_first=True)
            self.transformer_encoder = nn.TransformerEncoder(layer, 2)
            self.linear = nn.Linear(dim, vocab)

        def forward(self, src):
            n = src.shape[1]
            src_mask = nn.Transformer.generate_square_subsequent_mask(n) if fixed else None
            x = self.embedding(src) * math.sqrt(48) / 4 + self.position[:n]
            return self.linear(self.transformer_encoder(x, src_mask))

    model = TransformerModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    session = attach(model, optimizer)
    data = text(900)
    for epoch in range(12):
        model.train()
        for i in torch.randperm(900).split(45):
            out = model(data[i, :-1])
            loss = F.cross_entropy(out.flatten(0, 1), data[i, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            session.log(loss=loss.item())
    model.eval()
    test = text(100)
    with torch.no_grad():  # as it is used: the words so far, then the next
        told = [model(test[:, :t])[:, -1].argmax(1) for t in (4, 8, 12)]
    truth = [(test[:, t - 1] + test[:, t - 2] + 1) % vocab for t in (4, 8, 12)]
    return float((torch.stack(told) != torch.stack(truth)).float().mean())


@fault(
    "mask_inverted",
    area="sound tokens",
    source="https://github.com/earthspecies/avex/pull/26",
    cause="The padding mask is 1 for real tokens while the encoder takes True for what is to be ignored, so it attends to the padding only.",
    words=(r"mask", r"invert|inverse|flip|opposite|wrong way|True|not "),
    cascade=(
        "underfitting",
        "loss_plateau",
        "input_ignored",
        "not_learning",
        "constant_output",
        "overfitting",
        "fully_masked_attention",
    ),
    sites=("encoder", "(model)", "attention", "self_attn"),
)
def encoder_is_told_which_tokens_are_real(attach, fixed):
    """src_key_padding_mask=(ids != pad)."""
    length = 20

    def calls(count):
        ids, kind = sentences(count, length=10)
        padded = torch.full((count, length), PAD)
        padded[:, :10] = ids
        cut = torch.randint(0, 5, (count, 1)) + 10
        extra = torch.randint(20, 60, (count, length))
        inside = (torch.arange(length) >= 10) & (torch.arange(length) < cut)
        return torch.where(inside, extra, padded), kind

    class CallClassifier(nn.Module):
        def __init__(self, dim=32):
            super().__init__()
            self.embed = nn.Embedding(60, dim, padding_idx=PAD)
            layer = nn.TransformerEncoderLayer(dim, 4, 64, dropout=0.1, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
            self.head = nn.Linear(dim, 6)
            self.query = nn.Parameter(torch.randn(dim) / 6)

        def forward(self, ids):
            real = ids != PAD
            mask = ~real if fixed else real
            x = torch.cat([self.query.expand(len(ids), 1, -1), self.embed(ids)], 1)
            mask = torch.cat([torch.zeros(len(ids), 1, dtype=torch.bool), mask], 1)
            return self.head(self.encoder(x, src_key_padding_mask=mask)[:, 0])

    model = CallClassifier()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    session = attach(model, optimizer)
    loader = DataLoader(TensorDataset(*calls(800)), batch_size=40, shuffle=True)
    for epoch in range(10):
        model.train()
        for ids, kind in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(ids), kind)
            loss.backward()
            optimizer.step()
            session.log(loss=loss.item())
    model.eval()
    return wrong(model, *calls(300))


@fault(
    "target_is_input",
    area="translation",
    source="from memory: forum questions on a nn.Transformer whose decoder gets tgt while the loss compares with the same tgt",
    cause="The decoder gets the whole target and is compared with the same target, without the shift by one, so it learns to copy its input.",
    words=(r"shift|same|copy|teacher|:-1|one (step|token|position)", r"target|tgt|decoder|input"),
    also=("future_leak",),
    cascade=("input_ignored", "train_val_preproc_mismatch"),
    sites=("(loop)", "(loss)", "decoder", "(data)", "model"),
)
def translator_is_asked_for_what_it_is_given(attach, fixed):
    """logits = model(src, tgt); loss = criterion(logits, tgt)."""
    vocab, length = 16, 6

    def pairs(count):
        src = torch.randint(2, vocab, (count, length))
        tgt = torch.cat([torch.full((count, 1), BOS), 2 + (src.flip(1) + 3) % (vocab - 2)], 1)
        return src, tgt

    class Seq2Seq(nn.Module):
        def __init__(self, dim=48):
            super().__init__()
            self.src_emb, self.tgt_emb = nn.Embedding(vocab, dim), nn.Embedding(vocab, dim)
            self.encoder = nn.GRU(dim, dim, batch_first=True, bidirectional=True)
            self.bridge = nn.Linear(2 * dim, 2 * dim)
            self.decoder = nn.GRU(dim, 2 * dim, batch_first=True)
            self.generator = nn.Linear(4 * dim, vocab)

        def forward(self, src, tgt):
            memory, h = self.encoder(self.src_emb(src))
            h = torch.tanh(self.bridge(torch.cat([h[0], h[1]], 1)))[None]
            out, _ = self.decoder(self.tgt_emb(tgt), h)
            weight = (out @ memory.transpose(1, 2) / 8).softmax(-1)
            return self.generator(torch.cat([out, weight @ memory], 2))

    model = Seq2Seq()
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
    session = attach(model, optimizer)
    src, tgt = pairs(1500)
    for epoch in range(13):
        for i in torch.randperm(1500).split(50):
            given, asked = (tgt[i, :-1], tgt[i, 1:]) if fixed else (tgt[i], tgt[i])
            loss = criterion(model(src[i], given).flatten(0, 1), asked.flatten())
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            session.log(loss=loss.item())
    src, tgt = pairs(200)
    with torch.no_grad():
        told = tgt[:, :1]
        for _ in range(length):
            told = torch.cat([told, model(src, told)[:, -1:].argmax(2)], 1)
    return float((told != tgt)[:, 1:].float().mean())


@fault(
    "dropout_ignores_mode",
    area="sentence encoder",
    source="https://github.com/facebookresearch/DME/issues/3",
    cause="F.dropout is called without training=self.training, so words are dropped when the encoder is used, too.",
    words=(r"dropout", r"training|eval|inference|mode|always|test"),
    also=("train_mode_in_eval",),
    cascade=("underfitting",),
    sites=("(model)", "encoder", "(validation)"),
    exact=False,
)
def sentence_encoder_drops_words_when_it_is_used(attach, fixed):
    """out = F.dropout(out, p=self.emb_dropout)."""

    class SentenceEncoder(nn.Module):
        def __init__(self, emb_dropout=0.5):
            super().__init__()
            self.emb_dropout = emb_dropout
            self.emb = nn.Embedding(60, 24)
            self.proj = nn.Linear(24, 12)

        def forward(self, ids):
            out = self.proj(self.emb(ids)).amax(1)
            return F.dropout(out, p=self.emb_dropout, training=self.training if fixed else True)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = SentenceEncoder()
            self.classifier = nn.Linear(12, 12)

        def forward(self, ids):
            return self.classifier(self.encoder(ids))

    model = Model()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    session = attach(model, optimizer)
    ids, topic = sentences(900, topics=12)
    x_dev, y_dev = sentences(200, topics=12)
    for epoch in range(14):
        model.train()
        for i in torch.randperm(900).split(45):
            loss = F.cross_entropy(model(ids[i]), topic[i])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss.item())
        model.eval()
        session.log(dev_error=wrong(model, x_dev, y_dev))
    return wrong(model, *sentences(400, topics=12))


@fault(
    "accumulation_not_scaled",
    area="distillation of a language model",
    source="https://github.com/agokrani/distillKitPlus/issues/5",
    cause="The losses of sixteen small batches are summed without division by their number, so the steps are sixteen times too long.",
    words=(r"accumul", r"divid|scale|sum|times|normali|mean|too (long|large|high)"),
    also=("lr_too_high",),
    cascade=(
        "loss_oscillation",
        "loss_divergence",
        "loss_spike",
        "loss_plateau",
        "not_learning",
        "exploding_gradient",
        "underfitting",
        "dead_relu",
        "exploding_activation",
        "constant_output",
    ),
    sites=("(loop)", "(loss)", "optimizer"),
)
def small_batches_are_summed_into_long_steps(attach, fixed):
    """loss.backward() sixteen times, then optimizer.step(); gradient_accumulation_steps is used for the counter only."""
    gradient_accumulation_steps = 16

    class Tagger(nn.Module):
        def __init__(self):
            super().__init__()
            self.emb = nn.Embedding(60, 32)
            self.conv1, self.conv2 = nn.Conv1d(32, 48, 3, padding=1), nn.Conv1d(48, 48, 3, padding=1)
            self.fc = nn.Linear(48, 6)

        def forward(self, ids):
            x = F.relu(self.conv1(self.emb(ids).transpose(1, 2)))
            return self.fc(F.relu(self.conv2(x)).amax(2))

    model = Tagger()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.15, momentum=0.9)
    session = attach(model, optimizer)
    loader = DataLoader(TensorDataset(*sentences(960)), batch_size=4, shuffle=True)
    for epoch in range(6):
        for step, (ids, topic) in enumerate(loader, start=1):
            loss = F.cross_entropy(model(ids), topic)
            (loss / (gradient_accumulation_steps if fixed else 1)).backward()
            if step % gradient_accumulation_steps == 0:
                optimizer.step()
                optimizer.zero_grad()
            session.log(loss=loss.item())
    return wrong(model, *sentences(400))


@fault(
    "lr_too_high",
    area="transformer",
    source="from memory: forum questions on a transformer with Adam(lr=1e-2) and more that answers the same for every sentence, cured by a rate of 1e-3 or less",
    cause="A learning rate of 0.02 is far too high for a transformer under Adam, which soon answers every sentence alike.",
    words=(r"learning rate|\blr\b|step size|steps?", r"high|large|big|long|0\.02|2e-2"),
    cascade=(
        "loss_plateau",
        "constant_output",
        "single_class_output",
        "not_learning",
        "underfitting",
        "dead_relu",
        "attention_entropy_collapse",
        "loss_oscillation",
        "loss_spike",
        "large_initial_loss",
        "input_ignored",
        "vanishing_gradient",
        "saturated_activation",
    ),
    sites=("optimizer", "(loop)", "(model)"),
    exact=False,
)
def topic_transformer_with_a_fast_adam(attach, fixed):
    """torch.optim.Adam(model.parameters(), lr=2e-2)."""

    class TopicTransformer(nn.Module):
        def __init__(self, dim=48):
            super().__init__()
            self.emb = nn.Embedding(60, dim)
            self.pos = nn.Parameter(0.1 * torch.randn(16, dim))
            layer = nn.TransformerEncoderLayer(dim, 4, 96, dropout=0.1, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 4)
            self.head = nn.Linear(dim, 6)

        def forward(self, ids):
            return self.head(self.encoder(self.emb(ids) + self.pos).mean(1))

    model = TopicTransformer()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3 if fixed else 2e-2)
    session = attach(model, optimizer)
    loader = DataLoader(TensorDataset(*sentences(1000)), batch_size=50, shuffle=True)
    x, y = sentences(300)
    for epoch in range(6):
        model.train()
        for ids, topic in loader:
            loss = F.cross_entropy(model(ids), topic)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss.item())
        model.eval()
        session.log(val_error=wrong(model, x, y))
    return wrong(model, x, y)


@fault(
    "lr_too_low",
    area="fine-tuning",
    source="from memory: issues on warm-up that counts the steps of the epoch instead of all steps, so that the rate starts anew with each epoch",
    cause="The warm-up counts the batches of the epoch and not of the run, so the rate never comes near its full value.",
    words=(r"warm.?up|learning rate|\blr\b|schedul", r"epoch|restart|reset|inner|never|low|small|counter"),
    also=("lr_schedule_collapse", "warmup_restarts"),
    cascade=("underfitting", "loss_plateau", "not_learning"),
    sites=("optimizer", "(loop)", "scheduler"),
    exact=False,
)
def warm_up_begins_again_with_each_epoch(attach, fixed):
    """lr_sched.step(cur_step=i) with i from enumerate(loader), and warmup_steps longer than an epoch."""

    class LinearWarmup:
        def __init__(self, optimizer, base_lr, warmup_steps):
            self.optimizer, self.base_lr, self.warmup_steps = optimizer, base_lr, warmup_steps

        def step(self, cur_step):
            scale = min(1.0, (cur_step + 1) / self.warmup_steps)
            for group in self.optimizer.param_groups:
                group["lr"] = self.base_lr * scale

    model = nn.Sequential(nn.EmbeddingBag(60, 48, mode="mean"), nn.Linear(48, 64), nn.ReLU(), nn.Linear(64, 6))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    lr_sched = LinearWarmup(optimizer, 0.1, 150)
    session = attach(model, optimizer)
    loader = DataLoader(TensorDataset(*sentences(800)), batch_size=80, shuffle=True)
    total = 0
    for epoch in range(26):
        for i, (ids, topic) in enumerate(loader):
            lr_sched.step(total if fixed else i)
            loss = F.cross_entropy(model(ids), topic)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += 1
            session.log(loss=loss.item(), lr=optimizer.param_groups[0]["lr"])
    return wrong(model, *sentences(400))
