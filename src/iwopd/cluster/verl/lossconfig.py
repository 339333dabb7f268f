"""verl's settings of the distillation loss, with the method in them. verl builds it in the driver and in every worker."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from verl.workers.config import DistillationLossConfig

from iwopd.algo.loss import DUAL_CLIP
from iwopd.cluster.verl.losses import check_loss_config
from iwopd.cluster.verl.params import read_settings
from iwopd.cluster.verl.registration import verify


@dataclass
class LossConfig(DistillationLossConfig):  # type: ignore[misc]  # verl has no types
    """The target of `distillation.distillation_loss._target_`; see `params`."""

    clip_ratio_c: float = DUAL_CLIP
    """Dual clip. verl's policy loss asks its settings for it, but the class above has no such field."""
    iwopd: dict[str, Any] | None = None
    """The recipe's `[method]` section and `steps`; None: what the loss's name stands for."""

    def __post_init__(self) -> None:
        verify(self.loss_mode)
        self.settings = read_settings(self.loss_mode, self.iwopd)
        check_loss_config(self, self.settings)
        super().__post_init__()
