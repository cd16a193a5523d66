"""Fifth hold-out: tokens, sentences and attention."""

from __future__ import annotations

import math

import torch
import torch.nn as nn
import torch.nn.functional as F

from fault_programs.holdout_5.about import fault
from fault_programs.holdout_5.materials import batches, markov, reviews, sorting, tagged


def chunk(text, length, size):
    start = torch.randint(len(text) - length - 2, (size, 1)) + torch.arange(length)
    return text[start]


class GPT(nn.Module):
    """A decoder of one block that computes its own loss when it is given labels."""

    def __init__(self, vocab=24, width=32, block=20, shift=1):
        super().__init__()
        self.tok, self.pos = nn.Embedding(vocab, width), nn.Embedding(block, width)
        layer = nn.TransformerEncoderLayer(width, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.lm_head = nn.Linear(width, vocab, bias=False)
        self.shift = shift

    def forward(self, input_ids, labels=None):
        t = input_ids.size(1)
        mask = torch.full((t, t), float("-inf")).triu(1)
        h = self.tok(input_ids) + self.pos(torch.arange(t))
        logits = self.lm_head(self.blocks(h, mask=mask))
        if labels is None:
            return logits
        if self.shift:
            logits, labels = logits[:, : -self.shift], labels[:, self.shift :]
        return F.cross_entropy(logits.reshape(-1, logits.size(-1)), labels.reshape(-1)), logits


@torch.no_grad()
def next_word_loss(model, text):
    model.eval()
    ids = torch.stack([text[k : k + 20] for k in range(0, 2000, 20)])
    logits = model(ids)[:, :-1]
    return float(F.cross_entropy(logits.reshape(-1, logits.size(-1)), ids[:, 1:].reshape(-1)))


@fault(
    "target_is_input",
    area="language",
    source="https://github.com/huggingface/transformers/issues/27517",
    cause="Labels are the inputs themselves, not shifted by one: the model learns to copy the current token.",
    words=(r"shift", r"target\w* (is|are|equal\w*|cop\w+|repeat\w*).{0,30}input", r"copies? (its|the) input", r"leak"),
    also=("future_leak", "data_leakage"),
    cascade=("overfitting",),
    sites=("(loss)", "loss_fn", "(model)", "(data)"),
)
def labels_not_shifted(attach, fixed):
    """labels = input_ids without a shift in the model."""
    text = markov()
    model = GPT(shift=1 if fixed else 0)
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
    session = attach(model, opt)
    for _ in range(250):
        ids = chunk(text, 20, 16)
        loss, _ = model(ids, labels=ids)
        opt.zero_grad()
        loss.backward()
        opt.step()
        session.log(loss=loss)
    return next_word_loss(model, text)


@fault(
    "shifted_twice",
    area="language",
    source="https://github.com/huggingface/transformers/pull/37830",
    cause="Logits and labels are shifted in the loop and again in the model, so position t learns token t + 2.",
    words=(r"shift",),
    cascade=("underfitting", "loss_plateau", "not_learning"),
    sites=("(loss)", "loss_fn", "(model)", "(data)"),
)
def labels_shifted_twice(attach, fixed):
    """The data loader has shifted the labels already."""
    text = markov()
    model = GPT(shift=1)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    attach(model, optimizer)
    for step in range(300):
        block = chunk(text, 21, 16)
        x = block[:, :-1]
        y = x if fixed else block[:, 1:]
        loss, _ = model(x, y)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return next_word_loss(model, text)


class LabelAttention(nn.Module):
    """Pools words by attention; `mask` is true for real words."""

    def __init__(self, invert):
        super().__init__()
        self.emb = nn.Embedding(40, 24)
        self.query = nn.Parameter(torch.randn(1, 1, 24) * 0.1)
        self.key, self.value = nn.Linear(24, 24), nn.Linear(24, 24)
        self.out = nn.Sequential(nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 2))
        self.invert = invert

    def forward(self, ids):
        mask = (ids != 0)[:, None, :]
        h = self.emb(ids)
        attn = mask.logical_not() if self.invert else mask
        q = self.query.expand(len(ids), 1, 24)
        pooled = F.scaled_dot_product_attention(q, self.key(h), self.value(h), attn_mask=attn)
        return self.out(pooled[:, 0])


