"""Seventh hold-out: losses, targets and what they are made of."""

from __future__ import annotations

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

from fault_programs.holdout_7.about import fault
from fault_programs.holdout_7.matter import (
    batches,
    blobs,
    chunks,
    citations,
    energy_distance,
    normal_adjacency,
    pictures,
    prose,
    rings,
    table,
    windows,
)


class GCN(nn.Module):
    """Two graph convolutions over a dense adjacency matrix."""

    def __init__(self, nfeat, nhid, nclass, dropout=0.3):
        super().__init__()
        self.gc1 = nn.Linear(nfeat, nhid)
        self.gc2 = nn.Linear(nhid, nclass)
        self.dropout = dropout

    def forward(self, x, adj):
        x = F.relu(adj @ self.gc1(x))
        x = F.dropout(x, self.dropout, training=self.training)
        return adj @ self.gc2(x)


class NodeClassifier(nn.Module):
    """A GCN with something at its end."""

    def __init__(self, end):
        super().__init__()
        self.body = GCN(12, 24, 5)
        self.end = end

    def forward(self, x, adj):
        return self.end(self.body(x, adj))


@fault(
    "double_softmax",
    area="graphs",
    source="https://github.com/mlelarge/graph_neural_net/pull/37",
    cause="The graph network ends in a softmax, and cross entropy applies another.",
    words=(r"softmax",),
    cascade=("underfitting", "loss_plateau", "not_learning"),
    sites=("loss_fn", "(loss)", "(model)", "end"),
)
def graph_network_ends_in_a_softmax(attach, fixed):
    """There was a softmax before the cross entropy."""
    x, adj, y = citations()
    adj = normal_adjacency(adj)
    model = NodeClassifier(nn.Identity() if fixed else nn.Softmax(dim=1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    criterion = nn.CrossEntropyLoss()
    session = attach(model, optimizer)
    for _ in range(60):
        model.train()
        optimizer.zero_grad()
        loss = criterion(model(x, adj)[:200], y[:200])
        loss.backward()
        optimizer.step()
        session.log(loss=loss)
    with torch.no_grad():
        return float(F.cross_entropy(model.eval().body(x, adj)[:200], y[:200]))


class RegressionHead(nn.Module):
    """A head for one number, as in a library of heads."""

    def __init__(self, size):
        super().__init__()
        self.feed_forward = nn.Sequential(nn.Linear(size, 32), nn.ReLU(), nn.Linear(32, 1))
        self.loss_fct = nn.MSELoss(reduction="none")

    def forward(self, x):
        return self.feed_forward(x)

    def logits_to_loss(self, logits, labels):
        return self.loss_fct(logits, labels.float()).mean()


@fault(
    "broadcast_loss",
    area="language",
    source="https://github.com/deepset-ai/FARM/issues/229",
    cause="The logits are squeezed to (N,) while the labels stay (N, 1), so each logit is compared with every label.",
    words=(r"broadcast", r"shape"),
    cascade=("not_learning", "loss_plateau", "underfitting", "constant_output"),
    sites=("loss_fn", "(loss)", "loss_fct"),
)
def head_squeezes_its_logits(attach, fixed):
    """logits.squeeze() against labels of (N, 1)."""
    x, y = table()
    head = RegressionHead(7)
    optimizer = torch.optim.AdamW(head.parameters(), lr=4e-3)
    session = attach(head, optimizer)
    for xb, labels in batches(x[:1000], y[:1000].unsqueeze(1), size=40, epochs=12):
        logits = head(xb)
        loss = head.logits_to_loss(logits if fixed else logits.squeeze(), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss)
    with torch.no_grad():
        return float(F.mse_loss(head(x[1000:]).squeeze(1), y[1000:]))


def teacher_of_digits():
    """Return a teacher trained on the digits for a moment."""
    xtr, ytr, _, _ = pictures()
    teacher = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.Adam(teacher.parameters(), lr=3e-3)
    for x, y in batches(xtr, ytr, size=64, epochs=6):
        optimizer.zero_grad()
        F.cross_entropy(teacher(x), y).backward()
        optimizer.step()
    return teacher.eval()


def student_net():
    return nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(128, 10))


@fault(
    "label_shuffle_mismatch",
    area="distillation",
    source="https://github.com/haitongli/knowledge-distillation-pytorch/pull/16",
    cause="The outputs of the teacher were computed in one pass over a shuffled loader and are then paired with the batches of another.",
    words=(r"(order|shuffl).*", r"teacher", r"do(es)? not belong|mismatch"),
    cascade=("not_learning", "underfitting", "loss_plateau"),
    sites=("(data)", "loader", "(loop)", "(loss)"),
)
def teacher_answers_in_another_order(attach, fixed):
    """fetch_teacher_outputs once, then zip with the batches of a shuffled loader."""
    xtr, ytr, xte, yte = pictures()
    teacher = teacher_of_digits()
    loader = DataLoader(TensorDataset(xtr, ytr), batch_size=64, shuffle=True)
    with torch.no_grad():
        teacher_outputs = [teacher(x) for x, _ in loader]
    student = student_net()
    optimizer = torch.optim.Adam(student.parameters(), lr=3e-3)
    session = attach(student, optimizer)
    T, alpha = 3.0, 0.9

    def loss_fn_kd(outputs, labels, teacher_outputs):
        soft = F.kl_div(F.log_softmax(outputs / T, 1), F.softmax(teacher_outputs / T, 1), reduction="batchmean")
        return soft * alpha * T * T + F.cross_entropy(outputs, labels) * (1 - alpha)

    for _epoch in range(8):
        student.train()
        for i, (x, y) in enumerate(loader):
            with torch.no_grad():
                answer = teacher(x) if fixed else teacher_outputs[i]
            loss = loss_fn_kd(student(x), y, answer)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss)
    with torch.no_grad():
        return float(F.cross_entropy(student(xte), yte))


