"""Several debuggers as one: attached to a model, run on every datapoint, and written to pages by sample."""

from __future__ import annotations

import logging
import queue
import threading
import weakref
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal, Self

import torch
from torch import Tensor, nn

from sonde.capture import Capture, copy_outputs, write_pickled_pages
from sonde.debuggers.base_debugger import BaseDebugger
from sonde.debuggers.config import build_debuggers, by_layer, check_layers
from sonde.debuggers.forward_debugger import ForwardDebugger
from sonde.debuggers.hooks import LayerHooks
from sonde.debuggers.isolation import Isolation, check_on_error
from sonde.debuggers.samples import SampleId, sample_ids, split_samples
from sonde.debuggers.utils import get_layer_by_name
from sonde.errors import ClosedError, OptionError
from sonde.hooks.guard import OnError
from sonde.parallel.ranks import is_connected, this_rank
from sonde.probes import cuda_devices, eager, is_compiled, untouched
from sonde.training.datapoints import apply_tensor_op

logger = logging.getLogger("sonde")

MB: Final = 1024 * 1024


class BufferQueue(queue.Queue[Any]):
    """A view of the captures that wait to be written. Do not put items into it."""

    def __init__(self, capture: Capture) -> None:
        super().__init__()
        self._capture = capture

    def qsize(self) -> int:
        """Return how many captures wait for the writer; 0 while no folder is set."""
        return self._capture.num_pending if self._capture.folder is not None else 0

    def empty(self) -> bool:
        """Return whether no capture waits."""
        return self.qsize() == 0

    def join(self) -> None:
        """Wait until all captures are written, as long as the writer makes progress."""
        if self._capture.folder is not None:
            self._capture.flush()


class BufferThread(threading.Thread):
    """A stand-in for the writer thread, which runs only while there is something to write."""

    def __init__(self, capture: Capture) -> None:
        super().__init__(name="sonde-pages", daemon=True)
        self._capture = capture

    def is_alive(self) -> bool:
        """Return whether captures are written: True until the debugger is closed."""
        return not self._capture.is_closed