@fault(
    "mask_inverted",
    area="language",
    source="https://github.com/InseeFrLab/torchTextClassifiers/pull/92",
    cause="The attention mask is inverted: padding is attended to and the words are ignored.",
    words=(r"mask.*(invert|wrong|revers|padding)", r"padding.*(attend|dominat|real)"),
    also=("padding_dominates",),
    cascade=("not_learning", "constant_output", "underfitting", "loss_plateau"),
    sites=("(model)", "(function)", "query", "key", "value", "(data)"),
)
def attends_to_padding_only(attach, fixed):
    """True means 'take part' here, and 'ignore' elsewhere."""
    x, _, y = reviews()
    model = LabelAttention(invert=not fixed)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    session = attach(model, optimizer)
    for epoch in range(8):
        for ids, lab in batches(x[200:], y[200:], size=50):
            loss = F.cross_entropy(model(ids), lab)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss)
    with torch.no_grad():
        return float((model(x[:200]).argmax(1) != y[:200]).float().mean())


class PositionalEncoding(nn.Module):
    """Sinusoids, as in the tutorial."""

    def __init__(self, d_model, max_len=64, dim=1):
        super().__init__()
        position = torch.arange(max_len).unsqueeze(1)
        div_term = torch.exp(torch.arange(0, d_model, 2) * (-math.log(10000.0) / d_model))
        pe = torch.zeros(max_len, d_model)
        pe[:, 0::2] = torch.sin(position * div_term)
        pe[:, 1::2] = torch.cos(position * div_term)
        self.register_buffer("pe", pe)
        self.dim = dim

    def forward(self, x):
        if self.dim == 1:
            return x + self.pe[: x.size(1)]
        return x + self.pe[: x.size(0)].unsqueeze(1)


@fault(
    "positions_by_sample",
    area="language",
    source="https://github.com/cmu-l3/anlp-fall2025-code/issues/1",
    cause="Positions are indexed by the batch instead of by time: all words of a sentence get the same encoding.",
    words=(r"positional|positions? (enc|emb|by)", r"batch.*(axis|dimension|index)"),
    also=("batch_axis_mixed",),
    cascade=("not_learning", "underfitting", "loss_plateau", "overfitting"),
    sites=("pos", "(model)", "1"),
)
def positions_of_the_batch(attach, fixed):
    """pe[:x.size(0)] with a batch first."""
    x, y = sorting()

    class Classifier(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(12, 32)
            self.pos = PositionalEncoding(32, dim=1 if fixed else 0)
            layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.1, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 1)
            self.fc = nn.Linear(32, 2)

        def forward(self, ids):
            return self.fc(self.encoder(self.pos(self.embed(ids))).mean(1))

    model = Classifier()
    opt = torch.optim.Adam(model.parameters(), lr=2e-3)
    session = attach(model, opt)
    for epoch in range(8):
        model.train()
        for xb, yb in batches(x[300:], y[300:], size=40):
            opt.zero_grad()
            loss = F.cross_entropy(model(xb), yb)
            loss.backward()
            opt.step()
        session.log(loss=loss)
    model.eval()
    with torch.no_grad():
        parts = [model(x[k : k + 50]).argmax(1) for k in range(0, 300, 50)]
    return float((torch.cat(parts) != y[:300]).float().mean())


@fault(
    "batch_axis_mixed",
    area="language",
    source="https://github.com/ray075hl/Bi-Model-Intent-And-Slot/pull/2 (batch_first forgotten; here in a transformer layer)",
    cause="nn.TransformerEncoderLayer without batch_first=True gets (batch, time, width): it attends across samples.",
    words=(r"batch.?first", r"batch.*(axis|dimension|mixed)", r"samples? .*(mix|influence|depend|attend)"),
    cascade=("not_learning", "underfitting", "loss_plateau", "overfitting", "attention_entropy_collapse"),
    sites=("encoder", "(model)", "1"),
)
def encoder_attends_across_samples(attach, fixed):
    """Default layout (time, batch, width) with batch-first data."""
    x, _ = sorting()
    y = (x[:, 0] < 6).long()
    embed, place = nn.Embedding(12, 32), nn.Parameter(torch.randn(8, 32) * 0.3)
    encoder = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=fixed)
    fc = nn.Linear(32, 2)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.place, self.encoder, self.fc = embed, place, encoder, fc

        def forward(self, ids):
            return self.fc(self.encoder(self.embed(ids) + self.place)[:, -1])

    net = Net()
    optim = torch.optim.AdamW(net.parameters(), lr=2e-3, weight_decay=0.01)
    session = attach(net, optim)
    for xb, yb in batches(x[300:], y[300:], size=30, epochs=12):
        loss = F.cross_entropy(net(xb), yb)
        optim.zero_grad()
        loss.backward()
        optim.step()
        session.log(loss=loss)
    net.eval()
    with torch.no_grad():
        parts = [net(x[k : k + 30]).argmax(1) for k in range(0, 300, 30)]
    return float((torch.cat(parts) != y[:300]).float().mean())


