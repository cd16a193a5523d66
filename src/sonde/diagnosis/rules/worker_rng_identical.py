"""Workers that draw the same random numbers."""

from __future__ import annotations

from sonde.diagnosis.case import Case, NotMeasured
from sonde.diagnosis.rule import Rule, above, fact
from sonde.records import Finding


def check(case: Case) -> Finding | None:
    """Find a generator that lives in the dataset and is copied, with its state, into several workers."""
    loader = case.facts.loader
    if loader is None:
        raise NotMeasured("the data loader")
    workers = loader.settings.get("num_workers")
    if not loader.settings.get("generator_in_dataset") or not isinstance(workers, int) or workers < 2:
        return None
    if loader.settings.get("worker_init_fn"):
        return None  # most likely it seeds the generators
    return RULE.finding(
        case,
        "warning",
        0.75,
        sites=("loader",),
        step=0,
        evidence=(
            above("workers that get a copy of it", workers, 2),
            fact("random generators in the dataset", 1),
        ),
        cause="The dataset holds a random generator: each worker gets a copy in the same state, so that all draw the "
        "same augmentations.",
        fix="Seed it per worker in worker_init_fn, or make the generator in __iter__ or __getitem__ from "
        "torch.initial_seed().",
        refute="Return a random number from __getitem__: if those of two workers differ, they are seeded apart.",
    )


RULE = Rule(kind="worker_rng_identical", check=check, since=0)
