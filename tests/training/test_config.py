from __future__ import annotations

import json
import sys

import pytest
import torch
from made_training import make_config
from torch import nn

from sonde.errors import MissingExtra, OptionError
from sonde.training import SupervisedTrainer, load_config
from sonde.training.config import describe

PYTHON = """
import torch
from beside import network
config = {"work_dir": "somewhere", "epochs": 2, "model": {"class": network, "args": {}}}
"""
YAML = """
work_dir: somewhere
epochs: 2
runner: sonde.training.SupervisedTrainer
model: {class: torch.nn.Linear, args: {in_features: 6, out_features: 3}}
optimizer: {class: torch.optim.SGD, args: {lr: 1e-2, momentum: .9e0}}
train_dataloader:
  class: torch.utils.data.DataLoader
  args:
    batch_size: 8
    collate_fn: {import: torch.utils.data.default_collate}
criterion: {class: torch.nn.CrossEntropyLoss, args: }
val_seeds: [1, 2]
"""


def test_a_python_file_defines_config_and_imports_its_neighbours(tmp_path):
    (tmp_path / "beside.py").write_text("import torch\ndef network():\n    return torch.nn.Linear(6, 3)\n")
    (tmp_path / "my config.py").write_text(PYTHON)
    path = list(sys.path)
    config = load_config(tmp_path / "my config.py")
    assert config["epochs"] == 2
    assert isinstance(config["model"]["class"](), nn.Linear)
    assert sys.path == path
    sys.modules.pop("beside")


@pytest.mark.parametrize("suffix", ["yaml", "yml", "json"])
def test_yaml_and_json_name_classes_by_import_path(tmp_path, suffix):
    path = tmp_path / f"config.{suffix}"
    if suffix == "json":
        import yaml

        plain = yaml.safe_load(YAML)
        plain["optimizer"]["args"] = {"lr": 0.01, "momentum": 0.9}
        path.write_text(json.dumps(plain))
    else:
        path.write_text(YAML)
    config = load_config(path)
    assert config["model"] == {"class": nn.Linear, "args": {"in_features": 6, "out_features": 3}}
    assert config["optimizer"]["args"] == {"lr": 0.01, "momentum": 0.9}
    assert config["train_dataloader"]["args"]["collate_fn"] is torch.utils.data.default_collate
    assert config["criterion"] == {"class": nn.CrossEntropyLoss, "args": {}}
    assert config["runner"] is SupervisedTrainer


