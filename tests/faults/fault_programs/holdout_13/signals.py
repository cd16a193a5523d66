"""Thirteenth hold-out: sound and series."""

from __future__ import annotations

import numpy as np
import torch
from sklearn.preprocessing import MinMaxScaler
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from fault_programs.holdout_13.about import fault
from fault_programs.holdout_13.material import words_as_sound


@fault(
    "missing_zero_grad",
    area="keyword spotting",
    source="https://github.com/wenet-e2e/wekws/pull/73",
    cause="The executor never calls zero_grad, so each step applies the sum of all gradients so far.",
    words=(r"zero_grad|accumulat|clear|sum of", r"grad"),
    cascade=(
        "loss_oscillation",
        "loss_divergence",
        "lr_too_high",
        "not_learning",
        "underfitting",
        "loss_plateau",
        "clip_always_active",
        "loss_spike",
        "constant_output",
        "dead_relu",
        "exploding_activation",
    ),
    sites=("(loop)", "optimizer"),
)
def executor_for_keywords_keeps_its_gradients(attach, fixed):
    """class Executor with train() and cv(): loss.backward() and optimizer.step()."""

    class KWSModel(nn.Module):
        def __init__(self, bands=10, hidden=32, words=6):
            super().__init__()
            self.preprocessing = nn.Linear(bands, hidden)
            self.backbone = nn.Sequential(
                nn.Conv1d(hidden, hidden, 3, padding=1), nn.ReLU(), nn.Conv1d(hidden, hidden, 3, padding=2, dilation=2)
            )
            self.classifier = nn.Linear(hidden, words)

        def forward(self, feats):
            x = F.relu(self.preprocessing(feats)).transpose(1, 2)
            return self.classifier(F.relu(self.backbone(x)).amax(2))

    class Executor:
        def __init__(self):
            self.step = 0

        def train(self, model, optimizer, data_loader, session):
            model.train()
            for feats, target in data_loader:
                logits = model(feats)
                loss = F.cross_entropy(logits, target)
                optimizer.zero_grad() if fixed else None
                loss.backward()
                optimizer.step()
                self.step += 1
                session.log(loss=loss.item())

        @torch.no_grad()
        def cv(self, model, feats, target):
            model.eval()
            return (model(feats).argmax(1) != target).float().mean().item()

    model, executor = KWSModel(), Executor()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3, weight_decay=5e-5)
    session = attach(model, optimizer)
    loader = DataLoader(TensorDataset(*words_as_sound(600)), batch_size=30, shuffle=True)
    held_out = words_as_sound(300)
    for epoch in range(12):
        executor.train(model, optimizer, loader, session)
        session.log(cv_error=executor.cv(model, *held_out))
    return executor.cv(model, *held_out)


@fault(
    "accumulation_not_scaled",
    area="speech",
    source="https://github.com/hirofumi0810/neural_sp/issues/168",
    cause="The loss is not divided by accum_grad_n_steps, so a step is as many times too long.",
    words=(r"accum", r"divid|scale|mean|sum|times|normali"),
    cascade=(
        "lr_too_high",
        "loss_oscillation",
        "loss_divergence",
        "loss_spike",
        "not_learning",
        "loss_plateau",
        "constant_output",
        "saturated_activation",
        "dead_relu",
        "exploding_gradient",
        "exploding_activation",
        "underfitting",
    ),
    sites=("(loop)", "(loss)", "optimizer"),
)
def speech_trainer_adds_up_twelve_losses(attach, fixed):
    """if args.accum_grad_n_steps > 1: loss.backward() for each, one step for all."""
    accum_grad_n_steps = 12

    class Speech2Word(nn.Module):
        def __init__(self):
            super().__init__()
            self.subsample = nn.Conv1d(10, 24, 4, 2, 1)
            self.enc = nn.GRU(24, 32, batch_first=True, bidirectional=True)
            self.out = nn.Linear(64, 6)

        def forward(self, xs):
            eouts, _ = self.enc(F.relu(self.subsample(xs.transpose(1, 2))).transpose(1, 2))
            return self.out(eouts.mean(1))

    model = Speech2Word()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.4, momentum=0.9)
    session = attach(model, optimizer)
    xs, ys = words_as_sound(720)
    for epoch in range(6):
        accum = 0
        optimizer.zero_grad()
        for i in torch.randperm(720).split(6):
            loss = F.cross_entropy(model(xs[i]), ys[i])
            (loss / accum_grad_n_steps if fixed else loss).backward()
            accum += 1
            if accum == accum_grad_n_steps:
                optimizer.step()
                optimizer.zero_grad()
                accum = 0
            session.log(loss=loss.item())
    xs, ys = words_as_sound(300)
    with torch.no_grad():
        return F.cross_entropy(model(xs), ys).clamp(max=50).item()


