"""The program inside the sandbox: restrict itself, then run the candidate on each input and report what it returned.

Started as `python -c "...; from sandbox.child import main; main()" CHANNEL`, with the job on standard input. Everything after
"ready" may be forged by the candidate, which shares this process. It can claim any return value, but no more: only the
parent knows the expected outputs.
"""

from __future__ import annotations

import os
import sys
import types
from typing import Any

from . import landlock, limits, relatives, seccomp, wire


def main() -> None:
    channel = int(sys.argv[1])
    job = wire.decode(_read_all(0), wire.JOB)
    _lock(job["walls"])
    _send(channel, ("ready",))
    os.dup2(1, 0)  # standard output is /dev/null; start-up errors went to standard error
    os.dup2(1, 2)
    function = _load(channel, job["source"], job["entry_point"])
    for index, arguments in enumerate(job["arguments"]):
        _send(channel, _call(function, index, arguments))
    _send(channel, ("end",))
    os._exit(0)  # no atexit, no threads, no flushing


def _lock(walls: dict[str, Any]) -> None:
    if walls["parent"]:
        limits.die_with_parent(walls["parent"])
    limits.set_rlimits(walls["memory"], walls["cpu_seconds"], walls["file_bytes"])
    if walls["privileges"]:
        limits.no_new_privileges()
        limits.drop_capabilities()
    if walls["readable"]:
        _remember_library()
        landlock.restrict(walls["readable"], walls["writable"])
    if walls["seccomp"]:
        seccomp.install(seccomp.build(os.getpid(), writes=walls["writes"]))


def _remember_library() -> None:
    """Let imports know the names in the library's folder, which cannot be listed any more: other packages are in it, too."""
    for place in sys.path:
        finder = sys.path_importer_cache.get(place)
        if finder is not None and hasattr(finder, "_fill_cache"):
            finder._fill_cache()
            finder._fill_cache = finder.invalidate_caches = lambda: None  # type: ignore[attr-defined]


def _load(channel: int, source: str, entry_point: str) -> Any:
    module = types.ModuleType("candidate")  # not __main__: `if __name__ == "__main__"` is not part of the answer
    sys.modules["candidate"] = module
    try:
        exec(compile(source, "<candidate>", "exec", dont_inherit=True), module.__dict__)
        if entry_point not in module.__dict__:
            raise NameError(f"the program does not define {entry_point!r}")
        return module.__dict__[entry_point]
    except BaseException as error:
        _send(channel, ("broken", _describe(error)))
        os._exit(0)


_SENT = {type(None), bool, int, float, complex, str, bytes, list, tuple, set, frozenset, dict}


def _call(function: Any, index: int, arguments: bytes) -> Any:
    try:
        result = function(*wire.decode(arguments, wire.JOB))  # decoded per call: calls share nothing
    except BaseException as error:
        return ("raised", index, _describe(error))
    if type(result) in _SENT or (plain := relatives.plain(result)) is result:
        return ("returned", index, result)
    return ("related", index, plain)


def _send(channel: int, message: Any) -> None:
    try:
        data = _pack(message)
    except BaseException as error:  # the parent will count it as wrong
        data = wire.encode(("raised", message[1], f"result not accepted: {_describe(error)}"))
    view = memoryview(len(data).to_bytes(4, "little") + data)
    while view:
        view = view[os.write(channel, view) :]


def _pack(message: Any) -> bytes:
    if message[0] not in ("returned", "related"):
        return wire.encode(message)
    result = message[2]
    try:
        if type(result) in (list, tuple) and len(result) > wire.RESULT.nodes:
            raise wire.WireError("too many")
        return wire.encode(message)
    except wire.WireError:
        return wire.encode(("digest", message[1], wire.digest(result)))


def _describe(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"[:300]
    except BaseException:
        return "an exception that cannot be described"


def _read_all(file: int) -> bytes:
    pieces = []
    while piece := os.read(file, 1 << 20):
        pieces.append(piece)
    return b"".join(pieces)
