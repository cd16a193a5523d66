"""Eighth hold-out: texts, and the optimizers, schedules and accumulations that train on them."""

from __future__ import annotations

import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.optim.lr_scheduler import LambdaLR

from fault_programs.holdout_8.about import fault
from fault_programs.holdout_8.matter import clinic, draw, houses, mistakes, scans, sentences


def causal(size):
    return torch.full((size, size), -1e9).triu(1)


class TinyGPT(nn.Module):
    """Two layers that read a text from left to right."""

    def __init__(self, words=20, width=32, length=24):
        super().__init__()
        self.embed, self.pos = nn.Embedding(words, width), nn.Embedding(length, width)
        layer = nn.TransformerEncoderLayer(width, 2, 64, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.lm_head = nn.Linear(width, words)

    def forward(self, ids):
        h = self.embed(ids) + self.pos(torch.arange(ids.shape[1]))
        return self.lm_head(self.blocks(h, mask=causal(ids.shape[1])))


class Collator:
    """Stacks examples, and makes labels of what it is given."""

    def __init__(self, pad_id, keep):
        self.pad_id, self.keep = pad_id, keep

    def __call__(self, examples):
        batch = {key: torch.stack([e[key] for e in examples]) for key in examples[0]}
        labels = batch["labels"] if self.keep else batch["input_ids"].clone()
        labels[labels == self.pad_id] = -100
        batch["labels"] = labels
        return batch


@fault(
    "mask_not_applied",
    area="fine-tuning",
    source="https://github.com/oobabooga/textgen/issues/4031",
    cause="The collator makes labels anew from the input, so the prompt that was marked with -100 is trained on as well, noise and all.",
    words=(r"label|-100|mask", r"prompt|overwrit|collat"),
    also=("data_overwritten", "setting_without_effect"),
    cascade=("loss_plateau", "underfitting"),
    sites=("(data)", "loader", "(loss)", "(loop)"),
)
def collator_overwrites_the_labels(attach, fixed):
    """labels = batch['input_ids'].clone(), whatever came in."""
    made = torch.Generator().manual_seed(831)
    prompt = torch.randint(2, 20, (600, 10), generator=made)
    answer = torch.stack([prompt.max(1).values, prompt.min(1).values], 1)
    ids = torch.cat([prompt, answer], 1)
    marked = torch.cat([torch.full_like(prompt, -100), answer], 1)
    examples = [{"input_ids": text, "labels": label} for text, label in zip(ids, marked)]
    collate = Collator(pad_id=0, keep=fixed)
    model = TinyGPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    session = attach(model, optimizer)
    for step in range(170):
        pick = torch.randint(0, 500, (32,)).tolist()
        batch = collate([{k: v.clone() for k, v in examples[n].items()} for n in pick])
        logits = model(batch["input_ids"])
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss)
    with torch.no_grad():
        said = model(ids[500:])[:, 9:11]
        return float(F.cross_entropy(said.flatten(0, 1), answer[500:].flatten()))


class PositionalEncoding(nn.Module):
    def __init__(self, width, longest=64, whole=True):
        super().__init__()
        position = torch.arange(longest)[:, None]
        div = torch.exp(torch.arange(0, width, 2) * (-math.log(10000.0) / width))
        pe = torch.zeros(1, longest, width)
        pe[0, :, 0::2], pe[0, :, 1::2] = torch.sin(position * div), torch.cos(position * div)
        self.register_buffer("pe", pe)
        self.whole = whole

    def forward(self, x):
        if self.whole:
            return x + self.pe[:, : x.shape[1], :]
        return x + self.pe[:, x.shape[1], :]


@fault(
    "position_encoding_constant",
    area="motion generation",
    source="https://github.com/DiffPoseTalk/DiffPoseTalk/issues/20",
    cause="The slice lacks its colon, so one row of the encoding is added to all places and the order of the sequence is lost.",
    words=(r"position", r"(same|one|single|constant|slice|index)"),
    also=("input_ignored", "index_for_value"),
    cascade=("underfitting", "loss_plateau", "not_learning"),
    sites=("pos", "pe", "(model)"),
)
def one_position_for_all_frames(attach, fixed):
    """x + self.pe[:, x.shape[1], :]."""
    net = nn.Module()
    net.inp = nn.Linear(3, 32)
    net.pos = PositionalEncoding(32, whole=fixed)
    net.enc = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    net.out = nn.Linear(32, 3)
    opt = torch.optim.Adam(net.parameters(), lr=2e-3)
    session = attach(net, opt)
    tail = []
    for step in range(250):
        x = torch.randn(32, 9, 3)
        target = torch.cat([x[:, 3:], x[:, :3]], 1)  # the same motion, three frames later
        loss = F.mse_loss(net.out(net.enc(net.pos(net.inp(x)))), target)
        opt.zero_grad()
        loss.backward()
        opt.step()
        tail.append(loss.item())
        if step % 25 == 24:
            session.log(step=step, mse=loss)
    return sum(tail[-20:]) / 20


