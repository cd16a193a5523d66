"""Common mistakes injected into healthy programs: does Sonde name them?

    python benchmarks/injected.py [--each N] [--only NAME,NAME] [--seed S] [--jobs N] [--out FILE] [--misses]

Each mistake is an edit of a program's syntax tree: a call that is removed, an argument that is wrapped. It is made at
one random place in each of N random programs of tests/faults (repaired twins and healthy programs), whoever wrote
them, so a rule is tried in loops that were not written for it. A mistake counts where it does harm, that is where the
program ends worse than its own limit. `--seed` draws other programs and places.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from types import ModuleType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "faults"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import fault_programs
import torch
from fault_programs.registry import Program
from faults import EVIDENCE, Watch

PRELUDE = '''
import torch as _torch

def _in_training(change, value):
    """Change a value in passes with gradients only: an evaluation stays as it was."""
    return change(value) if _torch.is_grad_enabled() else value

def _broadcast(target):
    if target.dim() >= 2 and target.size(-1) == 1:
        return target.squeeze(-1)
    return target.unsqueeze(1) if target.dim() == 1 else target

def _shuffled(target):
    return target[_torch.randperm(len(target))]

def _large(x):
    return x * 255 if isinstance(x, _torch.Tensor) and x.is_floating_point() else x

_calls = []

def _with_nan(x):
    _calls.append(None)
    if len(_calls) == 30 and isinstance(x, _torch.Tensor) and x.is_floating_point():
        x = x.clone()
        x.view(-1)[0] = float("nan")
    return x

def _last_two(parameters):
    found = list(parameters)
    return found[-2:] if len(found) > 3 else found

def _reduction():
    return "sum" if _torch.is_grad_enabled() else "mean"

def _draw(model, spread):
    with _torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, spread) if spread else parameter.zero_()

def _scale(model, factor):
    with _torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(factor)

def _lower_biases(model):
    with _torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.sub_(10.0)

def _cut(model):
    layers = [each for each in model.modules() if not list(each.children()) and list(each.parameters())]
    layers[len(layers) // 2].register_forward_hook(
        lambda module, args, output: output.detach() if isinstance(output, _torch.Tensor) else None
    )

def _decay(optimizer):
    for group in optimizer.param_groups:
        group["lr"] *= 0.9

def _clip(optimizer):
    _torch.nn.utils.clip_grad_norm_([each for group in optimizer.param_groups for each in group["params"]], 1e-4)

def _squares(optimizer):
    return sum((each ** 2).sum() for group in optimizer.param_groups for each in group["params"])

def _mixed(x):
    return x.transpose(0, 1).reshape(x.shape) if isinstance(x, _torch.Tensor) and x.dim() > 1 else x

def _same(batches):
    first = None
    for each in batches:
        first = each if first is None else first
        yield first

def _copies(parameters):
    return [each.detach().clone().requires_grad_() for each in parameters]

def _freeze(model):
    for parameter in list(model.parameters())[:-2]:
        parameter.requires_grad_(False)
'''
"""What injected expressions call."""

Place = Any
"""A call, or a block of statements and an index in it."""


@dataclass(frozen=True)
class Mistake:
    """A mistake that people make, where it can be made, and the findings that name it."""

    name: str
    causes: tuple[str, ...]
    find: Callable[[ast.FunctionDef], list[Place]]
    edit: Callable[[Place], None]
    everywhere: bool = False
    """Whether it is made at all places of a program at once."""

    def places(self, function: ast.FunctionDef) -> list[Place]:
        """Return where it can be made; not in what the program returns, which measures how well it is."""
        measured = {id(node) for each in function.body if isinstance(each, ast.Return) for node in ast.walk(each)}
        return [
            each for each in self.find(function) if id(each[0] if isinstance(each, tuple) else each) not in measured
        ]


# ---------------------------------------------------------------- where


def called(call: ast.AST) -> str:
    """Return the last name of what is called: `step` of `optimizer.step()`."""
    if not isinstance(call, ast.Call):
        return ""
    if isinstance(call.func, ast.Attribute):
        return call.func.attr
    return call.func.id if isinstance(call.func, ast.Name) else ast.unparse(call.func).rpartition(".")[2]


def owner(call: ast.Call) -> str:
    """Return what a method is called on: `optimizer` of `optimizer.step()`."""
    return ast.unparse(call.func).rpartition(".")[0]


def calls(test: Callable[[ast.Call], bool]) -> Callable[[ast.FunctionDef], list[Place]]:
    """Find calls."""
    return lambda function: [each for each in ast.walk(function) if isinstance(each, ast.Call) and test(each)]


def statements(test: Callable[[ast.Call], bool]) -> Callable[[ast.FunctionDef], list[Place]]:
    """Find statements that are a call."""
    return lambda function: [
        (block, at)
        for block, at, each in _statements(function)
        if isinstance(each, ast.Expr) and isinstance(each.value, ast.Call) and test(each.value)
    ]


def _statements(function: ast.FunctionDef) -> Iterator[tuple[list[ast.stmt], int, ast.stmt]]:
    for node in ast.walk(function):
        for name in ("body", "orelse", "finalbody"):
            block = getattr(node, name, None)
            if isinstance(block, list):
                yield from ((block, at, each) for at, each in enumerate(block) if isinstance(each, ast.stmt))


def pairs(first: Callable[[ast.Call], bool], later: str) -> Callable[[ast.FunctionDef], list[Place]]:
    """Find a statement and one after it in the same block that calls `later`."""

    def find(function: ast.FunctionDef) -> list[Place]:
        found = []
        for block, at in statements(first)(function):
            after = (to for to in range(at + 1, len(block)) if _calls(block[to], later))
            found += [(block, at, to) for to in after][:1]
        return found

    return find


def _calls(statement: ast.stmt, name: str) -> bool:
    return isinstance(statement, ast.Expr) and called(statement.value) == name


def steps(call: ast.Call) -> bool:
    return called(call) == "step" and "opt" in owner(call).lower() and "sched" not in owner(call).lower()


def losses(*names: str) -> Callable[[ast.Call], bool]:
    return lambda call: called(call) in names and owner(call).endswith(("F", "functional")) and len(call.args) >= 2


def makes_optimizer(call: ast.Call) -> bool:
    return called(call) in ("SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "NAdam", "RAdam") and bool(call.args)


def is_adam(call: ast.Call) -> bool:
    return makes_optimizer(call) and "Adam" in called(call)


def has_rate(call: ast.Call) -> bool:
    return makes_optimizer(call) and any(each.arg == "lr" for each in call.keywords)


def calls_model(call: ast.Call) -> bool:
    return called(call) in ("model", "net", "network", "encoder") and bool(call.args)


def before_optimizer(function: ast.FunctionDef) -> list[Place]:
    return [
        (block, at)
        for block, at, each in _statements(function)
        if isinstance(each, ast.Assign)
        and isinstance(each.value, ast.Call)
        and makes_optimizer(each.value)
        and called(each.value.args[0]) == "parameters"
    ]


def stacks_activations(function: ast.FunctionDef) -> list[Place]:
    return [
        each for each in calls(lambda call: called(call) == "Sequential")(function) if any(map(_activates, each.args))
    ]


def _activates(layer: ast.AST) -> bool:
    return called(layer) in ("ReLU", "Tanh", "GELU", "LeakyReLU", "SiLU", "ELU", "Sigmoid")


# ---------------------------------------------------------------- what


def expression(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body


def remove(place: Place) -> None:
    block, at = place
    block[at] = ast.Pass()


def repeat(place: Place) -> None:
    block, at = place
    block.insert(at + 1, block[at])


def move_behind(place: Place) -> None:
    block, at, to = place
    block.insert(to, block.pop(at))


def wrap(argument: int, text: str) -> Callable[[Place], None]:
    """Replace an argument by an expression in which `@` is the argument."""

    def edit(call: ast.Call) -> None:
        call.args[argument] = expression(text.replace("@", ast.unparse(call.args[argument])))

    return edit


def setting(name: str, text: str) -> Callable[[Place], None]:
    """Set a named argument; `@` is what it was."""

    def edit(call: ast.Call) -> None:
        old = next((each for each in call.keywords if each.arg == name), None)
        if old is None:
            call.keywords.append(ast.keyword(name, expression(text)))
        else:
            old.value = expression(text.replace("@", f"({ast.unparse(old.value)})"))

    return edit


def of_backward(text: str) -> Callable[[Place], None]:
    """Call backward on another expression; `@` is what it was called on."""

    def edit(call: ast.Call) -> None:
        assert isinstance(call.func, ast.Attribute)
        call.func.value = expression(text.replace("@", f"({ast.unparse(call.func.value)})"))

    return edit


def insert(text: str) -> Callable[[Place], None]:
    """Insert a statement before an optimizer is made; `@` is its model."""

    def edit(place: Place) -> None:
        block, at = place
        block.insert(at, ast.parse(text.replace("@", owner(block[at].value.args[0]))).body[0])

    return edit


def signed_difference(call: ast.Call) -> None:
    first, second = (ast.unparse(each) for each in call.args[:2])
    call.func, call.keywords = expression("_in_training"), []
    call.args = [
        expression("lambda _d: _d.mean() if _torch.is_grad_enabled() else (_d ** 2).mean()"),
        expression(f"({first}) - ({second})"),
    ]


def append(text: str) -> Callable[[Place], None]:
    """Insert a statement before one that calls `@.step()`."""

    def edit(place: Place) -> None:
        block, at = place
        block.insert(at, ast.parse(text.replace("@", owner(block[at].value))).body[0])

    return edit


def loops(function: ast.FunctionDef) -> list[Place]:
    """Find what innermost loops over batches go through."""
    return [
        (each, 0)
        for each in ast.walk(function)
        if isinstance(each, ast.For)
        and isinstance(each.iter, ast.Call | ast.Name)
        and isinstance(each.target, ast.Tuple)
        and called(each.iter) not in ("enumerate", "zip", "items")
        and any(called(node) == "backward" for node in ast.walk(each))
    ]


def repeat_the_first(place: Place) -> None:
    loop, _ = place
    loop.iter = expression(f"_same({ast.unparse(loop.iter)})")


def over_samples(call: ast.Call) -> None:
    dim = next((each for each in call.keywords if each.arg == "dim"), None)
    if dim is not None:
        dim.value = expression("0")
    elif len(call.args) > 1:
        call.args[1] = expression("0")
    elif call.args and isinstance(call.func, ast.Attribute) and owner(call) not in ("F", "torch"):
        call.args[0] = expression("0")


def drop_activations(call: ast.Call) -> None:
    call.args = [each for each in call.args if not _activates(each)]


def plain_list(call: ast.Call) -> None:
    call.func = ast.Name("list", ast.Load())


def drop_almost_all(call: ast.Call) -> None:
    call.args, call.keywords = [expression("0.97")], []


CLASSES, BINARY = ("cross_entropy",), ("binary_cross_entropy_with_logits",)
DISTANCES = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss")
ANY_LOSS = (*CLASSES, *BINARY, *DISTANCES)
backward = calls(lambda call: called(call) == "backward" and not call.args)

MISTAKES = (
    Mistake("zero_grad is missing", ("missing_zero_grad",), statements(lambda c: called(c) == "zero_grad"), remove),
    Mistake("step is missing", ("step_not_called",), statements(steps), remove),
    Mistake(
        "backward is missing",
        ("step_not_called", "graph_break_detach", "optimizer_step_noop"),
        statements(lambda c: called(c) == "backward"),
        remove,
    ),
    Mistake(
        "zero_grad after backward",
        ("zero_grad_misplaced",),
        pairs(lambda c: called(c) == "zero_grad", "backward"),
        move_behind,
    ),
    Mistake("steps twice", ("double_step",), statements(lambda c: steps(c) and not c.args), repeat),
    Mistake(
        "train() is missing",
        ("eval_mode_in_training",),
        statements(lambda c: called(c) == "train" and not c.args),
        remove,
    ),
    Mistake("eval() is missing", ("train_mode_in_eval",), statements(lambda c: called(c) == "eval"), remove),
    Mistake("rate x 10", ("lr_too_high",), calls(has_rate), setting("lr", "@ * 10")),
    Mistake("rate x 30", ("lr_too_high",), calls(has_rate), setting("lr", "@ * 30")),
    Mistake("rate x 100", ("lr_too_high",), calls(has_rate), setting("lr", "@ * 100")),
    Mistake("rate / 100", ("lr_too_low",), calls(has_rate), setting("lr", "@ * 1e-2")),
    Mistake("rate / 10,000", ("lr_too_low",), calls(has_rate), setting("lr", "@ * 1e-4")),
    Mistake("rate 0", ("lr_too_low", "optimizer_step_noop"), calls(has_rate), setting("lr", "0.0")),
    Mistake(
        "momentum 0.999",
        ("lr_too_high",),
        calls(lambda c: makes_optimizer(c) and called(c) == "SGD"),
        setting("momentum", "0.999"),
    ),
    Mistake("weight decay 1", ("weight_decay_too_large",), calls(makes_optimizer), setting("weight_decay", "1.0")),
    Mistake(
        "softmax before cross entropy",
        ("double_softmax",),
        calls(losses(*CLASSES)),
        wrap(0, "_in_training(lambda _x: _torch.softmax(_x, 1), @)"),
    ),
    Mistake(
        "softmax over samples",
        ("wrong_dim_softmax", "batch_axis_mixed"),
        calls(lambda c: called(c) in ("softmax", "log_softmax")),
        over_samples,
    ),
    Mistake(
        "sigmoid before a loss with logits",
        ("double_sigmoid",),
        calls(losses(*BINARY)),
        wrap(0, "_in_training(_torch.sigmoid, @)"),
    ),
    Mistake(
        "ReLU on logits",
        ("relu_before_logits",),
        calls(losses(*CLASSES, *BINARY)),
        wrap(0, "_in_training(_torch.relu, @)"),
    ),
    Mistake(
        "sigmoid on outputs",
        ("output_range_mismatch",),
        calls(losses(*DISTANCES)),
        wrap(0, "_in_training(_torch.sigmoid, @)"),
    ),
    Mistake(
        "target is broadcast",
        ("broadcast_loss",),
        calls(losses(*DISTANCES)),
        wrap(1, "_in_training(_broadcast, @)"),
    ),
    Mistake(
        "targets are shuffled",
        ("label_shuffle_mismatch",),
        calls(losses(*ANY_LOSS)),
        wrap(1, "_in_training(_shuffled, @)"),
    ),
    Mistake(
        "sum instead of mean",
        ("wrong_loss_reduction", "lr_too_high"),
        calls(losses(*ANY_LOSS)),
        setting("reduction", "_reduction()"),
    ),
    Mistake("sign of the loss", ("loss_sign_flipped",), backward, of_backward("(-@)")),
    Mistake("NaN in the loss", ("nan_in_loss", "nan_backward"), backward, of_backward("(@ + (@ * 0).sqrt())")),
    Mistake("NaN in a batch", ("nan_in_data",), calls(calls_model), wrap(0, "_with_nan(@)")),
    Mistake(
        "outputs are detached",
        ("graph_break_detach",),
        calls(losses(*ANY_LOSS)),
        wrap(0, "(@).detach().requires_grad_()"),
    ),
    Mistake(
        "inputs x 255",
        ("unnormalised_inputs", "train_val_preproc_mismatch"),
        calls(calls_model),
        wrap(0, "_large(@)"),
        everywhere=True,
    ),
    Mistake(
        "optimizer holds two parameters",
        ("params_not_in_optimizer",),
        calls(lambda c: makes_optimizer(c) and called(c.args[0]) == "parameters"),
        wrap(0, "_last_two(@)"),
    ),
    Mistake("layers are frozen", ("frozen_by_mistake",), before_optimizer, insert("_freeze(@)")),
    Mistake(
        "weights drawn from N(0, 1)",
        ("bad_init_scale", "large_initial_loss"),
        before_optimizer,
        insert("_draw(@, 1.0)"),
    ),
    Mistake(
        "weights are zero",
        ("symmetric_init", "zero_init_blocked", "bad_init_scale"),
        before_optimizer,
        insert("_draw(@, 0.0)"),
    ),
    Mistake("activations are missing", ("linear_stack",), stacks_activations, drop_activations),
    Mistake(
        "layers in a plain list",
        ("params_not_in_optimizer", "unused_parameters"),
        calls(lambda c: called(c) == "ModuleList"),
        plain_list,
    ),
    Mistake(
        "betas are swapped",
        ("momentum_never_filled", "arguments_swapped", "lr_too_high"),
        calls(is_adam),
        setting("betas", "(0.999, 0.9)"),
    ),
    Mistake("eps of 1", ("adam_eps_too_large",), calls(is_adam), setting("eps", "1.0")),
    Mistake("a layer detaches", ("graph_break_detach",), before_optimizer, insert("_cut(@)")),
    Mistake("rate x 0.9 in every step", ("lr_schedule_collapse",), statements(steps), append("_decay(@)")),
    Mistake(
        "gradients are clipped to nothing", ("clip_always_active", "lr_too_low"), statements(steps), append("_clip(@)")
    ),
    Mistake("loss / 10,000", ("lr_too_low", "vanishing_gradient"), backward, of_backward("(@ / 1e4)")),
    Mistake("weights / 100", ("bad_init_scale", "vanishing_gradient"), before_optimizer, insert("_scale(@, 0.01)")),
    Mistake("weights x 10", ("bad_init_scale", "large_initial_loss"), before_optimizer, insert("_scale(@, 10.0)")),
    Mistake(
        "biases - 10",
        ("dead_relu", "saturated_activation", "bad_init_scale"),
        before_optimizer,
        insert("_lower_biases(@)"),
    ),
    Mistake(
        "inputs are zero",
        ("input_ignored", "constant_feature"),
        calls(calls_model),
        wrap(0, "_in_training(lambda _x: _x * 0, @)"),
    ),
    Mistake("rows of inputs are mixed", ("batch_axis_mixed",), calls(calls_model), wrap(0, "_in_training(_mixed, @)")),
    Mistake(
        "targets of the next sample",
        ("label_shuffle_mismatch",),
        calls(losses(*ANY_LOSS)),
        wrap(1, "_in_training(lambda _t: _t.roll(1, 0), @)"),
    ),
    Mistake(
        "targets are constant",
        ("constant_target",),
        calls(losses(*ANY_LOSS)),
        wrap(1, "_in_training(lambda _t: _t * 0, @)"),
    ),
    Mistake(
        "outputs are rounded",
        ("graph_break_detach", "vanishing_gradient"),
        calls(losses(*DISTANCES)),
        wrap(0, "_in_training(_torch.round, @)"),
    ),
    Mistake(
        "difference without a square",
        ("loss_sign_flipped", "loss_divergence"),
        calls(losses(*DISTANCES)),
        signed_difference,
    ),
    Mistake("one batch again and again", ("same_batch_every_step",), loops, repeat_the_first),
    Mistake(
        "optimizer holds copies",
        ("stale_params_in_optimizer", "params_not_in_optimizer"),
        calls(lambda c: makes_optimizer(c) and called(c.args[0]) == "parameters"),
        wrap(0, "_copies(@)"),
    ),
    Mistake(
        "a penalty outweighs the loss",
        ("aux_loss_dominates", "weight_decay_too_large"),
        calls(lambda c: called(c) == "backward" and not c.args),
        of_backward("(@ + 10 * _squares(optimizer))"),
    ),
    Mistake("eval() before training", ("eval_mode_in_training",), before_optimizer, insert("@.eval()")),
    Mistake(
        "dropout of 97 %", ("dropout_too_high",), calls(lambda c: called(c).startswith("Dropout")), drop_almost_all
    ),
)


# ---------------------------------------------------------------- mutants


def source_of(program: Program) -> tuple[Path, ast.Module, ast.FunctionDef]:
    """Return the file of a program, its syntax tree, and its function in that."""
    file = Path(program.train.__code__.co_filename)
    tree = ast.parse(file.read_text())
    function = next(each for each in tree.body if isinstance(each, ast.FunctionDef) and each.name == program.name)
    return file, tree, function


def functions_of(programs: list[Program]) -> dict[str, ast.FunctionDef]:
    """Return the functions of programs by name, to be looked at only: each file is parsed once."""
    files = {Path(program.train.__code__.co_filename) for program in programs}
    known = {
        (file, each.name): each
        for file in files
        for each in ast.parse(file.read_text()).body
        if isinstance(each, ast.FunctionDef)
    }
    return {each.name: known[Path(each.train.__code__.co_filename), each.name] for each in programs}


def inject(program: Program, mistake: Mistake, place: int) -> str:
    """Return the source of the program's file with a mistake at one place of the program."""
    _, tree, function = source_of(program)
    places = mistake.places(function)
    for each in places if mistake.everywhere else [places[place]]:
        mistake.edit(each)
    for each in tree.body:
        if isinstance(each, ast.FunctionDef):  # not to be registered a second time
            each.decorator_list = [d for d in each.decorator_list if called(d) not in ("fault", "healthy")]
    first = next(at for at, each in enumerate(tree.body) if not _comes_first(each))
    tree.body[first:first] = ast.parse(PRELUDE).body
    return ast.unparse(ast.fix_missing_locations(tree))


