"""Fifth hold-out: speech and series."""

from __future__ import annotations

import torch
import torch.nn as nn
import torch.nn.functional as F

from fault_programs.holdout_5.about import fault
from fault_programs.holdout_5.materials import batches, demand, plant, utterances, windows


class Listener(nn.Module):
    """Frames to letters."""

    def __init__(self, out=7):
        super().__init__()
        self.conv = nn.Conv1d(10, 32, 3, padding=1)
        self.rnn = nn.GRU(32, 32, batch_first=True, bidirectional=True)
        self.fc = nn.Linear(64, out)

    def forward(self, frames):
        h = torch.relu(self.conv(frames.transpose(1, 2))).transpose(1, 2)
        return self.fc(self.rnn(h)[0])


@torch.no_grad()
def letter_errors(model, frames, letters, blank=0):
    """Return the share of utterances whose best path does not spell the letters."""
    model.eval()
    bad = 0
    for path, truth in zip(model(frames).argmax(-1), letters, strict=True):
        said = [int(c) for k, c in enumerate(path) if c != blank and (k == 0 or c != path[k - 1])]
        bad += said != truth.tolist()
    return bad / len(letters)


@fault(
    "logits_into_prob_loss",
    area="speech",
    source="https://github.com/gwx314/STARS/issues/9",
    cause="ctc_loss is given raw logits; it expects log-probabilities.",
    words=(r"log.?(prob|softmax)", r"raw logits", r"not normali[sz]ed", r"unbounded|no (lower )?bound|no bottom"),
    cascade=(
        "loss_sign_flipped",
        "loss_divergence",
        "exploding_activation",
        "exploding_gradient",
        "large_initial_loss",
    ),
    sites=("(loss)", "loss_fn", "(function)", "fc"),
)
def ctc_of_raw_logits(attach, fixed):
    """No log_softmax before ctc_loss."""
    frames, letters = utterances()
    model = Listener()
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
    session = attach(model, optimizer)
    for x, y in batches(frames[100:], letters[100:], size=20, epochs=10):
        ph_frame_logits = model(x).transpose(0, 1)
        given = ph_frame_logits.log_softmax(-1) if fixed else ph_frame_logits
        loss = F.ctc_loss(given, y, torch.full((len(x),), 24), torch.full((len(x),), 4))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(ctc=loss)
    return letter_errors(model, frames[:100], letters[:100])


@fault(
    "blank_is_a_letter",
    area="speech",
    source="https://github.com/espnet/espnet/issues/700",
    cause="Letters are counted from 0, which CTCLoss takes for the blank.",
    words=(r"blank", r"label (0|zero)", r"label.*(range|reserved)"),
    also=("label_out_of_range",),
    cascade=("loss_plateau", "underfitting", "not_learning"),
    sites=("(loss)", "loss_fn", "(data)"),
)
def letter_zero_is_the_blank(attach, fixed):
    """CTCLoss(blank=0) with labels from 0."""
    frames, letters = utterances()
    labels = letters if fixed else letters - 1
    acoustic = Listener(7)
    ctc = nn.CTCLoss(zero_infinity=True)
    opt = torch.optim.Adam(acoustic.parameters(), lr=4e-3)
    session = attach(acoustic, opt)
    for epoch in range(12):
        acoustic.train()
        for x, y in batches(frames[100:], labels[100:], size=20):
            logp = F.log_softmax(acoustic(x), dim=2).permute(1, 0, 2)
            loss = ctc(logp, y, torch.full((20,), 24), torch.full((20,), 4))
            opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(acoustic.parameters(), 5.0)
            opt.step()
        session.log(loss=loss)
    return letter_errors(acoustic, frames[:100], labels[:100])