class BiLSTM(nn.Module):
    """A classifier of the last states of both directions."""

    def __init__(self, joined):
        super().__init__()
        self.embedding = nn.Embedding(40, 16)
        self.lstm = nn.LSTM(16, 24, batch_first=True, bidirectional=True)
        self.fc = nn.Linear(48, 2)
        self.joined = joined

    def forward(self, X):
        _, (final_hidden_state, _) = self.lstm(self.embedding(X))
        if self.joined:
            hidden = torch.cat([final_hidden_state[0], final_hidden_state[1]], 1)
        else:
            hidden = final_hidden_state.view(-1, 48)
        return self.fc(hidden)


@fault(
    "batch_axis_mixed",
    area="language",
    source="https://github.com/graykode/nlp-tutorial/issues/38",
    cause="The final states (2, batch, hidden) are viewed as (batch, 2 * hidden), which mixes samples.",
    words=(
        r"batch.*(axis|dimension|mixed)",
        r"samples? .*(mix|influence|depend)",
        r"(view|reshape).*(mix|sample|batch)",
    ),
    cascade=("not_learning", "underfitting", "loss_plateau", "label_shuffle_mismatch", "overfitting"),
    sites=("(model)", "lstm", "fc", "(function)"),
)
def views_the_states_of_both_directions(attach, fixed):
    """h_n.view(-1, 2 * hidden)."""
    x, _, y = reviews()
    model = BiLSTM(joined=fixed)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
    session = attach(model, optimizer)
    for epoch in range(9):
        for words, label in batches(x[200:], y[200:], size=40):
            optimizer.zero_grad()
            output = model(words)
            loss = criterion(output, label)
            loss.backward()
            optimizer.step()
        session.log(cost=loss)
    with torch.no_grad():
        return float((model(x[:200]).argmax(1) != y[:200]).float().mean())


@fault(
    "padding_dominates",
    area="language",
    source="from memory: discuss.pytorch.org, 'get the last output of a padded sequence' (output[:, -1] instead of lengths - 1)",
    cause="The output at the last position is that of padding; the one at the true length was meant.",
    words=(r"pad",),
    cascade=("not_learning", "underfitting", "loss_plateau", "constant_output", "vanishing_gradient"),
    sites=("(data)", "rnn", "(model)", "embedding"),
    exact=False,
)
def reads_the_state_after_the_padding(attach, fixed):
    """output[:, -1] of padded sequences."""
    x, lengths, y = reviews(length=64)
    embedding, rnn, top = nn.Embedding(40, 16, padding_idx=0), nn.RNN(16, 32, batch_first=True), nn.Linear(32, 2)
    model = nn.ModuleDict({"embedding": embedding, "rnn": rnn, "top": top})

    def classify(ids, n):
        seen, _ = rnn(embedding(ids))
        last = n - 1 if fixed else torch.full_like(n, ids.size(1) - 1)
        return top(seen[torch.arange(len(ids)), last])

    opt = torch.optim.Adam(model.parameters(), lr=2e-3)
    session = attach(model, opt)
    short = lengths <= 15
    x, lengths, y = x[short], lengths[short], y[short]
    for ids, n, lab in batches(x[100:], lengths[100:], y[100:], size=20, epochs=25):
        loss = F.cross_entropy(classify(ids, n), lab)
        opt.zero_grad()
        loss.backward()
        opt.step()
        session.log(loss=loss)
    with torch.no_grad():
        return float((classify(x[:100], lengths[:100]).argmax(1) != y[:100]).float().mean())


@fault(
    "layout_scrambled",
    area="language",
    source="https://github.com/vitrioil/Speech-Separation/issues/4 (view where permute was needed; here logits for CrossEntropyLoss)",
    cause="Logits (batch, time, class) are viewed as (batch, class, time) for CrossEntropyLoss instead of permuted.",
    words=(r"permute|transpose", r"(view|reshape).*(mix|axes|class|time)"),
    also=("wrong_dim_softmax",),
    cascade=("not_learning", "underfitting", "loss_plateau", "label_shuffle_mismatch"),
    sites=("(loss)", "loss_fn", "(loop)", "(function)"),
)
def views_logits_for_the_loss(attach, fixed):
    """`view` to put classes second."""
    x, tags = tagged()

    class Tagger(nn.Module):
        def __init__(self):
            super().__init__()
            self.emb = nn.Embedding(20, 24)
            self.lstm = nn.LSTM(24, 32, batch_first=True)
            self.fc = nn.Linear(32, 4)

        def forward(self, ids):
            return self.fc(self.lstm(self.emb(ids))[0])

    model = Tagger()
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    session = attach(model, opt)
    for ids, tag in batches(x[150:], tags[150:], size=25, epochs=8):
        scores = model(ids)
        scores = scores.permute(0, 2, 1) if fixed else scores.view(len(ids), 4, -1)
        loss = F.cross_entropy(scores, tag)
        opt.zero_grad()
        loss.backward()
        opt.step()
        session.log(loss=loss)
    with torch.no_grad():
        return float((model(x[:150]).argmax(-1) != tags[:150]).float().mean())