def _comes_first(statement: ast.stmt) -> bool:
    is_text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    return is_text or (isinstance(statement, ast.ImportFrom) and statement.module == "__future__")


def mutant(program: Program, mistake: Mistake, place: int, folder: Path) -> Program:
    """Return a program with a mistake; its source lies in the folder, so that findings can name its lines."""
    file = folder / Path(program.train.__code__.co_filename).name
    file.write_text(inject(program, mistake, place))
    module = ModuleType(f"injected_{file.stem}")
    module.__file__, module.__package__ = str(file), f"fault_programs.{program.set}"
    sys.modules[module.__name__] = module
    exec(compile(file.read_text(), str(file), "exec"), module.__dict__)
    return replace(program, train=vars(module)[program.name])


def draw(mistakes: list[Mistake], programs: list[Program], each: int, seed: int) -> list[tuple[str, str, int]]:
    """Return names of mistakes and programs with places, `each` of every mistake."""
    functions = functions_of(programs)
    drawn = []
    for mistake in mistakes:
        chooser = random.Random(f"{mistake.name} {seed}")
        counts = [(name, len(mistake.places(function))) for name, function in functions.items()]
        possible = [(name, count) for name, count in counts if count]
        for name, count in chooser.sample(possible, min(each, len(possible))):
            drawn.append((mistake.name, name, chooser.randrange(count)))
    return drawn


