"""System call filters: an allowlist file, compiled by libseccomp ahead of the launch into the bytes that are installed.

    allowed                      as the list says, on conditions over arguments where it gives some
    known to libseccomp          EPERM
    unknown to libseccomp        ENOSYS: the C library falls back on that answer only, and on no other
    another architecture's       the process is killed (int 0x80, and x32, whose numbers carry bit 30)

A list is text: names of calls, any number per line, `#` to the end of a line is a comment. `include NAME` takes in
another list, which may not include a third. A line with a condition holds one call:

    socket when 0 = 1                     argument 0, its low 32 bits, is 1; or any of several numbers
    clone when 0 & 0x7e020000 = 0         argument 0 under a mask
    socket when 0 = 2 and 1 & 0xf = 1     both; several lines for one call are alternatives
    clone3 fails ENOSYS                   not allowed, with this errno in place of EPERM
    fchmodat2?                            may be unknown to an older libseccomp, and then is not allowed

Conditions look at 32 bits because that is what the Linux kernel looks at: comparing all 64 let a request with a high
bit set pass for another (CVE-2019-10063). libseccomp has no action for numbers that it does not know, so the program
starts with a few instructions of ours: the architecture, x32, and the ranges of unknown numbers (seccomp(2), bpf(4)).
"""

import ctypes
import errno
import hashlib
import os
import struct
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from confine.errors import ConfineError, ProfileError
from confine.spec import Filter

LISTS: Final = Path(__file__).resolve().parent.parent / "policies" / "seccomp"
LIBRARY: Final = "libseccomp.so.2"
_MAX_BYTES = 65_536
_LOW_32 = 0xFFFF_FFFF
_HIGHEST_NUMBER = 4_095  # no architecture of ours has calls above; what is there is answered as unknown anyway

# linux/seccomp.h, linux/audit.h
_KILL_PROCESS, _ERRNO, _ALLOW = 0x8000_0000, 0x0005_0000, 0x7FFF_0000
_X86_64, _X32_BIT = 0xC000_003E, 0x4000_0000
# linux/bpf_common.h: load a word of struct seccomp_data (its number is at 0, its architecture at 4), jump, return
_LOAD, _JUMP_EQUAL, _JUMP_GREATER, _JUMP_NOT_LESS, _RETURN = 0x20, 0x15, 0x25, 0x35, 0x06
_NUMBER_AT, _ARCHITECTURE_AT = 0, 4
_INSTRUCTION = struct.Struct("=HBBI")  # struct sock_filter
# seccomp.h of libseccomp
_BAD_ARCHITECTURE_ACTION, _OPTIMIZE, _BINARY_TREE = 2, 8, 2
_MASKED_EQUAL, _NO_SUCH_CALL = 7, -1


@dataclass(frozen=True, slots=True)
class Condition:
    """(argument `index` & mask) == value, on the low 32 bits."""

    index: int
    mask: int
    value: int


@dataclass(frozen=True, slots=True)
class Rule:
    """One line's meaning for one call. `errno` None allows it; all `conditions` must hold."""

    call: str
    conditions: tuple[Condition, ...] = ()
    errno: int | None = None
    optional: bool = False


class _Comparison(ctypes.Structure):
    """struct scmp_arg_cmp"""

    _fields_ = (("arg", ctypes.c_uint), ("op", ctypes.c_int), ("a", ctypes.c_uint64), ("b", ctypes.c_uint64))


def load_filter(name: str, folder: Path = LISTS) -> Filter:
    """The compiled list `name`. ProfileError for a list that is wrong, ConfineError without libseccomp."""
    path = folder / f"{name}.list"
    return _compiled(name, str(path), tuple(read_list(path)))


def list_text(name: str, folder: Path = LISTS) -> str:
    """The text of the list `name`; with an include, then a newline, `--- include NAME`, a newline, and that text."""
    path = folder / f"{name}.list"
    parts = [_text_of(path)]
    parts += [
        f"\n--- include {words[1]}\n{_text_of(path.with_name(f'{words[1]}.list'))}"
        for _, words in _lines(path)
        if words[0] == "include"
    ]
    return "".join(parts)