IGNORE_ID = -1


def answer_logps(model, ids, target, invert):
    """Return the mean log-probability of the part of a text that is not ignored."""
    mask = (target == IGNORE_ID) if invert else (target != IGNORE_ID)
    logps = model(ids[:, :-1]).log_softmax(-1)
    picked = logps.gather(2, target[:, 1:].masked_fill(target[:, 1:] == IGNORE_ID, 0)[..., None])[..., 0]
    keep = mask[:, 1:].float()
    return (picked * keep).sum(1) / keep.sum(1)


@fault(
    "mask_inverted",
    area="preference tuning",
    source="https://github.com/QwenAudio/CosyVoice/issues/1449",
    cause="The mask is True where the target is ignored, so the preference is taken over the prompt, which both answers share.",
    words=(r"mask", r"ignore|invert|prompt|padding"),
    also=("mask_not_applied",),
    cascade=("term_without_gradient", "loss_plateau", "not_learning", "vanishing_gradient"),
    sites=("(loss)", "loss_fn", "(loop)"),
)
def preference_over_the_prompt(attach, fixed):
    """chosen_lm_mask = chosen_lm_target == IGNORE_ID."""
    made = torch.Generator().manual_seed(832)
    prompt = torch.randint(2, 12, (400, 6), generator=made)
    good, bad = prompt.flip(1)[:, :3], torch.randint(2, 12, (400, 3), generator=made)
    model, reference = TinyGPT(), TinyGPT()
    reference.load_state_dict(model.state_dict())
    reference.requires_grad_(False)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    session = attach(model, opt)
    invert = not fixed

    def pair(rows, answer):
        ids = torch.cat([prompt[rows], answer[rows]], 1)
        return ids, torch.cat([torch.full_like(prompt[rows], IGNORE_ID), answer[rows]], 1)

    for step in range(120):
        rows = torch.randint(0, 320, (24,))
        chosen, rejected = pair(rows, good), pair(rows, bad)
        with torch.no_grad():
            ref_c, ref_r = answer_logps(reference, *chosen, invert), answer_logps(reference, *rejected, invert)
        margin = answer_logps(model, *chosen, invert) - ref_c - answer_logps(model, *rejected, invert) + ref_r
        dpo_loss = -F.logsigmoid(2.0 * margin).mean()
        opt.zero_grad()
        dpo_loss.backward()
        opt.step()
        session.log(dpo_loss=dpo_loss, accuracy=(margin > 0).float().mean())
    with torch.no_grad():
        rows = torch.arange(320, 400)
        better = answer_logps(model, *pair(rows, good), False) > answer_logps(model, *pair(rows, bad), False)
    return 1 - float(better.float().mean())


class Decoder(nn.Module):
    """Reads its own last word and a state, one step at a time."""

    def __init__(self, words=20, width=40, carry=True):
        super().__init__()
        self.embed, self.rnn, self.out = nn.Embedding(words, width), nn.GRUCell(width, width), nn.Linear(width, words)
        self.carry = carry

    def forward(self, ids, hidden):
        outputs, h = [], hidden
        for emb_t in self.embed(ids).unbind(1):
            h = self.rnn(emb_t, h if self.carry else hidden)
            outputs.append(self.out(h))
        return torch.stack(outputs, 1)


@fault(
    "recurrence_cut",
    area="translation",
    source="https://github.com/pytorch/examples/issues/88",
    cause="Each step of the decoder starts from the encoder's state again, so what has been said is forgotten.",
    words=(r"hidden|state", r"(not|never).*(updat|carr|pass)|recurren"),
    also=("result_discarded", "rnn_state_not_reset"),
    cascade=("underfitting", "loss_plateau"),
    sites=("decoder", "rnn", "(model)"),
)
def decoder_starts_over_at_every_word(attach, fixed):
    """output, h = self.rnn(emb_t, hidden) in the loop."""
    encoder = nn.Embedding(9, 40)
    model = nn.ModuleDict({"encoder": encoder, "decoder": Decoder(words=4, carry=fixed)})
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
    session = attach(model, optimizer)
    tail = []
    for step in range(200):
        # says 2 as often as the source asks for, then stops with 1, then pads with 0
        src, t = torch.randint(2, 9, (64,)), torch.arange(10)
        tgt = torch.where(t < src[:, None], 2, (t == src[:, None]).long())
        tgt_in = torch.cat([torch.full((64, 1), 3), tgt[:, :-1]], 1)
        loss = F.cross_entropy(model["decoder"](tgt_in, encoder(src)).flatten(0, 1), tgt.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss)
        tail.append(float(loss.detach()))
    return sum(tail[-20:]) / 20


