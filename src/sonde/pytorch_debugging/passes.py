"""Forward and backward passes that are recorded in detail; they compute what the plain calls compute."""

from __future__ import annotations

import time
import traceback
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from sonde.forensics.call_table import Call, CallTable, Seen, listen_to_calls
from sonde.probes.readings import readings_of
from sonde.pytorch_debugging.events import plain, statistics
from sonde.records import Reading

if TYPE_CHECKING:
    from sonde.pytorch_debugging.debugger import PyTorchDebugger


def forward(debugger: PyTorchDebugger, model: nn.Module, inputs: Any, *, layer_hooks: bool) -> Any:
    """Run `model(inputs)` and record every layer's call."""
    table: CallTable | None = None
    debugger.last_forward = {}
    begin = time.perf_counter()
    try:
        if layer_hooks:
            with listen_to_calls(model) as table:
                outputs = model(inputs)
        else:
            outputs = model(inputs)
    except Exception as error:
        data = _error_data(error) | {"input_shape": _shape(inputs)}
        if table is not None:
            debugger.last_forward = _activations(table)
            data |= {"last_call": next(reversed(debugger.last_forward), None)}
        debugger._log_debug_event("forward_pass_error", f"{type(error).__name__} in the forward pass: {error}", data)
        raise
    _wait_for(model)
    seconds = time.perf_counter() - begin
    debugger.forward_times.append(seconds)
    debugger._notes.log(forward_seconds=seconds)
    data = {"input_shape": _shape(inputs), "output_shape": _shape(outputs), "forward_time": seconds}
    entry = debugger._log_debug_event("forward_pass_debug", f"Forward pass completed in {seconds:.4f} s", data)
    if table is not None:
        debugger._notes.readings("output", _output_readings(table))
        debugger.last_forward = _activations(table)
        entry["data"] |= plain(_in_brief(table)) | {"activations": debugger.last_forward}
        debugger._keep_table_of(entry, "activations")
    return outputs


def backward(debugger: PyTorchDebugger, loss: Tensor, *, retain_graph: bool, names: dict[int, str]) -> None:
    """Run `loss.backward()` and record the time and every parameter's gradient."""
    value = loss.detach().item() if loss.numel() == 1 else None
    leaves = list(_leaves(loss))
    begin = time.perf_counter()
    try:
        loss.backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call] # torch
    except Exception as error:
        data = _error_data(error) | {"loss_value": value}
        debugger._log_debug_event("backward_pass_error", f"{type(error).__name__} in the backward pass: {error}", data)
        raise
    if loss.device.type == "cuda":
        torch.cuda.synchronize(loss.device)
    seconds = time.perf_counter() - begin
    debugger.backward_times.append(seconds)
    debugger._notes.log(backward_seconds=seconds)
    named = {names.get(id(leaf), f"leaf {number} {tuple(leaf.shape)}"): leaf for number, leaf in enumerate(leaves)}
    readings = readings_of({name: leaf.grad for name, leaf in named.items() if leaf.grad is not None})
    data = {"loss_value": value, "backward_time": seconds, "num_gradients": len(readings)}
    entry = debugger._log_debug_event("backward_pass_debug", f"Backward pass completed in {seconds:.4f} s", data)
    entry["data"]["gradients"] = plain(
        {
            name: {"norm": each.norm, "abs_max": each.get("abs_max"), "nonfinite": each.nonfinite}
            for name, each in readings.items()
        }
    )
    debugger._keep_table_of(entry, "gradients")


def _leaves(loss: Tensor) -> Iterator[Tensor]:
    """Yield the tensors whose `grad` a backward pass from `loss` will add to."""
    seen: set[Any] = set()
    waiting = [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if isinstance(variable, Tensor):
            yield variable
        waiting += [parent for parent, _ in node.next_functions]


def _error_data(error: Exception) -> dict[str, Any]:
    return {"error": str(error), "error_type": type(error).__name__, "stack_trace": traceback.format_exc()}


def _shape(value: Any) -> Any:
    if isinstance(value, Tensor):
        return list(value.shape)
    if isinstance(value, dict):
        return {str(key): _shape(item) for key, item in value.items()}
    return [_shape(item) for item in value] if isinstance(value, list | tuple) else type(value).__name__


def _wait_for(model: nn.Module) -> None:
    """Wait for a CUDA device, so that the measured time is that of the pass."""
    parameter = next(model.parameters(), None)
    if parameter is not None and parameter.device.type == "cuda":
        torch.cuda.synchronize(parameter.device)


# ------------------------------------------------------------------ the table of layers


def _key(call: Call) -> str:
    """Return the name of a call: its module's, with a number from the second call on."""
    return f"{call.name}#{call.call}" if call.call else call.name


def _activations(table: CallTable) -> dict[str, dict[str, Any]]:
    """Return every call by name: shapes, types and statistics of inputs and outputs, time and memory."""
    return {_key(call): _row(call) for call in table.calls}


def _output_readings(table: CallTable) -> dict[str, Reading]:
    """Return the readings of all outputs, by the name of the call and the part."""
    return {
        f"{_key(call)}{seen.part}": seen.reading
        for call in table.calls
        for seen in call.outputs
        if seen.reading is not None
    }


def _in_brief(table: CallTable) -> dict[str, Any]:
    """Return what an event holds of the table: the slowest calls and those with values that are not finite."""
    timed = sorted((call for call in table.calls if call.time_ms is not None), key=lambda call: -(call.time_ms or 0.0))
    bad = [_key(call) for call in table.calls if any(seen.reading and seen.reading.nonfinite for seen in call.outputs)]
    return {
        "num_calls": len(table.calls) + table.left_out,
        "slowest_ms": {_key(call): round(call.time_ms or 0.0, 3) for call in timed[:5]},
        "nonfinite_outputs": bad[:20],
    }


def _row(call: Call) -> dict[str, Any]:
    shown: dict[str, Any] = {
        "class": call.kind,
        "input_shape": [list(seen.shape) for seen in call.inputs],
        "output_shape": _only([list(seen.shape) for seen in call.outputs]),
        "inputs": [_described(seen) for seen in call.inputs],
        "outputs": [_described(seen) for seen in call.outputs],
        "time_ms": call.time_ms,
        "output_bytes": call.output_bytes,
    }
    if call.cuda_bytes is not None:
        shown["cuda_bytes"] = call.cuda_bytes
    return shown


def _described(seen: Seen) -> dict[str, Any]:
    about: dict[str, Any] = {"part": seen.part} if seen.part else {}
    about |= {"shape": list(seen.shape), "dtype": seen.dtype}
    return about | (plain(statistics(seen.reading)) if seen.reading is not None else {})


def _only(values: list[Any]) -> Any:
    return values[0] if len(values) == 1 else values
