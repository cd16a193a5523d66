"""A language model that reads the word it is to foretell."""

from __future__ import annotations

from sonde import vitals
from sonde.diagnosis import thresholds
from sonde.diagnosis.case import Case
from sonde.diagnosis.rule import Rule, above
from sonde.records import Finding


def check(case: Case) -> Finding | None:
    """Find targets that are the inputs moved by one, and attention that is free to look ahead everywhere."""
    following = case.need_vital(vitals.LOSS, vitals.NEXT_TOKEN)
    ahead = case.need_vital(vitals.LOOP, vitals.LOOKS_AHEAD)
    # An encoder may look ahead; its decoder may not. One attention that does not is enough to leave it open.
    share, least = float(following.numbers().min()), float(ahead.stat("min")[0])
    if share < thresholds.NEXT_TOKEN_SHARE.value or least < thresholds.AHEAD_SHARE.value:
        return None
    if case.learning.state == "broken":  # a mask the wrong way round leaves the last place nothing: that comes first
        return None
    return RULE.finding(
        case,
        "critical",
        0.95,
        sites=_sites(case),
        step=1,
        evidence=(
            above("share of targets that are the next token of the input", share, thresholds.NEXT_TOKEN_SHARE),
            above("part of the attention that lies ahead, least of all layers", least, thresholds.AHEAD_SHARE),
        ),
        cause="The model is to foretell the next token and can see it: no attention is masked, so each place looks at "
        "those after it. The loss becomes very small, and what it writes by itself makes no sense.",
        fix="Mask what lies ahead: scores.masked_fill(mask, -inf) with torch.ones(T, T).triu(1).bool(), is_causal=True "
        "in scaled_dot_product_attention, or attn_mask (src_mask) in torch's layers.",
        refute="Change the last token of an input: if no output before it changes, it is wrong.",
    )


def _sites(case: Case) -> tuple[str, ...]:
    """Return the modules that hold attention, as far as they are known."""
    held = [each.module for each in case.facts.softmaxes if each.used == "weights" and each.module]
    named = [module.name for module in case.facts.modules if "attention" in module.kind.lower()]
    return tuple(dict.fromkeys((*held, *named))) or ("(model)",)


RULE = Rule(kind="future_leak", check=check, since=1, lasting=True)
