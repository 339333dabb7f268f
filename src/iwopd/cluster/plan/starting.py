"""What a job on verl is told before it starts: whether its GPUs hold what the settings put on them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from iwopd.cluster.plan.gpus import GPUS, Gpu, PlanError
from iwopd.cluster.plan.layout import asked_layout
from iwopd.cluster.plan.public_models import public_config
from iwopd.cluster.plan.workload import open_workload
from iwopd.config import Config
from iwopd.models import ModelSource
from iwopd.train.loading import source_of
from iwopd.train.memory import GB


def memory_warnings(config: Config) -> Iterator[str]:
    """What does not fit by the plan's arithmetic, with the settings as they are. Nothing is fetched for it."""
    gpu, whose = _gpu()
    if _unread(config):
        return
    try:
        needs = asked_layout(open_workload(config), gpu).needs
    except PlanError:  # a layout that the launcher refuses by itself
        return
    for need in needs:
        if need.verdict == "no":
            parts = ", ".join(f"{name} {size / GB:.1f}" for name, size in need.parts.items())
            yield (
                f"this will not fit by the estimate of `iwopd plan`, on {whose}: {need.who}: {need.needed / GB:.1f} GB needed "
                f"({parts}), {need.available / GB:.1f} GB there. To change it: {need.remedy}"
            )


def _gpu() -> tuple[Gpu, str]:
    """The GPUs that are here, else those that the plan takes for granted."""
    import torch

    if torch.cuda.is_available():
        about = torch.cuda.get_device_properties(0)
        return replace(GPUS["h100"], name="here", title=about.name, memory=float(about.total_memory)), f"this {about.name}"
    return GPUS["h100"], f"GPUs of {GPUS['h100'].memory / GB:.0f} GB (none is here to be asked)"


def _unread(config: Config) -> bool:
    """Whether a model's shape would have to be fetched from the hub."""
    if config.models.world is not None:
        return False
    sources = [source_of(config, "student"), source_of(config, "teacher"), source_of(config, "reference")]
    sources += [ModelSource.of(other.model) for other in config.teacher.others.values() if other.model is not None]
    return any(source.is_hub_id and public_config(source.path) is None for source in sources if source is not None)
