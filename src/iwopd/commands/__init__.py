"""The commands, one module each: `add` describes its arguments, `_run` imports what it needs and calls a function.

Heavy imports stay inside `_run`, so that `iwopd --help` is quick.
"""
