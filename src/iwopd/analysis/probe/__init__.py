"""`iwopd probe`: how strong is the position bias of a pair of models? Measured from the student's rollouts, without training.

    settings, pair, material --rollouts--> tokens scored under both models --> parts --> Probe --> probe.json, table, report

`run.run_probe` does all of it; `result` has the types and the file. A part is one module: `positions`, `rules`, `alignment`,
`agreement`, `horizons` (with `proposal`), and the hand-off curve next door (`analysis.handoff`). What cannot be measured is
named with its reason; the rest is measured. `docs/probe.md` says what each number means. Nothing is imported here: reading a
result must not load what measuring needs.
"""
