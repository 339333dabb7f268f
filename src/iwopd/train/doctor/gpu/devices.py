"""Which device there is, and what it is."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterator

import torch

from iwopd.devices import free_bytes, total_bytes
from iwopd.train.doctor.findings import Finding, failure, passed, warning
from iwopd.train.doctor.resources import gigabytes, main_memory

BFLOAT16_FROM = (8, 0)
"""Compute capability from which bfloat16, TF32 and FlashAttention are there (A100)."""
MOSTLY_FREE = 0.9
VERSIONS = ("torch", "transformers", "accelerate", "flash-attn", "vllm", "triton", "bitsandbytes")


def choose_device(asked: str | None) -> str | Finding:
    """The device to look at: the one asked for, else the first GPU. If there is none, what to do."""
    if asked == "cpu":
        return asked
    if asked is not None and not re.fullmatch(r"cuda(:\d{1,4})?", asked):
        return failure(
            "device", f"{asked!r} is no device of this checklist", "name cuda, cuda:1, ... or cpu (ROCm's are called cuda, too)"
        )
    if torch.version.cuda is None and torch.version.hip is None:
        return _cpu_build()
    if not torch.cuda.is_available():
        return _no_driver()
    count, place = torch.cuda.device_count(), int((asked or "cuda:0").removeprefix("cuda").removeprefix(":") or 0)
    if place >= count:
        there = "cuda:0" if count == 1 else f"cuda:0 to cuda:{count - 1}"
        return failure("device", f"there is no cuda:{place}", f"there are: {there}")
    return f"cuda:{place}"


def variables(device: str) -> dict[str, str]:
    """Environment of a process that sees this device alone (a GPU is then its cuda:0)."""
    if device == "cpu":
        return {"CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true"}
    seen = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    place = int(device.removeprefix("cuda:"))
    return {"CUDA_VISIBLE_DEVICES": seen[place] if seen else str(place)}


def describe(device: torch.device) -> Iterator[Finding]:
    """Versions, name, memory, and whether torch has kernels for it."""
    yield passed("versions", f"Python {platform.python_version()}, " + ", ".join(_versions()))
    if device.type == "cpu":
        memory = main_memory()
        free = "an unknown amount" if memory is None else gigabytes(memory)
        yield passed("device", f"the CPU ({platform.machine()}, {os.cpu_count()} cores), {free} of memory free")
        return
    about = torch.cuda.get_device_properties(device)
    capability, free_memory, total = (about.major, about.minor), free_bytes(device), total_bytes(device)
    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else f"ROCm {torch.version.hip}"
    words = (
        f"{about.name}, compute capability {about.major}.{about.minor}, {gigabytes(free_memory)} of {gigabytes(total)} free; "
        f"torch is built with {built}; driver: {_driver() or 'unknown'}"
    )
    if torch.version.hip is None and not _has_kernels(capability):
        known = ", ".join(torch.cuda.get_arch_list())
        yield failure("device", f"{words}. torch {torch.__version__} has no kernels for it (only {known})", _other_torch())
    elif torch.version.hip is None and capability < BFLOAT16_FROM:
        lacks = f"{words}. It has no bfloat16 matrix units and no FlashAttention"
        yield warning("device", lacks, "set precision = 'no', or use a newer GPU")
    else:
        yield passed("device", words)
    if free_memory < MOSTLY_FREE * total:
        yield warning(
            "device", f"{gigabytes(total - free_memory)} of its memory is taken", "look with nvidia-smi who else is there"
        )


def _has_kernels(capability: tuple[int, int]) -> bool:
    """Binary kernels of the same major version and an equal or lower minor one, or PTX of any lower version."""
    for name in torch.cuda.get_arch_list():
        kind, _, number = name.partition("_")
        digits = "".join(letter for letter in number if letter.isdigit())
        if len(digits) < 2:
            continue
        has = (int(digits[:-1]), int(digits[-1]))
        if has <= capability and (kind == "compute" or has[0] == capability[0]):
            return True
    return False


def _versions() -> Iterator[str]:
    for name in VERSIONS:
        try:
            yield f"{name} {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            continue


def _cpu_build() -> Finding:
    driver = _driver()
    there = f"an NVIDIA driver is here ({driver})" if driver else "no NVIDIA driver was found here, either (nvidia-smi)"
    return failure("device", f"torch {torch.__version__} is a CPU build: it knows no GPU; {there}", _other_torch())


def _no_driver() -> Finding:
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None and hidden.strip() in ("", "-1"):
        return failure("device", f"CUDA_VISIBLE_DEVICES is {hidden!r}: all GPUs are hidden", "unset it, or name some")
    driver, built = _driver(), torch.version.cuda or torch.version.hip
    if driver is None:
        return failure(
            "device",
            f"torch {torch.__version__} is built for GPUs, but no driver answers here (nvidia-smi)",
            "run it on a machine with a GPU; in a container: start it with --gpus all",
        )
    return failure(
        "device",
        f"torch {torch.__version__} (CUDA {built}) finds no usable GPU, although the driver answers ({driver})",
        f"the driver may be too old for CUDA {built}: update it, or install a torch built for an older CUDA (pytorch.org)",
    )


def _other_torch() -> str:
    version = torch.__version__.partition("+")[0]
    return (
        f"on the machine with the GPU: pip install --force-reinstall torch=={version} "
        "(PyPI's wheels for Linux are CUDA builds; for another CUDA version see pytorch.org)"
    )


def _driver() -> str | None:
    """What nvidia-smi says: name and driver of every GPU."""
    if (program := shutil.which("nvidia-smi")) is None:
        return None
    command = [program, "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return "; ".join(dict.fromkeys(done.stdout.strip().splitlines())) if done.returncode == 0 else None