def read_list(path: Path) -> list[Rule]:
    """Every rule of a list and of those it includes, in order. ProfileError with the file and the line."""
    rules: list[Rule] = []
    for number, words in _lines(path):
        if words[0] == "include":
            if len(words) != 2 or "/" in words[1]:
                raise _wrong(path, number, "include takes one list's name")
            included = path.with_name(f"{words[1]}.list")
            for inner_number, inner in _lines(included):
                if inner[0] == "include":
                    raise _wrong(included, inner_number, "a list that is included may not include another")
                rules += _rules(included, inner_number, inner)
        else:
            rules += _rules(path, number, words)
    plain = {rule.call for rule in rules if rule.errno is None and not rule.conditions}
    for rule in rules:
        # libseccomp would let the unconditional rule win, silently.
        if rule.call in plain and (rule.conditions or rule.errno is not None):
            raise ProfileError(f"{rule.call} is allowed with and without a condition", path=str(path), fix="keep one")
    return rules


def _lines(path: Path) -> list[tuple[int, list[str]]]:
    lines = ((number, line.partition("#")[0].split()) for number, line in enumerate(_text_of(path).splitlines(), 1))
    return [(number, words) for number, words in lines if words]


def _text_of(path: Path) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read(_MAX_BYTES + 1)
    except (OSError, UnicodeDecodeError) as error:
        fix = f"the lists are {', '.join(sorted(list_.stem for list_ in LISTS.glob('*.list')))}"
        raise ProfileError(f"no seccomp list can be read: {error}", path=str(path), fix=fix) from None
    if len(text) > _MAX_BYTES:
        raise ProfileError(f"a seccomp list over {_MAX_BYTES} characters", path=str(path), fix="shorten it")
    return text


def _wrong(path: Path, line: int, what: str) -> ProfileError:
    return ProfileError(f"line {line}: {what}", path=str(path), fix="see confine/seccomp.py for the form")


def _rules(path: Path, number: int, words: list[str]) -> list[Rule]:
    name, *rest = words
    if rest[:1] == ["when"]:
        return _conditional(path, number, name, rest[1:])
    if rest[:1] == ["fails"]:
        code = getattr(errno, rest[1], None) if len(rest) == 2 else None
        if not isinstance(code, int):
            raise _wrong(path, number, "fails takes the name of one errno")
        return [Rule(name.removesuffix("?"), errno=code, optional=name.endswith("?"))]
    if any(word in {"when", "fails", "and", "include"} for word in words):
        raise _wrong(path, number, "a line with a condition holds one call")
    return [Rule(word.removesuffix("?"), optional=word.endswith("?")) for word in words]


def _conditional(path: Path, number: int, name: str, words: list[str]) -> list[Rule]:
    """`A = V…` or `A & M = V…`, joined by `and`: a rule for each combination of the values."""
    combinations: list[tuple[Condition, ...]] = [()]
    for part in " ".join(words).split(" and "):
        left, equals, right = part.partition("=")
        index, _, mask = left.partition("&")
        try:
            argument, bits = int(index), int(mask, 0) if mask else _LOW_32
            values = [int(value, 0) for value in right.split()]
        except ValueError:
            raise _wrong(path, number, f"{part!r} is not a condition") from None
        sound = equals and values and 0 <= argument <= 5 and 0 < bits <= _LOW_32
        if not sound or any(value & ~bits for value in values):
            raise _wrong(path, number, f"{part!r} cannot hold: arguments are 0 to 5, values 32 bits under their mask")
        combinations = [(*before, Condition(argument, bits, value)) for before in combinations for value in values]
    if any(len({condition.index for condition in conditions}) != len(conditions) for conditions in combinations):
        raise _wrong(path, number, "an argument is looked at twice")
    optional, name = name.endswith("?"), name.removesuffix("?")
    return [Rule(name, conditions, optional=optional) for conditions in combinations]


@lru_cache(maxsize=16)
def _compiled(name: str, path: str, rules: tuple[Rule, ...]) -> Filter:
    library = _library()
    architecture = library.seccomp_arch_native()
    program = _prologue(architecture, _known_numbers(library, architecture)) + _allowlist(library, path, rules)
    return Filter(name, program.hex(), hashlib.sha256(program).hexdigest())


