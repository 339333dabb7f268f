"""The codec between evaluator and sandbox: faithful to plain data, deaf to everything else, and never greedy."""

from __future__ import annotations

import collections
import enum
import math
import struct
import time
import tracemalloc
from decimal import Decimal
from fractions import Fraction
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from iwopd.eval.sandbox import seccomp, wire
from iwopd.eval.sandbox.unbuilt import Bag, built, same, same_elements
from iwopd.eval.sandbox.wire import JOB, Limits, Opaque, WireError, decode, digest, encode, encode_plain

scalars = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.complex_numbers(allow_nan=False) | st.text()
    | st.binary() | st.text(st.characters(categories=["Cs"]), max_size=3)
)  # fmt: skip
hashable = st.recursive(scalars, lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=4), max_leaves=6)
values = st.recursive(
    scalars | st.sets(hashable, max_size=4),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(hashable, inner, max_size=4),
    max_leaves=25,
)


def _shape(value: Any) -> Any:
    """The value with the type of everything in it spelled out."""
    if isinstance(value, list | tuple):
        return type(value), [_shape(item) for item in value]
    if isinstance(value, set | frozenset):
        return type(value), {(type(item), item) for item in value}
    if isinstance(value, dict):
        return type(value), [(_shape(key), _shape(item)) for key, item in value.items()]
    return type(value), value


@given(values)
def test_plain_data_survives(value: Any) -> None:
    assert _shape(decode(encode(value), JOB)) == _shape(built(decode(encode(value)))) == _shape(value)
    assert decode(encode(value)) == value
    assert encode_plain(value) == encode(value)


def test_special_floats_survive() -> None:
    assert math.isnan(decode(encode(math.nan)))
    assert decode(encode([math.inf, -math.inf])) == [math.inf, -math.inf]
    assert math.copysign(1.0, decode(encode(-0.0))) == -1.0


@given(st.binary(max_size=60))
def test_noise_is_a_value_or_an_error(data: bytes) -> None:
    try:
        value = decode(data)
    except WireError:
        return
    encode(built(value)) if value == value else None  # whatever was accepted can be said again


@given(values, st.data())
def test_every_cut_and_every_addition_is_refused(value: Any, data: st.DataObject) -> None:
    coded = encode(value)
    with pytest.raises(WireError):
        decode(coded[: data.draw(st.integers(0, len(coded) - 1))])
    with pytest.raises(WireError, match="left over"):
        decode(coded + b"N")


def _u32(number: int) -> bytes:
    return struct.pack("<I", number)


class _Yes(str):
    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = str.__hash__


@pytest.mark.parametrize("thing", [object(), range(3), iter([]), int, {1: 2}.values(), collections.deque([1])])
def test_other_types_become_opaque(thing: Any) -> None:
    arrived = decode(encode([thing]))[0]
    assert type(arrived) is Opaque
    assert arrived.name == type(thing).__name__
    assert arrived != thing
    assert arrived != arrived
    with pytest.raises(WireError, match=r"value\[0\] is a"):
        encode_plain([thing])


class _Point(NamedTuple):
    x: float
    y: float


class _Colour(enum.IntEnum):
    RED = 3


class _Word(enum.StrEnum):
    NO = "no"


class _List(list[Any]):
    __slots__ = ()


RELATIVES: list[tuple[Any, Any]] = [
    (Fraction(1, 2), 0.5),
    (Fraction(4, 2), 2),
    (Decimal("0.25"), 0.25),
    (Decimal("1E+2"), 100),
    (Decimal("Infinity"), math.inf),
    (_Point(1, 2.5), (1.0, 2.5)),
    (_Colour.RED, 3),
    (_Word.NO, "no"),
    (_Yes("x"), "x"),
    (type("F", (float,), {})(-0.5), -0.5),
    (type("C", (complex,), {})(2, 3), 2 + 3j),
    (type("B", (bytes,), {})(b"x"), b"x"),
    (bytearray(b"x"), b"x"),
    (memoryview(b"x"), b"x"),
    (_List([1, _List([2])]), [1, [2]]),
    (type("S", (set,), {})({1}), {1}),
    (type("Z", (frozenset,), {})({1}), {1}),
    (type("D", (dict,), {})(a=1), {"a": 1}),
    (collections.Counter("aab"), {"a": 2, "b": 1}),
    (collections.OrderedDict(a=2, b=1), {"a": 2, "b": 1}),
    (collections.defaultdict(int, a=2, b=1), {"a": 2, "b": 1}),
    (collections.UserDict(a=1), {"a": 1}),
    (collections.UserList([1]), [1]),
    (collections.ChainMap({"a": 1}, {"b": 2}), {"a": 1, "b": 2}),
    (MappingProxyType({"a": 1}), {"a": 1}),
    ({1: 2}.keys(), {1}),
    ({1: 2}.items(), {(1, 2)}),
]