@fault(
    "mask_not_applied",
    area="permutation language model",
    source="https://github.com/huggingface/transformers/pull/8409",
    cause="Padding and separators are excluded with & where | was meant, so no token is both and all of them are asked for.",
    words=(r"padding|special|functional", r"mask|exclud|&"),
    also=("padding_dominates", "mask_inverted"),
    cascade=("constant_output", "loss_plateau", "single_class_output", "class_imbalance_collapse"),
    sites=("(data)", "(loss)", "(loop)"),
)
def no_token_is_pad_and_separator(attach, fixed):
    """non_func_mask = ~(padding_mask & special_tokens_mask)."""
    ids, _ = sentences()
    ids = torch.cat([torch.ones(len(ids), 1, dtype=torch.long), ids, torch.zeros(len(ids), 20, dtype=torch.long)], 1)
    padding, special = ids == 0, ids == 1
    functional = (padding | special) if fixed else (padding & special)
    model = TinyGPT(words=21, length=40)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    session = attach(model, optimizer)
    for epoch in range(7):
        for x, func in draw(ids[:600], functional[:600], size=30):
            chosen = (torch.rand(x.shape) < 0.3) & ~func
            labels = x.masked_fill(~chosen, -100)
            logits = model(torch.cat([torch.full_like(x[:, :1], 20), x[:, :-1]], 1))
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            session.log(loss=loss)
    x = ids[600:]
    with torch.no_grad():
        logits = model(torch.cat([torch.full_like(x[:, :1], 20), x[:, :-1]], 1))
    return float(F.cross_entropy(logits.flatten(0, 1), x.masked_fill(x < 2, -100).flatten(), ignore_index=-100))


class AdamW(torch.optim.Optimizer):
    """Written from the paper."""

    def __init__(
        self, params, lr=1e-3, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.0, *, decay_with_lr=True, correct=True
    ):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.decay_with_lr, self.correct = decay_with_lr, correct

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            lr, (b1, b2) = group["lr"], group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state.update(t=0, m=torch.zeros_like(p), v=torch.zeros_like(p))
                state["t"] += 1
                state["m"].mul_(b1).add_(p.grad, alpha=1 - b1)
                state["v"].mul_(b2).addcmul_(p.grad, p.grad, value=1 - b2)
                m_hat = state["m"] / (1 - b1 ** state["t"]) if self.correct else state["m"]
                v_hat = state["v"] / (1 - b2 ** state["t"]) if self.correct else state["v"]
                decay = (lr if self.decay_with_lr else 1.0) * group["weight_decay"] * p
                p.sub_(lr * m_hat / (v_hat.sqrt() + group["eps"]) + decay)


@fault(
    "weight_decay_too_large",
    area="language",
    source="https://github.com/joennlae/tensorli/issues/1",
    cause="The hand-written AdamW multiplies the decay without the learning rate, so weights shrink by a twentieth at each step.",
    words=(r"weight decay|decay", r"learning rate|\blr\b|shrink|too (large|strong)"),
    cascade=("underfitting", "loss_plateau", "not_learning", "constant_output", "vanishing_gradient", "input_ignored"),
    sites=("optimizer", "(model)"),
)
def decay_without_the_learning_rate(attach, fixed):
    """t.data -= lr * m_hat / (...) + weight_decay * t.data."""
    ids, sizes = sentences()
    model = TinyGPT()
    optimizer = AdamW(model.parameters(), lr=3e-3, weight_decay=0.05, decay_with_lr=fixed)
    session = attach(model, optimizer)
    for (x,) in draw(ids[:600], size=30, epochs=8):
        labels = x[:, 1:].masked_fill(x[:, 1:] == 0, -100)
        loss = F.cross_entropy(model(x[:, :-1]).flatten(0, 1), labels.flatten())
        model.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss)
    x = ids[600:]
    with torch.no_grad():
        return float(
            F.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].masked_fill(x[:, 1:] == 0, -100).flatten())
        )