class SequentialDebugger(BaseDebugger):
    """Runs debuggers on every datapoint while `enabled`, and writes what they return to pages, sample by sample.

    Outputs go to disk as they come, once a folder is known: `open(folder)` before the loop names it. Without that they
    wait, in memory and beyond `max_pending_mb` in a temporary folder, until `save_all(folder)`.

    Args:
        debuggers_config: A list of `{"name": ..., "debugger_config": ...}`, where the latter is a debugger or describes
            one as `{"class": ..., "args": {...}}`.
        model: The model whose layers are looked at.
        page_size_mb: How large a page of captures grows, counted in bytes of its tensors.
        on_error: What an error in a debugger does: `"raise"` lets it through; `"isolate"` records it with the
            samples, logs the first of each debugger, and goes on. By default errors are raised, except in a trainer or
            evaluator of `sonde.training`, which isolates them.
        strict: Whether a layer that does not exist is an error. If not, it is named on standard output.
        keep: Which captures stay once scores are known, such as `"worst:50"`; see `save_all`.
        save_dtype: Floating tensors are stored as this type.
        page_format: `"pickle"` writes pages for old tools, which run code when they are loaded.
        max_pending_mb: How much may wait in memory. Beyond it `__call__` waits until the writer has made room.
        stall_timeout_s: How long to wait for a writer that writes nothing (a disk that hangs) before captures are given
            up. While captures reach the disk, however slowly, nothing is lost.

    """

    def __init__(
        self,
        debuggers_config: Iterable[Mapping[str, Any]],
        model: nn.Module,
        page_size_mb: float = 100,
        *,
        on_error: OnError | None = None,
        strict: bool = False,
        keep: str | None = None,
        save_dtype: torch.dtype | None = None,
        page_format: Literal["safetensors", "pickle"] = "safetensors",
        max_pending_mb: float = 256,
        stall_timeout_s: float = 60.0,
    ) -> None:
        if page_format not in ("safetensors", "pickle"):
            raise OptionError(f"page_format is 'safetensors' or 'pickle'; got {page_format!r:.80}.")
        check_on_error(on_error)
        _check_kinds(model, page_size_mb=page_size_mb, max_pending_mb=max_pending_mb)
        self.page_size = int(page_size_mb * MB)
        self.page_format = page_format
        self.epoch: int | None = None
        """The epoch that captures belong to, where it is known."""
        self.split: str | None = None
        """The split that captures belong to, where it is known."""
        self.debuggers = build_debuggers(debuggers_config)
        self.model = model
        named = {name: each for name, each in self.debuggers.items() if isinstance(each, ForwardDebugger)}
        self.forward_debuggers = by_layer(named.values())
        check_layers(model, self.forward_debuggers, strict=strict)
        user_written = (name for name, each in self.debuggers.items() if _is_user_written(each))
        self._isolation = Isolation(on_error or "raise", user_written)
        # The hooks do not refer to this object, so that a model with hooks does not keep it alive.
        self._hooks = LayerHooks(model, named, self._isolation)
        self._capture = Capture(
            page_bytes=self.page_size,
            save_dtype=save_dtype,
            max_pending_bytes=int(max_pending_mb * MB),
            stall_timeout_s=stall_timeout_s,
            on_error=on_error or "raise",
            keep=keep,
            rank=_rank(),
        )
        self._on_error = on_error
        self._buffer_lock = threading.RLock()
        self._waiting = BufferQueue(self._capture)
        self._buffer_queue: queue.Queue[Any] = self._waiting
        self._buffer_thread: threading.Thread = BufferThread(self._capture)
        self._own_folders: set[Path] = set()
        self._output_dir: str | None = None
        self._warned_compiled = False
        # Also without `close`, nothing outlives this object: neither a hook nor a thread.
        self._finalizer = weakref.finalize(self, _finish, self._hooks, self._capture)

    # ------------------------------------------------------------------ what it holds

    @property
    def enabled(self) -> bool:
        """Whether captures are taken. The model carries hooks only while this is so."""
        return self._enabled

    @enabled.setter
    def enabled(self, value: bool) -> None:
        if value:
            self._check_open()
            _check_computes(self.model)
        self._enabled = bool(value)
        if self._enabled:
            self._isolation.devices = cuda_devices(self.model)
            self._hooks.attach()
        else:
            self._hooks.remove()

    _enabled = False

    @property
    def on_error(self) -> OnError | None:
        """What an error in a debugger does; None if it was not set, which raises."""
        return self._on_error

    @on_error.setter
    def on_error(self, value: OnError | None) -> None:
        check_on_error(value)
        self._on_error = value
        self._isolation.on_error = self._capture.on_error = value or "raise"

    @property
    def output_dir(self) -> str | None:
        """The folder that captures go to, or went to last. Assigning one is `open`."""
        return self._output_dir

    @output_dir.setter
    def output_dir(self, folder: str | Path | None) -> None:
        if folder is not None:
            self.open(folder)
        else:
            self._output_dir = None

    @property
    def current_page_idx(self) -> int:
        """The number of the page that is being filled."""
        return self._capture.current_page

    @property
    def current_page_size(self) -> int:
        """Bytes of the page that is being filled, and of the captures that wait to be written."""
        return self._capture.current_page_bytes + self._capture.pending_bytes

    @property
    def current_page_data(self) -> dict[SampleId, dict[str, Any]]:
        """Captures that wait to be written, by sample."""
        waiting = self._capture.waiting
        return {name: apply_tensor_op(func=Tensor.cpu, inputs=dict(outputs)) for name, outputs in waiting}

    @property
    def counters(self) -> dict[str, int]:
        """How many captures were written, dropped, not writable and removed by score; how often debuggers failed."""
        capture = self._capture
        return {
            "written": capture.written,
            "dropped": capture.dropped,
            "failed": capture.failed,
            "discarded": capture.discarded,
            "debugger_errors": self._isolation.num_failures,
        }

    # ------------------------------------------------------------------ datapoints

    def __call__(self, datapoint: dict[str, Any], model: nn.Module) -> dict[str, Any]:
        """Run all debuggers on a datapoint after its forward pass, and keep what they return; {} while disabled."""
        if not self._enabled:
            return {}
        given: Any = datapoint
        if not isinstance(given, Mapping):
            raise OptionError(
                "A datapoint is a dict with 'inputs', 'outputs' and {'meta_info': {'idx': [...]}}; got "
                f"{type(given).__name__}."
            )
        outputs: dict[str, Any] = {}
        try:
            self._isolation.run(type(self).__name__, lambda: self._look(datapoint, model, outputs))
        finally:
            self._hooks.forget()
            self._isolation.finish(_known_ids(datapoint))
        return outputs

    def _look(self, datapoint: dict[str, Any], model: nn.Module, outputs: dict[str, Any]) -> None:
        self._see_compiled(datapoint, model)
        with self._hooks.quiet():
            outputs.update((name, self._run(name, each, datapoint, model)) for name, each in self.debuggers.items())
        if outputs:
            self._buffer(outputs, datapoint)

    def add_to_buffer(self, debug_outputs: Mapping[str, Any], datapoint: Mapping[str, Any]) -> None:
        """Keep outputs for the samples that the datapoint's `meta_info.idx` names; nothing while disabled."""
        if self._enabled:
            self._buffer(copy_outputs(dict(debug_outputs)), datapoint)

    def _buffer(self, copied: Mapping[str, Any], datapoint: Mapping[str, Any]) -> None:
        ids = sample_ids(datapoint)
        info = self._info(datapoint)
        for name, outputs in zip(ids, split_samples(copied, ids), strict=True):
            self._capture.add(name, outputs, info=info)

    def take_problems(self) -> dict[str, Any]:
        """Return what is not in the captures since the last call; empty if they are complete.

        `missing` lists the samples without a capture, `failed` by debugger the samples that it failed on, and `errors`
        the first error of each, and of the `writer`.
        """
        failed, errors = self._isolation.take_failed()
        lost = self._capture.take_lost()
        missing = [*lost, *failed.get(type(self).__name__, [])]
        if lost:
            errors["writer"] = next(iter(lost.values()))
        found = {"missing": missing, "failed": failed, "errors": errors}
        return {key: value for key, value in found.items() if value}

    def _run(self, name: str, debugger: BaseDebugger, datapoint: dict[str, Any], model: nn.Module) -> Any:
        found: list[Any] = []
        run = self._isolation.run
        if not isinstance(debugger, ForwardDebugger):
            run(name, lambda: found.append(copy_outputs(debugger(datapoint, model))))
        elif (captures := self._hooks.captures(name)) or debugger._of_thread.by_hand:
            run(name, lambda: found.extend(_answers(debugger, captures, datapoint, model)))
        elif name not in self._isolation.failures:
            self._isolation.not_run.append(name)
            return {"error": self._why_not(debugger), "layer_name": debugger.layer_name}
        if name in self._isolation.failures:
            return {"error": self._isolation.failures[name]}
        return found[0] if len(found) == 1 else {f"#{call}": each for call, each in enumerate(found)}

    def _why_not(self, debugger: ForwardDebugger) -> str:
        if get_layer_by_name(self.model, debugger.layer_name) is None:
            return f"the model has no layer '{debugger.layer_name}'"
        return (
            f"layer '{debugger.layer_name}' did not run for this datapoint: call the model that the debugger was built "
            "with, after debugger.enabled = True"
        )

    def _see_compiled(self, datapoint: Mapping[str, Any], model: nn.Module) -> None:
        """Run a compiled model once more as it was written: hooks do not reach into compiled code."""
        if not self.forward_debuggers or "inputs" not in datapoint or not is_compiled(model):
            return
        if not self._warned_compiled:
            self._warned_compiled = True
            logger.warning(
                "The model is compiled, and hooks do not reach into compiled code: every captured datapoint is run a "
                "second time as the model was written."
            )
        with torch.no_grad(), untouched(model), eager(model):
            model(datapoint["inputs"])

    def _info(self, datapoint: Mapping[str, Any]) -> dict[str, Any]:
        """Return what is noted with a capture: where it belongs, and what went wrong."""
        meta = datapoint.get("meta_info")
        given = meta if isinstance(meta, Mapping) else {}
        info = {
            "epoch": self.epoch if self.epoch is not None else given.get("epoch"),
            "split": self.split if self.split is not None else given.get("split"),
            "rank": self._capture.rank,
            "calls": {name: calls for name in self.debuggers if (calls := self._hooks.num_calls(name)) > 1},
            "not_run": list(self._isolation.not_run),
            "failed": dict(self._isolation.failures),
        }
        return {key: value for key, value in info.items() if value not in (None, {}, [])}

    # ------------------------------------------------------------------ pages

    def open(
        self, output_dir: str | Path, *, epoch: int | None = None, split: str | None = None, resume: bool = False
    ) -> None:
        """Set the folder that captures go to, so that they are on disk as they come.

        A folder with pages of an earlier process raises `RunExists`, unless `resume` is set, which adds to them.
        """
        self._check_open()
        with self._buffer_lock:
            path = Path(output_dir)
            self._capture.rank = _rank()
            if self.page_format == "safetensors" and self._capture.folder != path:
                self._capture.open(path, resume=resume or path in self._own_folders)
                self._own_folders.add(path)
            self._output_dir = str(output_dir)
            self.epoch, self.split = epoch, split

    def save_all(
        self,
        output_dir: str | Path,
        *,
        scores: Mapping[SampleId, float] | None = None,
        higher_is_better: bool = True,
    ) -> None:
        """Write everything to the folder and finish it; later captures belong to the next folder.

        Waits as long as captures reach the disk. With `keep`, `scores` decides which captures stay; without scores all
        do.
        """
        self._check_open()
        with self._buffer_lock:
            if self.page_format == "pickle":
                write_pickled_pages(self._capture, output_dir, page_bytes=self.page_size)
                self._output_dir = str(output_dir)
                return
            if self._capture.folder != Path(output_dir):
                self.open(output_dir, epoch=self.epoch, split=self.split)
            if scores is not None and self._capture.keep is not None:
                self._capture.keep_only(scores, higher_is_better)
            self._capture.seal()
            self.epoch = self.split = None

    def reset_buffer(self) -> None:
        """Start afresh: finish an open folder, and discard captures that wait for one."""
        with self._buffer_lock:
            self._capture.seal()
            self._capture.discard()
            self._output_dir = self.epoch = self.split = None

    def _save_current_page(self) -> None:
        """Wait until what is captured so far is on disk; pages are finished when they are full."""
        self._waiting.join()

    def _check_open(self) -> None:
        if not self._finalizer.alive:
            raise ClosedError("This debugger is closed. Build another one to capture more.")

    def close(self) -> None:
        """Remove the hooks and finish what is open. Closing twice is fine."""
        if self._finalizer.alive:
            self._finalizer.detach()
            self._enabled = False
            _finish(self._hooks, self._capture)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _answers(
    debugger: ForwardDebugger, captures: list[Any], datapoint: dict[str, Any], model: nn.Module
) -> Iterable[Any]:
    """Yield a debugger's result for every call of its layer; `__call__` may be overridden."""
    if not captures:  # `last_capture` was assigned
        yield debugger(datapoint, model)
    for capture in captures:
        debugger._of_thread.value = capture
        yield debugger(datapoint, model)


def _check_kinds(model: Any, **sizes: Any) -> None:
    if not isinstance(model, nn.Module):
        raise OptionError(f"model takes a torch.nn.Module; got {type(model).__name__}.")
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int | float) or not size > 0:
            raise OptionError(f"{name} takes a number of megabytes above 0; got {size!r:.80}.")


def _check_computes(model: nn.Module) -> None:
    parameters = list(model.parameters())
    if parameters and all(parameter.is_meta for parameter in parameters):
        raise OptionError(
            f"{type(model).__name__} is on the meta device and computes no values that could be captured. "
            "Move it to a real one with model.to_empty(device=...) and load its weights."
        )


def _known_ids(datapoint: Mapping[str, Any]) -> list[SampleId]:
    """Return the names of a datapoint's samples; none if it does not name them, which is reported elsewhere."""
    try:
        return sample_ids(datapoint)
    except (AssertionError, ValueError, TypeError):
        return []


def _is_user_written(debugger: BaseDebugger) -> bool:
    return not type(debugger).__module__.startswith("sonde.")


def _rank() -> int:
    return this_rank() if is_connected() else 0


def _finish(hooks: LayerHooks, capture: Capture) -> None:
    hooks.remove()
    capture.close()
