"""Any expression of a healthy program edited: does Sonde warn where that does harm?

    python benchmarks/mutants.py [--number N] [--only EDIT,EDIT] [--seed S] [--jobs N] [--out FILE] [--all]

Unlike `injected.py`, the edits know nothing of mistakes, nor of rules: a keyword is left out, a dimension or an
operator is another one, a call is replaced by its first argument, a statement is deleted. So what is found is not what
somebody thought of. Each edit is made at one random place of a random program of tests/faults (repaired twins and
healthy programs), which is trained unwatched first; only where it ends worse than its own limit is it trained again
under `sonde.watch`. Printed are the edits that raised no alarm, with their line; with `--all` the others, too.
"""

from __future__ import annotations

import argparse
import ast
import copy
import os
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "faults"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import fault_programs
import torch
from faults import EVIDENCE, Watch
from injected import Mistake, called, functions_of, judged, mutant, source_of

_OTHER = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.Pow: ast.Mult, ast.Gt: ast.Lt,
          ast.Lt: ast.Gt, ast.GtE: ast.LtE, ast.LtE: ast.GtE, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq}  # fmt: skip
_OF_DIMENSIONS = frozenset(
    (
        *("softmax", "log_softmax", "sum", "mean", "std", "var", "cat", "stack", "argmax", "max", "min", "norm"),
        *("normalize", "cumsum", "logsumexp", "squeeze", "unsqueeze", "gather", "flip", "roll", "transpose", "size"),
    )
)
_NOT_UNWRAPPED = frozenset(
    ("attach", "range", "enumerate", "zip", "backward", "step", "zero_grad", "parameters", "print", "len", "item")
)


def _calls(function: ast.FunctionDef) -> Iterator[ast.Call]:
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and called(node) != "attach":
            yield node


def _keywords(function: ast.FunctionDef) -> list[Any]:
    return [(call, at) for call in _calls(function) for at in range(len(call.keywords))]


def _drop_keyword(place: Any) -> None:
    del place[0].keywords[place[1]]


def _dimensions(function: ast.FunctionDef) -> list[Any]:
    found = []
    for call in _calls(function):
        named = [each.value for each in call.keywords if each.arg in ("dim", "axis")]
        plain = call.args if called(call) in _OF_DIMENSIONS else []
        found += [each for each in (*named, *plain) if _integer(each) is not None]
    return found


def _integer(node: ast.expr) -> int | None:
    try:
        value = ast.literal_eval(node)
    except ValueError:
        return None
    return value if type(value) is int and -3 <= value <= 3 else None


def _other_dimension(node: ast.expr) -> None:
    _become(node, ast.Constant({0: 1, 1: 0, -1: 0, 2: 1, -2: -1}.get(_integer(node) or 0, 0)))


def _become(node: ast.AST, other: ast.AST) -> None:
    """Turn a node into another one in its place."""
    node.__class__ = other.__class__  # type: ignore[assignment]
    node.__dict__ = copy.copy(other.__dict__)


def _wraps(function: ast.FunctionDef) -> list[Any]:
    return [call for call in _calls(function) if called(call) not in _NOT_UNWRAPPED and _inside(call) is not None]


def _inside(call: ast.Call) -> ast.expr | None:
    if call.args and not isinstance(call.args[0], ast.Starred):
        return call.args[0]
    return call.func.value if isinstance(call.func, ast.Attribute) else None


def _unwrap(call: ast.Call) -> None:
    inside = _inside(call)
    assert inside is not None
    _become(call, copy.deepcopy(inside))


def _operators(function: ast.FunctionDef) -> list[Any]:
    binary = [node for node in ast.walk(function) if isinstance(node, ast.BinOp) and type(node.op) in _OTHER]
    compared = [node for node in ast.walk(function) if isinstance(node, ast.Compare) and type(node.ops[0]) in _OTHER]
    return [*binary, *compared]


