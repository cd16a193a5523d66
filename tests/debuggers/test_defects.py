"""Faults that a capturing debugger is prone to, each shown not to be here."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
import torch
import torch.distributed
from tests.debuggers.conftest import datapoint, image
from tests.waiting import run_to_end
from torch import nn

from sonde.debuggers import BaseDebugger, FeatureMapDebugger, ForwardDebugger, GradCAMDebugger, SequentialDebugger
from sonde.errors import RunError
from sonde.store.pages import load_debug_outputs
from sonde.testing import assert_no_taps


class Raw(ForwardDebugger):
    def process_forward(self, module, input, output):
        return output.detach()


class Given(BaseDebugger):
    """Returns what the datapoint carries."""

    def __call__(self, datapoint, model):
        return datapoint["given"]


def sequence(model, *debuggers, **options):
    config = [{"name": f"d{index}", "debugger_config": each} for index, each in enumerate(debuggers)]
    return SequentialDebugger(config, model, **options)


def test_defect_1_an_epoch_never_overwrites_another(model, tmp_path):
    with sequence(model, Given(), page_size_mb=1) as debugger:
        for epoch in range(3):
            debugger.enabled = True
            debugger.reset_buffer()
            for idx in range(4):
                value = torch.full((1, 200_000), float(100 * epoch + idx))
                debugger({"given": value, "meta_info": {"idx": idx}}, model)
            debugger.save_all(tmp_path / f"epoch_{epoch}" / "debugger")
            debugger.enabled = False
    for epoch in range(3):
        folder = tmp_path / f"epoch_{epoch}" / "debugger"
        assert len(list(folder.glob("page_*.safetensors"))) >= 3
        stored = load_debug_outputs(folder)
        assert {idx: float(stored[idx]["d0"][0, 0]) for idx in stored} == {idx: 100 * epoch + idx for idx in range(4)}


@pytest.mark.parametrize("open_first", [True, False])
def test_defect_2_pages_are_bounded_by_the_bytes_of_tensors(model, tmp_path, open_first):
    with sequence(model, Given(), page_size_mb=1) as debugger:
        debugger.enabled = True
        if open_first:
            debugger.open(tmp_path)
        for idx in range(10):
            debugger({"given": torch.zeros(1, 1024 * 1024), "meta_info": {"idx": idx}}, model)
        debugger.save_all(tmp_path)
    assert len(list(tmp_path.glob("page_*.safetensors"))) == 10


def test_defect_2_memory_is_bounded_however_much_is_captured(model, tmp_path):
    with sequence(model, Given(), page_size_mb=8, max_pending_mb=16) as debugger:
        debugger.enabled = True
        debugger.open(tmp_path / "warm")
        debugger({"given": torch.zeros(1, 1 << 20), "meta_info": {"idx": 0}}, model)
        debugger.save_all(tmp_path / "warm")
        process = psutil.Process()
        before = peak = process.memory_info().rss
        for idx in range(48):  # 192 MiB, and no folder is known until the end
            debugger({"given": torch.zeros(1, 1 << 20), "meta_info": {"idx": idx}}, model)
            peak = max(peak, process.memory_info().rss)
        debugger.save_all(tmp_path / "debugger")
    assert len(load_debug_outputs(tmp_path / "debugger")) == 48
    assert peak - before < 64 << 20


def test_defect_3_nothing_is_lost_when_saving_into_a_new_folder(model, tmp_path):
    with sequence(model, Given(), page_size_mb=0.001) as debugger:
        debugger.enabled = True
        for idx in range(8):
            debugger({"given": torch.ones(1, 500), "meta_info": {"idx": idx}}, model)
        debugger.save_all(tmp_path / "deep" / "and" / "new")
    assert len(load_debug_outputs(tmp_path / "deep" / "and" / "new")) == 8


def test_defect_3_a_folder_that_cannot_be_written_is_reported_and_the_captures_stay(model, tmp_path):
    (tmp_path / "file").write_text("in the way")
    with sequence(model, Given()) as debugger:
        debugger.enabled = True
        debugger({"given": torch.ones(1, 5), "meta_info": {"idx": 3}}, model)
        with pytest.raises((OSError, RunError)):
            debugger.save_all(tmp_path / "file" / "debugger")
        debugger.save_all(tmp_path / "elsewhere")
    assert list(load_debug_outputs(tmp_path / "elsewhere")) == [3]


def test_defect_4_threads_do_not_see_each_other_s_captures(model, tmp_path):
    expected = {idx: model.stem(image(idx)[None]).detach() for idx in range(400)}
    evaluate_in_threads(model, tmp_path, range(400), Raw("stem"))
    stored = load_debug_outputs(tmp_path, tensors="torch")
    assert [idx for idx in range(400) if not torch.equal(stored[idx]["d0"], expected[idx])] == []


FINALIZERS = """
import gc, os, threading
import torch
from sonde.probes.rerun import kept_random_state