def _library() -> Any:
    try:
        library = ctypes.CDLL(LIBRARY)
    except OSError as error:
        fix = "install it (apt-get install libseccomp2), or give the layer up by name: --without seccomp"
        raise ConfineError(f"the filter cannot be compiled: {error}", fix=fix) from None
    library.seccomp_init.restype = ctypes.c_void_p
    library.seccomp_arch_native.restype = ctypes.c_uint32
    library.seccomp_syscall_resolve_num_arch.restype = ctypes.c_void_p
    return library


def _known_numbers(library: Any, architecture: int) -> list[int]:
    known = []
    free = ctypes.CDLL(None).free
    for number in range(_HIGHEST_NUMBER + 1):
        name = library.seccomp_syscall_resolve_num_arch(ctypes.c_uint32(architecture), number)
        if name:
            free(ctypes.c_void_p(name))
            known.append(number)
    return known


def _prologue(architecture: int, known: list[int]) -> bytes:
    """Kills another architecture's calls and x32's, answers ENOSYS to unknown numbers, and falls through."""
    last = _X32_BIT - 1 if architecture == _X86_64 else _LOW_32
    bounds = [-1, *known, last + 1]
    unknown = [(before + 1, after - 1) for before, after in pairwise(bounds) if after - before > 1]
    no_such_call = (_RETURN, 0, 0, _ERRNO | errno.ENOSYS)
    code = [(_LOAD, 0, 0, _ARCHITECTURE_AT), (_JUMP_EQUAL, 1, 0, architecture), (_RETURN, 0, 0, _KILL_PROCESS)]
    code.append((_LOAD, 0, 0, _NUMBER_AT))
    for first, end in unknown:
        code += [(_JUMP_NOT_LESS, 0, 2, first), (_JUMP_GREATER, 1, 0, end), no_such_call]
    if architecture == _X86_64:
        # -1 is what a tracer leaves to skip a call, and no x32 number.
        code += [(_JUMP_NOT_LESS, 0, 3, _X32_BIT), (_JUMP_EQUAL, 0, 1, _LOW_32), no_such_call]
        code.append((_RETURN, 0, 0, _KILL_PROCESS))
    return b"".join(_INSTRUCTION.pack(*instruction) for instruction in code)


def _allowlist(library: Any, path: str, rules: tuple[Rule, ...]) -> bytes:
    context = ctypes.c_void_p(library.seccomp_init(ctypes.c_uint32(_ERRNO | errno.EPERM)))
    if not context:
        raise ConfineError("libseccomp refused to make a filter", fix="install another version of it")
    try:
        for attribute, value in ((_BAD_ARCHITECTURE_ACTION, _KILL_PROCESS), (_OPTIMIZE, _BINARY_TREE)):
            _check(library.seccomp_attr_set(context, attribute, ctypes.c_uint32(value)), path, "an attribute")
        for rule in rules:
            _add(library, context, path, rule)
        exported = os.memfd_create("filter", os.MFD_CLOEXEC)
        try:
            _check(library.seccomp_export_bpf(context, exported), path, "the export")
            return os.pread(exported, os.fstat(exported).st_size, 0)
        finally:
            os.close(exported)
    finally:
        library.seccomp_release(context)


def _add(library: Any, context: ctypes.c_void_p, path: str, rule: Rule) -> None:
    number = library.seccomp_syscall_resolve_name(rule.call.encode())
    if number == _NO_SUCH_CALL:
        if rule.optional:
            return
        fix = "correct the name, or write a question mark after it if an older libseccomp may not know it"
        raise ProfileError(f"libseccomp here knows no call {rule.call}", path=path, fix=fix)
    if number < 0:
        return  # another architecture's call, such as open on aarch64
    comparisons = (_Comparison * len(rule.conditions))(
        *(_Comparison(c.index, _MASKED_EQUAL, c.mask, c.value) for c in rule.conditions)
    )
    action = _ALLOW if rule.errno is None else _ERRNO | rule.errno
    result = library.seccomp_rule_add_exact_array(
        context, ctypes.c_uint32(action), number, len(rule.conditions), comparisons
    )
    _check(result, path, rule.call)


def _check(result: int, path: str, what: str) -> None:
    if result < 0:
        raise ProfileError(f"libseccomp refused {what}: {os.strerror(-result)}", path=path, fix="correct the list")
