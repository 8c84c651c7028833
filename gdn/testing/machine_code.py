"""Registers, memory and instructions of a compiled kernel, read from the machine code in the library that `compile` returns.

Both DSLs embed their cubins uncompressed, so a scan for CUDA ELF headers finds them without any CUDA library. Every
figure comes from the cubin's own attributes or from nvdisasm's text; one that is missing raises. Dynamic shared memory
is a launch argument and not in the cubin: `static_shared_bytes` is what the code itself declares.
"""

import hashlib
import importlib.metadata
import re
import shutil
import struct
import subprocess
import tempfile
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

_MACHINE_CUDA = 190  # e_machine of a cubin
_SECTION_WITHOUT_BYTES = 8  # SHT_NOBITS
_RESERVED_SHARED_BYTES = 1024  # SM90 keeps the first KiB of a block's shared memory; .nv.shared counts it

# Attribute codes of .nv.info: one 4-byte header (format, code, size or value), then the value where the format is 4.
_FORMAT_SIZED = 4
_ATTRIBUTE_MAX_THREADS = 0x05
_ATTRIBUTE_REQUIRED_THREADS = 0x10
_ATTRIBUTE_FRAME_SIZE = 0x11
_ATTRIBUTE_REGISTERS = 0x2F

_CODE_OF_FAMILY = 0x09  # in .nv.compat, which has the same layout: 1 where the code is for one architecture only, like sm_90a
_ABI_WITH_COMPAT = 8  # ABI version of CUDA 13's cubins, whose target is read here
_INSTRUCTION_BYTES = 16
# Banks with constants of the code; bank 0 holds the arguments of the launch.
_CONSTANTS = (".nv.constant2", ".nv.constant3", ".nv.global.init")

_ARGUMENT = re.compile(r"c\[0x0\]\[[^]]*\]")  # an operand: an argument of the launch, by its place
_ENCODING = re.compile(r"/\* 0x[0-9a-f]+ \*/")
_INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)")


class MachineCodeError(RuntimeError):
    """The library holds no cubin, or a figure cannot be read from it."""


@dataclass(frozen=True)
class MachineCode:
    """One kernel function of a cubin."""

    name: str
    target: str  # "sm_90a"
    registers: int  # 32-bit registers a thread at launch
    max_threads: int  # threads of a block the code was compiled for
    stack_bytes: int  # frame of one thread in local memory
    static_shared_bytes: int
    instructions: Counter[str]  # full opcode ("LDG.E.128.CONSTANT") -> occurrences

    def count(self, pattern: str) -> int:
        """Instructions of a mnemonic and, after dots, modifiers in any place: "LDG.128" counts "LDG.E.128.CONSTANT".

        A modifier after an exclamation mark must be absent: "FMNMX.!NAN" leaves out "FMNMX.NAN".
        """
        mnemonic, *modifiers = pattern.split(".")
        absent = {modifier[1:] for modifier in modifiers if modifier.startswith("!")}
        present = {modifier for modifier in modifiers if not modifier.startswith("!")}
        split = ((opcode.split("."), occurrences) for opcode, occurrences in self.instructions.items())
        return sum(
            count for (head, *parts), count in split if head == mnemonic and present <= {*parts} and absent.isdisjoint(parts)
        )

    @property
    def spills(self) -> int:
        """Loads and stores of local memory: spilled registers, or arrays that did not fit into registers."""
        return self.count("LDL") + self.count("STL")

    @property
    def spilled(self) -> str | None:
        """What a thread keeps in local memory, for a message; None for nothing."""
        if not (self.spills or self.stack_bytes):
            return None
        return f"{self.spills} local loads and stores, {self.stack_bytes} bytes of stack"


@dataclass(frozen=True)
class Undecoded:
    """A kernel function whose instructions are not counted yet: `decoded` counts those of many at once."""

    kernel: MachineCode  # without instructions
    code: bytes


class _Section(NamedTuple):
    name: str
    offset: int
    size: int
    link: int


