"""Checks of installed packages and of the processor."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterator

import torch

from iwopd.config import Config, ConfigError
from iwopd.quantization import EXTRAS, PACKAGES
from iwopd.train.doctor.findings import Finding, failure, listed, passed, warning
from iwopd.train.ranks import Launched
from iwopd.train.teachers import check_teacher_device

BFLOAT16 = """
import time, torch

@torch.no_grad()
def seconds(dtype):
    layer, states = torch.nn.Linear(1024, 1024, dtype=dtype), torch.ones(512, 1024, dtype=dtype)
    found = []
    for _ in range(6):
        began = time.perf_counter()
        layer(states)
        found.append(time.perf_counter() - began)
    return min(found)

print(seconds(torch.bfloat16) / seconds(torch.float32))
"""
"""Products large enough for the processor's matrix units; prints how many times as long as in float32 they take."""
SLOWER = 1.5
"""From so many times on it is a warning. Where a processor knows bfloat16, its products take less time than in float32."""


def check_packages(config: Config) -> Iterator[Finding]:
    """The extras that the recipe needs; one line for each, with the one command that brings it."""
    models = config.models
    names = [models.student, models.teacher, models.reference]
    files = [models.student_gguf_file, models.teacher_gguf_file, models.reference_gguf_file]
    kinds = [PACKAGES.get(kind) for kind in (config.lora.quantize, models.teacher_quantize)]
    needed = {
        "peft": (EXTRAS["bitsandbytes"] if "bitsandbytes" in kinds else "lora", config.lora.rank > 0),
        **{package: (extra, package in kinds) for package, extra in EXTRAS.items()},
        "gguf": ("gguf", any(files) or any(str(name).endswith(".gguf") for name in names)),
    }
    lacking: dict[str, list[str]] = {}
    for package, (extra, wanted) in needed.items():
        if wanted and importlib.util.find_spec(package) is None:
            lacking.setdefault(extra, []).append(package)
    for extra, packages in lacking.items():
        message = f"this recipe needs {' and '.join(packages)}, not installed here"
        yield failure("packages", message, f"install it: pip install 'iwopd[{extra}]'")


def check_ranks(config: Config, ranks: Launched) -> Iterator[Finding]:
    """Settings that do not go with several processes."""
    try:
        check_teacher_device(config, ranks.here)
    except ConfigError as error:
        yield failure("processes", str(error), "choose one of these")


def check_processor(config: Config) -> Iterator[Finding]:
    """bfloat16 on a CPU, in a separate process: a virtual machine that advertises AMX but forbids it kills the process."""
    dtypes = {config.models.dtype, config.models.teacher_dtype}
    if torch.cuda.is_available() or ("bfloat16" not in dtypes and config.precision != "bf16"):
        return
    done = subprocess.run([sys.executable, "-c", BFLOAT16], capture_output=True, text=True, timeout=300)
    if done.returncode:
        yield failure(
            "processor",
            f"a bfloat16 product kills the process here (exit code {done.returncode}): the machine advertises instructions "
            "that it does not allow",
            "set ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 in the environment, or load in float32",
        )
        return
    try:
        times = float(done.stdout)
    except ValueError:
        times = 0.0
    if times > SLOWER:
        yield warning(
            "processor",
            f"bfloat16 products work, but take {times:.1f} times as long as in float32: this processor has no instructions for "
            "them. Steps take about as many times as long",
            f"set {_float32(config)}, unless the memory is needed: bfloat16 weights take half of it",
        )
    else:
        measured = f", in {times:.1f} of float32's time" if times else ""
        yield passed("processor", f"bfloat16 products work{measured}")


def _float32(config: Config) -> str:
    """The settings that ask for bfloat16, as they would be in float32."""
    models = config.models
    asked = {
        "models.dtype = 'float32'": models.dtype == "bfloat16",
        "models.teacher_dtype = 'float32'": models.teacher_dtype == "bfloat16",
        "precision = 'no'": config.precision == "bf16",
    }
    return listed(setting for setting, wanted in asked.items() if wanted)
