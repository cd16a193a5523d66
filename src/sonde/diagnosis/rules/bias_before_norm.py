"""A bias that the norm behind it takes away again."""

from __future__ import annotations

from sonde.diagnosis.case import Case, NotMeasured
from sonde.diagnosis.ownership import by_number, few
from sonde.diagnosis.rule import Rule, fact
from sonde.records import Finding

_LAYERS = ("Linear", "Conv1d", "Conv2d", "Conv3d", "ConvTranspose1d", "ConvTranspose2d", "ConvTranspose3d")
_NORMS = ("BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "SyncBatchNorm", "InstanceNorm1d", "InstanceNorm2d",
          "InstanceNorm3d")  # fmt: skip


def check(case: Case) -> Finding | None:
    """Find layers with a bias whose output goes straight into a norm that subtracts the mean of each channel."""
    if not case.need_facts().edges:
        raise NotMeasured("how modules follow each other")
    layers = [
        before
        for before, after in case.facts.edges
        if (layer := case.modules.get(before)) is not None
        and (norm := case.modules.get(after)) is not None
        and layer.kind in _LAYERS
        and norm.kind in _NORMS
        and layer.settings.get("bias") is True
    ]
    if not layers:
        return None
    return RULE.finding(
        case,
        "info",
        0.97,
        sites=tuple(dict.fromkeys(layers)),
        step=0,
        evidence=(fact("layers with a bias right before such a norm", len(set(layers))),),
        cause=f"The norm behind {few(layers)} subtracts the mean of each channel, and with it "
        f"{by_number(layers, 'its', 'their')} bias, which has no effect.",
        fix="Write bias=False in those layers; it saves memory and changes nothing else.",
        refute="Add 1 to the bias and run a batch in train() mode: another output refutes it.",
    )


RULE = Rule(kind="bias_before_norm", check=check, since=1)
