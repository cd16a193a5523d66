"""Debuggers capture what a model computes inside for every sample, and store it by sample."""

from sonde.capture import PerSample
from sonde.debuggers.attention import AttentionDebugger
from sonde.debuggers.base_debugger import BaseDebugger
from sonde.debuggers.forward_debugger import (
    ActivationStatsDebugger,
    EmbeddingDebugger,
    FeatureMapDebugger,
    ForwardDebugger,
    LayerOutputDebugger,
)
from sonde.debuggers.gradcam import GradCAMDebugger
from sonde.debuggers.utils import get_layer_by_name
from sonde.debuggers.wrappers.sequential_debugger import SequentialDebugger

__all__ = [
    "ActivationStatsDebugger",
    "AttentionDebugger",
    "BaseDebugger",
    "EmbeddingDebugger",
    "FeatureMapDebugger",
    "ForwardDebugger",
    "GradCAMDebugger",
    "LayerOutputDebugger",
    "PerSample",
    "SequentialDebugger",
    "get_layer_by_name",
]
