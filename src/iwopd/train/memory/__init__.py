"""How much memory a run needs, by arithmetic from its models' configs: doctor, plan and docs/gpu.md all ask this package.

`shapes` counts the parameters of a model, `step` turns what one device holds into bytes by part, `run` reads a recipe. The
estimate leaves out the allocator's slack, the CUDA context (about 0.5 GB), communication buffers and the working memory of
kernels: add 10-20 %. It was never compared with a GPU (there was none).
"""

from iwopd.train.memory.run import RunShape
from iwopd.train.memory.shapes import ModelShape, ParameterCount
from iwopd.train.memory.step import GB, StepMemory, Stored, TrainedModel, device_memory

__all__ = ["GB", "ModelShape", "ParameterCount", "RunShape", "StepMemory", "Stored", "TrainedModel", "device_memory"]