def _other_operator(node: Any) -> None:
    if isinstance(node, ast.BinOp):
        node.op = _OTHER[type(node.op)]()  # type: ignore[abstract]
    else:
        node.ops[0] = _OTHER[type(node.ops[0])]()


def _binary(function: ast.FunctionDef) -> list[Any]:
    kinds = (ast.Sub, ast.Div, ast.MatMult)
    return [node for node in ast.walk(function) if isinstance(node, ast.BinOp) and isinstance(node.op, kinds)]


def _swap_operands(node: ast.BinOp) -> None:
    node.left, node.right = node.right, node.left


def _sums(function: ast.FunctionDef) -> list[Any]:
    return [node for node in ast.walk(function) if isinstance(node, ast.BinOp)]


def _keep_left(node: ast.BinOp) -> None:
    _become(node, copy.deepcopy(node.left))


def _unary(function: ast.FunctionDef) -> list[Any]:
    return [
        node
        for node in ast.walk(function)
        if isinstance(node, ast.UnaryOp) and not isinstance(node.operand, ast.Constant)
    ]


def _drop_sign(node: ast.UnaryOp) -> None:
    _become(node, copy.deepcopy(node.operand))


def _bounds(function: ast.FunctionDef) -> list[Any]:
    return [
        (node, name)
        for node in ast.walk(function)
        if isinstance(node, ast.Slice)
        for name in ("lower", "upper")
        if getattr(node, name) is not None
    ]


def _move_bound(place: Any) -> None:
    node, name = place
    bound = getattr(node, name)
    value = _integer(bound)
    moved = ast.BinOp(bound, ast.Add(), ast.Constant(1))
    setattr(node, name, None if value in (1, -1) else moved)


def _numbers(function: ast.FunctionDef) -> list[Any]:
    return [
        node
        for node in ast.walk(function)
        if isinstance(node, ast.Constant) and type(node.value) is float and node.value
    ]


def _times(factor: float) -> Callable[[Any], None]:
    def edit(node: ast.Constant) -> None:
        assert isinstance(node.value, float)
        node.value *= factor

    return edit


def _pairs(function: ast.FunctionDef) -> list[Any]:
    return [call for call in _calls(function) if len(call.args) >= 2]


def _swap_arguments(call: ast.Call) -> None:
    call.args[0], call.args[1] = call.args[1], call.args[0]


def _statements(function: ast.FunctionDef) -> list[Any]:
    found = []
    for node in ast.walk(function):
        for name in ("body", "orelse"):
            block = getattr(node, name, None)
            if isinstance(block, list):
                kinds = (ast.Expr, ast.Assign, ast.AugAssign, ast.If)
                found += [(block, at) for at, each in enumerate(block) if isinstance(each, kinds)]
    return [(block, at) for block, at in found if "attach(" not in ast.unparse(block[at])]


def _delete(place: Any) -> None:
    block, at = place
    block[at] = ast.Pass()


def _conditions(function: ast.FunctionDef) -> list[Any]:
    return [node for node in ast.walk(function) if isinstance(node, ast.If | ast.IfExp)]


def _always(node: ast.If | ast.IfExp) -> None:
    node.test = ast.Constant(True)


EDITS = (
    Mistake("keyword is left out", (), _keywords, _drop_keyword),
    Mistake("another dimension", (), _dimensions, _other_dimension),
    Mistake("call is left out", (), _wraps, _unwrap),
    Mistake("another operator", (), _operators, _other_operator),
    Mistake("operands are swapped", (), _binary, _swap_operands),
    Mistake("second operand is left out", (), _sums, _keep_left),
    Mistake("sign is left out", (), _unary, _drop_sign),
    Mistake("bound moves by one", (), _bounds, _move_bound),
    Mistake("number x 10", (), _numbers, _times(10)),
    Mistake("number / 10", (), _numbers, _times(0.1)),
    Mistake("arguments are swapped", (), _pairs, _swap_arguments),
    Mistake("statement is deleted", (), _statements, _delete),
    Mistake("condition is always true", (), _conditions, _always),
)


