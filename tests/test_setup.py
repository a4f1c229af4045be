"""setup.py's decisions, and the doctor's report. The build itself is what `make setup` and `make cuda-check` run."""

import ctypes
import importlib.metadata
import importlib.util
import re
import shlex
import shutil
import subprocess
from argparse import Namespace

import pytest
from programs import ROOT, run_python

from visdet import doctor, ops


@pytest.fixture(scope="module")
def build():
    return importlib.import_module("setup")


def stand_in_for_nvcc(folder, release, architectures):
    """Return the path of a program that answers setup.py's questions as an nvcc of this release does."""
    path = folder / f"cuda-{release}" / "bin" / "nvcc"
    path.parent.mkdir(parents=True)
    codes = "\\n".join(f"sm_{name}" for name in architectures)
    version = f"Cuda compilation tools, release {release}, V{release}.88"
    path.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo "{version}" || printf "{codes}\\n"\n')
    path.chmod(0o755)
    return path


CUDA_13 = ["75", "80", "86", "87", "88", "89", "90", "100", "110", "103", "120", "121"]


@pytest.fixture
def nvcc(tmp_path):
    return stand_in_for_nvcc(tmp_path, "13.0", CUDA_13)


@pytest.mark.parametrize(
    "library", sorted((ROOT / "visdet" / "ops").glob("*.so")), ids=lambda path: path.name
)
def test_the_libraries_need_no_function_of_a_torch_after_2_10(library):
    audit = pytest.importorskip("torch_abi_audit")
    found = audit.inspect_extension(library).torch
    assert found.stable and not found.unknown_shim_symbols
    oldest = tuple(map(int, found.min_torch_version.split(".")))
    assert oldest <= (2, 10, 0), found.version_defining_symbols


def test_a_wheel_is_compiled_for_ten_architectures_with_ptx_of_three(build, nvcc, monkeypatch):
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    native, ptx = build.cuda_architectures(nvcc, for_wheel=True)
    assert native == ["75", "80", "86", "87", "89", "90", "100", "110", "120", "121"] and ptx == [
        "80",
        "100",
        "120",
    ]
    assert build.gencode_flags(native, ptx) == [
        *(f"-gencode=arch=compute_{name},code=sm_{name}" for name in native),
        *(f"-gencode=arch=compute_{name},code=compute_{name}" for name in ptx),
    ]


@pytest.mark.parametrize(
    ("text", "native", "ptx"),
    [
        ("8.6;9.0+PTX", ["86", "90"], ["90"]),
        ("9.0a 10.0a+PTX", ["90a", "100a"], ["100a"]),
        ("12.0f;12.1", ["120f", "121"], []),
        ("Hopper", ["90"], ["90"]),
        ("Ampere;Hopper 8.6", ["80", "86", "90"], ["86", "90"]),
        ("Ampere+Tegra", ["87"], []),
        ("native", ["90"], ["90"]),
    ],
)
def test_arch_list_overrides(build, nvcc, monkeypatch, text, native, ptx):
    """Names and letters are those of torch."""
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", text)
    monkeypatch.setattr(build, "present_gpus", list)
    assert build.cuda_architectures(nvcc, for_wheel=True) == (native, ptx)
    assert build.os.environ["TORCH_CUDA_ARCH_LIST"] == text


def test_an_unknown_architecture_is_named(build, nvcc, monkeypatch):
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0;Hoper")
    with pytest.raises(SystemExit, match=r"TORCH_CUDA_ARCH_LIST must have .* got 'Hoper'"):
        build.cuda_architectures(nvcc, for_wheel=False)


def test_the_library_says_its_architectures_with_their_letters(build, nvcc):
    text = build.cuda_build_text(nvcc, ["75", "90a", "100"], ["120f"])
    assert text == "toolkit=13.0 native=7.5,9.0a,10.0 ptx=12.0f"


@pytest.mark.parametrize(
    ("flag", "expected"),
    [
        ("-march=native", "-Xcompiler=-march=native"),
        ("-Wp,-D_FORTIFY_SOURCE=2", "-Xcompiler=-Wp\\,-D_FORTIFY_SOURCE=2"),
        ("-ffile-prefix-map=/my work=.", "-Xcompiler='-ffile-prefix-map=/my work=.'"),
        ("-Wl,-z,relro", "-Xlinker=-z,relro"),
        ("-fuse-ld=lld", "-Xcompiler=-fuse-ld=lld"),
        ("-L/my lib", "-L/my lib"),
        ("-lm", "-lm"),
    ],
)
def test_flags_that_nvcc_hands_on(build, flag, expected):
    assert build.handed_on(flag) == expected


def test_nvcc_takes_the_flags_of_a_distribution(build, tmp_path, monkeypatch):
    nvcc = build.find_nvcc()
    if nvcc is None:
        pytest.skip("needs nvcc")
    folder = tmp_path / "my work"
    folder.mkdir()
    (folder / "kernel.cu").write_text("__global__ void k() {}\n#ifndef A\n#error lost\n#endif\n")
    monkeypatch.setattr(build, "ROOT", folder)
    monkeypatch.setenv("CXXFLAGS", "-g0 -fstack-protector-strong -Wp,-DA -Wformat '-DNAME=a b'")
    linked = [build.handed_on(flag) for flag in ("-Wl,-z,relro", "-Wl,-z,now", "-fuse-ld=bfd")]
    command = [nvcc, *build.common_flags(by_nvcc=True), "-Xcompiler=-fPIC", "-shared", *linked]
    done = subprocess.run([*command, folder / "kernel.cu", "-o", folder / "kernel.so"], capture_output=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["my work", "a$b", "it's", "a:b"])
