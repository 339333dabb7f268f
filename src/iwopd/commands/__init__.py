"""The commands, one module each: its docstring is the description in its `--help`, `HELP` the line in the list of commands.

`add` describes the arguments, `run` imports what it needs and calls a function. Heavy imports stay inside `run`, so that
`iwopd --help` is quick.
"""
