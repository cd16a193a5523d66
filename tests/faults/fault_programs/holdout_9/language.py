"""Ninth hold-out: tokens, sentences and attention."""

from __future__ import annotations

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from fault_programs.holdout_9.about import fault
from fault_programs.holdout_9.matter import keywords, sums


@fault(
    "future_leak",
    area="language",
    source="from memory: questions on transformers with a training loss near zero and senseless translations",
    cause="The mask is the wrong triangle: it hides the past and shows the token that is to be predicted.",
    words=(r"mask|triangle|triu|tril|causal", r"future|next|wrong|inverted|leak"),
    also=("mask_inverted",),
    cascade=("overfitting", "target_is_input"),
    sites=("(model)", "encoder", "blocks", "layer"),
)
def masks_the_lower_triangle(attach, fixed):
    """A subsequent mask made with tril in the place of triu."""
    ids = sums()
    vocab = 7

    def subsequent_mask(size):
        ones = torch.ones(size, size)
        return (torch.triu(ones, diagonal=1) if fixed else torch.tril(ones, diagonal=-1)).bool()

    class Decoder(nn.Module):
        def __init__(self, width=32):
            super().__init__()
            self.emb = nn.Embedding(vocab, width)
            self.pos = nn.Parameter(0.1 * torch.randn(1, 16, width))
            self.blocks = nn.ModuleList(
                nn.TransformerEncoderLayer(width, 4, 96, dropout=0.0, batch_first=True) for _ in range(2)
            )
            self.head = nn.Linear(width, vocab)

        def forward(self, tokens):
            x = self.emb(tokens) + self.pos[:, : tokens.shape[1]]
            mask = subsequent_mask(tokens.shape[1])
            for block in self.blocks:
                x = block(x, src_mask=mask)
            return self.head(x)

    model = Decoder()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    session = attach(model, optimizer)
    for _epoch in range(12):
        for batch in DataLoader(ids[:240], batch_size=20, shuffle=True):
            logits = model(batch[:, :-1])
            loss = F.cross_entropy(logits.reshape(-1, vocab), batch[:, 1:].reshape(-1))
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
            session.log(loss=loss, ppl=loss.exp())
    wrong = 0.0
    with torch.no_grad():
        for size in range(4, 16):
            wrong += float((model(ids[240:, :size])[:, -1].argmax(-1) != ids[240:, size]).float().mean()) / 12
    return wrong


def pad_collate(batch):
    texts, labels = zip(*batch, strict=True)
    lengths = torch.tensor([len(text) for text in texts])
    return pad_sequence(texts, batch_first=True, padding_value=0), lengths, torch.stack(labels)


@fault(
    "padding_dominates",
    area="language",
    source="https://github.com/allenai/allennlp/issues/1713",
    cause="The output at the last step of the padded batch is read, which for short texts lies far behind their end in the padding.",
    words=(r"pad", r"last|final|length"),
    also=("mask_not_applied", "last_step_is_padding", "input_ignored"),
    cascade=("underfitting", "loss_plateau", "vanishing_gradient", "not_learning"),
    sites=("(model)", "rnn", "(data)", "loader"),
)
def reads_the_last_step_of_the_padding(attach, fixed):
    """out[:, -1] of a padded batch."""

    class SentimentRNN(nn.Module):
        def __init__(self, vocab_size=30, dim=16, hidden=24, classes=4):
            super().__init__()
            self.embedding = nn.Embedding(vocab_size, dim, padding_idx=0)
            self.rnn = nn.RNN(dim, hidden, batch_first=True)
            self.fc = nn.Linear(hidden, classes)

        def forward(self, text, text_lengths):
            output, _ = self.rnn(self.embedding(text))
            last = output[torch.arange(len(text)), text_lengths - 1] if fixed else output[:, -1]
            return self.fc(last)

    texts, labels = keywords(600, longest=40)
    short = [i for i in range(500, 600) if len(texts[i]) < 10]
    model = SentimentRNN()
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
    session = attach(model, optimizer)
    loader = DataLoader(
        list(zip(texts[:500], labels[:500], strict=True)), batch_size=25, shuffle=True, collate_fn=pad_collate
    )
    for _epoch in range(16):
        for text, lengths, target in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(text, lengths), target)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            session.log(loss=loss)
    with torch.no_grad():
        text, lengths, target = pad_collate([(texts[i], labels[i]) for i in range(500, 600)])
        said = model(text, lengths).argmax(1)
    return float((said != target)[torch.tensor(short) - 500].float().mean())