def test_a_build_below_any_path(build, tmp_path, capfd, name):
    """Sources, a header that is compiled first, and a library below a path with marks of ninja and the shell."""
    folder = tmp_path / name
    folder.mkdir()
    (folder / "one.cpp").write_text('extern "C" const char* one() { return NAME; }\n')
    rules = build.NinjaFile()
    built = rules.compile(
        ["g++", "-fPIC", '-DNAME="a b"', f"-I{folder}"], folder / "one.cpp", folder / "one.o"
    )
    library = folder / "lib one.so"
    rules.link(["g++", "-shared"], [built], library, [f"-L{folder}"])
    rules.run(folder)
    first, second = re.findall(r"^visdet: compiled (.*)$", capfd.readouterr().out, re.MULTILINE)
    assert re.fullmatch(r"1 of 2 in \d+\.\d+ s: one\.o", first)
    assert re.fullmatch(r"2 of 2 in \d+\.\d+ s: lib one\.so", second)
    function = ctypes.CDLL(str(library)).one
    function.restype = ctypes.c_char_p
    assert function() == b"a b"
    assert shlex.split(rules.links[library])[-3:] == ["-o", str(library), f"-L{folder}"]


def test_one_header_includes_torch_for_all_sources(build):
    csrc = build.ROOT / build.CSRC
    sources = [path for path in csrc.rglob("*") if path.suffix in (".h", ".cpp", ".cu", ".cuh")]
    including = {
        path: re.findall(r"#include <(torch/[^>]*|ATen/[^>]*|c10/[^>]*)>", path.read_text())
        for path in sources
    }
    allowed = including.pop(csrc / "common" / "torch.h")
    assert not any(including.values())
    stable = ("torch/csrc/stable/", "torch/headeronly/", "torch/csrc/inductor/aoti_torch/c/shim.h")
    assert allowed and all(name.startswith(stable) for name in allowed)


def test_the_doctor_reports_versions_libraries_and_operators(stdout):
    assert doctor.run(Namespace()) == 0
    printed = stdout()
    parts = (
        "torch ",
        "system",
        "torchvision",
        "mmengine",
        "libvisdet_cpu.so",
        "loaded",
        "CPU: visdet (C++)",
        "To do",
    )
    assert all(part in printed for part in parts) and "ANOTHER PROJECT" not in printed


LOADED = {"loaded": True, "path": "a library", "isa": "AVX2", "toolkit": "12.8", "native": ["9.0"], "ptx": []}
MISSING = {"loaded": False, "path": "a library", "problem": "it does not exist"}


@pytest.mark.parametrize(
    ("cpu", "cuda", "parts"),
    [
        (MISSING, MISSING, ["NOT LOADED: it does not exist", "CPU: none", "build the operators, in a clone"]),
        (LOADED, MISSING, ["loaded, AVX2 kernels", "CUDA: none", "for CUDA operators: install a wheel"]),
        (
            LOADED,
            LOADED,
            ["CUDA 12.8 for GPUs of compute capability 9.0; PTX of none", "CUDA: visdet (CUDA)"],
        ),
    ],
    ids=["none", "cpu", "both"],
)
def test_the_doctor_says_what_is_missing_and_what_is_in_the_way(cpu, cuda, parts, monkeypatch, stdout):
    """The report of a machine without OpenCV, where another project named visdet is installed."""
    found = {"torch": "2.14.1", "visdet": "1.2"}

    def version(name):
        if name not in found:
            raise importlib.metadata.PackageNotFoundError(name)
        return found[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(ops, "build_info", lambda: {"cpu": cpu, "cuda": cuda})
    assert doctor.run(Namespace()) == int(cpu is MISSING)
    printed = stdout()
    parts = [
        *parts,
        "opencv-python      MISSING",
        "pip install 'visdet-ops[train]' (missing: torchvision, mmengine",
    ]
    parts += ["1.2  (ANOTHER PROJECT", "pip uninstall visdet"]
    assert [part for part in parts if part not in printed] == []


def test_missing_libraries_raise_one_clear_error(tmp_path):
    package = tmp_path / "visdet"
    shutil.copytree(ROOT / "visdet" / "ops", package / "ops", ignore=shutil.ignore_patterns("*.so", "csrc"))
    (package / "__init__.py").touch()
    code = (
        "import torch\n"
        "from visdet import ops\n"
        "value = torch.zeros(1, 1, 1, 1)\n"
        "try:\n"
        "    ops.ms_deform_attn(value, [(1, 1)], None, torch.zeros(1, 1, 1, 1, 1, 2), torch.zeros(1, 1, 1, 1, 1))\n"
        "except ops.NotBuiltError as error:\n"
        "    print(error)\n"
        "print(ops.roi_pool(torch.zeros(1, 1, 4, 4), torch.zeros(3, 5), 2).shape)\n"
    )
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{code}"
    printed, _ = run_python("-c", code, cwd=tmp_path)
    for part in ("CPU library is not loaded", "pip install --no-build-isolation -e .", "Size([3, 1, 2, 2])"):
        assert part in printed
