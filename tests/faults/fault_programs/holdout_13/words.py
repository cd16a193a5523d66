"""Thirteenth hold-out: words, tokens and tags."""

from __future__ import annotations

import random

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, TensorDataset

from fault_programs.holdout_13.about import fault


def chains(count, length, vocab=12):
    """Return sequences in which a token mostly follows from the two before it."""
    ids = torch.randint(1, vocab, (count, length))
    for t in range(2, length):
        follows = 1 + (ids[:, t - 1] * 3 + ids[:, t - 2]) % (vocab - 1)
        ids[:, t] = torch.where(torch.rand(count) < 0.93, follows, ids[:, t])
    return ids


@fault(
    "future_leak",
    area="language model",
    source="https://github.com/huggingface/transformers/issues/48745",
    cause="The decoder is called without a causal mask, so each position sees the token that it should predict.",
    words=(r"causal|mask", r"future|next token|sees?|leak|attend|missing|after it|look"),
    cascade=("overfitting", "train_val_preproc_mismatch"),
    sites=("blocks", "(model)", "encoder", "layers", "(loop)"),
)
def decoder_of_a_config_attends_to_both_sides(attach, fixed):
    """is_decoder is in the config, and the mask is only made for is_causal."""
    config = {"vocab_size": 12, "hidden": 48, "heads": 4, "layers": 2, "positions": 14, "is_decoder": True}
    config["is_causal"] = bool(fixed)

    class TinyForCausalLM(nn.Module):
        def __init__(self, config):
            super().__init__()
            self.config, d = config, config["hidden"]
            self.tokens, self.places = nn.Embedding(config["vocab_size"], d), nn.Embedding(config["positions"], d)
            self.blocks = nn.ModuleList(
                nn.TransformerEncoderLayer(d, config["heads"], 2 * d, 0.0, batch_first=True, norm_first=True)
                for _ in range(config["layers"])
            )
            self.norm, self.lm_head = nn.LayerNorm(d), nn.Linear(d, config["vocab_size"])

        def forward(self, input_ids, labels=None):
            steps, mask = input_ids.shape[1], None
            if self.config["is_causal"]:
                mask = nn.Transformer.generate_square_subsequent_mask(steps)
            x = self.tokens(input_ids) + self.places.weight[:steps]
            for block in self.blocks:
                x = block(x, src_mask=mask)
            logits = self.lm_head(self.norm(x))
            if labels is None:
                return {"logits": logits}
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
            return {"loss": loss, "logits": logits}

    model = TinyForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    session = attach(model, optimizer)
    data = chains(600, 14)
    for epoch in range(8):
        model.train()
        for i in torch.randperm(600).split(30):
            out = model(data[i], labels=data[i])
            optimizer.zero_grad()
            out["loss"].backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            session.log(loss=out["loss"].item())
    model.eval()
    data, wrong = chains(200, 14), []
    with torch.no_grad():
        for t in range(4, 13):  # as in generation: only what came before is there
            wrong.append((model(data[:, :t])["logits"][:, -1].argmax(1) != data[:, t]).float().mean())
    return float(torch.stack(wrong).mean())