@fault(
    "batch_axis_mixed",
    area="language",
    source="https://github.com/timbmg/Sentence-VAE/issues/15",
    cause="The hidden state of both directions is (2, batch, hidden) and view(batch, 2 * hidden) joins states of different sentences.",
    words=(r"hidden|view|reshape", r"batch|transpose|permute|direction|mix"),
    also=("label_shuffle_mismatch",),
    cascade=("underfitting", "overfitting", "loss_plateau", "not_learning"),
    sites=("(model)", "encoder_rnn", "outputs2tag", "classifier"),
)
def views_two_directions_as_one_row(attach, fixed):
    """hidden = hidden.view(batch_size, hidden_size * hidden_factor)."""

    class SentenceClassifier(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(30, 16)
            self.encoder_rnn = nn.GRU(16, 24, bidirectional=True, batch_first=True)
            self.classifier = nn.Linear(48, 4)

        def forward(self, input_sequence):
            batch_size = input_sequence.size(0)
            _, hidden = self.encoder_rnn(self.embedding(input_sequence))
            hidden = (hidden.transpose(0, 1).reshape if fixed else hidden.view)(batch_size, 2 * 24)
            return self.classifier(hidden)

    made = torch.Generator().manual_seed(991)
    x = torch.randint(5, 30, (700, 8), generator=made)
    y = torch.randint(0, 4, (700,), generator=made)
    x[torch.arange(700), torch.randint(0, 8, (700,), generator=made)] = y + 1
    model = SentenceClassifier()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    session = attach(model, optimizer)
    step = 0
    for _epoch in range(10):
        for rows in torch.randperm(500).split(20):
            loss = F.cross_entropy(model(x[rows]), y[rows])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step % 5 == 0:
                session.log(loss=loss)
    with torch.no_grad():
        return float((model(x[500:]).argmax(1) != y[500:]).float().mean())


@fault(
    "wrong_dim_softmax",
    area="translation",
    source="https://github.com/nerdai/llms-from-scratch-rs/pull/30",
    cause="The attention weights are a softmax over the sentences of the batch instead of the words of the source.",
    words=(r"softmax", r"dim|axis|batch"),
    also=("batch_axis_mixed",),
    cascade=("underfitting", "loss_plateau", "not_learning", "attention_entropy_collapse"),
    sites=("(model)", "attention"),
)
def attends_over_the_batch(attach, fixed):
    """F.softmax(energy, dim=0) of (batch, source length)."""

    class Attention(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.attn = nn.Linear(2 * width, width)
            self.v = nn.Linear(width, 1, bias=False)

        def forward(self, hidden, encoder_outputs):
            src_len = encoder_outputs.shape[1]
            hidden = hidden.unsqueeze(1).repeat(1, src_len, 1)
            energy = torch.tanh(self.attn(torch.cat((hidden, encoder_outputs), dim=2)))
            return F.softmax(self.v(energy).squeeze(2), dim=1 if fixed else 0)

    class Lookup(nn.Module):
        """Says which value follows the key that is asked for."""

        def __init__(self, width=32):
            super().__init__()
            self.source = nn.Embedding(20, width)
            self.question = nn.Embedding(10, width)
            self.rnn = nn.GRU(width, width, batch_first=True)
            self.attention = Attention(width)
            self.out = nn.Linear(2 * width, 10)

        def forward(self, src, asked):
            outputs, _ = self.rnn(self.source(src))
            query = self.question(asked)
            a = self.attention(query, outputs)
            weighted = torch.bmm(a.unsqueeze(1), outputs).squeeze(1)
            return self.out(torch.cat([weighted, query], 1))

    made = torch.Generator().manual_seed(992)
    keys = torch.rand(1100, 10, generator=made).argsort(1)[:, :4]
    values = torch.randint(0, 10, (1100, 4), generator=made)
    src = torch.stack([keys, values + 10], 2).flatten(1)
    which = torch.randint(0, 4, (1100,), generator=made)
    asked, answer = keys[torch.arange(1100), which], values[torch.arange(1100), which]
    model = Lookup()
    optimizer = torch.optim.Adam(model.parameters(), lr=8e-3)
    session = attach(model, optimizer)
    for _epoch in range(30):
        epoch_loss = 0
        for rows in torch.randperm(1000).split(50):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(src[rows], asked[rows]), answer[rows])
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1)
            optimizer.step()
            epoch_loss += loss.item() / 20
        session.log(epoch_loss=epoch_loss)
    with torch.no_grad():
        return float((model(src[1000:], asked[1000:]).argmax(1) != answer[1000:]).float().mean())