@fault(
    "logits_into_prob_loss",
    area="distillation",
    source="https://github.com/microsoft/ProDA/issues/20",
    cause="kl_div takes log-probabilities of the student but gets its softmax.",
    words=(r"log", r"kl_div|kl divergence"),
    cascade=("not_learning", "underfitting", "loss_plateau", "double_softmax"),
    sites=("(loss)", "loss_fn"),
)
def student_gives_probabilities_to_kl_div(attach, fixed):
    """F.kl_div(student, teacher) with both after softmax."""
    xtr, _, xte, yte = pictures()
    teacher = teacher_of_digits()
    model = student_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    session = attach(model, optimizer)
    squash = F.log_softmax if fixed else F.softmax
    for (x,) in batches(xtr, size=50, epochs=8):
        student = squash(model(x), dim=1)
        with torch.no_grad():
            target = F.softmax(teacher(x), dim=1)
        loss = F.kl_div(student, target, reduction="none").sum(1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss_kd=loss)
    with torch.no_grad():
        return float(F.cross_entropy(model(xte), yte))


class VAE(nn.Module):
    """A small VAE of digits between 0 and 1."""

    def __init__(self, latent=8):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 64), nn.ReLU())
        self.fc_mu, self.fc_logvar = nn.Linear(64, latent), nn.Linear(64, latent)
        self.decoder = nn.Sequential(nn.Linear(latent, 64), nn.ReLU(), nn.Linear(64, 64))

    def forward(self, x):
        h = self.encoder(x)
        mu, logvar = self.fc_mu(h), self.fc_logvar(h)
        z = mu + torch.randn_like(mu) * (0.5 * logvar).exp()
        return self.decoder(z), mu, logvar


@fault(
    "aux_loss_dominates",
    area="vae",
    source="https://github.com/keras-team/keras/pull/3383",
    cause="The reconstruction is averaged over the pixels while the divergence is summed, so the latter rules and the code is ignored.",
    words=(r"(kl|divergence|term).*(domina|large|outweigh)", r"(reconstruction|pixel).*(mean|average|small)"),
    also=("mixed_reductions",),
    cascade=("constant_output", "loss_plateau", "underfitting"),
    sites=("(loss)", "(loop)", "fc_mu", "fc_logvar", "encoder"),
    exact=False,
)
def divergence_against_a_mean_of_pixels(attach, fixed):
    """xent_loss lost its original_dim."""
    xtr, _, xte, _ = pictures()
    scale = lambda t: (t.flatten(1) * 0.376 + 0.305).clamp(0, 1)
    xtr, xte = scale(xtr), scale(xte)
    original_dim = 64
    model = VAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    session = attach(model, optimizer)

    def vae_loss(recon, x, mu, logvar):
        xent_loss = (original_dim if fixed else 1) * F.binary_cross_entropy_with_logits(recon, x)
        kl_loss = -0.5 * (1 + logvar - mu.pow(2) - logvar.exp()).sum(1).mean()
        return xent_loss + kl_loss, xent_loss, kl_loss

    for (x,) in batches(xtr, size=50, epochs=14):
        recon, mu, logvar = model(x)
        loss, xent, kl = vae_loss(recon, x, mu, logvar)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss, xent_loss=xent, kl_loss=kl)
    with torch.no_grad():
        return float(F.mse_loss(torch.sigmoid(model(xte)[0]), xte))