@fault(
    "bias_correction_missing",
    area="language",
    source="https://github.com/ml-explore/mlx/pull/1640",
    cause="Adam without bias correction takes first steps thirty times too long, because the second moment starts from zero.",
    words=(r"bias.?correct", r"first steps|early|second moment"),
    also=("lr_too_high",),
    cascade=(
        "loss_spike",
        "loss_divergence",
        "dead_relu",
        "exploding_activation",
        "large_initial_loss",
        "constant_output",
        "loss_plateau",
    ),
    sites=("optimizer",),
)
def adam_without_bias_correction(attach, fixed):
    """m and v are used as they are."""
    x, y = houses()
    model = nn.Sequential(
        nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)
    )
    optimizer = AdamW(model.parameters(), lr=1e-2, betas=(0.0, 0.9999), correct=fixed)
    session = attach(model, optimizer)
    for step in range(250):
        pick = torch.randint(0, 1000, (64,))
        loss = F.mse_loss(model(x[pick])[:, 0], y[pick])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss)
    with torch.no_grad():
        return min(float(F.mse_loss(model(x[1000:])[:, 0], y[1000:])), 3.0)


class Warmup:
    """Raises the rate step by step, then hands over to another schedule."""

    def __init__(self, optimizer, warmup_updates, after, by_count):
        self.optimizer, self.updates, self.after, self.by_count = optimizer, warmup_updates, after, by_count
        self.base, self.number = [g["lr"] for g in optimizer.param_groups], 0

    def _is_warming_up(self):
        if self.by_count:
            return self.number < self.updates
        return self.number < self.updates or self.optimizer.param_groups[0]["lr"] < 1.0

    def step(self):
        self.number += 1
        factor = (
            min(1.0, self.number / self.updates) if self._is_warming_up() else self.after(self.number - self.updates)
        )
        for group, lr in zip(self.optimizer.param_groups, self.base):
            group["lr"] = lr * factor


@fault(
    "schedule_never_decays",
    area="dialogue",
    source="https://github.com/facebookresearch/ParlAI/pull/4384",
    cause="Warm-up counts as unfinished while the rate is below 1, which it always is, so the decay after it never begins.",
    words=(r"warm.?up", r"(never|not|constant).*(decay|fall|end)|decay.*never"),
    also=("scheduler_never_called",),
    cascade=("lr_too_high", "loss_oscillation", "loss_plateau"),
    sites=("scheduler", "optimizer", "(loop)"),
    onset=20,
)
def warms_up_for_ever(attach, fixed):
    """_is_lr_warming_up() compares the rate with 1."""
    x, _ = houses()
    made = torch.Generator().manual_seed(833)
    truth = x @ torch.linspace(-1, 1, 8)
    y = truth + 1.5 * torch.randn(len(x), generator=made)
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    total = 280
    scheduler = Warmup(optimizer, 20, lambda n: max(0.0, 1 - n / (total - 20)), by_count=fixed)
    session = attach(model, optimizer)
    for step in range(total):
        pick = torch.randint(0, 1000, (8,))
        loss = F.mse_loss(model(x[pick])[:, 0], y[pick])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        session.log(loss=loss, lr=optimizer.param_groups[0]["lr"])
    with torch.no_grad():
        return float(F.mse_loss(model(x[1000:])[:, 0], truth[1000:]))


@fault(
    "lr_schedule_collapse",
    area="named entities",
    source="https://github.com/deepset-ai/FARM/issues/46",
    cause="The number of steps of an epoch is rounded down, so the rate is zero long before the end.",
    words=(r"(total )?steps|rounding|schedul", r"rate.*(zero|0)"),
    also=("lr_too_low",),
    cascade=("loss_plateau", "underfitting", "not_learning"),
    sites=("scheduler", "optimizer", "(loop)"),
    onset=40,
)
def steps_are_rounded_down(attach, fixed):
    """int(n / batch_size) * epochs."""
    xtr, ytr, xte, yte = scans()
    xtr, ytr = xtr[:190].flatten(1), ytr[:190]
    batch_size, epochs = 100, 40
    total = (math.ceil(len(xtr) / batch_size) if fixed else int(len(xtr) / batch_size)) * epochs
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    schedule = LambdaLR(optimizer, lambda s: min(1.0, (s + 1) / (0.1 * total)) * max(0.0, 1 - s / total))
    session = attach(model, optimizer)
    for epoch in range(epochs):
        for x, y in zip(xtr.split(batch_size), ytr.split(batch_size)):
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            session.log(loss=loss, lr=optimizer.param_groups[0]["lr"])
    return mistakes(model, xte.flatten(1), yte)