@fault(
    "train_val_preproc_mismatch",
    area="speech",
    source="from memory: speech recipes that apply mean and variance normalisation in the training collate function only",
    cause="Features are normalised in training and not in validation.",
    words=(r"(train\w*|valid\w*|evaluation).*(differently|mismatch|preproc|not normali|other scale)", r"preproc"),
    also=("unnormalised_inputs",),
    cascade=("overfitting", "train_mode_in_eval", "batchnorm_stats_stale"),
    sites=("(data)", "loader", "(input)"),
    exact=False,
)
def normalises_features_in_training_only(attach, fixed):
    """The evaluation path lacks the normalisation."""
    frames, letters = utterances()
    raw = frames * 6 + 20
    first = letters[:, 0] - 1
    mean, std = raw[100:].mean((0, 1)), raw[100:].std((0, 1))

    def collate_train(k):
        return ((raw[k] - mean) / std).transpose(1, 2), first[k]

    def collate_eval(k):
        feats = (raw[k] - mean) / std if fixed else raw[k]
        return feats.transpose(1, 2), first[k]

    net = nn.Sequential(nn.Conv1d(10, 24, 3), nn.ReLU(), nn.MaxPool1d(2), nn.Flatten(), nn.Linear(24 * 11, 6))
    opt = torch.optim.Adam(net.parameters(), lr=3e-3)
    session = attach(net, opt)
    for epoch in range(15):
        net.train()
        for (k,) in batches(torch.arange(100, 500), size=20):
            x, y = collate_train(k)
            loss = F.cross_entropy(net(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
        net.eval()
        with torch.no_grad():
            x, y = collate_eval(torch.arange(100))
            out = net(x)
            session.log(train_loss=loss, val_loss=F.cross_entropy(out, y))
    return float((out.argmax(1) != y).float().mean())


@fault(
    "nan_in_data",
    area="speech",
    source="from memory: log-mel features with torch.log(spec) and silent frames (log 0 = -inf), several speech repositories",
    cause="The logarithm of silent frames is minus infinity: log of the spectrum without a small constant.",
    words=(r"log(arithm)? of", r"\blog\b.*(zero|inf)", r"(inf|nan).*(data|input|batch)"),
    also=("nan_forward",),
    cascade=("nan_in_loss", "nan_backward", "nan_in_weights", "nan_in_optimizer", "nan_forward"),
    sites=("(data)", "loader", "(input)", "0", "conv"),
)
def logarithm_of_silence(attach, fixed):
    """torch.log(spec) where a few frames are zero."""
    frames, letters = utterances()
    spec = frames.abs()
    spec[::37, :2] = 0.0
    first = letters[:, 0] - 1
    net = nn.Sequential(nn.Conv1d(10, 24, 3), nn.ReLU(), nn.MaxPool1d(2), nn.Flatten(), nn.Linear(24 * 11, 6))
    opt = torch.optim.Adam(net.parameters(), lr=2e-3)
    session = attach(net, opt)
    for x, y in batches(spec[100:], first[100:], size=20, epochs=8):
        feats = torch.log(x + 1e-3) if fixed else torch.log(x)
        loss = F.cross_entropy(net(feats.transpose(1, 2)), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        session.log(loss=loss)
    with torch.no_grad():
        return float((net(torch.log(spec[:100] + 1e-3).transpose(1, 2)).argmax(1) != first[:100]).float().mean())


@fault(
    "broadcast_loss",
    area="time series",
    source="https://github.com/jsboige/CoursIA/pull/926",
    cause="Predictions (batch, 1) minus targets (batch,) broadcast to (batch, batch).",
    words=(r"broadcast", r"shapes?.*(differ|expand|mismatch)"),
    cascade=("constant_output", "not_learning", "underfitting", "loss_plateau"),
    sites=("(loss)", "loss_fn", "(function)"),
)
def one_step_forecast_broadcasts(attach, fixed):
    """pred_len = 1 keeps its dimension, the target does not."""
    x, y = windows(demand(), 24)

    class Forecaster(nn.Module):
        def __init__(self, pred_len=1):
            super().__init__()
            self.lstm = nn.LSTM(1, 32, batch_first=True)
            self.proj = nn.Linear(32, pred_len)

        def forward(self, w):
            return self.proj(self.lstm(w.unsqueeze(-1))[0][:, -1])

    model = Forecaster()
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
    session = attach(model, optimizer)

    def mse(pred, target):
        return torch.mean((pred - target) ** 2)

    for xb, yb in batches(x[:1500], y[:1500], size=50, epochs=8):
        pred = model(xb)
        loss = mse(pred, yb.view_as(pred) if fixed else yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss)
    with torch.no_grad():
        return float(F.mse_loss(model(x[1500:])[:, 0], y[1500:]) / y[1500:].var())


@fault(
    "target_in_input",
    area="time series",
    source="from memory: stackoverflow.com, 'LSTM prediction looks shifted by one step' (target taken from inside the window)",
    cause="The target is the last value of the input window itself, so the model learns to repeat it.",
    words=(
        r"leak",
        r"target\w* (is|are|equal\w*|cop\w+|repeat\w*).{0,30}input",
        r"target.*(in|part of) .{0,10}input",
        r"off.?by.?one",
        r"copies",
    ),
    also=("data_leakage", "future_leak"),
    cascade=("overfitting",),
    sites=("(data)", "loader", "(loss)"),
)
def forecasts_the_last_value_it_sees(attach, fixed):
    """An index off by one when windows are cut."""
    series = demand()

    def create_sequences(data, seq_length):
        xs, ys = [], []
        for i in range(len(data) - seq_length - 8):
            xs.append(data[i : i + seq_length])
            ys.append(data[i + seq_length + 7] if fixed else data[i + seq_length - 1])
        return torch.stack(xs), torch.stack(ys)

    x, y = create_sequences(series[:1600], 20)
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    session = attach(model, optimizer)
    loss_fn = nn.MSELoss()
    for epoch in range(25):
        for xb, yb in batches(x, y, size=64):
            loss = loss_fn(model(xb).squeeze(-1), yb)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        session.log(mse=loss)
    tx, ty = windows(series[1500:], 20, ahead=8)
    with torch.no_grad():
        return float(F.mse_loss(model(tx).squeeze(-1), ty) / ty.var())


@fault(
    "output_range_mismatch",
    area="time series",
    source="from memory: discuss.pytorch.org, 'LSTM regression never predicts below zero' (ReLU after the last layer)",
    cause="A ReLU after the last layer cannot reach the negative half of the standardised targets.",
    words=(r"relu.*(output|last|end|target)", r"(output|range).*(negative|cannot reach|below zero)"),
    also=("relu_before_logits",),
    cascade=("dead_relu", "underfitting", "loss_plateau", "constant_output", "not_learning"),
    sites=("3", "2", "(model)", "(loss)", "loss_fn", "act"),
)
def rectified_forecast(attach, fixed):
    """The output layer is followed by the same activation as the others."""
    x, y = windows(demand(), 16)
    dims = [16, 48, 1]
    layers = []
    for k, (a, b) in enumerate(zip(dims[:-1], dims[1:], strict=True)):
        layers.append(nn.Linear(a, b))
        if k < len(dims) - 2 or not fixed:
            layers.append(nn.ReLU())
    model = nn.Sequential(*layers)
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    session = attach(model, opt)
    for xb, yb in batches(x[:1500], y[:1500], size=50, epochs=15):
        loss = F.smooth_l1_loss(model(xb)[:, 0], yb)
        opt.zero_grad()
        loss.backward()
        opt.step()
        session.log(loss=loss)
    with torch.no_grad():
        return float(F.mse_loss(model(x[:1500])[:, 0], y[:1500]))


class Stateful(nn.Module):
    """Keeps its hidden state as an attribute."""

    def __init__(self, reset):
        super().__init__()
        self.rnn = nn.LSTM(3, 24, batch_first=True)
        self.fc = nn.Linear(24, 1)
        self.hidden, self.reset = None, reset

    def forward(self, x):
        if self.reset or self.hidden is None or self.hidden[0].size(1) != x.size(0):
            self.hidden = (torch.zeros(1, x.size(0), 24), torch.zeros(1, x.size(0), 24))
        out, (h, c) = self.rnn(x, self.hidden)
        self.hidden = (h.detach(), c.detach())
        return self.fc(out[:, -1])


@fault(
    "rnn_state_not_reset",
    area="time series",
    source="https://github.com/Hvass-Labs/TensorFlow-Tutorials/issues/79 (state kept between unrelated windows distorts predictions)",
    cause="The hidden state of one batch starts the next, though batches are shuffled and unrelated.",
    words=(r"(hidden|recurrent|rnn) state", r"state.*(reset|carried|kept)"),
    also=("rnn_state_not_detached",),
    cascade=("not_learning", "underfitting", "loss_plateau", "overfitting"),
    sites=("rnn", "(model)", "hidden"),
)
def state_of_another_batch(attach, fixed):
    """self.hidden lives on between shuffled batches."""
    g = torch.Generator().manual_seed(7)
    x = torch.randn(1000, 6, 3, generator=g)
    y = x[:, :, 0].cumsum(1)[:, -1:] * 0.5
    model = Stateful(reset=fixed)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    session = attach(model, optimizer)
    for epoch in range(10):
        for xb, yb in batches(x[200:], y[200:], size=40):
            optimizer.zero_grad()
            loss = F.mse_loss(model(xb), yb)
            loss.backward()
            optimizer.step()
            session.log(loss=loss)
    with torch.no_grad():
        order = torch.randperm(200)
        errors = [F.mse_loss(model(x[k]), y[k]) for k in order.split(40)]
    return float(torch.stack(errors).mean() / y.var())


@fault(
    "target_scale",
    area="time series",
    source="from memory: stackoverflow.com, 'loss is huge and network predicts a constant' (prices in the hundred thousands)",
    cause="Targets are in the hundred thousands and were not standardised.",
    words=(r"(target|output).*(scale|standardi|normali|large)", r"scale.*target"),
    also=("output_range_mismatch",),
    cascade=(
        "underfitting",
        "large_initial_loss",
        "lr_too_low",
        "not_learning",
        "constant_output",
        "exploding_gradient",
        "loss_plateau",
        "dead_relu",
        "clip_always_active",
    ),
    sites=("(data)", "(loss)", "loss_fn", "loader"),
    exact=False,
)
def prices_as_they_are(attach, fixed):
    """House prices without scaling."""
    x, y = plant()
    price = 300_000 + 90_000 * y
    goal = (price - price.mean()) / price.std() if fixed else price
    net = nn.Sequential(nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 1))
    opt = torch.optim.Adam(net.parameters(), lr=3e-3)
    session = attach(net, opt)
    for epoch in range(30):
        for xb, yb in batches(x[300:], goal[300:], size=60):
            opt.zero_grad()
            loss = nn.MSELoss()(net(xb).squeeze(1), yb)
            loss.backward()
            opt.step()
        session.log(loss=loss)
    with torch.no_grad():
        return float(F.mse_loss(net(x[:300]).squeeze(1), goal[:300]) / goal[:300].var())