class Denoiser(nn.Module):
    """Predicts the noise in a point, given the time."""

    def __init__(self):
        super().__init__()
        self.time_embed = nn.Embedding(40, 16)
        self.net = nn.Sequential(nn.Linear(18, 96), nn.SiLU(), nn.Linear(96, 96), nn.SiLU(), nn.Linear(96, 2))

    def forward(self, x, t):
        return self.net(torch.cat([x, self.time_embed(t)], 1))


class Diffusion:
    """Forty steps of noise with a linear schedule."""

    def __init__(self, model):
        self.model = model
        self.betas = torch.linspace(1e-3, 0.25, 40)
        self.alphas_cumprod = (1 - self.betas).cumprod(0)

    def q_sample(self, x_start, t, noise):
        a = self.alphas_cumprod[t, None]
        return a.sqrt() * x_start + (1 - a).sqrt() * noise

    @torch.no_grad()
    def p_sample_loop(self, count):
        x = torch.randn(count, 2)
        for i in reversed(range(40)):
            eps = self.model(x, torch.full((count,), i))
            b, a = self.betas[i], self.alphas_cumprod[i]
            x = (x - b / (1 - a).sqrt() * eps) / (1 - b).sqrt()
            if i:
                x = x + b.sqrt() * torch.randn_like(x)
        return x


@fault(
    "target_is_input",
    area="diffusion",
    source="https://github.com/irom-princeton/dppo/issues/14",
    cause="The loss compares the output with the noisy sample that went in instead of the noise.",
    words=(r"(noisy|input).*(target|compared)", r"target.*input"),
    also=("data_leakage",),
    cascade=("underfitting",),
    sites=("(loss)", "(loop)", "loss_fn", "(data)"),
)
def recovers_the_noisy_sample(attach, fixed):
    """F.mse_loss(x_recon, x_noisy)."""
    data = rings()
    model = Denoiser()
    diffusion = Diffusion(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    session = attach(model, optimizer)

    def p_losses(x_start):
        t = torch.randint(0, 40, (len(x_start),))
        noise = torch.randn_like(x_start)
        x_noisy = diffusion.q_sample(x_start, t, noise)
        x_recon = model(x_noisy, t)
        return F.mse_loss(x_recon, noise if fixed else x_noisy)

    for (x,) in batches(data, size=100, epochs=40):
        loss = p_losses(x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss)
    return energy_distance(diffusion.p_sample_loop(500), data[:500])


class VectorQuantizer(nn.Module):
    """Nearest entry of a codebook, with a straight-through gradient."""

    def __init__(self, entries, dim, loss_first):
        super().__init__()
        self.codebook = nn.Embedding(entries, dim)
        nn.init.uniform_(self.codebook.weight, -1, 1)
        self.loss_first = loss_first

    def losses(self, quantize, inputs):
        encoding = F.mse_loss(inputs, quantize.detach())
        return F.mse_loss(quantize, inputs.detach()) + 0.25 * encoding

    def forward(self, inputs):
        nearest = torch.cdist(inputs, self.codebook.weight).argmin(1)
        quantize = self.codebook(nearest)
        through = inputs + (quantize - inputs).detach()
        loss = self.losses(quantize if self.loss_first else through, inputs)
        return through, loss


class VQVAE(nn.Module):
    """Points to one of sixteen codes and back."""

    def __init__(self, loss_first):
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 4))
        self.vq = VectorQuantizer(24, 4, loss_first)
        self.dec = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2))

    def forward(self, x):
        z, vq_loss = self.vq(self.enc(x))
        return self.dec(z), vq_loss