class Slow:
    def __init__(self):
        self.cycle = self
    def __del__(self):
        os.stat("/")  # gives up Python's lock

def work():
    for _ in range(1500):
        Slow()
        with kept_random_state([]):
            torch.rand(())

gc.set_threshold(11, 1, 1)
threads = [threading.Thread(target=work) for _ in range(4)]
for each in threads:
    each.start()
for each in threads:
    each.join()
os._exit(0)
"""


def test_threads_that_keep_the_random_state_do_not_wait_for_each_other_for_ever():
    """A collection while torch holds the lock of its generator would let another thread wait for it with Python's."""
    assert run_to_end([sys.executable, "-c", FINALIZERS]).returncode == 0


def test_defect_4_grad_cam_in_threads_is_that_of_the_sample(model, tmp_path):
    probe = GradCAMDebugger("stem")
    expected = {idx: probe(datapoint(model, idx), model)["gradcam"] for idx in range(40)}
    evaluate_in_threads(model, tmp_path, range(40), GradCAMDebugger("stem"), Raw("head"))
    stored = load_debug_outputs(tmp_path, tensors="torch")
    assert [idx for idx in range(40) if not torch.equal(stored[idx]["d0"]["gradcam"], expected[idx])] == []


def evaluate_in_threads(model, folder, ids, *debuggers):
    meeting = threading.Barrier(4)

    def evaluate(own):
        with torch.no_grad():
            meeting.wait()
            for step, idx in enumerate(own):
                inputs = image(idx)[None]
                outputs = model(inputs)
                if step % 5 == 0:
                    meeting.wait()  # everyone is between forward and capture
                debugger({"inputs": inputs, "outputs": outputs, "meta_info": {"idx": idx}}, model)

    with sequence(model, *debuggers) as debugger, ThreadPoolExecutor(4) as pool:
        debugger.enabled = True
        list(pool.map(evaluate, [ids[start::4] for start in range(4)]))
        debugger.save_all(folder)


def test_defect_5_operations_in_place_do_not_change_a_capture(model, tmp_path):
    with sequence(model, Raw("stem"), FeatureMapDebugger("stem")) as debugger:
        debugger.enabled = True
        debugger(datapoint(model, 1), model)
        debugger.save_all(tmp_path)
    stored = load_debug_outputs(tmp_path, tensors="torch")[1]
    expected = model.stem(image(1)[None]).detach()
    assert float(expected.min()) < 0
    assert torch.equal(stored["d0"], expected)
    assert torch.equal(stored["d1"]["feature_map"], expected)


def test_defect_5_what_a_debugger_returns_may_change_afterwards(model, tmp_path):
    shared = torch.zeros(1, 4)
    with sequence(model, Given()) as debugger:
        debugger.enabled = True
        for idx in range(4):
            shared.fill_(idx)
            debugger({"given": {"live": shared}, "meta_info": {"idx": idx}}, model)
        debugger.save_all(tmp_path)
    stored = load_debug_outputs(tmp_path)
    assert [float(stored[idx]["d0"]["live"][0, 0]) for idx in range(4)] == [0, 1, 2, 3]


@dataclasses.dataclass(frozen=True)
class Frozen:
    score: torch.Tensor
    name: str = "frozen"


class Unwritable:
    def __repr__(self):
        raise RuntimeError("not even this")


@pytest.mark.parametrize("on_error", ["raise", "isolate"])
def test_defect_6_nothing_hangs_on_what_cannot_be_written(model, tmp_path, on_error):
    with sequence(model, Given(), on_error=on_error) as debugger:
        debugger.enabled = True
        debugger({"given": Frozen(torch.ones(1)), "meta_info": {"idx": 0}}, model)
        debugger({"given": {"strange": Unwritable(), "fine": 1}, "meta_info": {"idx": 1}}, model)
        debugger({"given": {"fine": 2}, "meta_info": {"idx": 2}}, model)
        debugger._buffer_queue.join()
        debugger.save_all(tmp_path)
        debugger.reset_buffer()
    stored = load_debug_outputs(tmp_path)
    assert stored[0]["d0"]["name"] == "frozen"
    assert stored[1]["d0"]["fine"] == 1
    assert stored[2]["d0"] == {"fine": 2}


