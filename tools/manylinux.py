"""The manylinux platform of a wheel, which setup.py puts into the wheel's name.

A library that is linked on a new system needs the newest version of every function of the C library. Most of these
functions also exist, with the same results, in a version as old as the architecture. ``lower_glibc`` writes an
assembler file of jumps to those older versions. If the file is linked with the library, the older versions replace the
newer ones, also in the static CUDA runtime. ``platform_tag`` then reads which versions the library needs, and returns
the platform tag of the wheel. Both use ``objdump`` of binutils, which gcc needs, too.

The usual ways to an older C library do not serve a wheel that ``pip`` builds where it is installed. A manylinux
container or a sysroot with gcc is in no Python package. ``ziglang`` is one, but it compiles against a C++ library of
its own instead of GCC's, which torch uses, and nvcc does not support it as a host compiler. ``auditwheel`` checks
symbols and replaces none. In a manylinux_2_28 container, ``lower_glibc`` finds nothing to do.
"""

import re
import shutil
import subprocess
from pathlib import Path

__all__ = ["LINKER_FLAGS", "TARGET", "lower_glibc", "machine_of", "needed_symbols", "platform_tag"]

TARGET = (2, 28)  # torch's own wheels need this version of glibc.
# The newest versions of the symbols of each library that all systems of manylinux_2_<minor> have, by <minor>.
_POLICIES = {
    28: {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11), "GCC": (7, 0, 0)},
    31: {"GLIBC": (2, 31), "GLIBCXX": (3, 4, 28), "CXXABI": (1, 3, 12), "GCC": (7, 0, 0)},
    34: {"GLIBC": (2, 34), "GLIBCXX": (3, 4, 29), "CXXABI": (1, 3, 13), "GCC": (7, 0, 0)},
    35: {"GLIBC": (2, 35), "GLIBCXX": (3, 4, 30), "CXXABI": (1, 3, 13), "GCC": (12, 0, 0)},
    39: {"GLIBC": (2, 39), "GLIBCXX": (3, 4, 33), "CXXABI": (1, 3, 15), "GCC": (14, 0, 0)},
}
_VERSIONED = re.compile(r"\(?([A-Z]+)_([0-9.]+)\)?\s+(\S+)$")
# Before glibc 2.34, these functions were in separate libraries, which newer systems keep as empty files.
LINKER_FLAGS = ["--no-as-needed", "-l:libpthread.so.0", "-l:libdl.so.2", "-l:librt.so.1", "--as-needed"]

# This replaces a function of the C library by a jump to its older version, which keeps the arguments and the caller's
# return address.
_SYMBOL = """
\t.section .text.{name}, "ax", @progbits
\t.symver visdet_old_{name}, {name}@{version}
\t.globl {name}
\t.hidden {name}
\t.type {name}, @function
{name}:
{jump}
\t.size {name}, .-{name}
"""
_JUMPS = {
    "x86_64": "\tendbr64\n\tjmp *visdet_old_{name}@GOTPCREL(%rip)",
    "aarch64": "\thint 34\n\tadrp x16, :got:visdet_old_{name}\n\tldr x16, [x16, :got_lo12:visdet_old_{name}]\n\tbr x16",
}
# libstdc++ reads this variable, and leaves out atomic operations as long as the process has one thread. If the variable
# is 0, libstdc++ never leaves them out.
_SINGLE_THREADED = """
\t.section .rodata.__libc_single_threaded, "a", @progbits
\t.globl __libc_single_threaded
\t.hidden __libc_single_threaded
\t.type __libc_single_threaded, @object
__libc_single_threaded:
\t.byte 0
\t.size __libc_single_threaded, 1
"""


def machine_of(compiler: str) -> str:
    """Return the processor that a compiler writes code for, such as "x86_64"."""
    command = [*compiler.split(), "-dumpmachine"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.partition("-")[0]


def _dynamic_symbols(library: Path) -> list[tuple[str, str, tuple[int, ...], bool]]:
    """Return (name, family, version, is_undefined) of each versioned dynamic symbol, or nothing without objdump."""
    if shutil.which("objdump") is None:
        return []
    listed = subprocess.run(
        ["objdump", "-T", str(library)], capture_output=True, text=True, check=True
    ).stdout
    found = []
    for line in listed.splitlines():
        match = _VERSIONED.search(line)
        if match:
            version = tuple(int(part) for part in match[2].split("."))
            found.append((match[3], match[1], version, "*UND*" in line))
    return found


def needed_symbols(library: Path) -> list[tuple[str, str, tuple[int, ...]]]:
    """Return the (name, family, version) of the symbols that a library needs, such as ("exp", "GLIBC", (2, 29))."""
    return [symbol[:3] for symbol in _dynamic_symbols(library) if symbol[3]]


def _older_versions(names: set[str], compiler: str) -> dict[str, tuple[int, ...]]:
    """Return the newest version up to TARGET of each function in this system's C library, if there is one."""
    older: dict[str, tuple[int, ...]] = {}
    for file in ("libc.so.6", "libm.so.6"):
        path = subprocess.run(
            [compiler, f"-print-file-name={file}"], capture_output=True, text=True
        ).stdout.strip()
        for name, family, version, is_undefined in (
            _dynamic_symbols(Path(path)) if Path(path).is_file() else []
        ):
            if name in names and family == "GLIBC" and not is_undefined and version <= TARGET:
                older[name] = max(version, older.get(name, version))
    return older


def lower_glibc(library: Path, assembly: Path, compiler: str) -> bool:
    """Write an assembler file that makes ``library`` need an older glibc when it is linked again with the file.

    If all functions exist in older versions, the library then needs no glibc newer than TARGET.

    Args:
        library: the shared library.
        assembly: the assembler file to write.
        compiler: the command of the compiler that links the library.

    Returns:
        whether the file replaces any symbol. The result is False without objdump, for processors other than x86-64 and
        aarch64, if nothing newer than TARGET is needed, and if nothing older exists.
    """
    jump = _JUMPS.get(machine_of(compiler))
    if jump is None:
        return False
    too_new = {
        name for name, family, version in needed_symbols(library) if family == "GLIBC" and version > TARGET
    }
    older = _older_versions(too_new, compiler)
    parts = [
        _SYMBOL.format(
            name=name, version="GLIBC_" + ".".join(map(str, older[name])), jump=jump.format(name=name)
        )
        for name in sorted(too_new & set(older))
    ]
    if "__libc_single_threaded" in too_new:
        parts.append(_SINGLE_THREADED)
    assembly.write_text("".join([*parts, '\n\t.section .note.GNU-stack, "", @progbits\n']))
    return bool(parts)


def platform_tag(libraries: list[Path], compiler: str) -> str | None:
    """Return the oldest manylinux tag whose systems have all symbols that the libraries need.

    The result is None if there is no such tag, or if there is no objdump to read the symbols.
    """
    needed: dict[str, tuple[int, ...]] = {}
    for library in libraries:
        for _, family, version in needed_symbols(library):
            needed[family] = max(version, needed.get(family, version))
    if "GLIBC" not in needed:
        return None
    for minor, newest in _POLICIES.items():
        if all(family in newest and version <= newest[family] for family, version in needed.items()):
            return f"manylinux_2_{minor}_{machine_of(compiler)}"
    return None
