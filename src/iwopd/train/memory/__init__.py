"""How much memory a run needs, by arithmetic from its models' configs: doctor, plan and docs/gpu.md all ask this package.

`shapes` counts the parameters of a model, `passes` what reading a token takes, `step` turns what one device holds into bytes by
stage and part, `run` reads a recipe. Tests compare it with what torch's allocator handed out on a CPU. It leaves out the
allocator's slack, the CUDA context (about 0.5 GB), communication buffers and the working memory of kernels: add 10-20 %. It was
never compared with a GPU (there was none).
"""

from iwopd.train.memory.passes import Pass
from iwopd.train.memory.run import RunShape
from iwopd.train.memory.shapes import ModelShape, ParameterCount
from iwopd.train.memory.step import (
    GB,
    UPDATE,
    DeviceMemory,
    Stage,
    StepMemory,
    Stored,
    Tokens,
    TrainedModel,
    WriterMemory,
)

__all__ = [
    "GB",
    "UPDATE",
    "DeviceMemory",
    "ModelShape",
    "ParameterCount",
    "Pass",
    "RunShape",
    "Stage",
    "StepMemory",
    "Stored",
    "Tokens",
    "TrainedModel",
    "WriterMemory",
]