@pytest.mark.parametrize(("thing", "equal"), RELATIVES, ids=lambda value: type(value).__name__)
def test_what_equals_plain_data_goes_as_such(thing: Any, equal: Any) -> None:
    """As EvalPlus judges it: by `==`. The table is checked against Python itself."""
    assert thing == equal
    for shape in (lambda x: x, lambda x: [x], lambda x: {"k": (x,)}):
        assert decode(encode(shape(thing))) == shape(equal)
        assert decode(encode(shape(thing))) != shape([equal])


@pytest.mark.parametrize(
    ("thing", "other"),
    [
        (Fraction(1, 3), 1 / 3),
        (Decimal("0.1"), 0.1),
        (Decimal("NaN"), math.nan),
        (_Point(1, 2), [1, 2]),
    ],
)
def test_what_does_not_equal_it_does_not(thing: Any, other: Any) -> None:
    assert thing != other
    assert decode(encode(thing)) != other


# --- comparing without hash tables

PRIME = 2**61 - 1  # Python's hash of an int is its remainder: multiples of this all hash to 0


def _int(number: int) -> bytes:
    data = number.to_bytes(number.bit_length() // 8 + 1, "little")
    return b"I" + _u32(len(data)) + data


def _colliding_frozensets(count: int, size: int) -> bytes:
    common = b"".join(_int(number * PRIME) for number in range(1, size))
    return b"E" + _u32(count) + b"".join(b"Z" + _u32(size) + common + _int((size + i) * PRIME) for i in range(count))


def _colliding_tuples(count: int, size: int) -> bytes:
    return b"M" + _u32(count) + b"".join(b"U" + _u32(size) + b"N" * (size - 1) + _int(i * PRIME) + b"N" for i in range(count))


@pytest.mark.parametrize(
    "data",
    [
        _colliding_frozensets(800, 100),
        _colliding_frozensets(1900, 100),
        _colliding_tuples(1900, 100),
        _colliding_tuples(13, 15_000),
    ],
    ids=["800 frozensets", "1900 frozensets", "1900 tuples", "13 long tuples"],
)
def test_colliding_keys_cost_no_more_than_others(data: bytes) -> None:
    """Building these takes half a minute and more (800 frozensets: 34 to 127 s)."""
    began = time.thread_time()
    value = decode(data)
    assert type(value) is Bag
    for expected in ({1, 2}, {(): 1}, value, [value]):
        assert (value == expected) is (expected is value)
    assert not same_elements([value], [1])
    assert time.thread_time() - began < 10.0


@settings(max_examples=40)
@given(values, values)
def test_bags_are_equal_when_the_values_are(one: Any, other: Any) -> None:
    assert (decode(encode(one)) == other) is (one == other)
    assert same(decode(encode(one)), one) is (one == one)


def test_equal_numbers_are_the_same_element() -> None:
    equal: list[tuple[Any, Any]] = [({1, 2}, {1.0, 2.0}), ({True: 0.0}, {1: False}), ({0.5}, {0.5 + 0j}), (set(), frozenset())]
    for one, other in equal:
        assert one == other
        assert decode(encode(one)) == other
    unequal: list[tuple[Any, Any]] = [({1}, {2}), ({}, set())]
    unequal += [({(1,)}, {1}), ({"1"}, {1}), ({"a": 1}, {"a": 2}), ({b"a"}, {"a"})]
    for one, other in unequal:
        assert one != other
        assert decode(encode(one)) != other


def test_a_bag_goes_into_no_table_and_holds_nothing_twice() -> None:
    with pytest.raises(TypeError):
        hash(decode(encode({1})))
    assert decode(b"E" + _u32(2) + b"NN") != {None}
    assert decode(b"E" + _u32(2) + b"T" + b"D" + struct.pack("<d", 1.0)) != {1}
    with pytest.raises(WireError, match="twice"):
        decode(b"M" + _u32(2) + b"NTNF", JOB)


@pytest.mark.parametrize(
    ("result", "expected", "right"),
    [([1, 1, 2], (2, 1), True), ({1, 2}, [1, 2], True), ({1: 5}, [1], True), ("aba", ["a", "b"], True),
     ([(1, [2])], [1], False), (5, [5], False), ([1], [1, 2], False), ([frozenset({1})], [frozenset({1})], True),
     ([{1}], [{1}], False)],
)  # fmt: skip
def test_elements_compare_as_sets_of_them_would(result: Any, expected: Any, right: bool) -> None:
    assert same_elements(decode(encode(result)), expected) is right


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "ends"),
        (b"?", "unknown tag"),
        (b"I" + _u32(0), "without bytes"),
        (b"I" + _u32(2 << 20) + bytes(2 << 20), "limit"),
        (b"S" + _u32(2) + b"\xff\xff", "UTF-8"),
        (b"L" + _u32(0xFFFFFFFF), "announced"),
        (b"M" + _u32(2000) + b"N" * 3999, "announced"),
        (b"E" + _u32(2001) + b"N" * 2000, "announced"),
        (b"Q" + b"T" + b"T", "ratio"),
        (b"Q" + b"I" + _u32(1) + b"\x01" + b"I" + _u32(1) + b"\x00", "ratio"),
        (b"E" + _u32(1) + b"L" + _u32(0), "unhashable"),
        (b"M" + _u32(1) + b"M" + _u32(0) + b"N", "unhashable"),
        (b"E" + _u32(1) + b"U" + _u32(1) + b"L" + _u32(0), "unhashable"),
        ((b"L" + _u32(1)) * 65 + b"N", "deeper"),
        (b"L" + _u32(200_000) + b"N" * 200_000, "more than 200000"),
        (b"O" + _u32(5000) + b"x" * 5000, "limit"),
        (b"B" + _u32(5 << 20) + bytes(5 << 20), "limit"),
    ],
)
def test_bad_messages_are_refused(data: bytes, why: str) -> None:
    with pytest.raises(WireError, match=why):
        decode(data)