@fault(
    "label_shuffle_mismatch",
    area="language",
    source="from memory: stackoverflow.com, POS tagging with (seq, batch) outputs flattened against (batch, seq) tags",
    cause="Outputs are flattened time-first and tags batch-first, so words meet tags of other words.",
    words=(
        r"shuffle.?mismatch",
        r"(target|label|tag).*(not|mis).*(match|align|belong|order)",
        r"(flatten|view|reshape|transpose).*(target|label|order|mix)",
        r"misalign",
    ),
    also=("batch_axis_mixed", "layout_scrambled"),
    cascade=("not_learning", "underfitting", "loss_plateau"),
    sites=("(loss)", "loss_fn", "(loop)", "(data)"),
)
def flattens_words_and_tags_differently(attach, fixed):
    """(T, B, C) against (B, T)."""
    x, tags = tagged()

    class LSTMTagger(nn.Module):
        def __init__(self, vocab, emb, hid, out):
            super().__init__()
            self.word_embeddings = nn.Embedding(vocab, emb)
            self.lstm = nn.LSTM(emb, hid)
            self.hidden2tag = nn.Linear(hid, out)

        def forward(self, sentence):
            lstm_out, _ = self.lstm(self.word_embeddings(sentence))
            return F.log_softmax(self.hidden2tag(lstm_out), dim=-1)

    net = LSTMTagger(20, 16, 32, 4)
    loss_function = nn.NLLLoss()
    optimizer = torch.optim.Adam(net.parameters(), lr=5e-3)
    session = attach(net, optimizer)
    for epoch in range(8):
        for sent, tag in batches(x[150:], tags[150:], size=25):
            net.zero_grad()
            tag_scores = net(sent.t())
            truth = tag.t() if fixed else tag
            loss = loss_function(tag_scores.reshape(-1, 4), truth.reshape(-1))
            loss.backward()
            optimizer.step()
            session.log(loss=loss)
    with torch.no_grad():
        return float((net(x[:150].t()).argmax(-1).t() != tags[:150]).float().mean())


@fault(
    "wrong_dim_softmax",
    area="language",
    source="from memory: seq2seq attention with F.softmax(energies) and no dim (the implicit dim of a 3-D tensor is 0)",
    cause="The attention softmax runs over the batch (dim 0) instead of over the source words.",
    words=(r"softmax.*(dim|axis|batch)", r"wrong.*(dim|axis)"),
    also=("batch_axis_mixed",),
    cascade=("not_learning", "underfitting", "loss_plateau", "overfitting"),
    sites=("(model)", "(function)", "attention"),
)
def attention_over_the_batch(attach, fixed):
    """softmax(dim=0) of (batch, 1, source)."""
    g = torch.Generator().manual_seed(5)
    src = torch.randint(2, 14, (1200, 6), generator=g)
    tgt = src.flip(1)

    class Seq2Seq(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(14, 24)
            self.encoder = nn.GRU(24, 32, batch_first=True, bidirectional=True)
            self.bridge = nn.Linear(64, 32)
            self.cell = nn.GRUCell(24 + 64, 32)
            self.energy = nn.Linear(32, 64)
            self.out = nn.Linear(32 + 64, 14)

        def forward(self, source, target):
            memory, last = self.encoder(self.embed(source))
            h = torch.tanh(self.bridge(torch.cat([last[0], last[1]], 1)))
            word, scores = torch.ones(len(source), dtype=torch.long), []
            context = memory.mean(1)
            for t in range(6):
                h = self.cell(torch.cat([self.embed(word), context], 1), h)
                attn = torch.bmm(self.energy(h).unsqueeze(1), memory.transpose(1, 2))
                weights = F.softmax(attn, dim=2 if fixed else 0)
                context = torch.bmm(weights, memory).squeeze(1)
                scores.append(self.out(torch.cat([h, context], 1)))
                word = target[:, t]
            return torch.stack(scores, 1)

    model = Seq2Seq()
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
    session = attach(model, optimizer)
    for s, t in batches(src[200:], tgt[200:], size=40, epochs=10):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(s, t).reshape(-1, 14), t.reshape(-1))
        loss.backward()
        optimizer.step()
        session.log(loss=loss)
    with torch.no_grad():
        return float((model(src[:200], tgt[:200]).argmax(-1) != tgt[:200]).float().mean())


