"""Tenth hold-out: text, sound and series."""

from __future__ import annotations

import random

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence
from torch.utils.data import DataLoader, Dataset, TensorDataset

from fault_programs.holdout_10.about import fault
from fault_programs.holdout_10.material import digits


class Decoder(nn.Module):
    """A small transformer that only looks back."""

    def __init__(self, vocab, length, width=32, layers=1):
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.places = nn.Parameter(0.1 * torch.randn(length, width))
        layer = nn.TransformerEncoderLayer(width, 4, 64, dropout=0.0, batch_first=True)
        self.blocks = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.to_logits = nn.Linear(width, vocab)

    def forward(self, x):
        n = x.size(1)
        mask = torch.triu(torch.full((n, n), float("-inf")), 1)
        h = self.blocks(self.tokens(x) + self.places[:n], mask=mask)
        return self.to_logits(h)


@fault(
    "future_leak",
    area="image tokens",
    source="https://github.com/Project-MONAI/GenerativeModels/issues/314",
    cause="The targets are not shifted: each position is asked for the token that it gets as input, so nothing is predicted.",
    words=(r"shift|next token|same token|own (input|token)|copy|sees?", r"target|token|input|label"),
    also=("data_leakage",),
    sites=("(loss)", "(data)", "loss_fn", "(loop)"),
    cascade=("overfitting",),
)
def transformer_predicts_the_token_it_sees(attach, fixed):
    """ce_loss(logits, latent) without a shift."""
    xtr, _, xte, _ = digits()

    def quantise(images):
        return (F.avg_pool2d(images, 2).flatten(1) * 5.99).long()

    latents, held_out = quantise(xtr), quantise(xte)
    start = torch.full((1, 1), 6)
    transformer = Decoder(7, 17)
    optimizer = torch.optim.Adam(transformer.parameters(), lr=2e-3)
    session = attach(transformer, optimizer)

    def step_loss(latent):
        latent = torch.cat([start.expand(len(latent), 1), latent], 1)
        logits = transformer(latent)
        ahead = 1 if fixed else 0
        return F.cross_entropy(logits[:, : 17 - ahead].flatten(0, 1), latent[:, ahead:].flatten())

    for epoch in range(4):
        for (latent,) in DataLoader(TensorDataset(latents), batch_size=32, shuffle=True):
            optimizer.zero_grad(set_to_none=True)
            loss = step_loss(latent)
            loss.backward()
            optimizer.step()
            session.log(loss=loss.item())
    with torch.no_grad():
        logits = transformer(torch.cat([start.expand(len(held_out), 1), held_out], 1))[:, :-1]
        return min(10.0, float(F.cross_entropy(logits.flatten(0, 1), held_out.flatten())))


def collate_sentences(pairs):
    """Pad sources with 0 and stack targets."""
    src, trg = zip(*pairs)
    return pad_sequence(src, batch_first=True), torch.tensor([len(s) for s in src]), torch.stack(trg)


class Corpus(Dataset):
    """Sentences of different lengths; the translation says the last three words, mapped and in turned order."""

    def __init__(self, count, long):
        self.pairs = []
        for _ in range(count):
            src = torch.randint(1, 12, (random.randint(3, long),))
            self.pairs.append((src, (src[-3:].flip(0) * 5) % 12))
        self.pairs.sort(key=lambda pair: len(pair[0]))

    def __len__(self):
        return len(self.pairs)

    def __getitem__(self, i):
        return self.pairs[i]


