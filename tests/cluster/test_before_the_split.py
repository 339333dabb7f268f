"""A method whose signal the loss of micro-batches cannot compute, through the whole of verl: batch, denominator, reference."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cluster_support import steps, train
from iwopd.tiny import open_world

METHOD = (
    "--method.advantage=exopd",
    "--method.weights=prefix-only",
    "--method.params={ratio = 0.5, normalize = 'mean-one'}",
)


def test_the_signal_of_the_whole_batch_reaches_the_loss(tmp_path: Path) -> None:
    """The one update of a step starts at ratio 1, so its loss is the mean advantage, over the tokens that count."""
    open_world("clean")
    with train(tmp_path, "run", *METHOD, steps=2) as job:
        assert job.finish() == 0, job.text()[-3000:]
    metrics = steps(tmp_path / "run")
    assert len(metrics) == 2
    for step in metrics:
        assert step["loss"] == pytest.approx(-step["advantages/mean"], rel=1e-3)
        assert step["weights/mean"] == pytest.approx(1, abs=1e-6)
        answers = step["rollout/length_mean"] * step["rollouts"]
        assert answers / 2 <= step["tokens"] < answers * 0.75  # half of each, rounded up
        assert step["weights/max"] == pytest.approx(answers / step["tokens"], rel=1e-6)
    (written,) = (tmp_path / "run" / "verl").glob("metrics-*.jsonl")
    names = json.loads(written.read_text().splitlines()[0])["data"].keys()
    assert not [name for name in names if name.endswith("distillation/weights_max")]  # the loss computed no signal of its own