@fault(
    "lengths_too_short",
    area="speech recognition",
    source="from memory: questions on CTC whose input lengths are still divided by the old factor after the strides of the network were changed",
    cause="The input lengths for CTC are divided by 4 and the network shortens by 2, so the second half of each sound is cut off.",
    words=(r"length", r"half|divid|stride|factor|\b4\b|short|subsampl|frames|cut"),
    cascade=("underfitting", "loss_plateau"),
    sites=("(loss)", "(loop)", "ctc", "(data)", "loss_fn"),
)
def lengths_follow_the_strides_of_an_older_network(attach, fixed):
    """input_lengths = frames // 4, for a network that now has one stride of two."""
    letters, word = 4, 5
    shapes = 1.5 * torch.randn(letters, 10)

    def recordings(count):
        text = torch.randint(0, letters, (count, word))
        feats = torch.zeros(count, 40, 10)
        for k in range(word):
            feats[:, 8 * k + 1 : 8 * k + 6] = shapes[text[:, k], None]
        return feats + 0.4 * torch.randn_like(feats), text + 1

    class AcousticModel(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Sequential(nn.Conv1d(10, 32, 4, 2, 1), nn.ReLU(), nn.Conv1d(32, 32, 3, 1, 1), nn.ReLU())
            self.proj = nn.Linear(32, letters + 1)

        def forward(self, feats):
            return self.proj(self.conv(feats.transpose(1, 2)).transpose(1, 2)).log_softmax(-1)

    def read(model, feats):
        for path in model(feats).argmax(-1).tolist():
            yield [c for j, c in enumerate(path) if c and (j == 0 or path[j - 1] != c)]

    feats, text = recordings(500)
    frames = torch.full((500,), 40)
    model, ctc = AcousticModel(), nn.CTCLoss(blank=0, zero_infinity=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    session = attach(model, optimizer)
    for epoch in range(14):
        for i in torch.randperm(500).split(25):
            input_lengths = frames[i] // (2 if fixed else 4)
            loss = ctc(model(feats[i]).transpose(0, 1), text[i], input_lengths, torch.full((len(i),), word))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(ctc_loss=loss.item())
    feats, text = recordings(150)
    with torch.no_grad():
        return sum(a != b for a, b in zip(read(model, feats), text.tolist())) / 150


@fault(
    "train_val_preproc_mismatch",
    area="sensors",
    source="https://github.com/NetManAIOps/OmniAnomaly/issues/39",
    cause="The test set is scaled by a scaler fitted on the test set, which has another range than the training set.",
    words=(r"scal|normali|min.?max|fit", r"test|val|two|differ|separat|own|train"),
    cascade=("overfitting",),
    sites=("(data)", "(validation)", "loader", "(input)"),
    exact=False,
)
def machine_data_are_scaled_by_two_scalers(attach, fixed):
    """preprocess(df): MinMaxScaler().fit_transform(df), called for train and for test."""

    def preprocess(df, scaler=None):
        scaler = scaler or MinMaxScaler().fit(df)
        return torch.tensor(scaler.transform(df), dtype=torch.float32), scaler

    def machine(count, low, high):
        """Temperature, current and vibration under a load, and how much oil is used."""
        load = np.random.uniform(low, high, count)
        sensors = np.stack([20 + 60 * load, 4 + 9 * load**2, np.abs(np.sin(3 * load)) + 0.3 * load], 1)
        sensors += np.random.randn(count, 3) * [1.5, 0.3, 0.05]
        return sensors, torch.tensor(np.cos(4 * load) + load, dtype=torch.float32)

    (train, oil), (test, test_oil) = machine(800, 0.0, 1.0), machine(300, 0.35, 0.7)
    x_train, scaler = preprocess(train)
    x_test, _ = preprocess(test, scaler if fixed else None)
    net = nn.Sequential(nn.Linear(3, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 1), nn.Flatten(0))
    optimizer = torch.optim.Adam(net.parameters(), lr=5e-3)
    session = attach(net, optimizer)
    for epoch in range(14):
        net.train()
        for x, y in DataLoader(TensorDataset(x_train, oil), batch_size=40, shuffle=True):
            optimizer.zero_grad()
            loss = F.mse_loss(net(x), y)
            loss.backward()
            optimizer.step()
            session.log(loss=loss.item())
        net.eval()
        with torch.no_grad():
            val_loss = F.mse_loss(net(x_test), test_oil).item()
        session.log(val_loss=val_loss)
    return val_loss / test_oil.var().item()


@fault(
    "nan_in_data",
    area="weather",
    source="https://github.com/mllam/neural-lam/pull/189",
    cause="A field that never varies has the deviation 0, and standardising divides by it, so the inputs are NaN.",
    words=(r"nan|divi|zero", r"std|deviation|constant|standardi|normali|data|input|field"),
    cascade=("not_learning", "constant_feature"),
    sites=("(data)", "loader", "(input)"),
)
def dry_months_have_no_deviation(attach, fixed):
    """(field - mean) / std, and it has not rained in the training period."""
    hours, stations = 700, 5
    t = np.arange(hours)[:, None]
    temperature = 12 + 8 * np.sin(t / 24 * 2 * np.pi + np.arange(stations)) + np.random.randn(hours, stations)
    pressure = 1010 + np.cumsum(np.random.randn(hours, stations), 0) * 0.3
    rain = np.zeros((hours, stations))
    fields = np.concatenate([temperature, pressure, rain], 1).astype(np.float32)
    mean, std = fields.mean(0), fields.std(0)
    state = torch.from_numpy((fields - mean) / (np.where(std > 0, std, 1) if fixed else std))

    class WeatherRNN(nn.Module):
        def __init__(self, fields=15, hidden=48):
            super().__init__()
            self.gru, self.out = nn.GRU(fields, hidden, batch_first=True), nn.Linear(hidden, stations)

        def forward(self, window):
            return self.out(self.gru(window)[0][:, -1])

    windows = state.unfold(0, 13, 1).transpose(1, 2)
    past, target = windows[:, :12], windows[:, 12, :stations]
    train, test = torch.arange(0, 520), torch.arange(540, len(windows))
    model = WeatherRNN()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    session = attach(model, optimizer)
    for epoch in range(7):
        for i in train[torch.randperm(520)].split(26):
            loss = F.mse_loss(model(past[i]), target[i])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss.item())
    with torch.no_grad():
        return float(F.mse_loss(model(past[test]), target[test]).nan_to_num(10.0))


@fault(
    "lr_too_low",
    area="time series",
    source="from memory: forum questions on an LSTM for prices whose loss goes down in the fourth digit only, with Adam(lr=1e-6)",
    cause="The learning rate of 1e-6 is thousands of times too low for a network that starts from nothing.",
    words=(r"learning rate|\blr\b|step size|steps?", r"low|small|tiny|short|1e-0?6"),
    cascade=("underfitting", "loss_plateau", "not_learning", "constant_output"),
    sites=("optimizer", "(loop)"),
    exact=False,
)
def lstm_for_prices_with_a_rate_for_fine_tuning(attach, fixed):
    """learning_rate = 1e-6, from a script for something else."""
    learning_rate = 5e-3 if fixed else 1e-6
    price = torch.zeros(900)
    for t in range(2, 900):
        price[t] = 1.6 * price[t - 1] - 0.8 * price[t - 2] + 0.3 * torch.randn(())
    price = (price - price[:700].mean()) / price[:700].std()
    X, y = price[:-1].unfold(0, 10, 1)[..., None], price[10:, None]

    class LSTM(nn.Module):
        def __init__(self, input_dim=1, hidden_dim=32, num_layers=2, output_dim=1):
            super().__init__()
            self.hidden_dim, self.num_layers = hidden_dim, num_layers
            self.lstm = nn.LSTM(input_dim, hidden_dim, num_layers, batch_first=True)
            self.fc = nn.Linear(hidden_dim, output_dim)

        def forward(self, x):
            h0 = torch.zeros(self.num_layers, x.size(0), self.hidden_dim)
            out, _ = self.lstm(x, (h0, torch.zeros_like(h0)))
            return self.fc(out[:, -1, :])

    model, criterion = LSTM(), nn.MSELoss()
    optimiser = torch.optim.Adam(model.parameters(), lr=learning_rate)
    session = attach(model, optimiser)
    for t in range(10):
        for i in torch.randperm(680).split(34):
            y_train_pred = model(X[i])
            loss = criterion(y_train_pred, y[i])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            session.log(mse=loss.item())
    with torch.no_grad():
        return float(criterion(model(X[700:]), y[700:]) / y[700:].var())
