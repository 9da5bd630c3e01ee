"""The ELF reader against files that a compiler makes here, and against damaged ones."""

from __future__ import annotations

import re
import shutil
import struct
import subprocess
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from builder import elf, elf_hash
from builder.elf_image import ElfError
from builder.smoke.stub import stub_bytes

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Build = Callable[[str], Path]

DEP = """
int dep_f(void) { return 1; }
"""
DEP_MAP = "DEP_1 { global: dep_f; local: *; };"

MAIN = """
__asm__(".symver old_f,f@V1");
__asm__(".symver new_f,f@@V2");
extern int dep_f(void);
extern int maybe(void) __attribute__((weak));
int old_f(void) { return dep_f(); }
int new_f(void) { return maybe ? maybe() : 2; }
int g(void) { return 3; }
"""
MAIN_MAP = "V1 { global: f; g; local: *; }; V2 { global: f; } V1;"

KINDS = """
__thread int tls_variable = 1;
int object = 2;
static int chosen(void) { return 1; }
static int (*resolve(void))(void) { return chosen; }
int ifunc_f(void) __attribute__((ifunc("resolve")));
__attribute__((visibility("protected"))) int protected_f(void) { return 1; }
__attribute__((visibility("hidden"))) int hidden_f(void) { return 1; }
__attribute__((weak)) int weak_f(void) { return hidden_f(); }
"""
UNIQUE = "inline int &counter() { static int x; return x; } int use() { return ++counter(); }"
SILENT = """
extern int puts(const char *);
__attribute__((constructor, visibility("hidden"))) void start(void) { puts("registered"); }
"""
PLAIN = """
extern int puts(const char *);
int a(void) { return 1; }
int b(void) { return a(); }
int c(void) { return puts(0); }
"""
EXECUTABLE = "#include <stdio.h>\nint main(void) { fputs(0, stdout); return 0; }"
STATIC = "void _start(void) { for (;;) ; }"
LARGE = '__asm__(".section .rodata\\n.fill 4194304,1,0x41\\n.text"); int a(void) { return 1; }'

# name → compiler, source, version script, flags
FILES: dict[str, tuple[str, str, str, list[str]]] = {
    "libdep.so": ("gcc", DEP, DEP_MAP, ["-shared", "-Wl,-soname,libdep.so.1"]),
    "libmain.so": ("gcc", MAIN, MAIN_MAP, ["-shared", "-Wl,-soname,libmain.so.2", "-Wl,--as-needed", "libdep.so"]),
    "kinds.so": ("gcc", KINDS, "", ["-shared"]),
    "unique.so": ("g++", UNIQUE, "", ["-shared"]),
    "silent.so": ("gcc", SILENT, "", ["-shared", "-Wl,--hash-style=gnu"]),
    "sysv.so": ("gcc", PLAIN, "", ["-shared", "-Wl,--hash-style=sysv"]),
    "gnu.so": ("gcc", PLAIN, "", ["-shared", "-Wl,--hash-style=gnu"]),
    "rpath.so": ("gcc", PLAIN, "", ["-shared", "-Wl,--disable-new-dtags,-rpath,$ORIGIN/../lib:/opt/x"]),
    "runpath.so": ("gcc", PLAIN, "", ["-shared", "-Wl,--enable-new-dtags,-rpath,$ORIGIN"]),
    "textrel.so": ("gcc", '__asm__(".quad puts");', "", ["-shared", "-Wl,-z,notext"]),
    "executable": ("gcc", EXECUTABLE, "", ["-no-pie", "-fno-pie"]),
    "static": ("gcc", STATIC, "", ["-static", "-nostdlib"]),
    "object.o": ("gcc", PLAIN, "", ["-c"]),
    "large.so": ("gcc", LARGE, "", ["-shared"]),
}