def examine(job: tuple[str, str, int]) -> dict[str, Any]:
    """Train one mutant and return how ill it was and what was said of it."""
    torch.set_num_threads(1)
    name, program_name, place = job
    mistake = next(each for each in MISTAKES if each.name == name)
    program = next(each for each in fault_programs.load() if each.name == program_name)
    found: dict[str, Any] = {"mistake": name, "program": program_name, "set": program.set, "place": place}
    with tempfile.TemporaryDirectory(prefix="sonde-injected-") as folder:
        watch = Watch(str(Path(folder) / "runs"))
        try:
            illness = mutant(program, mistake, place, Path(folder)).run(watch, fixed=True)
        except Exception as error:  # noqa: BLE001 - an edit may make any error; such a mistake is no silent one
            return found | {"error": f"{type(error).__name__}: {error}"[:200]}
        finally:
            watch.end()
        return found | {"harmful": not illness <= program.well, "said": [each.kind for each in watch.said]}


def report(rows: list[dict[str, Any]], *, misses: bool) -> None:
    """Print by mistake how many did harm, were named first, and raised an alarm."""
    print(f"{'mistake':36}{'harmful':>9}{'first':>7}{'alarm':>7}")
    total = [0, 0, 0]
    for mistake in MISTAKES:
        harmful = [row for row in rows if row["mistake"] == mistake.name and row.get("harmful")]
        first = [row for row in harmful if row["said"][:1] and row["said"][0] in mistake.causes]
        counts = [len(harmful), len(first), sum(bool(row["said"]) for row in harmful)]
        total = [one + other for one, other in zip(total, counts, strict=True)]
        if any(row["mistake"] == mistake.name for row in rows):
            print(f"{mistake.name:36}{counts[0]:9}{counts[1]:7}{counts[2]:7}")
        for row in harmful if misses else ():
            if row not in first:
                said = ", ".join(row["said"][:3]) or "nothing"
                print(f"    {row['set']}/{row['program']}, place {row['place']}: {said}")
    print(f"{'all':36}{total[0]:9}{total[1]:7}{total[2]:7}")