@fault(
    "warm_up_restarts",
    area="vision-language",
    source="https://github.com/Vision-CAIR/MiniGPT-4/pull/263",
    cause="Warm-up counts the steps of the epoch instead of all steps, so the rate falls back to its start at every epoch and never gets through.",
    words=(r"warm.?up", r"(reset|restart|every epoch|each epoch)"),
    also=("lr_schedule_collapse", "lr_too_low"),
    cascade=("underfitting", "loss_plateau", "not_learning"),
    sites=("scheduler", "optimizer", "(loop)"),
    onset=20,
)
def warm_up_begins_again_every_epoch(attach, fixed):
    """warmup_lr_schedule(step=cur_step) with the step of the epoch."""
    xtr, ytr, xte, yte = scans()
    config = {"init_lr": 2e-2, "warmup_start_lr": 1e-5, "warmup_steps": 150, "max_epoch": 10}
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=config["warmup_start_lr"], momentum=0.9)
    session = attach(model, optimizer)
    total_cur_step = 0
    for epoch in range(config["max_epoch"]):
        for cur_step, (x, y) in enumerate(draw(xtr, ytr, size=65)):
            at = total_cur_step if fixed else cur_step
            if at < config["warmup_steps"]:
                share = at / config["warmup_steps"]
                lr = config["warmup_start_lr"] + share**3 * (config["init_lr"] - config["warmup_start_lr"])
            else:
                lr = 0.5 * config["init_lr"] * (1 + math.cos(math.pi * epoch / config["max_epoch"]))
            for group in optimizer.param_groups:
                group["lr"] = lr
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total_cur_step += 1
        session.log(loss=loss, lr=lr)
    return mistakes(model, xte, yte)


class Accelerator:
    """Divides a loss by the accumulation before it goes backward."""

    def __init__(self, accumulation, divide):
        self.accumulation, self.divide = accumulation, divide

    def backward(self, loss):
        (loss / self.accumulation if self.divide else loss).backward()