@pytest.fixture(scope="session")
def build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    """Compile one of FILES, once a session."""
    folder = tmp_path_factory.mktemp("elf")

    def made(name: str) -> Path:
        target = folder / name
        if target.exists():
            return target
        compiler, source, script, flags = FILES[name]
        if shutil.which(compiler) is None:
            pytest.skip(f"{compiler} is not installed: {name} cannot be made")
        if "libdep.so" in flags:
            made("libdep.so")
        code = folder / f"{name}.{'c' if compiler == 'gcc' else 'cc'}"
        code.write_text(source)
        if script:
            (folder / f"{name}.map").write_text(script)
            flags = [*flags, f"-Wl,--version-script={name}.map"]
        command = [compiler, "-O1", "-fPIC", "-w", "-o", name, code.name, *flags]
        subprocess.run(command, cwd=folder, check=True)
        return target

    return made


def symbol(file: elf.Elf, name: str, version: str | None = None) -> elf.Symbol:
    found = [s for s in file.symbols if s.name == name and s.version == version]
    assert len(found) == 1, [s for s in file.symbols if s.name == name]
    return found[0]


def read(data: bytes) -> elf.Elf:
    return elf.read(elf.BytesSource(data))


def patched(data: bytes, at: int, new: bytes) -> bytes:
    return data[:at] + new + data[at + len(new) :]


def without_sections(data: bytes) -> bytes:
    """What `strip --strip-section-headers` of newer binutils makes: no e_shoff, e_shnum, e_shstrndx."""
    return patched(patched(data, 40, bytes(8)), 60, bytes(4))


def program_headers(data: bytes) -> list[tuple[int, tuple[int, ...]]]:
    """(offset, fields) of each program header."""
    at, count = struct.unpack_from("<Q", data, 32)[0], struct.unpack_from("<H", data, 56)[0]
    return [(at + i * 56, struct.unpack_from("<IIQQQQQQ", data, at + i * 56)) for i in range(count)]


def dynamic_entry(data: bytes, tag: int) -> tuple[int, int]:
    """(file offset of the value, value) of the dynamic entry ``tag``."""
    (_, fields) = next(h for h in program_headers(data) if h[1][0] == 2)
    for at in range(fields[2], fields[2] + fields[5], 16):
        if struct.unpack_from("<Q", data, at)[0] == tag:
            return at + 8, struct.unpack_from("<Q", data, at + 8)[0]
    raise AssertionError(f"no dynamic entry {tag:#x}")


def with_moved_strings(data: bytes) -> bytes:
    """As patchelf does: the string table in a new segment at the end of the file, its old place overwritten with X."""
    at, old = dynamic_entry(data, 5)
    size = dynamic_entry(data, 10)[1]
    strings = data[old : old + size]
    new_offset = len(data) + -len(data) % 4096
    note = next(offset for offset, fields in program_headers(data) if fields[0] == 4)
    segment = struct.pack("<IIQQQQQQ", 1, 4, new_offset, 0x900000, 0x900000, size, size, 4096)
    data = patched(data, note, segment)
    data = patched(data, at, struct.pack("<Q", 0x900000))
    data = patched(data, old, b"X" * size)
    return data.ljust(new_offset, b"\0") + strings


# What a file says


def test_soname_and_needed_libraries(build: Build) -> None:
    file = elf.read_file(build("libmain.so"))
    assert (file.soname, file.needed) == ("libmain.so.2", ("libdep.so.1",))


def test_machine_and_type(build: Build) -> None:
    file = elf.read_file(build("gnu.so"))
    assert (file.machine, file.type) == ("x86_64", "dyn")


def test_path_is_kept(build: Build) -> None:
    path = build("gnu.so")
    assert elf.read_file(path).path == str(path)


def test_rpath_is_split(build: Build) -> None:
    file = elf.read_file(build("rpath.so"))
    assert (file.rpath, file.runpath) == (("$ORIGIN/../lib", "/opt/x"), ())


def test_runpath(build: Build) -> None:
    file = elf.read_file(build("runpath.so"))
    assert (file.rpath, file.runpath) == ((), ("$ORIGIN",))


def test_text_relocations(build: Build) -> None:
    assert elf.read_file(build("textrel.so")).has_textrel
    assert not elf.read_file(build("gnu.so")).has_textrel


def test_interpreter_of_an_executable(build: Build) -> None:
    assert elf.read_file(build("executable")).interpreter == "/lib64/ld-linux-x86-64.so.2"


def test_default_and_hidden_version_of_one_name(build: Build) -> None:
    file = elf.read_file(build("libmain.so"))
    assert symbol(file, "f", "V2").default_version
    assert not symbol(file, "f", "V1").default_version
    assert symbol(file, "g", "V1").default_version


