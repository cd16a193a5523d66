"""Ninth hold-out: series, speech, tables and several targets at once."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.preprocessing import StandardScaler
from torch.utils.data import DataLoader, TensorDataset

from fault_programs.holdout_9.about import fault
from fault_programs.holdout_9.matter import heard, houses, slips, speech, waves


@fault(
    "train_val_preproc_mismatch",
    area="time series",
    source="https://github.com/AnswerXuan/Galformer-Improved-Transformer-for-Time-Series-Prediction/issues/3",
    cause="The scaler is fitted anew on the test set, so the same reading means another number there than in training.",
    words=(r"scal|normali[sz]|fit_transform|standard", r"test|valid|separate|different|again|anew"),
    cascade=("overfitting", "target_scale"),
    sites=("(data)", "(validation)", "loader"),
)
def fits_the_scaler_on_the_test_set_too(attach, fixed):
    """test = scaler.fit_transform(test)."""
    rng = np.random.RandomState(930)

    def season(hours, wind):
        speed = np.abs(rng.normal(wind, 1.6, hours))
        heat = rng.normal(15, 4, hours)
        power = np.clip((speed - 3) / 8, 0, 1) ** 2 * (1.1 - heat / 100) + rng.normal(0, 0.01, hours)
        return np.stack([speed, heat], 1), power[:, None]

    summer, summer_power = season(900, 6.0)
    winter, winter_power = season(300, 8.5)
    scaler = StandardScaler()
    train = scaler.fit_transform(summer)
    test = scaler.transform(winter) if fixed else scaler.fit_transform(winter)
    x, y = torch.tensor(train, dtype=torch.float32), torch.tensor(summer_power, dtype=torch.float32)
    x_test, y_test = torch.tensor(test, dtype=torch.float32), torch.tensor(winter_power, dtype=torch.float32)
    model = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    session = attach(model, optimizer)
    for epoch in range(20):
        model.train()
        for xb, yb in DataLoader(TensorDataset(x, y), batch_size=45, shuffle=True):
            optimizer.zero_grad()
            loss = F.mse_loss(model(xb), yb)
            loss.backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            val_loss = F.mse_loss(model(x_test), y_test)
        session.log(epoch=epoch, train_loss=loss, val_loss=val_loss)
    return float(val_loss) ** 0.5


@fault(
    "label_shuffle_mismatch",
    area="time series",
    source="https://github.com/jessicayung/blog-code-snippets/issues/6",
    cause="view gives the shape (time, sample, 1) without transposing, so each column is a mixture of several samples.",
    words=(r"view|reshape|transpose|permute", r"mix|scrambl|sample|batch|order|time"),
    also=("batch_axis_mixed", "target_unrelated"),
    cascade=("underfitting", "overfitting", "loss_plateau", "not_learning"),
    sites=("(data)", "(model)", "lstm", "(loop)"),
)
def views_samples_as_steps(attach, fixed):
    """X_train = X_train.view(input_size, -1, 1) of samples by steps."""
    x, _, y = waves(400, 12)
    num_train = 300

    class LSTM(nn.Module):
        def __init__(self, input_dim, hidden_dim, output_dim=1):
            super().__init__()
            self.lstm = nn.LSTM(input_dim, hidden_dim)
            self.linear = nn.Linear(hidden_dim, output_dim)

        def forward(self, input):
            lstm_out, _ = self.lstm(input)
            return self.linear(lstm_out[-1]).view(-1)

    def steps_first(part):
        return part.t().reshape(12, -1, 1) if fixed else part.reshape(12, -1, 1)

    X_train, X_test = steps_first(x[:num_train]), steps_first(x[num_train:])
    y_train, y_test = y[:num_train], y[num_train:]
    model = LSTM(1, 24)
    loss_fn = torch.nn.MSELoss()
    optimiser = torch.optim.Adam(model.parameters(), lr=1.5e-2)
    session = attach(model, optimiser)
    hist = np.zeros(200)
    for t in range(200):
        model.zero_grad()
        y_pred = model(X_train)
        loss = loss_fn(y_pred, y_train)
        hist[t] = loss.item()
        session.log(mse=hist[t])
        loss.backward()
        optimiser.step()
    with torch.no_grad():
        return float(loss_fn(model(X_test), y_test))


@fault(
    "target_scale",
    area="time series",
    source="https://github.com/sktime/pytorch-forecasting/pull/2413",
    cause="The window is normalised by its own mean and deviation, and the value to predict stays as it is, far from zero.",
    words=(r"target|\by\b", r"normali[sz]|scale|raw"),
    also=("train_val_preproc_mismatch",),
    cascade=("large_initial_loss", "underfitting", "loss_plateau", "not_learning", "exploding_gradient", "lr_too_low"),
    sites=("(data)", "(loss)", "loader"),
)
def normalises_the_past_and_not_the_target(attach, fixed):
    """encoder values are scaled per window, the decoder target is not."""
    rng = np.random.RandomState(931)
    level = rng.uniform(60, 240, 400)
    swing = rng.uniform(2, 10, 400)
    phase = rng.uniform(0, 6, 400)
    t = np.arange(21)
    series = level[:, None] + swing[:, None] * np.sin(0.6 * t + phase[:, None]) + rng.normal(0, 0.2, (400, 21))

    class WindowDataset(torch.utils.data.Dataset):
        def __init__(self, rows):
            self.rows = rows

        def __len__(self):
            return len(self.rows)

        def __getitem__(self, i):
            past, future = self.rows[i, :20], self.rows[i, 20:]
            mean, std = past.mean(), past.std()
            y = (future - mean) / std if fixed else future
            return torch.tensor((past - mean) / std).float(), torch.tensor(y).float()

    model = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    session = attach(model, optimizer)
    for _epoch in range(10):
        for xb, yb in DataLoader(WindowDataset(series[:320]), batch_size=20, shuffle=True):
            loss = F.mse_loss(model(xb), yb)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss)
    xb, yb = next(iter(DataLoader(WindowDataset(series[320:]), batch_size=80)))
    with torch.no_grad():
        return float((model(xb) - yb).abs().mean() / yb.std())


@fault(
    "logits_into_prob_loss",
    area="speech",
    source="https://github.com/SeanNaren/deepspeech.pytorch/issues/488",
    cause="CTCLoss wants log-probabilities and gets raw outputs, so the loss becomes negative and nothing is learned.",
    words=(r"ctc|loss", r"log.?softmax|log.?prob|logits"),
    cascade=("loss_divergence", "exploding_activation", "exploding_gradient", "constant_output", "not_learning", "nan_in_loss",
             "underfitting", "loss_sign_flipped", "loss_oscillation"),
    sites=("(loss)", "loss_fn", "(model)"),
)  # fmt: skip
def ctc_of_raw_outputs(attach, fixed):
    """ctc_loss(model(x), ...) without log_softmax."""
    x, y = speech()

    class SpeechRecognitionModel(nn.Module):
        def __init__(self):
            super().__init__()
            self.cnn = nn.Conv1d(8, 24, 3, padding=1)
            self.birnn = nn.GRU(24, 24, bidirectional=True, batch_first=True)
            self.classifier = nn.Linear(48, 6)

        def forward(self, frames):
            h = F.gelu(self.cnn(frames.transpose(1, 2))).transpose(1, 2)
            h, _ = self.birnn(h)
            return self.classifier(h)

    model = SpeechRecognitionModel()
    criterion = nn.CTCLoss(blank=0, zero_infinity=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    session = attach(model, optimizer, loss_fn=criterion)
    for _epoch in range(12):
        for rows in torch.randperm(160).split(16):
            output = model(x[rows])
            output = F.log_softmax(output, dim=2) if fixed else output
            output = output.transpose(0, 1)
            input_lengths = torch.full((len(rows),), 16, dtype=torch.long)
            label_lengths = torch.full((len(rows),), 4, dtype=torch.long)
            loss = criterion(output, y[rows], input_lengths, label_lengths)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 400)
            optimizer.step()
            session.log(loss=loss)
    with torch.no_grad():
        return slips(heard(model(x[160:]).transpose(0, 1)), y[160:])


@fault(
    "one_permutation_for_the_batch",
    area="speech",
    source="https://github.com/pytorch/audio/pull/894",
    cause="The best permutation of the speakers is chosen once for the whole batch instead of for each sample.",
    words=(r"permut|assign|order|pit", r"batch|each|sample|per"),
    also=("wrong_dim_reduction",),
    cascade=("underfitting", "loss_plateau", "not_learning", "constant_output"),
    sites=("(loss)", "loss_fn"),
)
def one_permutation_for_all_mixtures(attach, fixed):
    """min over permutations after the mean over the batch."""
    made = torch.Generator().manual_seed(932)

    def voices(count):
        t = torch.arange(32)
        pitch = 0.25 + 0.15 * torch.rand(count, 2, 1, generator=made)
        pitch[:, 1] *= 4
        talk = torch.sin(pitch * t + 6 * torch.rand(count, 2, 1, generator=made))
        swap = torch.rand(count, generator=made) < 0.5
        return torch.where(swap[:, None, None], talk.flip(1), talk)

    sources = voices(640)
    mixtures = sources.sum(1)

    class PITLoss(nn.Module):
        def forward(self, estimate, target):
            losses = []
            for order in permutations(range(2)):
                losses.append(((estimate - target[:, list(order)]) ** 2).mean((1, 2)))
            losses = torch.stack(losses)
            return losses.min(0).values.mean() if fixed else losses.mean(1).min()

    model = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 64), nn.Unflatten(1, (2, 32)))
    criterion = PITLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    session = attach(model, optimizer)
    for _epoch in range(20):
        for rows in torch.randperm(560).split(40):
            loss = criterion(model(mixtures[rows]), sources[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(pit_loss=loss)
    with torch.no_grad():
        said, true = model(mixtures[560:]), sources[560:]
        pairs = torch.stack([((said - way) ** 2).mean((1, 2)) for way in (true, true.flip(1))])
    return float(pairs.min(0).values.mean() / true.pow(2).mean())


@fault(
    "batch_axis_mixed",
    area="video",
    source="https://github.com/HHTseng/video-classification/issues/42",
    cause="The LSTM is not batch_first and gets (batch, time, features), so it runs along the batch.",
    words=(r"batch_first|lstm|time|dim", r"batch|axis|order"),
    cascade=("underfitting", "overfitting", "loss_plateau", "not_learning"),
    sites=("(model)", "LSTM"),
)
def lstm_runs_along_the_batch(attach, fixed):
    """nn.LSTM without batch_first on (batch, time, features)."""
    x, y, _ = waves(600, 20)

    class DecoderRNN(nn.Module):
        def __init__(self, hidden=24, classes=4):
            super().__init__()
            self.LSTM = nn.LSTM(input_size=2, hidden_size=hidden, num_layers=1, batch_first=fixed)
            self.fc1 = nn.Linear(hidden, 16)
            self.fc2 = nn.Linear(16, classes)

        def forward(self, x_RNN):
            RNN_out, _ = self.LSTM(x_RNN, None)
            x = self.fc1(RNN_out[:, -1, :])
            return self.fc2(F.relu(x))

    frames = x.unfold(1, 2, 2)  # (count, 10, 2)
    rnn_decoder = DecoderRNN()
    optimizer = torch.optim.Adam(rnn_decoder.parameters(), lr=6e-3)
    session = attach(rnn_decoder, optimizer)
    for epoch in range(16):
        rnn_decoder.train()
        N_count = 0
        for rows in torch.randperm(480).split(24):
            N_count += len(rows)
            optimizer.zero_grad()
            output = rnn_decoder(frames[rows])
            loss = F.cross_entropy(output, y[rows])
            loss.backward()
            optimizer.step()
            session.log(loss=loss)
        session.log(epoch=epoch)
    rnn_decoder.eval()
    with torch.no_grad():
        return float((rnn_decoder(frames[480:]).argmax(1) != y[480:]).float().mean())


@fault(
    "clip_after_step",
    area="tabular",
    source="https://github.com/yandex-research/tabm/issues/20",
    cause="Gradients are clipped before the backward pass, when there are none, so nothing is ever clipped.",
    words=(r"clip", r"before|order|backward|no effect"),
    cascade=("exploding_gradient", "loss_divergence", "loss_spike", "nan_in_loss", "nan_forward", "nan_in_weights", "lr_too_high",
             "loss_oscillation", "dead_relu", "nan_backward", "target_scale", "bad_batch_spike", "nan_in_optimizer"),
    sites=("(loop)", "optimizer"),
)  # fmt: skip
def clips_gradients_that_are_not_there_yet(attach, fixed):
    """clip_grad_norm_ between zero_grad and backward."""
    x, y = houses()
    made = torch.Generator().manual_seed(933)
    y = torch.where(torch.rand(600, generator=made) < 0.03, 300 * torch.randn(600, generator=made), y)
    model = nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.8)
    gradient_clipping_norm = 1.0
    session = attach(model, optimizer)
    for _epoch in range(20):
        for batch_idx in torch.randperm(500).split(25):
            model.train()
            optimizer.zero_grad()
            loss = F.mse_loss(model(x[batch_idx]).squeeze(-1), y[batch_idx])
            torch.nn.utils.clip_grad_norm_(model.parameters(), gradient_clipping_norm)
            loss.backward()
            if fixed:
                torch.nn.utils.clip_grad_norm_(model.parameters(), gradient_clipping_norm)
            optimizer.step()
            session.log(loss=loss)
    with torch.no_grad():
        error = (model(x[500:]).squeeze(-1) - y[500:]).abs().median()
    return min(float(error), 1e6) if torch.isfinite(error) else 1e6


@fault(
    "broadcast_loss",
    area="regression",
    source="from memory: discuss.pytorch.org and Stack Overflow, regression networks that predict the mean for every sample",
    cause="The output is (batch, 1) and the target (batch,), so their difference is a square of all pairs.",
    words=(r"shape|broadcast|squeeze|dimension|size", r"target|output|pred|pairs"),
    cascade=("constant_output", "loss_plateau", "not_learning", "underfitting"),
    sites=("(loss)", "loss_fn", "(data)", "(loop)"),
)
def pairs_every_price_with_every_guess(attach, fixed):
    """def rmse(pred, y): torch.sqrt(torch.mean((pred - y) ** 2))."""
    x, y = houses()

    def rmse(pred, actual):
        return torch.sqrt(torch.mean((pred - actual) ** 2))

    class Regressor(nn.Module):
        def __init__(self, n_features):
            super().__init__()
            self.hid1 = nn.Linear(n_features, 64)
            self.drop1 = nn.Dropout(0.05)
            self.hid2 = nn.Linear(64, 32)
            self.oupt = nn.Linear(32, 1)

        def forward(self, x):
            z = torch.relu(self.hid1(x))
            z = self.drop1(z)
            return self.oupt(torch.relu(self.hid2(z)))

    net = Regressor(6).train()
    optimizer = torch.optim.Adam(net.parameters(), lr=4e-3)
    session = attach(net, optimizer)
    for epoch in range(30):
        epoch_loss = 0
        for X, Y in DataLoader(TensorDataset(x[:480], y[:480]), batch_size=24, shuffle=True):
            optimizer.zero_grad()
            oupt = net(X)
            loss_val = rmse(oupt, Y.view(-1, 1) if fixed else Y)
            epoch_loss += loss_val.item()
            loss_val.backward()
            optimizer.step()
        session.log(epoch=epoch, loss=epoch_loss / 20)
    net.eval()
    with torch.no_grad():
        return float(F.mse_loss(net(x[480:])[:, 0], y[480:]) / y[480:].var())


@fault(
    "result_discarded",
    area="multitask",
    source="https://github.com/samvanstroud/hepattn/pull/23",
    cause="In the loop over the tasks the total is overwritten instead of added to, so only the last task trains.",
    words=(r"loss|total", r"overwrit|last|only|add|accumulat|\+="),
    also=("unused_parameters", "graph_break_detach"),
    cascade=("underfitting", "loss_plateau"),
    sites=("(loss)", "(loop)", "heads", "heads.kind", "heads.next", "(model)"),
)
def keeps_the_loss_of_the_last_task(attach, fixed):
    """total_loss = weight * loss in the loop over tasks."""
    x, kind, following = waves(600, 20)
    targets = {"kind": kind, "next": following}

    class MultiTask(nn.Module):
        def __init__(self):
            super().__init__()
            self.trunk = nn.Sequential(nn.Linear(20, 48), nn.ReLU(), nn.Linear(48, 32), nn.ReLU())
            self.heads = nn.ModuleDict({"kind": nn.Linear(32, 4), "next": nn.Linear(32, 1)})

        def forward(self, x):
            h = self.trunk(x)
            return {name: head(h) for name, head in self.heads.items()}

    def loss_of(name, out, target):
        return F.cross_entropy(out, target) if name == "kind" else F.smooth_l1_loss(out[:, 0], target)

    model = MultiTask()
    weights = {"kind": 1.0, "next": 2.0}
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    session = attach(model, optimizer)
    for _epoch in range(20):
        for rows in torch.randperm(480).split(24):
            outputs = model(x[rows])
            total_loss = torch.zeros(())
            for name, output in outputs.items():
                loss = weights[name] * loss_of(name, output, targets[name][rows])
                total_loss = total_loss + loss if fixed else loss
                session.log(**{f"loss_{name}": loss})
            optimizer.zero_grad()
            total_loss.backward()
            optimizer.step()
    with torch.no_grad():
        return float((model(x[480:])["kind"].argmax(1) != kind[480:]).float().mean())


@fault(
    "lr_schedule_collapse",
    area="tabular",
    source="https://github.com/automl/Auto-PyTorch/pull/210",
    cause="The scheduler is stepped after every batch although its steps are counted in epochs, so the rate is gone within the first epochs.",
    words=(r"schedul|learning rate|step_size", r"batch|epoch|too (fast|early|often)|every"),
    also=("lr_too_low",),
    cascade=("underfitting", "loss_plateau", "not_learning"),
    sites=("scheduler", "optimizer", "(loop)"),
    onset=6,
)
def steps_the_schedule_with_each_batch(attach, fixed):
    """scheduler.step() one indentation too deep."""
    made = torch.Generator().manual_seed(934)
    x = torch.randn(500, 16, generator=made)
    y = ((x[:, :4] * x[:, 4:8]).sum(1) > 0).long()
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=8, gamma=0.3)
    session = attach(model, optimizer)
    loader = DataLoader(TensorDataset(x[:400], y[:400]), batch_size=20, shuffle=True)
    for epoch in range(1, 25):
        model.train()
        train_loss_total, num_steps = 0.0, 0
        for i, (input_samples, gt_samples) in enumerate(loader):
            preds = model(input_samples)
            loss = F.cross_entropy(preds, gt_samples)
            train_loss_total += loss.item()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            num_steps += 1
            if not fixed or i == len(loader) - 1:
                scheduler.step()
        session.log(epoch=epoch, train_loss=train_loss_total / num_steps, lr=scheduler.get_last_lr()[0])
    with torch.no_grad():
        return float((model(x[400:]).argmax(1) != y[400:]).float().mean())


class InnerAutoencoder(nn.Module):
    def __init__(self, n_features, hidden=(24, 6), last=None):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Linear(n_features, hidden[0]), nn.ReLU(), nn.Linear(hidden[0], hidden[1]), nn.ReLU()
        )
        self.decoder = nn.Sequential(nn.Linear(hidden[1], hidden[0]), nn.ReLU(), nn.Linear(hidden[0], n_features))
        self.last = last or nn.Identity()

    def forward(self, x):
        return self.last(self.decoder(self.encoder(x)))


def sensors(count=500, seed=935):
    """Twelve readings that hang on three hidden causes; their means and deviations have nothing to do with each other."""
    made = torch.Generator().manual_seed(seed)
    cause = torch.randn(count, 3, generator=made)
    mix = torch.randn(3, 12, generator=made)
    offset = torch.tensor([0.02, -0.03, 0.5, 3.0, -0.01, 0.04, 0.8, -0.02, 1.5, 0.03, -0.05, 0.3])
    return cause @ mix + 0.05 * torch.randn(count, 12, generator=made) + offset


@fault(
    "unnormalised_inputs",
    area="anomaly detection",
    source="https://github.com/yzhao062/pyod/issues/391",
    cause="The data are divided by their mean where the standard deviation is meant, so columns with a mean near zero become huge.",
    words=(r"mean|std|deviation|normali[sz]|scale", r"divid|std|deviation|huge|large|instead"),
    also=("target_scale", "wrong_formula"),
    cascade=("large_initial_loss", "loss_plateau", "underfitting", "dead_relu", "exploding_gradient", "lr_too_low",
             "loss_oscillation"),
    sites=("(data)", "loader"),
)  # fmt: skip
def divides_by_the_mean(attach, fixed):
    """PyODDataset(X, mean=X.mean(0), std=X.mean(0))."""
    X = sensors()

    class PyODDataset(torch.utils.data.Dataset):
        def __init__(self, X, mean, std):
            self.X, self.mean, self.std = X, mean, std

        def __len__(self):
            return len(self.X)

        def __getitem__(self, idx):
            return (self.X[idx] - self.mean) / (self.std + 1e-8)

    mean, std = X[:400].mean(0), X[:400].std(0) if fixed else X[:400].mean(0)
    train_loader = DataLoader(PyODDataset(X[:400], mean, std), batch_size=32, shuffle=True)
    model = InnerAutoencoder(12)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, weight_decay=1e-5)
    session = attach(model, optimizer)
    for epoch in range(40):
        overall_loss = []
        for data in train_loader:
            loss = F.mse_loss(model(data), data)
            model.zero_grad()
            loss.backward()
            optimizer.step()
            overall_loss.append(loss.item())
        session.log(epoch=epoch, training_loss=float(np.mean(overall_loss)))
    test = (X[400:] - mean) / (std + 1e-8)
    with torch.no_grad():
        return float(((model(test) - test).pow(2).mean(0) / test.var(0)).max())


@fault(
    "output_range_mismatch",
    area="anomaly detection",
    source="https://github.com/yzhao062/pyod/issues/314",
    cause="The decoder ends in a sigmoid, and the data it should reproduce are standardised, below zero and above one.",
    words=(r"sigmoid|output|activation", r"range|standard|negative|above|below|scale"),
    also=("target_scale",),
    cascade=("saturated_activation", "loss_plateau", "underfitting", "vanishing_gradient"),
    sites=("(model)", "last", "(data)", "(loss)"),
)
def sigmoid_for_standardised_readings(attach, fixed):
    """StandardScaler before an autoencoder with output_activation='sigmoid'."""
    X = sensors(seed=936).numpy()
    scaler = StandardScaler().fit(X[:400])
    X_train = torch.tensor(scaler.transform(X[:400]), dtype=torch.float32)
    X_test = torch.tensor(scaler.transform(X[400:]), dtype=torch.float32)
    model = InnerAutoencoder(12, last=nn.Identity() if fixed else nn.Sigmoid())
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
    session = attach(model, optimizer)
    for _epoch in range(40):
        for (xb,) in DataLoader(TensorDataset(X_train), batch_size=32, shuffle=True):
            optimizer.zero_grad()
            loss = F.mse_loss(model(xb), xb)
            loss.backward()
            optimizer.step()
            session.log(loss=loss)
    with torch.no_grad():
        return float(F.mse_loss(model(X_test), X_test))


@fault(
    "double_sigmoid",
    area="tabular",
    source="from memory: discuss.pytorch.org, binary classifiers with a sigmoid layer and BCEWithLogitsLoss whose accuracy stays at one half",
    cause="The network ends in a sigmoid and BCEWithLogitsLoss applies another.",
    words=(r"sigmoid", r"twice|double|second|logits"),
    cascade=("loss_plateau", "underfitting", "not_learning", "vanishing_gradient"),
    sites=("(model)", "(loss)", "loss_fn", "sigmoid"),
)
def a_sigmoid_before_the_loss_with_logits(attach, fixed):
    """return self.sigmoid(self.layer_out(x)) and nn.BCEWithLogitsLoss()."""
    x, price = houses(700)
    y = (price > 0).float()

    class BinaryClassification(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer_1 = nn.Linear(6, 64)
            self.layer_2 = nn.Linear(64, 64)
            self.layer_out = nn.Linear(64, 1)
            self.relu = nn.ReLU()
            self.sigmoid = nn.Sigmoid()
            self.batchnorm1 = nn.BatchNorm1d(64)
            self.batchnorm2 = nn.BatchNorm1d(64)

        def forward(self, inputs):
            x = self.batchnorm1(self.relu(self.layer_1(inputs)))
            x = self.batchnorm2(self.relu(self.layer_2(x)))
            x = self.layer_out(x)
            return x if fixed else self.sigmoid(x)

    def binary_acc(y_pred, y_test):
        y_pred_tag = torch.round(torch.sigmoid(y_pred))
        return (y_pred_tag == y_test).float().mean()

    model = BinaryClassification()
    criterion = nn.BCEWithLogitsLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    session = attach(model, optimizer, loss_fn=criterion)
    for _e in range(12):
        model.train()
        for X_batch, y_batch in DataLoader(TensorDataset(x[:560], y[:560]), batch_size=28, shuffle=True):
            optimizer.zero_grad()
            y_pred = model(X_batch)
            loss = criterion(y_pred, y_batch.unsqueeze(1))
            acc = binary_acc(y_pred, y_batch.unsqueeze(1))
            loss.backward()
            optimizer.step()
            session.log(loss=loss, acc=acc)
    model.eval()
    with torch.no_grad():
        return 1 - float(binary_acc(model(x[560:]), y[560:].unsqueeze(1)))