@fault(
    "padding_dominates",
    area="translation",
    source="https://github.com/OpenNMT/OpenNMT-py/issues/318",
    cause="The encoder reads on over the padding and hands over the state at the end of it, so translations depend on how long the others in the batch are.",
    words=(r"pad", r"(state|read|encoder|pack|length|hidden)"),
    also=("train_val_preproc_mismatch",),
    cascade=("overfitting", "underfitting"),
    sites=("encoder", "rnn", "(model)", "(data)", "(validation)"),
    exact=False,
)
def encoder_reads_on_over_the_padding(attach, fixed):
    """self.rnn(embedded) where the lengths are at hand."""

    class Seq2Seq(nn.Module):
        def __init__(self, vocab=12, width=48):
            super().__init__()
            self.embedding = nn.Embedding(vocab, 24, padding_idx=0)
            self.encoder = nn.GRU(24, width, batch_first=True)
            self.decoder = nn.GRU(24, width, batch_first=True)
            self.out = nn.Linear(width, vocab)

        def forward(self, src, lengths, trg):
            emb = self.embedding(src)
            _, hidden = self.encoder(
                pack_padded_sequence(emb, lengths, batch_first=True, enforce_sorted=False) if fixed else emb
            )
            shifted = torch.cat([torch.zeros_like(trg[:, :1]), trg[:, :-1]], 1)
            states, _ = self.decoder(self.embedding(shifted), hidden)
            return self.out(states)

    train, valid = Corpus(500, 14), Corpus(100, 14)
    model = Seq2Seq()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    session = attach(model, optimizer)
    buckets = list(DataLoader(train, batch_size=20, collate_fn=collate_sentences))
    everything = next(iter(DataLoader(valid, batch_size=100, collate_fn=collate_sentences)))
    for epoch in range(14):
        model.train()
        for src, lengths, trg in random.sample(buckets, len(buckets)):
            loss = F.cross_entropy(model(src, lengths, trg).transpose(1, 2), trg)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            session.log(loss=loss.item())
        model.eval()
        with torch.no_grad():
            logits = model(*everything)
            session.log(val_loss=F.cross_entropy(logits.transpose(1, 2), everything[2]).item())
    return float((logits.argmax(-1) != everything[2]).float().mean())


@fault(
    "target_wraps_around",
    area="language",
    source="https://github.com/udacity/deep-learning/pull/239",
    cause="The target of the last character of each window is the first character of the same window instead of the next one of the text.",
    words=(r"target|label", r"last|wrap|first|roll|window|end"),
    also=("label_shuffle_mismatch",),
    cascade=("loss_plateau", "underfitting"),
    sites=("(data)", "(loss)", "loader"),
    exact=False,
)
def last_target_is_the_first_input(attach, fixed):
    """y[:, :-1], y[:, -1] = x[:, 1:], x[:, 0]."""
    author = random.Random(3)
    rule = author.sample(range(10), 10)
    text = [0]
    while len(text) < 6000:
        text.append(rule[text[-1]] if author.random() < 0.85 else author.randrange(10))
    arr = torch.tensor(text)

    def get_batches(arr, batch_size, n_steps):
        n_batches = (len(arr) - 1) // (batch_size * n_steps)
        ahead = arr[1 : batch_size * n_batches * n_steps + 1].view(batch_size, -1)
        arr = arr[: batch_size * n_batches * n_steps].view(batch_size, -1)
        for n in range(0, arr.shape[1], n_steps):
            x = arr[:, n : n + n_steps]
            y = torch.zeros_like(x)
            y[:, :-1], y[:, -1] = x[:, 1:], (ahead[:, n + n_steps - 1] if fixed else x[:, 0])
            yield x, y

    class CharRNN(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(10, 32, batch_first=True)
            self.fc = nn.Linear(32, 10)

        def forward(self, x, hidden=None):
            out, hidden = self.lstm(F.one_hot(x, 10).float(), hidden)
            return self.fc(out), tuple(h.detach() for h in hidden)

    net = CharRNN()
    opt = torch.optim.Adam(net.parameters(), lr=1e-2)
    session = attach(net, opt)
    for epoch in range(6):
        h = None
        for x, y in get_batches(arr[:5000], 10, 4):
            out, h = net(x, h)
            loss = F.cross_entropy(out.reshape(-1, 10), y.reshape(-1))
            opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 5)
            opt.step()
            session.log(loss=loss.item())
    with torch.no_grad():
        out, _ = net(arr[5000:5999].view(1, -1))
        return float(F.cross_entropy(out[0], arr[5001:6000]))


@fault(
    "rnn_state_not_reset",
    area="summarisation",
    source="https://github.com/JulesBelveze/text-summarizer/pull/8",
    cause="The hidden state of the encoder is made once and carried on from batch to batch, though the texts have nothing to do with each other.",
    words=(r"hidden|state", r"reset|carr|init|batch|unrelated|previous"),
    cascade=("underfitting", "loss_plateau", "not_learning", "overfitting"),
    sites=("encoder", "gru", "encoder.gru", "(model)", "(loop)"),
)
def encoder_state_is_made_once(attach, fixed):
    """self.hidden is set up for the first batch only."""

    class Encoder(nn.Module):
        def __init__(self, vocab=6, width=32):
            super().__init__()
            self.embedding = nn.Embedding(vocab, 16)
            self.gru = nn.GRU(16, width, batch_first=True)
            self.hidden = None

        def forward(self, text):
            if fixed or self.hidden is None:
                self.hidden = torch.zeros(1, len(text), self.gru.hidden_size)
            _, hidden = self.gru(self.embedding(text), self.hidden)
            self.hidden = hidden.detach()
            return hidden[0]

    class Summarizer(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = Encoder()
            self.decoder = nn.Linear(32, 10)

        def forward(self, text):
            return self.decoder(self.encoder(text))

    texts = torch.randint(0, 6, (1200, 9))
    summaries = (texts < 2).sum(1)
    model = Summarizer()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    session = attach(model, optimizer)
    for epoch in range(12):
        for text, summary in DataLoader(TensorDataset(texts[:1000], summaries[:1000]), batch_size=40, shuffle=True):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(text), summary)
            loss.backward()
            optimizer.step()
            session.log(loss=loss.item())
    wrong = 0
    with torch.no_grad():
        for text, summary in DataLoader(TensorDataset(texts[1000:], summaries[1000:]), batch_size=40):
            wrong += int((model(text).argmax(1) != summary).sum())
    return wrong / 200