@fault(
    "target_not_shifted",
    area="language model",
    source="https://github.com/huggingface/transformers/pull/404",
    cause="The loss compares the logits at a position with the token at the same position, which is the input, not the next one.",
    words=(r"shift|next token|same (position|token)|input", r"label|target|logit|loss|copy|identity|align|shift"),
    also=("data_leakage",),
    cascade=("overfitting",),
    sites=("(loss)", "(data)", "(loop)", "(model)", "loss_fn"),
)
def language_model_learns_the_token_that_it_reads(attach, fixed):
    """loss_fct(lm_logits.view(-1, V), lm_labels.view(-1)), with lm_labels=batch and input_ids=batch."""
    V = 12

    class GRULMHead(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(V, 24)
            self.rnn = nn.GRU(24, 64, batch_first=True)
            self.head = nn.Linear(64, V)

        def forward(self, input_ids, lm_labels=None):
            lm_logits = self.head(self.rnn(self.embed(input_ids))[0])
            if lm_labels is None:
                return lm_logits
            ahead = int(bool(fixed))
            shift_logits, shift_labels = lm_logits[:, : lm_logits.shape[1] - ahead], lm_labels[:, ahead:]
            return nn.CrossEntropyLoss()(shift_logits.reshape(-1, V), shift_labels.reshape(-1))

    model = GRULMHead()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    session = attach(model, optimizer)
    data = chains(640, 16)
    for epoch in range(8):
        for (batch,) in DataLoader(TensorDataset(data), batch_size=32, shuffle=True):
            loss = model(batch, lm_labels=batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss.item())
    data = chains(200, 16)
    with torch.no_grad():
        return (model(data)[:, 2:-1].argmax(-1) != data[:, 3:]).float().mean().item()


@fault(
    "bad_init_scale",
    area="text classification",
    source="https://github.com/huggingface/transformers/pull/7",
    cause="normal_(0.02) sets the mean to 0.02 and leaves the standard deviation at 1, so the weights start far too large.",
    words=(r"init|normal_|std|standard deviation|mean", r"large|1\b|scale|mean|argument|position|big"),
    cascade=(
        "large_initial_loss",
        "saturated_activation",
        "underfitting",
        "loss_plateau",
        "exploding_gradient",
        "vanishing_gradient",
        "exploding_activation",
        "overfitting",
        "attention_entropy_collapse",
        "clip_always_active",
    ),
    sites=("(model)", "encoder", "embed", "classifier", "pooler"),
    exact=False,
)
def init_weights_names_the_deviation_as_mean(attach, fixed):
    """module.weight.data.normal_(0.02), after TensorFlow's truncated_normal_initializer(0.02)."""
    vocab, width = 40, 64
    normal = {"mean": 0.0, "std": 0.02} if fixed else {"mean": 0.02}

    def init_weights(module):
        if isinstance(module, nn.Linear | nn.Embedding):
            module.weight.data.normal_(**normal)
        if isinstance(module, nn.Linear):
            module.bias.data.zero_()

    class SentencePair(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(vocab, width)
            self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
            self.dense = nn.Sequential(nn.Linear(width, 128), nn.GELU(), nn.Linear(128, width))
            self.norm = nn.LayerNorm(width)
            self.pooler, self.classifier = nn.Linear(width, width), nn.Linear(width, 3)
            self.apply(init_weights)

        def forward(self, ids):
            x = self.embed(ids)
            x = x + F.scaled_dot_product_attention(self.query(x), self.key(x), self.value(x))
            x = self.norm(x + self.dense(x))
            return self.classifier(torch.tanh(self.pooler(x.mean(1))))

    def sentences(count):
        label = torch.randint(0, 3, (count,))
        ids = torch.randint(3, vocab, (count, 12))
        at = torch.rand(count, 12).argsort(1)[:, :2]
        ids.scatter_(1, at, torch.stack([label, (label + 1) % 3 + 3], 1))
        return ids, label

    model = SentencePair()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    session = attach(model, optimizer)
    ids, label = sentences(700)
    for epoch in range(9):
        for i in torch.randperm(700).split(28):
            loss = F.cross_entropy(model(ids[i]), label[i])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss.item())
    ids, label = sentences(400)
    with torch.no_grad():
        return (model(ids).argmax(1) != label).float().mean().item()


@fault(
    "batch_axis_mixed",
    area="next place",
    source="https://github.com/songyangco/GETNext/issues/2",
    cause="The encoder layers are made without batch_first, so attention runs over the walks of a batch, not over the steps of a walk.",
    words=(r"batch_first|batch|dimension|axis", r"attention|first|time|step|sequence|across|mix|samples"),
    cascade=("underfitting", "loss_plateau", "overfitting", "not_learning"),
    sites=("transformer", "encoder", "(model)", "layers"),
)
def walks_of_a_batch_attend_to_each_other(attach, fixed):
    """nn.TransformerEncoderLayer(...) for inputs of shape (batch, steps, features)."""
    places = 12

    class NextPlace(nn.Module):
        def __init__(self, dim=48):
            super().__init__()
            self.embedding = nn.Embedding(places, dim)
            self.position = nn.Parameter(0.3 * torch.randn(9, dim))
            layer = nn.TransformerEncoderLayer(dim, 4, 96, dropout=0.0, batch_first=bool(fixed))
            self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
            self.decoder = nn.Linear(dim, places)

        def forward(self, walk):
            x = self.embedding(walk) + self.position
            return self.decoder(self.encoder(x)[:, -1])

    model, criterion = NextPlace(), nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    session = attach(model, optimizer)
    walks = chains(900, 10, places)
    for epoch in range(10):
        model.train()
        for i in torch.randperm(900).split(36):
            loss = criterion(model(walks[i, :-1]), walks[i, -1])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss.item())
    model.eval()
    walks = chains(400, 10, places)
    with torch.no_grad():
        return (model(walks[:, :-1]).argmax(1) != walks[:, -1]).float().mean().item()


