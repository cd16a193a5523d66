"""Fourteenth hold-out: words and tokens."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from fault_programs.holdout_14.about import fault
from fault_programs.holdout_14.material import sentences, wrong


@fault(
    "eval_mode_in_training",
    area="text classification",
    source="https://github.com/hendrycks/ethics/issues/5",
    cause="evaluate() sets the model to evaluation mode, and nothing sets it back, so all later epochs train in that mode.",
    words=(r"eval|train\(\)|mode", r"never|back|mode|stay|remain|missing|train"),
    cascade=("batchnorm_stats_stale", "overfitting", "loss_spike", "loss_divergence"),
    sites=("(model)", "(loop)", "norm", "drop"),
    onset=21,
)
def model_stays_in_evaluation_after_the_first_epoch(attach, fixed):
    """model.train() stands above the loop over the epochs, model.eval() in it."""
    words, label = sentences(500, classes=5, hints=3)
    flipped = torch.where(torch.rand(500) < 0.4, torch.randint(0, 5, (500,)), label)  # the annotators did not agree
    x_test, y_test = sentences(500, classes=5, hints=3)

    class Classifier(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.EmbeddingBag(40, 48)
            self.drop, self.hidden, self.norm = nn.Dropout(0.5), nn.Linear(48, 192), nn.BatchNorm1d(192)
            self.out = nn.Linear(192, 5)

        def forward(self, ids):
            h = F.relu(self.norm(self.hidden(self.drop(self.embed(ids)))))
            return self.out(self.drop(h))

    def evaluate(model):
        model.eval()
        with torch.no_grad():
            return F.cross_entropy(model(x_test), y_test).item()

    model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    session = attach(model, optimizer)
    loader = DataLoader(TensorDataset(words, flipped), batch_size=25, shuffle=True)
    model.train()
    for epoch in range(32):
        for ids, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(ids), y)
            loss.backward()
            optimizer.step()
            session.log(loss=loss.item())
        val_loss = evaluate(model)
        session.log(val_loss=val_loss)
        model.train() if fixed else None
    return min(val_loss, 1e3)


@fault(
    "dropout_ignores_mode",
    area="surnames",
    source="https://github.com/delip/PyTorchNLPBook/issues/28",
    cause="F.dropout is called without training=self.training, so it drops units in evaluation mode too.",
    words=(r"dropout", r"eval|mode|training|always|test|functional"),
    cascade=("train_mode_in_eval", "train_val_preproc_mismatch"),
    sites=("(model)", "fc2", "fc1", "conv", "(validation)"),
)
def surname_classifier_drops_at_test_time(attach, fixed):
    """prediction_vector = self.fc2(F.dropout(hidden, p=0.5))."""
    letters, nations = 20, 6
    habits = torch.softmax(2.0 * torch.randn(nations, letters, letters), -1)

    def surnames(count, length=8):
        nation = torch.randint(0, nations, (count,))
        name = torch.randint(0, letters, (count, length))
        for k in range(1, length):
            name[:, k] = torch.multinomial(habits[nation, name[:, k - 1]], 1)[:, 0]
        return F.one_hot(name, letters).float().transpose(1, 2), nation

    class SurnameClassifier(nn.Module):
        def __init__(self, initial_num_channels, num_classes, num_channels):
            super().__init__()
            self.convnet = nn.Sequential(nn.Conv1d(initial_num_channels, num_channels, 2), nn.ELU())
            self.fc1, self.fc2 = nn.Linear(num_channels, 32), nn.Linear(32, num_classes)

        def forward(self, x_surname):
            features = self.convnet(x_surname).mean(2)
            hidden = F.relu(self.fc1(features))
            return self.fc2(F.dropout(hidden, p=0.7, training=self.training if fixed else True))

    x, y = surnames(900)
    x_val, y_val = surnames(400)
    classifier, loss_func = SurnameClassifier(letters, nations, 96), nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(classifier.parameters(), lr=5e-3)
    session = attach(classifier, optimizer)
    for epoch_index in range(14):
        classifier.train()
        for i in torch.randperm(900).split(45):
            optimizer.zero_grad()
            loss = loss_func(classifier(x[i]), y[i])
            loss.backward()
            optimizer.step()
            session.log(train_loss=loss.item())
        classifier.eval()
        with torch.no_grad():
            val_loss = loss_func(classifier(x_val), y_val).item()
        session.log(val_loss=val_loss)
    return val_loss


@fault(
    "padding_dominates",
    area="molecules",
    source="https://github.com/DaoyuanLi2816/Molecule-Generator/pull/20",
    cause="The reconstruction loss goes over all places, and most of them are padding.",
    words=(r"pad", r"ignore|mask|loss|most|dominat|count"),
    also=("mask_not_applied",),
    cascade=("underfitting", "loss_plateau", "aux_loss_dominates", "constant_output"),
    sites=("(loss)", "loss_fn", "(data)"),
    exact=False,
)
def molecules_are_mostly_padding(attach, fixed):
    """recon = F.cross_entropy(logits.transpose(1, 2), tokens), with <pad> = 0."""
    vocab, longest = 14, 48
    ignored = 0 if fixed else -100

    def molecules(count):
        tokens = torch.zeros(count, longest, dtype=torch.long)
        body = torch.randint(1, 7, (count, 2))
        for k in range(6):  # two atoms decide which follow
            tokens[:, k] = 1 + (body[:, 0] * (k + 1) + body[:, 1] * k) % (vocab - 1)
        return tokens

    class MoleculeVAE(nn.Module):
        def __init__(self, latent=12, hidden=64):
            super().__init__()
            self.embed = nn.Embedding(vocab, 16, padding_idx=0)
            self.encode = nn.Sequential(nn.Linear(16 * longest, hidden), nn.ReLU())
            self.mu, self.logvar = nn.Linear(hidden, latent), nn.Linear(hidden, latent)
            self.decode = nn.Sequential(nn.Linear(latent, 128), nn.ReLU(), nn.Linear(128, longest * vocab))

        def forward(self, tokens):
            h = self.encode(self.embed(tokens).flatten(1))
            mu, logvar = self.mu(h), self.logvar(h)
            z = mu + torch.randn_like(mu) * (0.5 * logvar).exp()
            return self.decode(z).view(-1, longest, vocab), mu, logvar

    def loss_function(logits, tokens, mu, logvar, beta=0.03):
        recon = F.cross_entropy(logits.transpose(1, 2), tokens, ignore_index=ignored)
        kld = -0.5 * (1 + logvar - mu.pow(2) - logvar.exp()).sum(1).mean()
        return recon + beta * kld, recon, kld

    data = molecules(640)
    model = MoleculeVAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    session = attach(model, optimizer)
    for epoch in range(14):
        model.train()
        for (tokens,) in DataLoader(TensorDataset(data), batch_size=32, shuffle=True):
            loss, recon, kld = loss_function(*[(out := model(tokens))[0], tokens], *out[1:])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss.item(), recon=recon.item(), kld=kld.item())
    data = molecules(300)
    with torch.no_grad():
        return (model(data)[0].argmax(-1) != data)[data > 0].float().mean().item()


@fault(
    "label_shuffle_mismatch",
    area="chatbot",
    source="https://github.com/DrexelChatbotGroup/DrexelChatbot/issues/15",
    cause="The questions are put into a random order and their intents are not, so they do not belong together.",
    words=(r"shuffl|order|permut|random|pair", r"label|target|intent|\by\b|mismatch|not belong|only|together"),
    cascade=("not_learning", "overfitting", "loss_plateau", "underfitting", "constant_output"),
    sites=("(data)", "loader"),
    exact=False,
)
def questions_are_shuffled_without_their_intents(attach, fixed):
    """x_train = x_train[order], and y_train stays as it is."""
    words, intent = sentences(800, classes=5)
    bags = F.one_hot(words, 40).sum(1).float()
    x_train, y_train, x_test, y_test = bags[:600], intent[:600], bags[600:], intent[600:]
    order = torch.randperm(600)
    x_train, y_train = x_train[order], y_train[order] if fixed else y_train

    class IntentNet(nn.Module):
        def __init__(self, vocab, hidden, intents):
            super().__init__()
            self.l1, self.l2, self.l3 = nn.Linear(vocab, hidden), nn.Linear(hidden, hidden), nn.Linear(hidden, intents)
            self.relu = nn.ReLU()

        def forward(self, x):
            return self.l3(self.relu(self.l2(self.relu(self.l1(x)))))

    model = IntentNet(40, 32, 5)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    session = attach(model, optimizer)
    for epoch in range(12):
        for k in range(0, 600, 20):
            loss = criterion(model(x_train[k : k + 20]), y_train[k : k + 20])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss.item())
    return wrong(model, x_test, y_test)


@fault(
    "resume_incomplete",
    area="translation",
    source="https://github.com/OpenNMT/OpenNMT-py/issues/617",
    cause="After the checkpoint is loaded, set_parameters() makes a new Adagrad, so the sums of squares of the first run are lost.",
    words=(r"optimi[sz]er|adagrad|state|accumul", r"lost|eras|new|reset|again|not (restored|loaded)|resum|fresh"),
    also=("momentum_state_stale",),
    cascade=("loss_spike", "lr_too_high", "loss_oscillation", "loss_divergence", "overfitting"),
    sites=("optimizer", "(loop)"),
    onset=1,
    exact=False,
)
def loaded_optimizer_is_built_anew(attach, fixed):
    """optim.optimizer.load_state_dict(...), then optim.set_parameters(model.parameters())."""
    vocab = 16
    table = torch.randperm(vocab)

    def pairs(count):
        source = torch.randint(0, vocab, (count, 6))
        target = table[(source + source.roll(1, 1)) % vocab]
        return source, torch.where(torch.rand(count, 6) < 0.15, torch.randint(0, vocab, (count, 6)), target)

    class Optim:
        def __init__(self, lr):
            self.lr = lr

        def set_parameters(self, params):
            self.optimizer = torch.optim.Adagrad(params, lr=self.lr)

    class Translator(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(vocab, 32)
            self.mix, self.generator = nn.Linear(64, 96), nn.Linear(96, vocab)

        def forward(self, source):
            x = self.embed(source)
            return self.generator(F.relu(self.mix(torch.cat([x, x.roll(1, 1)], -1))))

    def run(model, optim, data, steps, session=None):
        for i in torch.randint(0, len(data[0]), (steps, 24)):
            optim.optimizer.zero_grad()
            loss = F.cross_entropy(model(data[0][i]).flatten(0, 1), data[1][i].flatten())
            loss.backward()
            optim.optimizer.step()
            session.log(loss=loss.item()) if session else None

    data = pairs(900)
    model, optim = Translator(), Optim(0.25)
    optim.set_parameters(model.parameters())
    run(model, optim, data, 900)
    checkpoint = copy.deepcopy({"model": model.state_dict(), "optim": optim.optimizer.state_dict()})

    model, optim = Translator(), Optim(0.25)
    model.load_state_dict(checkpoint["model"])
    optim.set_parameters(model.parameters())
    optim.optimizer.load_state_dict(checkpoint["optim"])
    None if fixed else optim.set_parameters(model.parameters())
    session = attach(model, optim.optimizer)
    run(model, optim, data, 60, session)
    source, target = pairs(400)
    with torch.no_grad():
        return F.cross_entropy(model(source).flatten(0, 1), target.flatten()).item()