@fault(
    "view_instead_of_permute",
    area="speech separation",
    source="https://github.com/vitrioil/Speech-Separation/issues/4",
    cause="view() takes the place of a permutation, so each frame that the recurrent layer sees is made of pieces of other frames.",
    words=(r"view|reshape|permut|transpos", r"frame|time|channel|axis|axes|dim|mix|scrambl"),
    cascade=("underfitting", "loss_plateau"),
    sites=("(model)", "lstm", "rnn", "net"),
)
def frames_are_viewed_and_not_permuted(attach, fixed):
    """x.view(batch, time, -1) of a tensor in the order batch, channel, time, frequency."""
    time, freq = 24, 12

    class SeparationNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Sequential(
                nn.Conv2d(1, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 4, 3, padding=1), nn.ReLU()
            )
            self.lstm = nn.LSTM(4 * freq, 24, batch_first=True, bidirectional=True)
            self.mask = nn.Linear(48, freq)

        def forward(self, mix):
            h = self.conv(mix.unsqueeze(1))
            h = h.permute(0, 2, 1, 3).reshape(len(h), time, -1) if fixed else h.view(len(h), time, -1)
            return torch.sigmoid(self.mask(self.lstm(h)[0]))

    def mixtures(count):
        voices = []
        for _ in range(2):
            talks = (torch.rand(count, time, 1) < 0.5).float()
            pitch = torch.randint(0, freq - 1, (count, time, 1))
            bands = torch.arange(freq).view(1, 1, -1)
            voices.append(talks * torch.exp(-((bands - pitch) ** 2) / 2.0))
        first, second = voices
        return first + second.flip(2) * (torch.arange(freq) % 2) + 0.05 * torch.rand(count, time, freq), first

    mix, clean = mixtures(300)
    net = SeparationNet()
    optim = torch.optim.Adam(net.parameters(), lr=5e-3)
    session = attach(net, optim)
    for epoch in range(9):
        for x, y in DataLoader(TensorDataset(mix, clean), batch_size=20, shuffle=True):
            loss = F.mse_loss(net(x) * x, y)
            optim.zero_grad()
            loss.backward()
            optim.step()
            session.log(loss=loss.item())
    x, y = mixtures(80)
    with torch.no_grad():
        return float(F.mse_loss(net(x) * x, y) / y.var())