@fault(
    "loss_divided_twice",
    area="fine-tuning",
    source="https://github.com/huggingface/transformers/issues/40052",
    cause="The trainer divides the loss by the accumulation and the accelerator divides it again, so gradients are sixteen times too small.",
    words=(r"(divid|scal).*(twice|again|double)|double", r"accumulat"),
    also=("lr_too_low",),
    cascade=("underfitting", "not_learning", "loss_plateau"),
    sites=("(loop)", "(loss)", "optimizer"),
)
def both_divide_by_the_accumulation(attach, fixed):
    """loss / steps in training_step, and in Accelerator.backward."""
    xtr, ytr, xte, yte = clinic()
    steps = 16
    accelerator = Accelerator(steps, divide=not fixed)
    model = nn.Sequential(nn.Linear(30, 24), nn.Tanh(), nn.Linear(24, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.8)
    session = attach(model, optimizer)
    for update in range(70):
        total = 0.0
        for _micro in range(steps):
            pick = torch.randint(0, 400, (4,))
            loss = F.cross_entropy(model(xtr[pick]), ytr[pick]) / steps
            accelerator.backward(loss)
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        session.log(loss=total)
    with torch.no_grad():
        return float(F.cross_entropy(model(xte), yte))


@fault(
    "accumulation_not_scaled",
    area="preference tuning",
    source="https://github.com/huggingface/trl/pull/3716",
    cause="The loss of each micro-batch is not divided by the number of them, so gradients are eight times too large.",
    words=(r"accumulat", r"(not|never).*(divid|scal)"),
    cascade=(
        "lr_too_high",
        "loss_oscillation",
        "loss_spike",
        "loss_divergence",
        "exploding_gradient",
        "exploding_activation",
        "clip_always_active",
    ),
    sites=("(loop)", "optimizer", "(loss)"),
)
def micro_batches_are_summed(attach, fixed):
    """if num_items_in_batch is None: loss = loss / steps, never reached."""
    x, _ = houses()
    made = torch.Generator().manual_seed(834)
    quality = x[:, 0] - 0.7 * x[:, 1] + 0.5 * x[:, 2].tanh()
    first, second = torch.randint(0, 1000, (2, 4000), generator=made)
    won = torch.rand(4000, generator=made) < torch.sigmoid(1.2 * (quality[first] - quality[second]))
    chosen, rejected = torch.where(won, first, second), torch.where(won, second, first)
    scorer = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.SGD(scorer.parameters(), lr=0.7)
    session = attach(scorer, optimizer)
    scale = 1 / 16 if fixed else 1.0
    tail = []
    for update in range(80):
        for _ in range(16):
            pick = torch.randint(0, 4000, (4,))
            odds = scorer(x[chosen[pick]]) - scorer(x[rejected[pick]])
            loss = -F.logsigmoid(odds).mean()
            (loss * scale).backward()
            tail.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
        session.log(loss=sum(tail[-16:]) / 16)
    return min(sum(tail[-400:]) / 400, 10.0)


@fault(
    "temperature_not_squared",
    area="distillation",
    source="https://github.com/IntelLabs/distiller/issues/122",
    cause="The soft loss is not multiplied by the square of the temperature, so the teacher has almost no say beside the noisy labels.",
    words=(r"temperature|T\*T|squar", r"(soft|teacher|distill)"),
    also=("aux_loss_dominates",),
    cascade=("overfitting", "underfitting"),
    sites=("(loss)", "loss_fn", "(loop)"),
)
def soft_loss_lacks_the_square(attach, fixed):
    """0.9 * KL(T) + 0.1 * CE without T * T."""
    xtr, ytr, xte, yte = scans()
    xtr, xte = xtr.flatten(1), xte.flatten(1)
    teacher = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    opt = torch.optim.Adam(teacher.parameters(), lr=3e-3)
    for x, y in draw(xtr, ytr, size=65, epochs=8):
        opt.zero_grad()
        F.cross_entropy(teacher(x), y).backward()
        opt.step()
    teacher.eval().requires_grad_(False)
    made = torch.Generator().manual_seed(835)
    wrong = torch.where(
        torch.rand(len(ytr), generator=made) < 0.6, torch.randint(0, 10, (len(ytr),), generator=made), ytr
    )
    student = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 10))
    optimizer = torch.optim.Adam(student.parameters(), lr=5e-3)
    session = attach(student, optimizer)
    T = 8.0
    for x, y in draw(xtr[:400], wrong[:400], size=40, epochs=25):
        logits = student(x)
        soft = F.kl_div(F.log_softmax(logits / T, 1), F.softmax(teacher(x) / T, 1), reduction="batchmean")
        hard = F.cross_entropy(logits, y)
        loss = 0.7 * soft * (T * T if fixed else 1) + 0.3 * hard
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(soft=soft, hard=hard)
    return mistakes(student, xte, yte)


@fault(
    "position_frequencies_wrong",
    area="interpretability",
    source="https://github.com/goodfire-ai/spd/pull/88",
    cause="Positions are multiplied by the wavelengths instead of divided, so the encoding jumps about and grows instead of turning slowly.",
    words=(r"position", r"(multipl|divid|frequen|wavelength|blow|scale)"),
    also=("bad_init_scale",),
    cascade=(
        "unnormalised_inputs",
        "exploding_activation",
        "large_initial_loss",
        "underfitting",
        "loss_plateau",
        "saturated_activation",
    ),
    sites=("(model)", "pos", "embed"),
)
def wavelengths_are_multiplied(attach, fixed):
    """position * wavelength for position / wavelength, added without sine."""
    ids, _ = sentences()

    class InductionHead(nn.Module):
        def __init__(self, width=32):
            super().__init__()
            self.embed, self.head = nn.Embedding(20, width), nn.Linear(width, 20)
            wavelength = 100.0 ** (torch.arange(width) / width)
            position = torch.arange(12.0)[:, None]
            self.register_buffer("pos", position / wavelength if fixed else position * wavelength)
            self.block = nn.TransformerEncoderLayer(width, 2, 64, dropout=0.0, batch_first=True, norm_first=True)

        def forward(self, x):
            return self.head(self.block(self.embed(x) + self.pos[: x.shape[1]], src_mask=causal(x.shape[1])))

    model = InductionHead()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    session = attach(model, optimizer)
    for (x,) in draw(ids[:600], size=30, epochs=8):
        labels = x[:, 1:].masked_fill(x[:, 1:] == 0, -100)
        loss = F.cross_entropy(model(x[:, :-1]).flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss)
    x = ids[600:]
    with torch.no_grad():
        return float(
            F.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].masked_fill(x[:, 1:] == 0, -100).flatten())
        )