def test_version_definitions_leave_out_the_base(build: Build) -> None:
    assert elf.read_file(build("libmain.so")).verdef == ("V1", "V2")


def test_undefined_symbol_names_version_and_library(build: Build) -> None:
    file = elf.read_file(build("libmain.so"))
    wanted = elf.Symbol("dep_f", "DEP_1", "libdep.so.1", False, False, "global", "notype", "default", False)
    assert symbol(file, "dep_f", "DEP_1") == replace(wanted, type=symbol(file, "dep_f", "DEP_1").type)
    assert ("libdep.so.1", "DEP_1") in file.verneed


def test_strong_and_weak_undefined_symbols_are_apart(build: Build) -> None:
    file = elf.read_file(build("libmain.so"))
    assert [s.name for s in file.undefined_strong] == ["dep_f"]
    assert "maybe" in [s.name for s in file.undefined_weak]


def test_exports_are_what_the_version_script_lets_through(build: Build) -> None:
    assert elf.read_file(build("libmain.so")).exports_names == {"f", "g", "V1", "V2"}


def test_copy_relocation_has_a_version_but_no_library(build: Build) -> None:
    stdout = symbol(elf.read_file(build("executable")), "stdout", "GLIBC_2.2.5")
    assert (stdout.defined, stdout.library, stdout.default_version) == (True, None, False)


@pytest.mark.parametrize(
    ("name", "kind", "binding", "visibility"),
    [
        ("tls_variable", "tls", "global", "default"),
        ("object", "object", "global", "default"),
        ("ifunc_f", "ifunc", "global", "default"),
        ("protected_f", "func", "global", "protected"),
        ("weak_f", "func", "weak", "default"),
    ],
)
def test_kinds_of_exports(build: Build, name: str, kind: str, binding: str, visibility: str) -> None:
    found = symbol(elf.read_file(build("kinds.so")), name)
    assert (found.type, found.binding, found.visibility) == (kind, binding, visibility)
    assert found in elf.read_file(build("kinds.so")).exported


def test_hidden_symbol_is_no_export(build: Build) -> None:
    assert "hidden_f" not in elf.read_file(build("kinds.so")).exports_names


def test_unique_binding(build: Build) -> None:
    file = elf.read_file(build("unique.so"))
    assert symbol(file, "_ZZ7countervE1x").binding == "unique"
    assert "_ZZ7countervE1x" in file.exports_names


def test_file_that_exports_nothing_still_tells_its_imports(build: Build) -> None:
    file = elf.read_file(build("silent.so"))
    assert (file.exported, file.gnu_hash_ok) == ((), True)
    assert [(s.name, s.library) for s in file.undefined_strong] == [("puts", "libc.so.6")]


def test_file_that_exports_nothing_without_section_headers(build: Build) -> None:
    data = build("silent.so").read_bytes()
    assert read(without_sections(data)) == read(data)


def test_both_hash_styles_give_the_same_symbols(build: Build) -> None:
    sysv, gnu = elf.read_file(build("sysv.so")), elf.read_file(build("gnu.so"))
    assert (sysv.gnu_hash_ok, gnu.gnu_hash_ok) == (None, True)
    assert set(sysv.symbols) == set(gnu.symbols)
    assert sysv.exports_names == {"a", "b", "c"}


@pytest.mark.parametrize("name", ["libmain.so", "kinds.so", "sysv.so", "executable"])
def test_section_headers_are_not_needed(build: Build, name: str) -> None:
    data = build(name).read_bytes()
    assert read(without_sections(data)) == read(data)


def test_string_table_moved_to_the_end(build: Build) -> None:
    data = build("libmain.so").read_bytes()
    assert read(with_moved_strings(data)) == read(data)


def test_string_table_moved_and_no_section_headers(build: Build) -> None:
    data = build("libmain.so").read_bytes()
    assert read(without_sections(with_moved_strings(data))) == read(data)


@pytest.mark.parametrize("name", ["static", "object.o"])
def test_file_without_dynamic_table(build: Build, name: str) -> None:
    file = elf.read_file(build(name))
    assert (file.symbols, file.needed, file.interpreter, file.gnu_hash_ok) == ((), (), None, None)