@fault(
    "nan_in_loss",
    area="speech",
    source="https://github.com/k2-fsa/icefall/issues/1777",
    cause="The filter of too short utterances forgets that equal tokens in a row need a blank between them, so the CTC loss of some is infinite and its gradient is NaN.",
    words=(
        r"(ctc|loss).*(inf|nan|not finite)|(inf|nan|not finite).*(ctc|loss)",
        r"repeat|length|long|short|blank|token|utterance|align",
    ),
    cascade=("nan_backward", "nan_in_weights", "nan_in_optimizer", "nan_forward", "loss_divergence"),
    sites=("(loss)", "(data)", "loss_fn", "loader"),
)
def repeats_need_blanks_of_their_own(attach, fixed):
    """if T < len(tokens): return False, without the repeated tokens."""
    sounds = torch.randn(6, 8)

    def record():
        tokens = [random.randint(1, 5) for _ in range(random.randint(2, 5))]
        if random.random() < 0.03:
            tokens = [random.randint(1, 5)] * 5
        span = [random.choice([2, 4]) for _ in tokens] if random.random() < 0.95 else [2] * len(tokens)
        wave = torch.cat(
            [
                sounds[t].expand(n, 8) if i % 2 else sounds[t].expand(n, 8) * 1.5
                for i, (t, n) in enumerate(zip(tokens, span))
            ]
        )
        return wave + 0.2 * torch.randn_like(wave), tokens

    def remove_short_utt(cut):
        wave, tokens = cut
        frames = (len(wave) - 1) // 2 + 1
        repeats = sum(a == b for a, b in zip(tokens, tokens[1:]))
        return frames >= len(tokens) + (repeats if fixed else 0)

    def collate(cuts):
        waves, texts = zip(*cuts)
        return pad_sequence(waves, batch_first=True), torch.tensor([len(w) for w in waves]), texts

    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv1d(8, 32, 3, stride=2, padding=1)
            self.rnn = nn.GRU(32, 24, batch_first=True, bidirectional=True)
            self.ctc_output = nn.Linear(48, 6)

        def forward(self, x):
            h = F.relu(self.conv(x.transpose(1, 2))).transpose(1, 2)
            return self.ctc_output(self.rnn(h)[0]).log_softmax(-1)

    cuts = [cut for cut in (record() for _ in range(500)) if remove_short_utt(cut)]
    model = Encoder()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    criterion = nn.CTCLoss(blank=0, reduction="sum")
    session = attach(model, optimizer)
    for epoch in range(8):
        for wave, lens, texts in DataLoader(cuts, batch_size=25, shuffle=True, collate_fn=collate):
            log_probs = model(wave).transpose(0, 1)
            targets = torch.tensor([t for text in texts for t in text])
            loss = criterion(
                log_probs, targets, (lens - 1) // 2 + 1, torch.tensor([len(text) for text in texts])
            ) / len(lens)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(ctc_loss=loss.item())
    wrong, tests = 0, [record() for _ in range(100)]
    tests = [(wave, tokens) for wave, tokens in tests if all(a != b for a, b in zip(tokens, tokens[1:]))]
    for wave, tokens in tests:
        with torch.no_grad():
            path = model(wave.unsqueeze(0))[0].argmax(-1).tolist()
        said = [p for i, p in enumerate(path) if p and (i == 0 or p != path[i - 1])]
        wrong += said != tokens
    return wrong / len(tests)


@fault(
    "data_leakage",
    area="time series",
    source="https://github.com/philipperemy/n-beats/pull/6",
    cause="The window that the model looks back on is cut from the end of the piece, so it holds the values to forecast.",
    words=(r"leak|contain|hold|overlap|future|see", r"forecast|target|future|window|input"),
    also=("future_leak",),
    cascade=("overfitting",),
    sites=("(data)", "loader", "(validation)", "(loss)"),
)
def look_back_holds_the_forecast(attach, fixed):
    """x = piece[forecast_length:] where piece[:backcast_length] was meant."""
    backcast_length, forecast_length = 20, 5
    t = torch.arange(1400.0)
    noise = torch.zeros(1400)
    for i in range(1, 1400):
        noise[i] = 0.7 * noise[i - 1] + 0.25 * torch.randn(())
    series = torch.sin(t / 4) + 0.5 * torch.sin(t / 11) + noise
    train, test = series[:1000], series[1000:]

    def data_generator(part, size, count):
        for _ in range(count):
            x, y = [], []
            for _ in range(size):
                i = random.randrange(len(part) - backcast_length - forecast_length)
                piece = part[i : i + backcast_length + forecast_length]
                x.append(piece[:backcast_length] if fixed else piece[forecast_length:])
                y.append(piece[backcast_length:])
            yield torch.stack(x), torch.stack(y)

    class Block(nn.Module):
        def __init__(self, units=32):
            super().__init__()
            self.fc = nn.Sequential(nn.Linear(backcast_length, units), nn.ReLU(), nn.Linear(units, units), nn.ReLU())
            self.backcast = nn.Linear(units, backcast_length)
            self.forecast = nn.Linear(units, forecast_length)

        def forward(self, x):
            h = self.fc(x)
            return x - self.backcast(h), self.forecast(h)

    class NBeats(nn.Module):
        def __init__(self, blocks=3):
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(blocks))

        def forward(self, x):
            total = 0
            for block in self.blocks:
                x, forecast = block(x)
                total = total + forecast
            return total

    net = NBeats()
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
    session = attach(net, optimizer)
    for step, (x, y) in enumerate(data_generator(train, 32, 300)):
        loss = F.mse_loss(net(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss.item())
        if step % 60 == 59:
            with torch.no_grad():
                vx, vy = next(data_generator(test, 100, 1))
                session.log(val_loss=F.mse_loss(net(vx), vy).item())
    pieces = test.unfold(0, backcast_length + forecast_length, 3)
    with torch.no_grad():
        return float(F.mse_loss(net(pieces[:, :backcast_length]), pieces[:, backcast_length:]))