def test_a_yaml_config_trains(tmp_path):
    (tmp_path / "config.yaml").write_text(
        f"work_dir: {tmp_path / 'run'}\nepochs: 1\nbatch_size: 8\nwatch: false\n"
        "model: {class: torch.nn.Linear, args: {in_features: 6, out_features: 3}}\n"
        "train_dataset: {class: made_training.Points, args: {count: 16}}\n"
        "val_dataset: {class: made_training.Points, args: {count: 8, seed: 1}}\n"
        "criterion: {class: torch.nn.CrossEntropyLoss, args: {}}\n"
        "optimizer: {class: torch.optim.SGD, args: {lr: 1e-1}}\n"
    )
    history = SupervisedTrainer(load_config(tmp_path / "config.yaml")).run()
    assert list(history[0]) == ["loss"]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("c.py", "x = 1", "has no variable 'config'; it must define config = {...}"),
        ("c.py", "config = [1]", "has a 'config' that is a list"),
        ("c.json", "{", "is not valid JSON"),
        ("c.json", "[1]", "holds a list; a config is a mapping"),
        ("c.yaml", "a: [1", "is not valid YAML"),
        ("c.toml", "a = 1", "a config is a .py, .yaml, .yml or .json file"),
        ("c.yaml", "model: {class: torch.nn.Linnear, args: {}}", "model.class: Cannot import 'torch.nn.Linnear'"),
        (
            "c.json",
            '{"a": [{"class": 5, "args": {}}]}',
            r"a[0].class takes an import path such as torch.optim.SGD; got 5",
        ),
    ],
)
def test_a_file_that_is_not_a_config_is_refused(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(OptionError) as caught:
        load_config(tmp_path / name)
    assert message in str(caught.value)


def test_a_missing_file_is_an_error_with_what_is_there(tmp_path):
    (tmp_path / "config.py").write_text("config = {}")
    with pytest.raises(OptionError, match=r"There is no config file .*confg.py \(nearest: .*config.py\)"):
        load_config(tmp_path / "confg.py")


def test_yaml_needs_its_package(tmp_path, monkeypatch):
    (tmp_path / "c.yaml").write_text("a: 1")
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(MissingExtra, match=r"Reading a YAML config needs PyYAML.*pip install 'sonde\[yaml\]'"):
        load_config(tmp_path / "c.yaml")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"epochs": None, "epcohs": 3}, r"The config lacks 'epochs' \(nearest in it: epcohs\)"),
        ({"optimizer": None}, r"The config lacks 'optimizer'; it has work_dir, epochs"),
        ({"criterion": None}, "The config lacks 'criterion'"),
        ({"early_stoping": {}}, r"has 'early_stoping', which nothing reads \(nearest: early_stopping\)"),
        ({"epochs": 0}, "epochs takes a whole number of at least 1; got 0"),
        ({"eval_n_jobs": "two"}, "eval_n_jobs takes a whole number of at least 1; got 'two'"),
        ({"amp": "fp8"}, "amp='fp8': choose 'bf16', 'fp16' or None"),
        ({"checkpoint_method": "best"}, "checkpoint_method='best': choose 'all', 'latest' or a whole number"),
        ({"scheduler_interval": "batch"}, "scheduler_interval='batch': choose from 'epoch', 'step'"),
        ({"device": "gpu"}, "device='gpu' is not a torch device"),
        ({"device": "cuda:99"}, "device='cuda:99': torch sees .* CUDA devices here"),
        ({"save_samples": {"max": 5, "policy": "best"}}, "policy 'best': choose 'first' or 'worst'"),
        ({"save_samples": {"most": 5}}, "save_samples takes"),
        ({"watch": 5}, "watch takes a dict of options, True or False"),
    ],
)
def test_a_wrong_config_is_refused_before_anything_is_built(tmp_path, changes, message):
    with pytest.raises(OptionError, match=message):
        SupervisedTrainer(make_config(tmp_path / "run", **changes))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": {"class": dict, "args": {}}}, "'model' describes a dict; it must be a torch.nn.Module"),
        ({"optimizer": {"class": dict, "args": {}}}, "'optimizer' describes a dict; it must be a torch optimizer"),
        ({"train_dataset": None, "train_dataloader": None}, "The config lacks 'train_dataset'"),
        (
            {"train_dataloader": {"batch_size": 8}},
            r"is a dict with the keys \['batch_size'\]; describe",
        ),
        ({"monitor": "f1"}, "The direction of 'f1' is unknown"),
        ({"init_seed": "a"}, "A seed is a whole number of 0 or more; got 'a'"),
        ({"early_stopping": 5}, "early_stopping takes a dict"),
        ({"early_stopping": {"patience": 0}}, "patience takes a whole number"),
        ({"early_stopping": {"direction": "up"}}, "direction='up': choose 'max' or 'min'"),
    ],
)
def test_what_a_config_describes_must_fit(tmp_path, changes, message):
    with pytest.raises(OptionError, match=message):
        SupervisedTrainer(make_config(tmp_path, **changes)).run()


def test_keys_of_ones_own_are_left_for_subclasses(tmp_path):
    trainer = SupervisedTrainer(make_config(tmp_path, temperature=0.5))
    assert trainer.config["temperature"] == 0.5
    with pytest.raises(TypeError):
        trainer.config["temperature"] = 1
    with pytest.raises(OptionError, match="A config is a dict; got str"):
        SupervisedTrainer("config.py")


def test_the_config_is_kept_with_the_run_in_plain_words(tmp_path):
    SupervisedTrainer(make_config(tmp_path, epochs=1)).run()
    kept = json.loads((tmp_path / "config.json").read_text(), parse_constant=pytest.fail)
    assert kept["optimizer"] == {"class": "torch.optim.adamw.AdamW", "args": {"lr": 0.01}}
    assert kept["model"]["class"] == "made_training.network"
    assert (
        describe({"t": torch.ones(2), "m": nn.ReLU(), 3: (1, float("nan"))})["m"]
        == "<torch.nn.modules.activation.ReLU>"
    )


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("config = {\n", r"could not be run: SyntaxError: '\{' was never closed \(.*, line 1\)"),
        ("import torch\nimport no_such_module\n", r"ModuleNotFoundError: No module named 'no_such_module' \(line 2\)"),
        ("rate = 1\nconfig = {'lr': rat}\n", r"NameError: name 'rat' is not defined \(line 2\)"),
    ],
)
def test_a_slip_in_a_config_file_is_reported_with_its_line(tmp_path, text, says):
    path = tmp_path / "config.py"
    path.write_text(text)
    with pytest.raises(OptionError, match=says):
        load_config(path)


def test_a_folder_is_not_a_config_file(tmp_path):
    with pytest.raises(OptionError, match="is a folder; name the config file in it"):
        load_config(tmp_path)