class _Cubin:
    """The ELF sections of one cubin at `start` of a larger file."""

    def __init__(self, file: bytes, start: int) -> None:
        program_offset, section_offset = struct.unpack_from("<QQ", file, start + 32)
        program_size, program_count, section_size, section_count, names_index = struct.unpack_from("<HHHHH", file, start + 54)
        if start + section_offset + section_count * section_size > len(file):
            raise MachineCodeError(f"cubin at byte {start} is cut off before its section headers")
        starts = range(start + section_offset, start + section_offset + section_count * section_size, section_size)
        headers = [struct.unpack_from("<IIQQQQIIQQ", file, at) for at in starts]
        end = max(section_offset + section_size * section_count, program_offset + program_size * program_count)
        end = max([end, *(header[4] + header[5] for header in headers if header[1] != _SECTION_WITHOUT_BYTES)])
        if start + end > len(file):
            raise MachineCodeError(f"cubin at byte {start} is cut off: needs {end} bytes, has {len(file) - start}")
        self.bytes = file[start : start + end]
        names = headers[names_index][4]
        self.sections = [_Section(self._text(names + name), *fields[3:6]) for name, *fields in headers]

    def _text(self, offset: int) -> str:
        return self.bytes[offset : self.bytes.index(b"\0", offset)].decode()

    def find(self, name: str) -> _Section | None:
        return next((section for section in self.sections if section.name == name), None)

    def section(self, name: str) -> _Section:
        found = self.find(name)
        if found is None:
            raise MachineCodeError(f"cubin has no section {name}")
        return found

    def content(self, section: _Section) -> bytes:
        return self.bytes[section.offset : section.offset + section.size]

    def kernels(self) -> list[str]:
        return [section.name.removeprefix(".text.") for section in self.sections if section.name.startswith(".text.")]

    def entries(self, section_name: str) -> Iterator[tuple[int, int, bytes | None]]:
        """(code, size or value, bytes where it is a size) of an .nv.info section or one of the same layout."""
        content, at = self.content(self.section(section_name)), 0
        while at < len(content):
            form, code, size = struct.unpack_from("<BBH", content, at)
            at += 4
            value = content[at : at + size] if form == _FORMAT_SIZED else None
            yield code, size, value
            at += len(value or b"")

    def per_kernel(self, code: int) -> dict[str, int]:
        """Kernel name -> value of an attribute that .nv.info keeps as (symbol, value) pairs."""
        table = self.section(".symtab")
        strings = self.sections[table.link].offset
        symbols = [self._text(strings + name) for (name, *_) in struct.iter_unpack("<I20s", self.content(table))]
        values = (value for found, _, value in self.entries(".nv.info") if found == code and value is not None)
        return {symbols[symbol]: number for symbol, number in (struct.unpack("<II", value) for value in values)}


def _cubins(library: bytes) -> Iterator[_Cubin]:
    at = library.find(b"\x7fELF")
    while at >= 0:
        if len(library) >= at + 64 and struct.unpack_from("<H", library, at + 18)[0] == _MACHINE_CUDA:
            yield _Cubin(library, at)
        at = library.find(b"\x7fELF", at + 4)


@cache
def nvdisasm() -> Path:
    """The disassembler: from the wheel nvidia-cuda-nvdisasm, else from PATH."""
    with suppress(importlib.metadata.PackageNotFoundError):
        for file in importlib.metadata.files("nvidia-cuda-nvdisasm") or []:
            if file.name == "nvdisasm":
                return Path(str(file.locate()))
    if (found := shutil.which("nvdisasm")) is None:
        raise MachineCodeError("nvdisasm not found: install nvidia-cuda-nvdisasm, or put CUDA's nvdisasm on PATH")
    return Path(found)


def _run_nvdisasm(code: bytes, *options: str) -> str:
    """Text of a cubin or, with `-b`, of bare machine code."""
    with tempfile.NamedTemporaryFile(suffix=".bin") as file:
        file.write(code)
        file.flush()
        # Without the analysis of the data flow, which takes a third of the time and adds no instruction.
        done = subprocess.run([str(nvdisasm()), *options, "-ndf", file.name], capture_output=True, text=True)
    if done.returncode != 0:
        raise MachineCodeError(f"nvdisasm failed: {done.stderr.strip()}")
    return done.stdout


def _target_by_nvdisasm(cubin: _Cubin) -> str:
    target = re.search(r"^\s*\.target\s+(\w+)", _run_nvdisasm(cubin.bytes, "-c"), re.MULTILINE)
    if target is None:
        raise MachineCodeError("nvdisasm names no target")
    return target[1]


def _target(cubin: _Cubin) -> str:
    """Target under nvdisasm's name; read without it where the cubin has CUDA 13's format, since a start of it takes long."""
    if cubin.bytes[8] == _ABI_WITH_COMPAT and cubin.find(".nv.compat") is not None:
        family = next((value for code, value, _ in cubin.entries(".nv.compat") if code == _CODE_OF_FAMILY), None)
        if family in (0, 1):
            (flags,) = struct.unpack_from("<I", cubin.bytes, 48)
            return f"sm_{flags >> 8 & 0xFF}{'a' if family else ''}"
    return _target_by_nvdisasm(cubin)