def test_type_of_an_object_file(build: Build) -> None:
    assert elf.read_file(build("object.o")).type == "rel"


def test_name_that_is_not_utf8_is_escaped(build: Build) -> None:
    data = build("sysv.so").read_bytes().replace(b"\0puts\0", b"\0p\xfft\x01\0")
    assert "p\\xfft\x01" in {s.name for s in read(data).undefined_strong}


@pytest.mark.parametrize("name", ["libmain.so", "kinds.so", "unique.so", "executable"])
def test_symbols_as_readelf_prints_them(build: Build, name: str) -> None:
    if shutil.which("readelf") is None:
        pytest.skip("readelf is not installed: nothing to compare with")
    path = build(name)
    text = subprocess.run(["readelf", "-W", "--dyn-syms", path], check=True, capture_output=True, text=True).stdout
    rows = re.findall(r"^ +[1-9]\d*: \w+ +\w+ (\w+) +(\w+) +(\w+) +(\w+) (\S+)", text, re.MULTILINE)

    def row(s: elf.Symbol) -> tuple[str, ...]:
        # readelf leaves the version out where it is the symbol's own name.
        version = f"{'@@' if s.default_version else '@'}{s.version}" if s.version not in (None, s.name) else ""
        return s.type.upper(), s.binding.upper(), s.visibility.upper(), s.name + version

    assert [row(s) for s in elf.read_file(path).symbols] == [(r[0], r[1], r[2], r[4]) for r in rows]


# How it is read


class Recorder:
    def __init__(self, data: bytes) -> None:
        self.data, self.size, self.bytes = data, len(data), 0

    def read(self, offset: int, length: int) -> bytes:
        assert 0 <= offset <= offset + length <= self.size
        self.bytes += length
        return self.data[offset : offset + length]


def test_only_tables_are_read(build: Build) -> None:
    source = Recorder(build("large.so").read_bytes())
    elf.read(source)
    assert source.size > 4 << 20
    assert source.bytes < 8 << 10


def test_what_a_source_raises_passes_through(build: Build) -> None:
    class NotAvailable(Exception):
        pass

    class Head(Recorder):
        def read(self, offset: int, length: int) -> bytes:
            if offset + length > 4096:
                raise NotAvailable
            return super().read(offset, length)

    with pytest.raises(NotAvailable):
        elf.read(Head(build("libmain.so").read_bytes()))


def test_source_that_returns_too_little_is_an_error(build: Build) -> None:
    class Short(Recorder):
        def read(self, offset: int, length: int) -> bytes:
            return super().read(offset, length)[:-1]

    with pytest.raises(
        ElfError, match=r"^truncated: ELF identification of 16 bytes, of which 15 could be read at offset 0x0$"
    ):
        elf.read(Short(build("gnu.so").read_bytes()))