def test_defect_7_a_layer_that_did_not_run_is_recorded_as_such(model, tmp_path):
    with sequence(model, Raw("even"), Raw("odd")) as debugger:
        debugger.enabled = True
        for idx in range(12):
            debugger(datapoint(model, idx), model)
        debugger.save_all(tmp_path)
    stored = load_debug_outputs(tmp_path, tensors="torch")
    ran = {"d0": 0, "d1": 0}
    for idx in range(12):
        (missing,) = stored.info(idx)["not_run"]
        other = "d1" if missing == "d0" else "d0"
        ran[other] += 1
        assert "did not run" in stored[idx][missing]["error"]
        layer = model.even if other == "d0" else model.odd
        expected = layer(torch.relu(model.stem(image(idx)[None]))).detach()
        torch.testing.assert_close(stored[idx][other], expected)
    assert min(ran.values()) > 0  # both kinds were seen


def test_defect_7_no_capture_outlives_its_pass(model):
    with sequence(model, Raw("stem")) as debugger:
        debugger.enabled = True
        dp = datapoint(model, 1)
        first = debugger(dp, model)
        again = debugger({**dp, "meta_info": {"idx": [2]}}, model)  # no forward in between
        assert "did not run" in again["d0"]["error"]
        with pytest.raises(RuntimeError):
            model(torch.ones(1, 5, 6, 6))  # fails at the stem
        assert "did not run" in debugger({"meta_info": {"idx": [3]}}, model)["d0"]["error"]
        assert first["d0"].shape == (1, 4, 6, 6)


def test_defect_8_a_disabled_debugger_leaves_the_model_alone(model):
    calls = []

    class Counting(ForwardDebugger):
        def process_forward(self, module, input, output):
            calls.append(1)

    with sequence(model, Counting("stem")) as debugger:
        assert_no_taps(model)
        datapoint(model, 1)
        debugger.enabled = True
        debugger(datapoint(model, 1), model)
        debugger.enabled = False
        assert_no_taps(model)
        datapoint(model, 1)
    assert len(calls) == 1


def test_defect_9_a_test_split_does_not_pollute_the_validation(model, tmp_path):
    with sequence(model, Given()) as debugger:
        debugger.enabled = True
        debugger.open(tmp_path / "val", epoch=0, split="val")
        for idx in range(3):
            debugger({"given": {"split": "val"}, "meta_info": {"idx": idx}}, model)
        debugger.save_all(tmp_path / "val")
        for idx in range(3):  # somebody forgot to switch it off
            debugger({"given": {"split": "test"}, "meta_info": {"idx": idx}}, model)
        debugger.reset_buffer()
        debugger.open(tmp_path / "next", epoch=1, split="val")
        debugger({"given": {"split": "val"}, "meta_info": {"idx": 0}}, model)
        debugger.save_all(tmp_path / "next")
    validation, following = load_debug_outputs(tmp_path / "val"), load_debug_outputs(tmp_path / "next")
    assert [validation[idx]["d0"]["split"] for idx in validation] == ["val"] * 3
    assert validation.info(0)["split"] == "val"
    assert list(following) == [0]
    assert following.info(0) == {"epoch": 1, "split": "val", "rank": 0}


CRASH = """
import sys, torch
from torch import nn
from sonde.debuggers import FeatureMapDebugger, SequentialDebugger
model = nn.Sequential(nn.Linear(4, 4))
debugger = SequentialDebugger([{"name": "maps", "debugger_config": FeatureMapDebugger("0")}], model)
debugger.enabled = True
debugger.open(sys.argv[1])
for idx in range(1000):
    x = torch.full((1, 4), float(idx))
    debugger({"inputs": x, "outputs": model(x), "meta_info": {"idx": idx}}, model)
    debugger._buffer_queue.join()
    print(idx, flush=True)
"""


def test_defect_10_a_kill_in_mid_epoch_loses_nothing_acknowledged(model, tmp_path):
    folder = tmp_path / "debugger"
    process = subprocess.Popen([sys.executable, "-c", CRASH, str(folder)], stdout=subprocess.PIPE, text=True)
    for line in process.stdout:
        if int(line) == 20:
            break
    os.kill(process.pid, signal.SIGKILL)
    told = [20, *map(int, process.stdout.read().split())]
    process.wait()
    process.stdout.close()
    assert set(range(told[-1] + 1)) <= set(load_debug_outputs(folder))
    with sequence(model, Given()) as debugger:  # resuming adds to what is there
        debugger.enabled = True
        debugger.open(folder, resume=True)
        debugger({"given": 1, "meta_info": {"idx": 5000}}, model)
        debugger.save_all(folder)
    assert {0, told[-1], 5000} <= set(load_debug_outputs(folder))