@fault(
    "future_leak",
    area="language",
    source="from memory: stackoverflow.com, 'transformer decoder copies its input' (decoder fed the unshifted target)",
    cause="The decoder is given the target itself instead of the target shifted right: it sees the answer.",
    words=(r"leak", r"shift", r"target.*(fed|given|sees)", r"copies"),
    also=("data_leakage", "target_is_input"),
    cascade=("overfitting",),
    sites=("(model)", "(data)", "(loss)", "decoder"),
)
def decoder_sees_the_answer(attach, fixed):
    """tgt where tgt[:, :-1] with a start token was meant."""
    g = torch.Generator().manual_seed(6)
    source = torch.randint(2, 12, (1000, 5), generator=g)
    answer = (source + 3 - 2) % 10 + 2
    start = torch.ones(1000, 1, dtype=torch.long)
    emb, where = nn.Embedding(12, 32), nn.Embedding(8, 32)
    core = nn.Transformer(32, 4, 1, 1, 64, dropout=0.0, batch_first=True)
    top = nn.Linear(32, 12)
    model = nn.ModuleDict({"emb": emb, "where": where, "core": core, "top": top})

    def run(src, dec):
        mask = nn.Transformer.generate_square_subsequent_mask(dec.size(1))
        place = where(torch.arange(8))
        return top(core(emb(src) + place[: src.size(1)], emb(dec) + place[: dec.size(1)], tgt_mask=mask))

    opt = torch.optim.Adam(model.parameters(), lr=2e-3)
    session = attach(model, opt)
    for s, a, one in batches(source[200:], answer[200:], start[200:], size=40, epochs=12):
        decoder_in = torch.cat([one, a[:, :-1]], 1) if fixed else a
        loss = F.cross_entropy(run(s, decoder_in).flatten(0, 1), a.flatten())
        opt.zero_grad()
        loss.backward()
        opt.step()
        session.log(loss=loss)
    model.eval()
    with torch.no_grad():
        out = torch.ones(200, 1, dtype=torch.long)
        for _ in range(5):
            out = torch.cat([out, run(source[:200], out)[:, -1:].argmax(-1)], 1)
    return float((out[:, 1:] != answer[:200]).float().mean())


@fault(
    "label_shuffle_mismatch",
    area="language",
    source="from memory: stackoverflow.com, pack_padded_sequence after sorting by length, with labels left in the old order",
    cause="Sentences are sorted by length for packing; the labels stay in the old order.",
    words=(r"shuffle.?mismatch", r"(label|target).*(not|mis).*(match|align|belong|order)", r"sort|reorder"),
    also=("batch_axis_mixed",),
    cascade=("not_learning", "underfitting", "loss_plateau", "overfitting"),
    sites=("(data)", "loader", "(loss)", "(loop)"),
)
def sorts_sentences_and_keeps_labels(attach, fixed):
    """Sorted for pack_padded_sequence, never unsorted."""
    x, lengths, y = reviews()

    class Sentiment(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(40, 16, padding_idx=0)
            self.gru = nn.GRU(16, 32, batch_first=True)
            self.decoder = nn.Linear(32, 1)

        def forward(self, ids, n):
            n, order = n.sort(descending=True)
            packed = nn.utils.rnn.pack_padded_sequence(self.embedding(ids[order]), n, batch_first=True)
            _, h = self.gru(packed)
            out = self.decoder(h[-1]).squeeze(1)
            return out[order.argsort()] if fixed else out

    model = Sentiment()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    criterion = nn.BCEWithLogitsLoss()
    session = attach(model, optimizer)
    for epoch in range(10):
        model.train()
        total = 0.0
        for ids, n, label in batches(x[200:], lengths[200:], y[200:], size=40):
            optimizer.zero_grad()
            loss = criterion(model(ids, n), label.float())
            loss.backward()
            optimizer.step()
            total += loss.item()
        session.log(loss=total / 25)
    with torch.no_grad():
        return float(((model(x[:200], lengths[:200]) > 0).long() != y[:200]).float().mean())