def _max_threads(cubin: _Cubin, kernel: str) -> int:
    for code, _, value in cubin.entries(f".nv.info.{kernel}"):
        if code in (_ATTRIBUTE_MAX_THREADS, _ATTRIBUTE_REQUIRED_THREADS) and value is not None:
            x, y, z = struct.unpack_from("<III", value)
            return int(x * y * z)
    raise MachineCodeError(f"{kernel}: the cubin states no maximum of threads")


def _required(kernel: str, what: str, figures: dict[str, int]) -> int:
    if kernel not in figures:
        raise MachineCodeError(f"{kernel}: the cubin states no {what}")
    return figures[kernel]


def code_hash(libraries: Sequence[bytes]) -> str:
    """SHA-256 over what the device runs: instructions, constant tables, registers and threads of every kernel function.

    The same where names, line tables, the host's part of the libraries or the places of the launch's arguments alone differ. The
    launch (grid, dynamic shared memory) is the host's.
    """
    parts = []
    for cubin in (cubin for library in libraries for cubin in _cubins(library)):
        registers = cubin.per_kernel(_ATTRIBUTE_REGISTERS)
        for name in cubin.kernels():
            figures = f"{_required(name, 'register count', registers)} {_max_threads(cubin, name)}".encode()
            text = _disassemble(cubin.content(cubin.section(f".text.{name}")), _target(cubin))
            parts.append(b"text " + figures + b" " + _ARGUMENT.sub("c[0x0]", text).encode())
        parts += [b"data " + cubin.content(one) for one in cubin.sections if one.name.startswith(_CONSTANTS)]
    if not parts:
        raise MachineCodeError("the libraries hold no cubin")
    digests = sorted(hashlib.sha256(part).hexdigest() for part in parts)  # the order in the file follows names
    return hashlib.sha256("".join(digests).encode()).hexdigest()


def undecoded(library: bytes) -> list[Undecoded]:
    """`kernels` without the instructions, which `decoded` counts for many: a start of the disassembler takes long."""
    found: list[Undecoded] = []
    for cubin in _cubins(library):
        registers, frames = cubin.per_kernel(_ATTRIBUTE_REGISTERS), cubin.per_kernel(_ATTRIBUTE_FRAME_SIZE)
        for name in cubin.kernels():
            shared = cubin.find(f".nv.shared.{name}")
            kernel = MachineCode(
                name=name, target=_target(cubin), registers=_required(name, "register count", registers),
                max_threads=_max_threads(cubin, name), stack_bytes=_required(name, "stack frame", frames),
                # A kernel without static shared memory has no such section.
                static_shared_bytes=max(0, shared.size - _RESERVED_SHARED_BYTES) if shared is not None else 0,
                instructions=Counter(),
            )  # fmt: skip
            found.append(Undecoded(kernel, cubin.content(cubin.section(f".text.{name}"))))
    if not found:
        raise MachineCodeError("the library holds no cubin")
    return found


def decoded(kernels: Sequence[Undecoded]) -> list[MachineCode]:
    """Machine code of the kernels in the same order, with one run of the disassembler for each target."""
    opcodes: list[Counter[str]] = [Counter() for _ in kernels]
    for target in dict.fromkeys(one.kernel.target for one in kernels):
        places = [at for at, one in enumerate(kernels) if one.kernel.target == target]
        ends = list(accumulate(len(kernels[at].code) for at in places))
        for line in _disassemble(b"".join(kernels[at].code for at in places), target).splitlines():
            if (instruction := _INSTRUCTION.match(line)) is not None:
                opcodes[places[bisect_right(ends, int(instruction[1], 16))]][instruction[2]] += 1
    for one, counted in zip(kernels, opcodes, strict=True):
        if not one.code or counted.total() != len(one.code) // _INSTRUCTION_BYTES:
            raise MachineCodeError(f"{one.kernel.name}: nvdisasm does not show every instruction")
    return [replace(one.kernel, instructions=counted) for one, counted in zip(kernels, opcodes, strict=True)]


def kernels(library: bytes) -> list[MachineCode]:
    """Every kernel function in the cubins of a shared library, in file order; at least one."""
    return decoded(undecoded(library))


def _disassemble(code: bytes, target: str) -> str:
    """Every instruction with its address and operands, a line each."""
    return _ENCODING.sub("", _run_nvdisasm(code, "-b", target.replace("sm_", "SM")))
