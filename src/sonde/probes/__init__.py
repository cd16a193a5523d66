"""What can be read beyond statistics: maps, attention, features, time, memory. Needs torch only."""

from sonde.probes.attention import (
    Attention,
    Choice,
    explain_attention,
    find_returned,
    head_statistics,
    is_attention,
)
from sonde.probes.attention_calls import AttentionCalls, explain_module
from sonde.probes.axes import channel_axis
from sonde.probes.dense import dense
from sonde.probes.grad_cam import Cam, CamError, grad_cam
from sonde.probes.memory_scope import MemoryScope, memory_scope
from sonde.probes.memory_snapshot import compare_snapshots, memory_snapshot
from sonde.probes.profiling import ProfileScope, profile_scope
from sonde.probes.profiling_schedule import ProfileSchedule
from sonde.probes.rerun import cuda_devices, eager, is_compiled, kept_random_state, untouched
from sonde.probes.shrink import downsample, pooled_features
from sonde.probes.statistics import brief_statistics, sample_statistics
from sonde.probes.token_grid import TokenGrid, find_grid
from sonde.probes.verdict import Verdict

__all__ = [
    "Attention",
    "AttentionCalls",
    "Cam",
    "CamError",
    "Choice",
    "MemoryScope",
    "ProfileSchedule",
    "ProfileScope",
    "TokenGrid",
    "Verdict",
    "brief_statistics",
    "channel_axis",
    "compare_snapshots",
    "cuda_devices",
    "dense",
    "downsample",
    "eager",
    "explain_attention",
    "explain_module",
    "find_grid",
    "find_returned",
    "grad_cam",
    "head_statistics",
    "is_attention",
    "is_compiled",
    "kept_random_state",
    "memory_scope",
    "memory_snapshot",
    "pooled_features",
    "profile_scope",
    "sample_statistics",
    "untouched",
]
