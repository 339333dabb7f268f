"""Run untrusted programs. Expected outputs never enter; results are plain data, decoded strictly.

The modules `child`, `wire`, `relatives`, `unbuilt`, `limits`, `landlock` and `seccomp` also run inside the sandbox, under a
bare interpreter without this package. They import the standard library and each other (relatively), nothing else; this file
imports nothing at all.
"""