def test_what_is_too_much_does_not_leave() -> None:
    loop: list[Any] = []
    loop.append(loop)
    fan: list[Any] = [1] * 10
    for _ in range(8):
        fan = [fan] * 10
    for value in (loop, fan, "x" * (5 << 20), 1 << (8 << 21), set(range(200_000))):
        with pytest.raises(WireError):
            encode(value)


@pytest.mark.parametrize(
    "item", [b"N", b"L" + _u32(0), b"M" + _u32(0), b"S" + _u32(1) + b"x", b"D" + bytes(8), b"U" + _u32(1) + b"N"]
)
def test_no_message_costs_the_reader_much(item: bytes) -> None:
    count = min(199_000 // (2 if item[:1] == b"U" else 1), (4 << 20) // len(item) - 2)
    data = b"L" + _u32(count) + item * count
    tracemalloc.start()
    decode(data)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 32 << 20


def test_limits_can_be_set() -> None:
    with pytest.raises(WireError, match="more than 3"):
        decode(encode([1, 2, 3]), Limits(nodes=3))
    assert decode(encode([1, 2]), Limits(nodes=3)) == [1, 2]


# --- digests of what is too large to travel


@given(st.lists(st.integers(-9, 9) | st.text(max_size=2) | st.none() | st.lists(st.integers(-2, 2), max_size=3), max_size=9))
def test_equal_values_have_equal_digests(value: list[Any]) -> None:
    def other(item: Any) -> Any:
        if type(item) is list:
            return [bool(number) if number in (0, 1) else number for number in item]
        return float(item) if type(item) is int else item

    floats = list(map(other, value))
    assert floats == value
    assert digest(floats) == digest(value)
    assert digest(tuple(value)) != digest(value)
    assert digest([*value, 0]) != digest(value)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ([1], [2]),
        ([-1], [-2]),
        ([[1], [2]], [[1, 2]]),
        (["1"], [1]),
        ([0.5], [0.25]),
        ([1, 2], [2, 1]),
        ("a", b"a"),
        ([(1,)], [[1]]),
    ],
)
def test_different_values_have_different_digests(one: Any, other: Any) -> None:
    assert digest(one) != digest(other)


@pytest.mark.parametrize("value", [{1}, {}, 5, [{1}], [object()], [math.nan], None])
def test_some_values_have_no_digest(value: Any) -> None:
    with pytest.raises(WireError):
        digest(value)


def test_a_digest_is_of_all_pieces() -> None:
    long = list(range(10_000))
    changed = [*long[:-1], 7]
    assert digest(long) != digest(changed)
    assert digest([float(x) for x in long]) == digest(long)


# --- the filter of system calls, run on paper