def test_missing_file_is_an_oserror(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        elf.read_file(tmp_path / "absent.so")


# .gnu.hash


@pytest.mark.parametrize(
    ("name", "value"), [(b"", 0x1505), (b"printf", 0x156B2BB8), (b"exit", 0x7C967E3F), (b"syscall", 0xBAC212A0)]
)
def test_gnu_hash_of_known_names(name: bytes, value: int) -> None:
    assert elf_hash.gnu_hash(name) == value


@given(st.lists(st.binary(max_size=40)))
def test_hashes_of_many_names_are_those_of_each(names: list[bytes]) -> None:
    assert elf_hash.gnu_hashes(names) == {name: elf_hash.gnu_hash(name) for name in names}


def test_gnu_hash_check_notices_a_changed_name() -> None:
    data = stub_bytes("libx.so.1", ["first", "second", "third"])
    assert read(data.replace(b"\0second\0", b"\0secomd\0")).gnu_hash_ok is False


def test_gnu_hash_check_notices_an_empty_bloom_filter() -> None:
    data = stub_bytes("libx.so.1", ["first"])
    _, at = dynamic_entry(data, 0x6FFFFEF5)
    assert read(data).gnu_hash_ok is True
    assert read(patched(data, at + 16, bytes(8))).gnu_hash_ok is False


def test_gnu_hash_check_notices_a_bucket_that_starts_too_late() -> None:
    data = stub_bytes("libx.so.1", ["first", "second", "third"])
    _, at = dynamic_entry(data, 0x6FFFFEF5)
    assert struct.unpack_from("<4I", data, at) == (1, 1, 1, 6)
    assert read(patched(data, at + 24, struct.pack("<I", 2))).gnu_hash_ok is False


# Files that are wrong


def error(data: bytes) -> str:
    with pytest.raises(ElfError) as caught:
        read(data)
    return str(caught.value)


STUB = stub_bytes("libx.so.1", ["first", "second", "third"])
SEGMENT = program_headers(STUB)[0][1][5]
HASH, STRINGS, SYMBOLS, GNU_HASH = (dynamic_entry(STUB, tag)[1] for tag in (4, 5, 6, 0x6FFFFEF5))
SIZE = dynamic_entry(STUB, 10)[1]
LAST_NAME = STUB.rfind(b"\0", 0, STRINGS + SIZE - 1) + 1


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "not an ELF file: starts with `` at offset 0x0"),
        (b"/* GNU ld script */", "not an ELF file: starts with `2f2a2047` at offset 0x0"),
        (STUB[:10], "truncated: the file has 10 bytes, its identification alone needs 16 at offset 0x0"),
        (STUB[:40], "truncated: file header of 48 bytes in a file that ends at 0x28 at offset 0x10"),
        (STUB[:100], "truncated: program headers of 280 bytes in a file that ends at 0x64 at offset 0x40"),
        (STUB[:400], f"truncated: segment of {SEGMENT} bytes in a file that ends at 0x190 at offset 0x0"),
        (patched(STUB, 4, b"\x01"), "not a 64-bit ELF file: class 1 at offset 0x4"),
        (patched(STUB, 5, b"\x02"), "not a little-endian ELF file: data encoding 2 at offset 0x5"),
        (patched(STUB, 54, b"\x20"), "program headers of 32 bytes, not 56 at offset 0x36"),
    ],
)
def test_headers_that_are_wrong(data: bytes, message: str) -> None:
    assert error(data) == message


@pytest.mark.parametrize(
    ("tag", "value", "message"),
    [
        (5, 1 << 60, "dynamic string table: address 0x1000000000000000 is in no loadable segment"),
        (
            10,
            1 << 27,
            (
                "dynamic string table of 134217728 bytes, more than the 67108864 that are plausible"
                f" at offset {STRINGS:#x}"
            ),
        ),
        (
            10,
            65000,
            (
                f"truncated: dynamic string table of 65000 bytes in a file that ends at {len(STUB):#x}"
                f" at offset {STRINGS:#x}"
            ),
        ),
        (11, 16, f"dynamic symbols of 16 bytes, not 24 at offset {SYMBOLS:#x}"),
        (14, 999, f"soname: index 0x3e7 in a string table of {SIZE} bytes at offset {STRINGS:#x}"),
        (10, SIZE - 1, f"symbol name: string without an end at offset {LAST_NAME:#x}"),
    ],
)
def test_dynamic_entries_that_are_wrong(tag: int, value: int, message: str) -> None:
    at, _ = dynamic_entry(STUB, tag)
    assert error(patched(STUB, at, struct.pack("<Q", value))) == message


def test_more_symbols_than_there_is_room_for() -> None:
    room = (SEGMENT - SYMBOLS) // 24
    assert error(patched(STUB, HASH + 4, struct.pack("<I", 1000))) == (
        f"dynamic symbol table of 1000 entries, its segment has room for {room} at offset {SYMBOLS:#x}"
    )


def test_more_symbols_than_any_library_has() -> None:
    assert error(patched(STUB, HASH + 4, struct.pack("<I", 1 << 31))) == (
        f"2147483648 dynamic symbols, more than the 524288 that are plausible at offset {SYMBOLS:#x}"
    )


def test_gnu_hash_chain_without_an_end() -> None:
    data = bytearray(STUB)
    for word in range(GNU_HASH + 28, SEGMENT, 4):
        data[word] &= 0xFE
    end = SEGMENT - (SEGMENT - GNU_HASH) % 4
    assert error(bytes(data)) == f"GNU hash table: chain without an end at offset {end:#x}"