class CausalLM(nn.Module):
    """As in a hub: with labels given, forward returns the loss, for which it shifts them itself."""

    def __init__(self, vocab=7, width=32):
        super().__init__()
        self.vocab = vocab
        self.wte = nn.Embedding(vocab, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.lm_head = nn.Linear(width, vocab)

    def forward(self, input_ids, labels=None):
        hidden, _ = self.rnn(self.wte(input_ids))
        logits = self.lm_head(hidden)
        loss = None
        if labels is not None:
            shift_logits = logits[..., :-1, :].contiguous()
            shift_labels = labels[..., 1:].contiguous()
            loss = F.cross_entropy(shift_logits.view(-1, self.vocab), shift_labels.view(-1), ignore_index=-100)
        return {"loss": loss, "logits": logits}


@fault(
    "shifted_twice",
    area="language",
    source="from memory: discuss.huggingface.co, whether labels must be shifted for GPT-2 (they are shifted inside the model)",
    cause="Labels are shifted by the data set, and the model shifts them again, so it learns the token after the next.",
    words=(r"shift", r"twice|again|double|already|next"),
    also=("label_shuffle_mismatch",),
    cascade=("underfitting", "overfitting"),
    sites=("(data)", "(loss)", "(loop)", "loader"),
)
def shifts_labels_for_a_model_that_shifts(attach, fixed):
    """labels = ids[1:] for a model that shifts labels itself."""

    class TextDataset(torch.utils.data.Dataset):
        def __init__(self, rows):
            self.rows = rows

        def __len__(self):
            return len(self.rows)

        def __getitem__(self, i):
            ids = self.rows[i]
            labels = ids.clone() if fixed else torch.cat([ids[1:], torch.tensor([-100])])
            return {"input_ids": ids, "labels": labels}

    ids = sums(360)
    model = CausalLM()
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-3)
    session = attach(model, optimizer)
    for _epoch in range(30):
        for batch in DataLoader(TextDataset(ids[:300]), batch_size=30, shuffle=True):
            optimizer.zero_grad()
            outputs = model(**batch)
            outputs["loss"].backward()
            optimizer.step()
            session.log(loss=outputs["loss"])
    with torch.no_grad():
        said = model(ids[300:])["logits"][:, 2:-1].argmax(-1)
    return float((said != ids[300:, 3:]).float().mean())


@fault(
    "mask_inverted",
    area="language",
    source="https://github.com/mlwithme/TransformerTranslation/issues/6",
    cause="The padding mask is True for real tokens, which attention then leaves out, and it reads the padding instead.",
    words=(r"mask", r"invert|padding|real|True|opposite|ignored|wrong way"),
    also=("padding_dominates", "mask_not_applied"),
    cascade=("underfitting", "loss_plateau", "not_learning", "constant_output", "input_ignored"),
    sites=("(model)", "(data)", "encoder", "loader"),
)
def masks_the_words_and_not_the_padding(attach, fixed):
    """src_key_padding_mask = (src != PAD)."""
    PAD, CLS = 0, 30
    texts, labels = keywords(600, longest=12)

    def collate(batch):
        words, y = zip(*batch, strict=True)
        src = torch.full((len(words), 14), PAD)
        src[:, 0] = CLS
        for row, text in enumerate(words):
            src[row, 1 : len(text) + 1] = text
        mask = src == PAD if fixed else src != PAD
        return src, mask, torch.stack(y)

    class Classifier(nn.Module):
        def __init__(self, d_model=32):
            super().__init__()
            self.embedding = nn.Embedding(31, d_model)
            layer = nn.TransformerEncoderLayer(d_model, 4, 64, dropout=0.1, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
            self.decoder = nn.Linear(d_model, 4)

        def forward(self, src, src_key_padding_mask):
            memory = self.encoder(self.embedding(src), src_key_padding_mask=src_key_padding_mask)
            return self.decoder(memory[:, 0])

    data = list(zip(texts, labels, strict=True))
    model = Classifier()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    session = attach(model, optimizer)
    for epoch in range(8):
        model.train()
        for src, mask, y in DataLoader(data[:480], batch_size=24, shuffle=True, collate_fn=collate):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(src, mask), y)
            loss.backward()
            optimizer.step()
            session.log(loss=loss, epoch=epoch)
    model.eval()
    src, mask, y = collate(data[480:])
    with torch.no_grad():
        return float((model(src, mask).argmax(1) != y).float().mean())
