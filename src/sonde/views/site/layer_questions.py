"""What the page *Layers* asks: the picture of all layers, gradients by depth, the model, and one site at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from sonde.views.site.questions import Questions

_MOST_LISTED: Final = 500


def ask_layers(ask: Questions, overview: dict[str, Any]) -> None:
    """Ask what the page shows at first, and what its controls lead to, within limits."""
    table = ask("statistics", {}, of_run=False) or {"statistics": [], "quantities": []}
    stats = ["", *(row["name"] for row in table["statistics"] if row["shown"] == "always")]
    known = [each for each in table["quantities"] if overview.get("quantities", {}).get(each)]
    kept = _ask_steps(ask, known[0] if known else "", stats)
    for quantity in known:
        for stat in stats:
            ask("figure/heat", {"pattern": f"*:{quantity}", "stat": stat})
            for colour in ("findings", "statistic"):
                ask("figure/tree", {"colour": colour, "quantity": quantity, "stat": stat})
    if not known:
        ask("figure/heat", {"pattern": "*"})
        ask("figure/tree", {"colour": "statistic"})
    listed, total = _ask_lists(ask, known)
    shown = _ask_sites(ask, overview, listed, known[0] if known else "gradient")
    ask.say(f"All layers in one picture: each quantity whole, for {len(stats) - 1} statistics.")
    ask.say(f"Gradients by depth, and the model by its usual statistic: at {kept:,} of the steps.")
    if total > shown:
        ask.say(f"Of {total:,} sites, {shown:,} can be looked at one by one.")


def _ask_steps(ask: Questions, quantity: str, stats: list[str]) -> int:
    """Ask for gradients by depth and for the model at some steps, and offer only those."""
    steps = (ask.look("steps", {}) or {}).get("steps", [])
    count = min(len(steps), ask.limits.steps)
    chosen = [steps[round(at * (len(steps) - 1) / max(count - 1, 1))] for at in range(count)]
    ask.put("steps", {}, {"steps": chosen})
    for stat in stats:
        ask("figure/flow", {"stat": stat})
    for step in chosen:
        ask("figure/flow", {"step": step}, group="by step")
        ask("figure/tree", {"colour": "statistic", "quantity": quantity, "step": step}, group="by step")
    return len(chosen)


def _ask_lists(ask: Questions, known: list[str]) -> tuple[list[dict[str, Any]], int]:
    """Ask for the lists of sites; return the sites and how many there are with those that are not listed."""
    sites: list[dict[str, Any]] = []
    total = 0
    for pattern in [f"*:{quantity}" for quantity in known] or ["*"]:
        answer = ask("sites", {"pattern": pattern, "most": _MOST_LISTED}) or {"sites": [], "total": 0}
        sites += answer["sites"]
        total += answer["total"]
    return sites, total


def _ask_sites(ask: Questions, overview: dict[str, Any], listed: list[dict[str, Any]], first: str) -> int:
    findings = overview.get("findings", [])
    # What findings point at comes first, with the statistic they name.
    for item in [item for finding in findings for item in finding.get("evidence", ()) if item.get("site")]:
        _ask_site(ask, item["site"], item["stat"] or "")
        ask("figure/heat", {"pattern": f"*:{first}", "stat": item["stat"] or ""})
    named = {site.partition(":")[0] for finding in findings for site in finding.get("sites", ())}
    order = sorted(listed, key=lambda site: not (site["name"] in named or site["layer"] in named))
    chosen = order[: ask.limits.sites]
    for site in chosen:
        _ask_site(ask, site["key"], "")
    return len(chosen)


def _ask_site(ask: Questions, key: str, stat: str) -> None:
    group = f"site {key}"
    about = ask("site", {"site": key, "stat": stat}, group=group)
    if about is None:
        return
    for log in ("", "1"):
        ask("figure/curves", {"site": key, "stat": about["shown"], "log": log}, group=group)
    if about["quantity"] != "scalar":
        ask("figure/histogram", {"site": key}, group=group)
