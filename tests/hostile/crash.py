# Crashes the interpreter.
import ctypes


def solve(facts):
    ctypes.string_at(0)
