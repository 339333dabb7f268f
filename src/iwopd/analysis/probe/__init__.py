"""`iwopd probe`: how strong is the position bias of a pair of models? Measured from the student's rollouts, without training.

    settings, pair, material --rollouts--> tokens scored under both models --> parts --> Probe --> probe.json, table, report

A part is one module: `positions`, `rules`, `alignment`, and the hand-off curve next door (`analysis.handoff`). What cannot be
measured is named with its reason; the rest is measured. `docs/probe.md` says what each number means.
"""

from iwopd.analysis.probe.result import Probe, ProbeError, read_probe, write_probe
from iwopd.analysis.probe.run import run_probe
from iwopd.analysis.probe.settings import PARTS, ProbeSettings

__all__ = ["PARTS", "Probe", "ProbeError", "ProbeSettings", "read_probe", "run_probe", "write_probe"]
