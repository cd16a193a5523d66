"""What can be read beyond statistics: maps, attention, features, time, memory. Needs torch only."""

from sonde.probes.maps.attention import (
    Attention,
    AttentionCalls,
    Choice,
    explain_attention,
    explain_module,
    find_returned,
    head_statistics,
    is_attention,
)
from sonde.probes.maps.grad_cam import Cam, CamError, TokenGrid, find_grid, grad_cam
from sonde.probes.maps.outputs import channel_axis, dense, downsample, pooled_features
from sonde.probes.maps.statistics import brief_statistics, sample_statistics
from sonde.probes.memory.scope import MemoryScope, compare_snapshots, memory_scope, memory_snapshot
from sonde.probes.profile.advice import Verdict
from sonde.probes.profile.scope import ProfileScope, profile_scope
from sonde.probes.profile.windows import ProfileSchedule
from sonde.probes.rerun import cuda_devices, eager, is_compiled, kept_random_state, untouched

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