def test_defect_15_what_waits_is_bounded_and_what_is_dropped_is_counted(model):
    with sequence(model, Given(), max_pending_mb=1) as debugger:
        debugger.enabled = True
        debugger._capture.on_full = "drop"
        for idx in range(8):
            debugger({"given": torch.zeros(1, 100_000), "meta_info": {"idx": idx}}, model)
            assert debugger._capture.pending_bytes <= 1 << 20
        assert debugger.counters["dropped"] + len(debugger.current_page_data) <= 8


def test_defect_16_process_wide_state_is_left_as_it_was(model):
    with torch.autograd.set_detect_anomaly(True), sequence(model, GradCAMDebugger("stem")) as debugger:
        debugger.enabled = True
        debugger(datapoint(model, 1), model)
        assert torch.is_anomaly_enabled()
    assert not torch.is_anomaly_enabled()


def test_defect_17_layers_of_wrapped_models_are_found(model, tmp_path):
    wrapped = nn.DataParallel(model)
    with sequence(wrapped, Raw("stem"), GradCAMDebugger("stem"), strict=True) as debugger:
        debugger.enabled = True
        outputs = debugger(datapoint(wrapped, 1), wrapped)
    assert outputs["d0"].shape == (1, 4, 6, 6)
    assert outputs["d1"]["gradcam"].shape == (1, 6, 6)


def test_defect_17_a_compiled_model_is_captured_on_an_eager_pass(tmp_path, caplog):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(64, 3)).eval()
    compiled = torch.compile(model, backend="eager")
    with sequence(compiled, Raw("0"), strict=True) as debugger, torch.no_grad():
        compiled(torch.randn(2, 3, 6, 6))
        debugger.enabled = True
        dp = datapoint(compiled, 1, 2)
        outputs = debugger(dp, compiled)
        debugger(datapoint(compiled, 3, 4), compiled)
    torch.testing.assert_close(outputs["d0"], model[0](dp["inputs"]).detach())
    assert sum("compiled" in record.message for record in caplog.records) == 1


IMPORTS = "from sonde.debuggers import FeatureMapDebugger, GradCAMDebugger, SequentialDebugger"
RANKS = """
model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32, 2))
model = nn.parallel.DistributedDataParallel(model)
config = [
    {"name": "maps", "debugger_config": FeatureMapDebugger("0")},
    {"name": "cam", "debugger_config": GradCAMDebugger("0")},
]
with SequentialDebugger(config, model, strict=True) as debugger:
    debugger.enabled = True
    for idx in range(rank, 6, 2):
        x = torch.full((1, 1, 6, 6), float(idx))
        with torch.no_grad():
            debugger({"inputs": x, "outputs": model(x), "meta_info": {"idx": [idx]}}, model)
    debugger.save_all(folder)
model(torch.randn(1, 1, 6, 6)).sum().backward()  # training continues
"""


def test_defect_17_ranks_write_beside_each_other(run_two_ranks, tmp_path):
    folder = tmp_path / "debugger"
    run_two_ranks(IMPORTS, RANKS, folder)
    stored = load_debug_outputs(folder)
    assert {idx: stored.info(idx)["rank"] for idx in stored} == {idx: idx % 2 for idx in range(6)}
    assert all(stored[idx]["cam"]["gradcam"].shape == (1, 4, 4) for idx in stored)


