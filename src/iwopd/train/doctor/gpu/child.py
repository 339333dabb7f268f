"""One check of the checklist in a process of its own: `python -m iwopd.train.doctor.gpu.child CHECK DEVICE FILE [PLACE COUNT]`.

Findings go to FILE (`wire`). PLACE and COUNT are of one of several processes that talk.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch

from iwopd.train.doctor.findings import Finding
from iwopd.train.doctor.gpu import devices, engine, flash, kernels, ranks
from iwopd.train.doctor.gpu.wire import write_findings

CHECKS: Mapping[str, Callable[[torch.device], Iterator[Finding]]] = {
    "device": devices.describe,
    "products": kernels.check_products,
    "attention": kernels.check_attention,
    "optimizer": kernels.check_optimizer,
    "sampling": kernels.check_sampling,
    "flash": flash.check_flash,
    "vllm": engine.check_engine,
}


def main(name: str, device: str, file: str, *place: str) -> None:
    where = torch.device(device)
    together = [int(number) for number in place]
    found = ranks.connect(where, Path(file).parent, *together) if together else CHECKS[name](where)
    write_findings(Path(file), found)


if __name__ == "__main__":
    main(*sys.argv[1:])