@pytest.mark.parametrize(("machine", "column"), [("x86_64", 0), ("aarch64", 1)])
def test_the_filter_allows_and_forbids(machine: str, column: int) -> None:
    program, writing = seccomp.build(4242, machine), seccomp.build(4242, machine, writes=True)
    audit = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}[machine]
    allow, kill, eperm, enosys = 0x7FFF0000, 0x80000000, 0x50001, 0x50026

    def verdict(number: int, *arguments: int, architecture: int = audit, program: bytes = program) -> int:
        return _execute(program, struct.pack("<IIQ6Q", number, architecture, 0, *arguments, *[0] * (6 - len(arguments))))

    numbers = {
        "read": (0, 63), "write": (1, 64), "openat": (257, 56), "kill": (62, 129), "tgkill": (234, 131), "fcntl": (72, 25),
        "ioctl": (16, 29), "prlimit64": (302, 261), "clone": (56, 220), "clone3": (435, 435), "execve": (59, 221),
        "socket": (41, 198), "ptrace": (101, 117), "unshare": (272, 97), "mount": (165, 40), "memfd_create": (319, 279),
        "prctl": (157, 167), "seccomp": (317, 277), "bpf": (321, 280), "io_uring_setup": (425, 425), "openat2": (437, 437),
        "unlinkat": (263, 35), "mkdirat": (258, 34), "truncate": (76, 45), "setrlimit": (160, 164),
        "process_vm_readv": (310, 270), "pidfd_send_signal": (424, 424), "rt_sigqueueinfo": (129, 138), "execveat": (322, 281),
        "socketpair": (53, 199), "sendto": (44, 206), "fchmod": (91, 52), "fchmodat": (268, 53), "fchownat": (260, 54),
        "utimensat": (280, 88), "setxattr": (188, 5), "linkat": (265, 37), "symlinkat": (266, 36), "mknodat": (259, 33),
        "ftruncate": (77, 46), "connect": (42, 203), "bind": (49, 200), "sendmsg": (46, 211),
    }  # fmt: skip
    call = {name: pair[column] for name, pair in numbers.items()}
    assert verdict(call["read"]) == verdict(call["write"]) == allow
    assert verdict(call["read"], architecture=0x40000003) == kill, "32-bit calls have other numbers"
    for name in ("clone", "execve", "execveat", "socket", "connect", "bind", "sendmsg", "ptrace", "unshare", "mount",
                 "memfd_create", "prctl",
                 "seccomp", "bpf", "io_uring_setup", "unlinkat", "mkdirat", "truncate", "setrlimit", "process_vm_readv",
                 "pidfd_send_signal", "rt_sigqueueinfo"):  # fmt: skip
        assert verdict(call[name]) == eperm, name
        assert name in ("unlinkat", "mkdirat") or verdict(call[name], program=writing) == eperm, name
    for name in ("fchmod", "fchmodat", "fchownat", "utimensat", "setxattr", "linkat", "symlinkat", "mknodat"):
        assert verdict(call[name], program=writing) == eperm, f"no other wall stops {name}"
    assert verdict(call["unlinkat"], program=writing) == verdict(call["ftruncate"], program=writing) == allow
    assert verdict(call["openat"], 0, 0, 0o1101, program=writing) == allow
    assert verdict(call["openat"], 0, 0, 0o20200002, program=writing) == eperm, "a file without a name"
    assert verdict(call["socketpair"], 1, 0o2000001) == allow
    assert verdict(call["socketpair"], 1, 2) == verdict(call["socketpair"], 2, 1) == eperm, "datagrams find others"
    assert verdict(call["sendto"], 3, 4, 5, 6, 0) == allow
    assert verdict(call["sendto"], 3, 4, 5, 6, 7) == verdict(call["sendto"], 3, 4, 5, 6, 1 << 32) == eperm
    assert verdict(call["clone3"]) == verdict(call["openat2"]) == enosys
    assert verdict(call["openat"], 0, 0, 0o2000000) == allow
    for flags in (1, 2, 0o100, 0o1000, 0o2000, 0o20200000):
        assert verdict(call["openat"], 0, 0, flags) == eperm
    assert verdict(call["kill"], 4242) == verdict(call["tgkill"], 4242) == allow
    for other in (0, 1, 4241, 2**64 - 1):
        assert verdict(call["kill"], other) == verdict(call["tgkill"], other) == eperm
    assert verdict(call["fcntl"], 0, 3) == allow
    assert verdict(call["fcntl"], 0, 8) == eperm, "F_SETOWN sends signals"
    assert verdict(call["ioctl"], 0, 0x5401) == allow
    assert verdict(call["ioctl"], 0, 0x5412) == eperm, "TIOCSTI types"
    assert verdict(call["prlimit64"], 0, 7, 0) == allow
    assert verdict(call["prlimit64"], 0, 7, 1) == verdict(call["prlimit64"], 0, 7, 1 << 32) == eperm
    if column == 0:
        assert verdict(0x40000000) == enosys, "x32's table"
        assert verdict(2, 0, 0) == allow
        assert verdict(2, 0, 1) == verdict(57) == verdict(58) == eperm


def _execute(program: bytes, data: bytes) -> int:
    """What the kernel does with the few instructions we use."""
    accumulator = place = 0
    while True:
        code, yes, no, value = struct.unpack_from("<HBBI", program, place * 8)
        place += 1
        if code == 0x20:
            accumulator = struct.unpack_from("<I", data, value)[0]
        elif code == 0x06:
            return int(value)
        else:
            met = {0x15: accumulator == value, 0x35: accumulator >= value, 0x45: bool(accumulator & value)}[code]
            place += yes if met else no


def test_job_limits_are_wider_than_result_limits() -> None:
    assert wire.JOB.size > wire.RESULT.size
