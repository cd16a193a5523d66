"""What the programs of the fifteenth hold-out say about themselves."""

from __future__ import annotations

from pathlib import Path

from fault_programs.sources import Sources

_SOURCES = Sources(Path(__file__).with_name("measured.json"))
ABOUT, fault, healthy = _SOURCES.about, _SOURCES.fault, _SOURCES.healthy
