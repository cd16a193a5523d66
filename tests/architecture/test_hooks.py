"""Only `sonde.hooks` registers torch hooks and stands in for torch functions."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import sonde

SOURCE = Path(sonde.__file__).parent
# A method of the user's hook manager, not of torch.
NOT_TORCHS = {"debug/hooks.py"}
REGISTER = re.compile(r"register_(\w+_)?hook$")


def trees(mentioning, outside):
    """Parse the modules that mention something, except those below some paths. Parsing all would take seconds."""
    for path in SOURCE.rglob("*.py"):
        text = path.read_text()
        if re.search(mentioning, text) and not path.is_relative_to(SOURCE / outside):
            yield str(path.relative_to(SOURCE)), ast.parse(text)


def torch_names(tree):
    """Return the names that stand for torch or one of its modules."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.asname or "torch" for alias in node.names if alias.name.split(".")[0] == "torch"}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            names |= {alias.asname or alias.name for alias in node.names}
    return names


def root_of(node):
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def hooks_and_replacements(tree):
    torch_like = torch_names(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and REGISTER.search(node.attr):
            yield ast.unparse(node)
        if isinstance(node, ast.ImportFrom) and any(REGISTER.search(alias.name) for alias in node.names):
            yield ast.unparse(node)
        targets = node.targets if isinstance(node, ast.Assign) else ()
        yield from (
            ast.unparse(each) for each in targets if isinstance(each, ast.Attribute) and root_of(each) in torch_like
        )
        if isinstance(node, ast.Call) and root_of(node.func) == "setattr" and root_of(node.args[0]) in torch_like:
            yield ast.unparse(node)


def test_torch_is_hooked_in_one_package():
    mentions = r"_hook|setattr\(|(?m:^\s*(?!self\.)\w[^(\n]*\.\w+ = )"
    found = {name: list(hooks_and_replacements(tree)) for name, tree in trees(mentions, "hooks")}
    assert len(found) > 20
    assert {name: each for name, each in found.items() if each and name not in NOT_TORCHS} == {}


@pytest.mark.parametrize(
    "code",
    [
        "import torch\ntorch.autograd.backward = f",
        "import torch.nn.functional as F\nF.mse_loss = f",
        "from torch import nn\nsetattr(nn.functional, name, f)",
        "module.register_forward_hook(f)",
        "tensor.register_hook(f)",
        "from torch.optim.optimizer import register_optimizer_step_pre_hook",
    ],
)
def test_what_the_test_looks_for_is_found(code):
    assert list(hooks_and_replacements(ast.parse(code)))


def test_what_only_looks_like_it_is_not_found():
    assert not list(hooks_and_replacements(ast.parse("import torch\nself.backward = torch.autograd.backward")))


def decides_kinds(tree):
    """Yield comparisons of an optimizer's class, by name, or tests of what wrappers and scalers leave on it."""
    for node in ast.walk(tree):
        text = ast.unparse(node) if isinstance(node, ast.Compare | ast.Call) else ""
        if isinstance(node, ast.Compare) and re.search(r"optimizer\.kind|type\(optimizer\)\.__name__", text):
            yield text
        if re.match(r"(getattr|hasattr)\(.*'(grad_scale|found_inf|_step_supports_amp_scaling)'", text):
            yield text


def test_the_kind_of_an_optimizer_is_decided_in_one_place():
    mentions = r"optimizer\.kind|type\(optimizer\)|grad_scale|found_inf|_step_supports_amp_scaling"
    found = {name: list(decides_kinds(tree)) for name, tree in trees(mentions, "record/kinds.py")}
    assert {name: each for name, each in found.items() if each} == {}
    assert list(decides_kinds(ast.parse("'Adam' in optimizer.kind; getattr(optimizer, 'found_inf', None)")))
