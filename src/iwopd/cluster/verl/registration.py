"""The losses in verl's registry."""

from __future__ import annotations

import socket
from typing import Any

from iwopd.cluster.verl.errors import VerlError
from iwopd.cluster.verl.params import FORWARD_KL, LOSS, presets

_registered: dict[str, Any] = {}
"""Our losses by name, as verl's registry of this process got them."""


def register() -> None:
    """Register every loss under its name; a second call changes nothing."""
    from verl.trainer.distillation.losses import DistillationLossSettings, register_distillation_loss

    from iwopd.cluster.verl.losses import make_loss

    for name in presets(rewarded=True):
        if name not in _registered:
            settings = DistillationLossSettings(names=[name], use_topk=name == FORWARD_KL, use_estimator=name != FORWARD_KL)
            _registered[name] = register_distillation_loss(settings)(make_loss(name))


def verify(name: str) -> None:
    """Make sure that verl's registry of this process holds our loss under `name`.

    verl swallows whatever goes wrong when it loads a plugin, and skips plugins if VERL_USE_EXTERNAL_PLUGINS says so. Here it is
    said, or made good.
    """
    from verl.trainer.distillation.losses import DISTILLATION_LOSS_REGISTRY

    try:
        register()
    except Exception as error:
        raise VerlError(
            f"iwopd's losses could not be registered with verl on {socket.gethostname()}: {error!r}. Install the same iwopd "
            "and verl on every node (pip install 'iwopd[verl]'); another plugin with a loss of the same name must go"
        ) from error
    if name not in _registered:
        raise VerlError(f"{LOSS}.loss_mode is {name!r}, which is none of ours: {', '.join(_registered)}")
    if DISTILLATION_LOSS_REGISTRY.get(name) is not _registered[name]:
        raise VerlError(f"verl's registry on {socket.gethostname()} holds another loss than ours under the name {name!r}")