def test_defect_18_no_number_is_made_up():
    """What a statistic cannot know is absent; Grad-CAM is the same every time it is asked."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)).eval()
    with sequence(model, FeatureMapDebugger("3"), GradCAMDebugger("0")) as debugger:
        debugger.enabled = True
        first, second = (debugger(datapoint(model, 1), model) for _ in range(2))
    assert torch.equal(first["d1"]["gradcam"], second["d1"]["gradcam"])


def test_defect_19_batches_are_split_by_sample_and_ids_may_be_text(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(64, 3)).eval()
    ids = [f"img/{index}.png" for index in range(5)]
    with sequence(model, Raw("0"), FeatureMapDebugger("0"), GradCAMDebugger("0")) as debugger:
        debugger.enabled = True
        for index, name in enumerate(ids):
            debugger(datapoint(model, index, idx=name), model)
        debugger.save_all(tmp_path / "alone")
        datapoint(model, 0, 1)  # a forward without a debugger call leaves nothing behind
        debugger(datapoint(model, 0, 1, 2, 3, idx=ids[:4]), model)
        debugger(datapoint(model, 4, idx=ids[4:]), model)
        debugger.save_all(tmp_path / "together")
    one, many = (load_debug_outputs(tmp_path / folder, tensors="torch") for folder in ("alone", "together"))
    assert list(one) == list(many) == ids
    for name in ids:
        for each in ("d0", "d1", "d2"):
            assert_same(one[name][each], many[name][each])


def assert_same(left, right):
    if isinstance(left, torch.Tensor):
        torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-5)
    elif isinstance(left, dict):
        assert left.keys() == right.keys()
        for key in left:
            assert_same(left[key], right[key])
    else:
        assert left == pytest.approx(right, rel=1e-4, abs=1e-5) if isinstance(left, float) else left == right


Pair = namedtuple("Pair", ["first", "second"])

OUTPUTS = {
    "a tuple": lambda x: (x, x * 2),
    "a list": lambda x: [x],
    "a dict": lambda x: {"logits": x, "loss": x.sum()},
    "a named tuple": lambda x: Pair(x, None),
    "a dataclass": lambda x: Frozen(x),
    "whole numbers": lambda x: x.long(),
    "yes and no": lambda x: x > 0,
    "bfloat16": lambda x: x.bfloat16(),
    "a number": lambda x: x.sum(),
    "nothing in it": lambda x: x[:, :0],
    "not finite": lambda x: x / 0,
    "None": lambda x: None,
    "text": lambda x: "text",
    "nested": lambda x: {"a": [x, (x, {"b": x})]},
    "sparse": lambda x: x.to_sparse(),
    "complex": lambda x: torch.complex(x, x),
}


@pytest.mark.parametrize("make", OUTPUTS.values(), ids=OUTPUTS.keys())
def test_defect_20_outputs_of_every_type_are_captured_by_rule(make, tmp_path):
    from sonde.debuggers import ActivationStatsDebugger, AttentionDebugger, EmbeddingDebugger, LayerOutputDebugger

    class Strange(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Inner()

        def forward(self, x):
            self.inner(x)
            return x

    class Inner(nn.Module):
        def forward(self, x):
            return make(x)

    class Whole(ForwardDebugger):
        def process_forward(self, module, input, output):
            return {"output": output}

    model = Strange()
    kinds = (
        Whole,
        FeatureMapDebugger,
        ActivationStatsDebugger,
        LayerOutputDebugger,
        EmbeddingDebugger,
        AttentionDebugger,
    )
    with sequence(model, *(kind("inner") for kind in kinds)) as debugger:
        debugger.enabled = True
        x = torch.randn(2, 4, 6)
        debugger({"inputs": x, "outputs": model(x), "meta_info": {"idx": [0, 1]}}, model)
        debugger.save_all(tmp_path)
    stored = load_debug_outputs(tmp_path, tensors="torch")
    assert list(stored) == [0, 1]
    assert len(stored[0]) == len(kinds)


def test_defect_20_shared_layers_keep_every_call(model, tmp_path):
    with sequence(model, Raw("cell")) as debugger:
        debugger.enabled = True
        debugger(datapoint(model, 1, 2), model)
        last = debugger.debuggers["d0"].last_capture
        debugger.save_all(tmp_path)
    stored = load_debug_outputs(tmp_path, tensors="torch")
    assert stored.info(1)["calls"] == {"d0": 3}
    assert list(stored[2]["d0"]) == ["#0", "#1", "#2"]
    previous = stored[2]["d0"]["#0"]
    for call in ("#1", "#2"):
        torch.testing.assert_close(stored[2]["d0"][call], model.cell(torch.tanh(previous)).detach())
        previous = stored[2]["d0"][call]
    assert torch.equal(last[1:], previous)


def test_defect_26_debuggers_need_no_more_than_a_training_container_has():
    code = (
        "import sys, json, sonde.debuggers\n"
        "heavy = {'pandas', 'pyarrow', 'rich', 'typer', 'sklearn', 'matplotlib', 'plotly', 'torchvision', 'joblib'}\n"
        "print(json.dumps(sorted(heavy & set(sys.modules))))"
    )
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=240)
    assert json.loads(found.stdout) == []
