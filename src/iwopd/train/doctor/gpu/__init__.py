"""`iwopd doctor --gpu`: the checklist for the first run on a GPU. `checklist` has the order, the other modules the checks."""

from iwopd.train.doctor.gpu.checklist import examine_gpu, verdict

__all__ = ["examine_gpu", "verdict"]
