"""What runs leave on disk, and the one way to read it. Training, evaluation, analysis and report all come here.

directory    writes a run directory (`RunDirectory`)
owner        one process at a time writes into a run directory
logs         JSONL logs: one reading of a line, and notes on what is missing or damaged
reading      reads a run directory in whatever state it is (`Run`): damage is a note, or for a strict reader an error
results      evaluation results of a run or of `iwopd eval`, as `iwopd compare` and the report take them
listing      runs under a folder, each with its state and result
identity     which method a run is of, and whether two runs are repeats of one method
alerts       what goes wrong in a run, told from its metrics
"""
