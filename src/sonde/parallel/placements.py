"""What this rank holds of a parameter: all of it, a shard, a summand of it, or a part of the model no other rank has.

`Site.placement` states it as text, and readers merge by that text alone: ranks with the same text hold copies. The
first word is the kind, the rest tells pieces apart: `shard 1/4`, with one `coordinate/size` for each dimension of the
mesh that is sharded.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from sonde.parallel.ranks import is_connected, this_rank

_PLAIN: Final = (Tensor, nn.Parameter)


@dataclass(frozen=True, slots=True)
class Holding:
    """What this rank holds of a tensor."""

    placement: str = ""
    """As in `Site.placement`; empty for the whole tensor."""
    shape: tuple[int, ...] | None = None
    """The shape of the whole tensor where the tensor itself does not tell."""
    padding: int = 0
    """Elements at the end of this rank's memory that do not belong to the tensor."""

    def local(self, tensor: Tensor) -> Tensor:
        """Return the elements on this rank; nothing is communicated."""
        if not self.padding and type(tensor) in _PLAIN:
            return tensor
        if hasattr(tensor, "to_local"):
            with torch.no_grad():  # else it would become a part of the user's graph
                tensor = tensor.to_local()
        return tensor.detach()[: tensor.numel() - self.padding] if self.padding else tensor


WHOLE: Final = Holding()


def holding_of(tensor: Tensor, known: Holding = WHOLE) -> Holding:
    """Return what this rank holds of a parameter, its gradient or its state; `known` is what holds for the parameter.

    A DTensor knows better: the gradient of a replicated parameter may be a summand.
    """
    return holding_by(getattr(tensor, "_spec", None), known)


def holding_by(spec: Any, known: Holding = WHOLE) -> Holding:
    """Return what this rank holds of a tensor by the layout (`DTensorSpec`) that a DTensor has; `known` without one."""
    mesh, placements = getattr(spec, "mesh", None), getattr(spec, "placements", None)
    if mesh is None or placements is None:
        return known
    coordinate = mesh.get_coordinate()
    if coordinate is None:  # this rank is not in the mesh
        return WHOLE
    dims = list(zip(placements, coordinate, mesh.shape, strict=True))
    pieces = " ".join(f"{at}/{size}" for placement, at, size in dims if not placement.is_replicate() and size > 1)
    if not pieces:
        return WHOLE
    return Holding(f"{'partial' if any(each.is_partial() for each, _, _ in dims) else 'shard'} {pieces}")


def find_holdings(models: Mapping[str, nn.Module]) -> dict[int, Holding]:
    """Return what this rank holds of those parameters that do not tell themselves, by their id."""
    if not is_connected():
        return {}
    found: dict[int, Holding] = {}
    for model in models.values():
        stage = _stage_of(model)
        if stage is not None:
            found |= dict.fromkeys(map(id, model.parameters()), Holding(f"stage {stage}"))
        for module in model.modules():
            found |= dict(_flat_parameters(getattr(module, "_handle", None)))
        found |= dict.fromkeys(map(id, _own_parameters(model)), Holding(f"own {this_rank()}"))
    return found


def data_of(model: nn.Module) -> Holding:
    """Return which samples a model is given on this rank: ranks of a tensor-parallel group work on the same ones.

    Groups are named by their lowest rank. A DTensor's mesh begins with the dimensions that FSDP shards over.
    """
    specs = (getattr(each, "_spec", None) for each in model.parameters())
    # Parameters that are not tensor-parallel know only the dimensions that FSDP shards over.
    mesh: Any = max((spec.mesh for spec in specs if spec is not None), key=lambda each: each.ndim, default=None)
    coordinate = None if mesh is None else mesh.get_coordinate()
    if coordinate is None:
        return WHOLE
    split = max((_data_dimensions(module) for module in model.modules()), default=0)
    if split >= len(coordinate):
        return WHOLE
    return Holding(f"data {int(mesh.mesh[tuple(coordinate[:split])].min())}")


def holding_of_output(layouts: Iterable[Any], data: Holding) -> Holding:
    """Return what this rank holds of an output of a tensor-parallel model: a copy, or a shard of the group's output.

    Args:
        layouts: Those of the DTensors that the output is, or was computed from.
        data: Which samples the model is given; see `data_of`.

    """
    pieces = dict.fromkeys(text for layout in layouts if (text := holding_by(layout).placement))
    partial = next((text for text in pieces if text.startswith("partial")), None)
    return Holding(partial or " ".join([data.placement, *pieces]))


def _data_dimensions(module: nn.Module) -> int:
    """Return how many dimensions of the mesh the second version of FSDP splits the data over, for its modules."""
    state = getattr(module, "_get_fsdp_state", None)
    group = getattr(state(), "_fsdp_param_group", None) if state is not None else None
    return int(group.mesh_info.mesh.ndim) if group is not None else 0


def _flat_parameters(handle: Any) -> Iterator[tuple[int, Holding]]:
    """Yield what the first version of FSDP keeps in one flat parameter, or the original parameters that lie in it."""
    flat: Any = getattr(handle, "flat_param", None)
    if flat is None or not getattr(handle, "uses_sharded_strategy", False) or handle.world_size == 1:
        return
    placement = f"shard {handle.rank}/{handle.world_size}"
    yield id(flat), Holding(placement, tuple(flat._unpadded_unsharded_size), int(flat._shard_numel_padded))
    for parameter, shape in zip(flat._params or (), flat._shapes, strict=False):
        yield id(parameter), Holding(placement, tuple(shape))


def _own_parameters(model: nn.Module) -> Iterable[nn.Parameter]:
    """Return parameters that are not meant to be equal on all ranks, as those of experts are marked."""
    ignored = getattr(model, "_ddp_params_and_buffers_to_ignore", ())
    inner = getattr(model, "module", model)
    for name, parameter in inner.named_parameters():
        if name in ignored or getattr(parameter, "allreduce", True) is False:
            yield parameter


def _stage_of(model: nn.Module) -> int | None:
    """Return the number of the pipeline stage that a model is; None if it is not a stage of torch's pipelining."""
    pipelining = sys.modules.get("torch.distributed.pipelining.stage")
    base = getattr(pipelining, "_PipelineStageBase", None)
    if base is None:
        return None
    for each in gc.get_referrers(model):
        owners = [each] if isinstance(each, base) else gc.get_referrers(each) if isinstance(each, dict) else []
        for owner in owners:
            if isinstance(owner, base) and getattr(owner, "submod", None) is model:
                return int(owner.stage_index)
    return None
