"""Doubles and checks for tests of code that uses Sonde, shared with Sonde's own tests."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import nn
from torch.nn.modules import module as torch_module
from torch.optim import optimizer as torch_optimizer

from sonde.hooks.replace_function import REPLACED
from sonde.records import Block, Event, Finding, Reading, Site


@dataclass
class MemorySink:
    """Keeps what it is given; subscribe it to a session to look at readings without files."""

    sites: dict[int, Site] = field(default_factory=dict)
    blocks: list[Block] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    flushes: int = 0
    closed: bool = False

    def take_sites(self, sites: list[Site]) -> None:
        """Keep new sites."""
        self.sites.update((site.id, site) for site in sites)

    def take_block(self, block: Block) -> None:
        """Keep a block."""
        self.blocks.append(block)

    def take_event(self, event: Event) -> None:
        """Keep an event."""
        self.events.append(event)

    def take_finding(self, finding: Finding) -> None:
        """Keep a finding."""
        self.findings.append(finding)

    def flush(self) -> None:
        """Count flushes."""
        self.flushes += 1

    def close(self) -> None:
        """Remember that it was closed."""
        self.closed = True

    def readings(self, key: str) -> dict[int, Reading]:
        """Return what was read at the site with this key, by step."""
        ids = {site.id for site in self.sites.values() if site.key == key}
        found: dict[int, Reading] = {}
        for block in self.blocks:
            for index, site in enumerate(block.sites):
                if int(site) in ids:
                    bins = block.bins[index] if block.binned[index] else None
                    found[block.step] = Reading(block.rows[index], bins, block.step)
        return found

    @property
    def keys(self) -> set[str]:
        """The keys of all sites that have at least one reading."""
        ids = {int(site) for block in self.blocks for site in block.sites}
        return {site.key for site in self.sites.values() if site.id in ids}


class FakeClock:
    """A clock that stands still until it is moved."""

    def __init__(self, now: float = 1_000_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        """Tell the time."""
        return self.now

    def advance(self, seconds: float) -> None:
        """Move the clock forward."""
        self.now += seconds


def tiny_mlp(inputs: int = 8, hidden: int = 16, outputs: int = 4) -> nn.Sequential:
    """Return a two-layer perceptron."""
    return nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, outputs))


def assert_no_taps(model: nn.Module | None = None) -> None:
    """Raise AssertionError if a hook is left on torch or, if given, on any module or parameter of `model`."""
    left = {
        name: hooks
        for name in (
            "_global_forward_hooks",
            "_global_forward_pre_hooks",
            "_global_backward_hooks",
            "_global_forward_hooks_always_called",
            "_global_forward_hooks_with_kwargs",
        )
        if (hooks := getattr(torch_module, name, None))
    }
    left |= {
        name: hooks
        for name in ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")
        if (hooks := getattr(torch_optimizer, name))
    }
    assert not left, f"hooks are left on torch: {left}"
    assert not REPLACED, f"functions are still replaced: {sorted(map(str, REPLACED))}"
    for name, module in model.named_modules() if model is not None else ():
        for kind in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
            assert not getattr(module, kind), f"{name or 'the model'} has {kind} left"
    for name, parameter in model.named_parameters() if model is not None else ():
        assert not parameter._backward_hooks, f"{name} has hooks left"
        assert not getattr(parameter, "_post_accumulate_grad_hooks", None), f"{name} has hooks left"