def changed_line(program: Any, edit: Mistake, place: int) -> str:
    """Return the line of a program that an edit changes, as it is after that."""
    before, after = (source_of(program)[2] for _ in range(2))
    edit.edit(edit.places(after)[place])
    lines = ast.unparse(before).splitlines(), ast.unparse(ast.fix_missing_locations(after)).splitlines()
    at = next((at for at, pair in enumerate(zip(*lines, strict=False)) if pair[0] != pair[1]), 0)
    return f"{lines[0][at].strip()}  ->  {lines[1][at].strip()}"


def examine(job: tuple[str, str, int]) -> dict[str, Any]:
    """Train one mutant unwatched and, if that does harm, watched; return what was said of it."""
    torch.set_num_threads(1)
    name, program_name, place = job
    edit = next(each for each in EDITS if each.name == name)
    program = next(each for each in fault_programs.load() if each.name == program_name)
    found: dict[str, Any] = {"edit": name, "program": program_name, "set": program.set, "place": place}
    with tempfile.TemporaryDirectory(prefix="sonde-mutants-") as folder:
        try:
            mutated = mutant(program, edit, place, Path(folder))
            found["harmful"] = not mutated.run(fixed=True) <= program.well
        except Exception as error:  # noqa: BLE001 - an edit may make any error; such a mistake is no silent one
            return found | {"error": f"{type(error).__name__}: {error}"[:200]}
        if not found["harmful"]:
            return found
        watch = Watch(str(Path(folder) / "runs"))
        try:
            mutated.run(watch, fixed=True)
        finally:
            watch.end()
        said = [each.kind for each in watch.said]
        return found | {"line": changed_line(program, edit, place), "said": said, "trouble": watch.complaints.found}


def draw(edits: list[Mistake], number: int, seed: int) -> list[tuple[str, str, int]]:
    """Return names of edits and programs with places: any place of any program is as likely."""
    chooser = random.Random(seed)
    functions = functions_of(fault_programs.load())
    drawn = []
    while len(drawn) < number:
        edit, name = chooser.choice(edits), chooser.choice(list(functions))
        count = len(edit.places(functions[name]))
        if count:
            drawn.append((edit.name, name, chooser.randrange(count)))
    return drawn


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--number", type=int, default=200, help="how many edits to make")
    parser.add_argument("--only", default="", help="names of edits, separated by commas")
    parser.add_argument("--seed", type=int, default=0, help="draws edits, programs and places")
    parser.add_argument("--jobs", type=int, default=1, help="how many programs to train at a time")
    parser.add_argument("--out", type=Path, help="write each verdict here as it comes, a line of JSON each")
    parser.add_argument("--all", action="store_true", help="also print what was said of the others")
    options = parser.parse_args(arguments)
    wanted = [each for each in EDITS if not options.only or each.name in options.only.split(",")]
    if not wanted:
        parser.error(f"no such edit; there is: {', '.join(each.name for each in EDITS)}")
    os.environ.update(EVIDENCE["tape"])
    harmful, alarms = Counter[str](), Counter[str]()
    for row in judged(examine, draw(wanted, options.number, options.seed), options.jobs, options.out):
        if not row.get("harmful"):
            continue
        harmful[row["edit"]] += 1
        alarms[row["edit"]] += bool(row["said"])
        if options.all or not row["said"]:
            print(f"{row['set']}/{row['program']}: {', '.join(row['said'][:3]) or 'nothing'}\n    {row['line']}")
    print(f"{'edit':28}{'harmful':>9}{'alarm':>7}")
    for name in (each.name for each in wanted):
        print(f"{name:28}{harmful[name]:9}{alarms[name]:7}")
    print(f"{'all':28}{harmful.total():9}{alarms.total():7}")


if __name__ == "__main__":
    main()
