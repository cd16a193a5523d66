"""What can be read from a model beyond statistics: maps, attention, features. Needs torch only; writes nothing."""

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
from sonde.probes.rerun import cuda_devices, eager, is_compiled, kept_random_state, untouched
from sonde.probes.shrink import downsample, pooled_features
from sonde.probes.statistics import brief_statistics, sample_statistics
from sonde.probes.token_grid import TokenGrid, find_grid

__all__ = [
    "Attention",
    "AttentionCalls",
    "Cam",
    "CamError",
    "Choice",
    "TokenGrid",
    "brief_statistics",
    "channel_axis",
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
    "pooled_features",
    "sample_statistics",
    "untouched",
]