@fault(
    "padding_dominates",
    area="question classification",
    source="https://github.com/thtrieu/qclass_dl/issues/1",
    cause="The state at the last place of the padded batch is classified, which stands after many pads for a short question.",
    words=(r"pad", r"last|final|\[:, -1\]|length|end|after|hides?|forget|real"),
    cascade=("underfitting", "loss_plateau", "constant_output", "not_learning", "overfitting", "vanishing_gradient"),
    sites=("(model)", "rnn", "(data)", "fc"),
    exact=False,
)
def question_is_read_off_after_its_pads(attach, fixed):
    """output[:, -1] of a recurrent layer over a batch from pad_sequence."""
    vocab, classes = 30, 6

    class QuestionRNN(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(vocab, 24, padding_idx=0)
            self.rnn = nn.RNN(24, 48, batch_first=True)
            self.fc = nn.Linear(48, classes)

        def forward(self, ids, real_len):
            output, _ = self.rnn(self.embed(ids))
            last = real_len - 1 if fixed else torch.full_like(real_len, -1)
            return self.fc(output[torch.arange(len(ids)), last])

    def questions(count):
        made = []
        for _ in range(count):
            label = random.randrange(classes)
            words = [random.randrange(7, vocab) for _ in range(random.choice([3, 4, 5, 6, 7, 40]))]
            words[-2] = label + 1
            made.append((torch.tensor(words), label))
        return made

    def collate(batch):
        ids, label = zip(*batch)
        return pad_sequence(ids, batch_first=True), torch.tensor([len(i) for i in ids]), torch.tensor(label)

    model = QuestionRNN()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    session = attach(model, optimizer)
    loader = DataLoader(questions(600), batch_size=24, shuffle=True, collate_fn=collate)
    for epoch in range(8):
        for ids, real_len, label in loader:
            loss = F.cross_entropy(model(ids, real_len), label)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss.item())
    ids, real_len, label = collate(questions(300))
    with torch.no_grad():
        return (model(ids, real_len).argmax(1) != label).float().mean().item()


@fault(
    "params_not_in_optimizer",
    area="adapters",
    source="https://github.com/adapter-hub/adapters/issues/260",
    cause="The list of parameters for the optimizer is made before the adapters are added, so it does not hold them.",
    words=(r"adapter", r"optimi[sz]er|before|not (in|held|updated|trained)|missing|order"),
    cascade=("underfitting", "loss_plateau", "not_learning"),
    sites=("optimizer", "adapters", "(model)", "adapter"),
)
def adapter_comes_after_the_list_of_parameters(attach, fixed):
    """AdamW(params), and model.add_adapter(task) after params = list(model.parameters())."""
    vocab, width = 24, 32

    class Adapter(nn.Module):
        def __init__(self, bottleneck=16):
            super().__init__()
            self.down, self.up = nn.Linear(width, bottleneck), nn.Linear(bottleneck, width)
            nn.init.zeros_(self.up.weight)

        def forward(self, x):
            return x + self.up(F.relu(self.down(x)))

    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(vocab, width)
            self.layers = nn.ModuleList([nn.Linear(width, width), nn.Linear(width, 8)])
            self.adapters = nn.ModuleDict()
            self.head = nn.Linear(8, 2)

        def add_adapter(self, task):
            for i in range(len(self.layers)):
                self.adapters[f"{task}_{i}"] = Adapter()

        def forward(self, ids, task=None):
            x = self.embed(ids).mean(1)
            for i, layer in enumerate(self.layers):
                x = self.adapters[f"{task}_{i}"](x) if task else x
                x = torch.tanh(layer(x))
            return self.head(x)

    def texts(count, rule):
        ids = torch.randint(0, vocab, (count, 5))
        return ids, rule(ids).long()

    def old_task(ids):
        return (ids < 12).sum(1) > 2

    def new_task(ids):
        return (ids % 2).sum(1) > 2

    model = Encoder()
    pre = torch.optim.Adam(model.parameters(), lr=1e-2)
    ids, label = texts(600, old_task)
    for i in torch.randint(0, 600, (150, 40)):
        pre.zero_grad()
        F.cross_entropy(model(ids[i]), label[i]).backward()
        pre.step()

    for p in (*model.embed.parameters(), *model.layers.parameters()):
        p.requires_grad = False
    params = list(model.parameters())
    model.add_adapter("odd")
    optimizer = torch.optim.AdamW(model.parameters() if fixed else params, lr=1e-2, weight_decay=0.01)
    session = attach(model, optimizer)
    ids, label = texts(1000, new_task)
    for epoch in range(16):
        for i in torch.randperm(1000).split(50):
            loss = F.cross_entropy(model(ids[i], task="odd"), label[i])
            model.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss.item())
    ids, label = texts(500, new_task)
    with torch.no_grad():
        return (model(ids, task="odd").argmax(1) != label).float().mean().item()