def test_symbol_table_of_unknown_length() -> None:
    data = without_sections(STUB)
    for tag in (4, 5, 0x6FFFFEF5):
        at, _ = dynamic_entry(data, tag)
        # DT_DEBUG, which says nothing about the file.
        data = patched(data, at - 8, struct.pack("<Q", 21))
    at, _ = dynamic_entry(data, 14)
    assert error(patched(data, at - 8, struct.pack("<Q", 21))) == (
        f"dynamic symbol table of unknown length: no hash table, no section, no table behind it at offset {SYMBOLS:#x}"
    )


def test_names_that_overlap_a_thousandfold_are_refused() -> None:
    # 2,000 names that start one byte apart in one long string: 2,000 times its length when taken out.
    names = ["n" * (4000 - i) for i in range(2000)]
    data = stub_bytes("libx.so.1", ["f" + str(i) for i in range(2000)] + names[:1])
    _, strings = dynamic_entry(data, 5)
    _, symbols = dynamic_entry(data, 6)
    long_name = data.index(names[0].encode(), strings) - strings
    for i in range(2000):
        data = patched(data, symbols + 24 * (i + 1), struct.pack("<I", long_name + i))
    assert error(data) == f"strings overlap more than any linker makes them at offset {strings:#x}"


def test_version_needs_of_another_revision(build: Build) -> None:
    data = build("libmain.so").read_bytes()
    _, at = dynamic_entry(data, 0x6FFFFFFE)
    assert error(patched(data, at, b"\x02\x00")) == f"version need of revision 2, not 1 at offset {at:#x}"


def test_version_needs_that_lead_out_of_the_segment(build: Build) -> None:
    data = build("libmain.so").read_bytes()
    _, at = dynamic_entry(data, 0x6FFFFFFE)
    message = error(patched(data, at + 8, struct.pack("<I", 1 << 31)))
    assert message == f"needed version outside its segment at offset {at + (1 << 31):#x}"


# Whatever the bytes are

TOTAL = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
SAMPLES = ["libmain.so", "kinds.so", "silent.so", "sysv.so", "executable"]


def outcome(data: bytes) -> elf.Elf | ElfError:
    """The only two outcomes there may be."""
    try:
        return read(data)
    except ElfError as problem:
        return problem


@TOTAL
@given(st.binary(max_size=400), st.booleans())
def test_random_bytes(data: bytes, headed: bool) -> None:
    outcome(STUB[:16] + data if headed else data)


@TOTAL
@given(st.sampled_from(SAMPLES), st.floats(0, 1))
def test_truncated_files(build: Build, name: str, part: float) -> None:
    data = build(name).read_bytes()
    outcome(data[: int(len(data) * part)])


def places(data: bytes) -> st.SearchStrategy[int]:
    """Offsets in the headers, the dynamic table and the first page, where a change matters, and some anywhere."""
    (dynamic,) = (fields for _, fields in program_headers(data) if fields[0] == 2)
    spans = [
        (0, 64 + 56 * len(program_headers(data))),
        (dynamic[2], dynamic[2] + dynamic[5]),
        (0, 4096),
        (0, len(data)),
    ]
    return st.one_of([st.integers(low, min(high, len(data)) - 4) for low, high in spans])


@TOTAL
@given(st.sampled_from(SAMPLES), st.data())
def test_files_with_changed_bytes(build: Build, name: str, draw: st.DataObject) -> None:
    data = build(name).read_bytes()
    for at in draw.draw(st.lists(places(data), min_size=1, max_size=4)):
        data = patched(data, at, bytes([draw.draw(st.integers(0, 255))]))
    outcome(data)


@TOTAL
@given(st.sampled_from(SAMPLES), st.data())
def test_files_with_changed_words(build: Build, name: str, draw: st.DataObject) -> None:
    data = build(name).read_bytes()
    words = st.sampled_from([0, 1, 2, 0x7FFFFFFF, 0xFFFFFFFF, len(data)]) | st.integers(0, 0xFFFFFFFF)
    for at in draw.draw(st.lists(places(data), min_size=1, max_size=4)):
        data = patched(data, at & ~3, struct.pack("<I", draw.draw(words)))
    outcome(data)