@fault(
    "graph_break_detach",
    area="vae",
    source="https://github.com/andylolu2/jax-vqvae-gpt/issues/2",
    cause="The codebook loss is computed after the straight-through trick, so the codebook never gets a gradient.",
    words=(r"codebook", r"no gradient|never.*gradient|not trained|unused"),
    also=("unused_parameters", "term_without_gradient", "frozen_by_mistake"),
    cascade=("underfitting", "loss_plateau"),
    sites=("vq", "vq.codebook", "(loss)"),
)
def codebook_loss_after_the_straight_through(attach, fixed):
    """quantize = inputs + sg(quantize - inputs), and then the losses."""
    data = rings()
    model = VQVAE(loss_first=fixed)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    session = attach(model, optimizer)
    for (x,) in batches(data[:1200], size=60, epochs=25):
        recon, vq_loss = model(x)
        recon_loss = F.mse_loss(recon, x)
        loss = recon_loss + vq_loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(recon_loss=recon_loss, vq_loss=vq_loss)
    with torch.no_grad():
        return float(F.mse_loss(model(data[1200:])[0], data[1200:]))


class TinyDecoder(nn.Module):
    """A causal transformer."""

    def __init__(self, vocab=24, dim=32, length=24):
        super().__init__()
        self.tok = nn.Embedding(vocab, dim)
        self.pos = nn.Embedding(length, dim)
        layer = nn.TransformerEncoderLayer(dim, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(dim, vocab)

    def forward(self, ids):
        n = ids.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(n)
        h = self.tok(ids) + self.pos(torch.arange(n))
        return self.head(self.blocks(h, mask=mask, is_causal=True))


def causal_lm_loss(logits, labels):
    """Shift inside, as the loss of a library does."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def shift_tokens_right(labels, start=0):
    return torch.cat([torch.full_like(labels[:, :1], start), labels[:, :-1]], 1)


@fault(
    "shifted_twice",
    area="language",
    source="https://github.com/huggingface/transformers/pull/46898",
    cause="decoder_input_ids are the labels shifted right, and the loss of the library shifts the labels again.",
    words=(r"shift", r"next token"),
    cascade=("underfitting", "loss_plateau"),
    sites=("(loss)", "loss_fn", "(loop)", "(data)"),
)
def library_loss_shifts_again(attach, fixed):
    """shift_tokens_right(labels), then ForCausalLMLoss."""
    text = prose()
    model = TinyDecoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    session = attach(model, optimizer)
    plain = lambda logits, labels: F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    loss_function = plain if fixed else causal_lm_loss
    for labels in chunks(text[:5000], 20, 24, 160):
        decoder_input_ids = shift_tokens_right(labels)
        logits = model(decoder_input_ids)
        loss = loss_function(logits, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss)
    with torch.no_grad():
        labels = torch.stack([text[a : a + 21] for a in range(5000, 5900, 10)])
        return float(plain(model(shift_tokens_right(labels)), labels))


@fault(
    "future_leak",
    area="language",
    source="https://github.com/ayaka14732/bart-base-jax/pull/6",
    cause="The decoder's input and its labels are aligned position by position, so the model copies its input and the loss falls to zero.",
    words=(r"(copies|sees|leak)", r"shift", r"target.*input"),
    also=("data_leakage", "target_is_input", "shifted_twice"),
    cascade=(),
    sites=("(data)", "(loop)", "(loss)", "(model)"),
)
def labels_are_the_decoder_input(attach, fixed):
    """dst and labels are aligned wrongly: nothing is shifted."""
    text = prose()
    model = TinyDecoder()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    session = attach(model, optimizer)
    for ids in chunks(text[:5000], 20, 24, 150):
        dst = ids[:, :-1]
        labels = ids[:, 1:] if fixed else dst
        logits = model(dst)
        loss = F.cross_entropy(logits.reshape(-1, 24), labels.reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss)
    with torch.no_grad():
        ids = torch.stack([text[a : a + 21] for a in range(5000, 5900, 10)])
        guess = model(ids[:, :-1]).argmax(-1)
        return float((guess != ids[:, 1:]).float().mean())


@fault(
    "class_imbalance_collapse",
    area="segmentation",
    source="https://github.com/mlcommons/GaNDLF/issues/209",
    cause="The penalty of a class is its frequency instead of one minus it, so the rare class weighs next to nothing.",
    words=(r"(class|rare|weight).*(imbalance|weight|frequen)", r"imbalanc"),
    also=("wrong_class_weights",),
    cascade=("constant_output", "underfitting", "loss_plateau"),
    sites=("loss_fn", "(loss)", "(data)", "(model)"),
    exact=False,
)
def penalties_are_the_frequencies(attach, fixed):
    """penalty_dict equals weights_dict."""
    x, y = blobs()
    frequency = torch.stack([1 - y.mean(), y.mean()])
    penalty = 1 - frequency if fixed else frequency
    criterion = nn.CrossEntropyLoss(weight=penalty)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 5, padding=2), nn.ReLU(), nn.Conv2d(8, 8, 5, padding=2), nn.ReLU(), nn.Conv2d(8, 2, 1)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    session = attach(model, optimizer, loss_fn=criterion)
    for xb, yb in batches(x[:200], y[:200, 0].long(), size=10, epochs=8):
        loss = criterion(model(xb), yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss)
    with torch.no_grad():
        found = model(x[200:]).argmax(1) == 1
    inside = y[200:, 0] == 1
    return float(1 - (found & inside).sum() / inside.sum())


@fault(
    "loss_sign_flipped",
    area="tabular",
    source="https://github.com/automl/Auto-PyTorch/pull/263",
    cause="The count of zeros is computed as ones minus rows, so pos_weight is negative and the loss of positives is maximised.",
    words=(r"negative", r"(sign|maximi[sz])", r"pos_weight|weight"),
    also=("class_imbalance_collapse",),
    cascade=("loss_divergence", "exploding_activation", "exploding_gradient", "not_learning", "constant_output"),
    sites=("loss_fn", "(loss)"),
)
def positive_weight_is_negative(attach, fixed):
    """counts_zero = counts_one + (-y.shape[0])."""
    x, value = table()
    y = (value > 0.8).float()
    counts_one = y.sum()
    counts_zero = len(y) - counts_one if fixed else counts_one - len(y)
    criterion = nn.BCEWithLogitsLoss(pos_weight=counts_zero / counts_one.clamp(min=1))
    model = nn.Sequential(nn.Linear(7, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    session = attach(model, optimizer, loss_fn=criterion)
    for xb, yb in batches(x[:1000], y[:1000], size=40, epochs=8):
        loss = criterion(model(xb).squeeze(1), yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss)
    with torch.no_grad():
        guess, truth = model(x[1000:]).squeeze(1) > 0, y[1000:] == 1
    return 1 - 0.5 * float(guess[truth].float().mean() + (~guess)[~truth].float().mean())


@fault(
    "target_scale",
    area="time series",
    source="https://github.com/JulesBelveze/time-series-autoencoder/pull/19",
    cause="The features are standardised but the target is left in its own unit, thousands.",
    words=(r"target.*(scale|unit|large|huge|standardi|normali)",),
    cascade=("large_initial_loss", "not_learning", "underfitting", "exploding_gradient", "loss_plateau"),
    sites=("(data)", "loss_fn", "(loss)"),
    exact=False,
)
def forecasts_in_thousands(attach, fixed):
    """The scaler is fitted on the features only."""
    past, ahead = windows()
    mean, scale = 5200.0, 900.0
    ahead = ahead[:, 0] * scale + mean
    target = (ahead - mean) / scale if fixed else ahead

    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(1, 24, batch_first=True)
            self.out = nn.Linear(24, 1)

        def forward(self, x):
            return self.out(self.lstm(x.unsqueeze(-1))[0][:, -1]).squeeze(1)

    model = Encoder()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    session = attach(model, optimizer)
    for xb, yb in batches(past[:1200], target[:1200], size=50, epochs=8):
        loss = F.mse_loss(model(xb), yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss)
    with torch.no_grad():
        error = (model(past[1200:]) - target[1200:]).pow(2).mean() / target.var()
    return min(float(error), 10.0)


@fault(
    "temperature_on_one_side",
    area="contrastive",
    source="https://github.com/RElbers/info-nce-pytorch/pull/17",
    cause="The temperature divides the logits of the negatives only, not that of the positive.",
    words=(r"temperature",),
    cascade=("underfitting", "loss_plateau"),
    sites=("(loss)", "loss_fn"),
)
def temperature_of_the_negatives_only(attach, fixed):
    """The positive logit is not divided."""
    xtr, _, xte, yte = pictures()
    xtr, xte = xtr.flatten(1), xte.flatten(1)
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 16))
    optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)
    session = attach(net, optimizer)
    temperature = 0.05

    def info_nce(query, key):
        query, key = F.normalize(query, dim=1), F.normalize(key, dim=1)
        sim = query @ key.T
        positive, off = sim.diagonal(), ~torch.eye(len(sim), dtype=torch.bool)
        negatives = sim[off].view(len(sim), -1) / temperature
        positive = positive / temperature if fixed else positive
        logits = torch.cat([positive[:, None], negatives], 1)
        return F.cross_entropy(logits, torch.zeros(len(sim), dtype=torch.long))

    def augment(x):
        return x + 0.4 * torch.randn_like(x)

    for (x,) in batches(xtr, size=64, epochs=8):
        loss = info_nce(net(augment(x)), net(augment(x)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss)
    with torch.no_grad():
        z = F.normalize(net(augment(xte)), dim=1) @ F.normalize(net(augment(xte)), dim=1).T
    return float((z.argmax(1) != torch.arange(len(z))).float().mean())


@fault(
    "label_shuffle_mismatch",
    area="segmentation",
    source="https://github.com/thuanz123/realfill/issues/4",
    cause="Picture and mask are cropped at random one after the other, each at its own place.",
    words=(r"(crop|augment|transform).*(mask|separate|differ)", r"do(es)? not belong|mismatch|misalign"),
    cascade=("not_learning", "underfitting", "loss_plateau", "constant_output"),
    sites=("(data)", "loader"),
    exact=False,
)
def picture_and_mask_are_cropped_apart(attach, fixed):
    """transform(image), transform(weighting)."""
    x, y = blobs()

    class Cuts(torch.utils.data.Dataset):
        def __len__(self):
            return 200

        def place(self):
            return int(torch.randint(0, 7, ())), int(torch.randint(0, 7, ()))

        def __getitem__(self, i):
            r, c = first = self.place()
            p, q = first if fixed else self.place()
            return x[i, :, r : r + 14, c : c + 14], y[i, :, p : p + 14, q : q + 14]

    model = nn.Sequential(
        nn.Conv2d(1, 8, 5, padding=2), nn.ReLU(), nn.Conv2d(8, 8, 5, padding=2), nn.ReLU(), nn.Conv2d(8, 1, 1)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
    loader = DataLoader(Cuts(), batch_size=10, shuffle=True)
    session = attach(model, optimizer)
    for _epoch in range(10):
        for image, weighting in loader:
            loss = F.binary_cross_entropy_with_logits(model(image), weighting)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss)
    with torch.no_grad():
        return float(F.binary_cross_entropy_with_logits(model(x[200:]), y[200:]))


@fault(
    "box_format",
    area="detection",
    source="https://github.com/WongKinYiu/yolor/issues/279",
    cause="Boxes are given as two corners where centre and size are expected, so the network learns wrong boxes.",
    words=(r"(xyxy|xywh|corner|format)",),
    cascade=("underfitting",),
    sites=("(data)", "(loss)"),
)
def corners_taken_for_sizes(attach, fixed):
    """Normalised xyxy labels fed to a trainer that reads xywh."""
    x, y = blobs()
    rows, cols = y[:, 0].any(2).float(), y[:, 0].any(1).float()
    edge = lambda line: (line.argmax(1) / 20.0, 1 - line.flip(1).argmax(1) / 20.0)
    (y0, y1), (x0, x1) = edge(rows), edge(cols)
    xyxy = torch.stack([x0, y0, x1, y1], 1)
    xywh = torch.stack([(x0 + x1) / 2, (y0 + y1) / 2, x1 - x0, y1 - y0], 1)
    labels = xywh if fixed else xyxy

    def to_corners(box):
        return torch.cat([box[:, :2] - box[:, 2:] / 2, box[:, :2] + box[:, 2:] / 2], 1)

    model = nn.Sequential(
        nn.Conv2d(1, 8, 5, stride=2, padding=2),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(400, 4),
        nn.Sigmoid(),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    session = attach(model, optimizer)
    for xb, target in batches(x[:200], labels[:200], size=10, epochs=15):
        box = to_corners(model(xb))
        loss = F.smooth_l1_loss(box, to_corners(target), beta=0.1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss)
    with torch.no_grad():
        return float((to_corners(model(x[200:])) - xyxy[200:]).abs().mean())