def judged(
    examine: Callable[[Any], dict[str, Any]], jobs: list[Any], processes: int, out: Path | None
) -> Iterator[dict[str, Any]]:
    """Yield the verdict on each job, and write it into a file as it comes."""
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        for row in pool.map(examine, jobs):
            if out is not None:
                with out.open("a") as file:
                    file.write(json.dumps(row) + "\n")
            yield row


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--each", type=int, default=20, help="how many programs get each mistake")
    parser.add_argument("--only", default="", help="names of mistakes, separated by commas")
    parser.add_argument("--seed", type=int, default=0, help="draws the programs and places")
    parser.add_argument("--jobs", type=int, default=1, help="how many programs to train at a time")
    parser.add_argument("--out", type=Path, help="write each verdict here as it comes, a line of JSON each")
    parser.add_argument("--misses", action="store_true", help="also print which were not named first")
    options = parser.parse_args(arguments)
    wanted = [each for each in MISTAKES if not options.only or each.name in options.only.split(",")]
    if not wanted:
        parser.error(f"no such mistake; there is: {', '.join(each.name for each in MISTAKES)}")
    os.environ.update(EVIDENCE["tape"])
    jobs = draw(wanted, fault_programs.load(), options.each, options.seed)
    report(list(judged(examine, jobs, options.jobs, options.out)), misses=options.misses)


if __name__ == "__main__":
    main()
