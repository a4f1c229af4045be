"""setup.py's decisions, and the doctor's report. The build itself is what `make setup` and `make cuda-check` run."""

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import setuptools

from visdet import doctor, ops
from visdet.ops import _library

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def build():
    spec = importlib.util.spec_from_file_location("visdet_setup", ROOT / "setup.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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


CUDA_TORCH = SimpleNamespace(__version__="2.14.1", version=SimpleNamespace(cuda="13.0"))
CPU_TORCH = SimpleNamespace(__version__="2.14.1+cpu", version=SimpleNamespace(cuda=None))


def test_targets_torch_2_10(build):
    value = int(build.STABLE_ABI.split("=")[1], 16)
    assert (value >> 56, value >> 48 & 0xFF) == (2, 10)


@pytest.mark.parametrize(
    "library", sorted((ROOT / "visdet" / "ops").glob("*.so")), ids=lambda path: path.name
)
def test_the_libraries_need_no_function_of_a_torch_after_2_10(library):
    audit = pytest.importorskip("torch_abi_audit")
    found = audit.inspect_extension(library).torch
    assert found.stable and not found.unknown_shim_symbols
    oldest = tuple(map(int, found.min_torch_version.split(".")))
    assert oldest <= (2, 10, 0), found.version_defining_symbols


def test_a_wheel_is_compiled_for_seven_architectures_with_ptx_of_three(build, nvcc, monkeypatch):
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    native, ptx = build.cuda_architectures(nvcc, for_wheel=True)
    assert native == ["75", "80", "86", "89", "90", "100", "120"] and ptx == ["80", "100", "120"]
    assert build.gencode_flags(native, ptx) == [
        *(f"-gencode=arch=compute_{name},code=sm_{name}" for name in native),
        *(f"-gencode=arch=compute_{name},code=compute_{name}" for name in ptx),
    ]


def test_a_wheel_of_an_older_nvcc_has_what_it_knows_and_ptx_of_the_last(build, tmp_path, monkeypatch):
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    nvcc = stand_in_for_nvcc(tmp_path, "12.4", ["50", "75", "80", "86", "87", "89", "90"])
    assert build.cuda_architectures(nvcc, for_wheel=True) == (["75", "80", "86", "89", "90"], ["80", "90"])


@pytest.mark.parametrize(
    "capability, code",
    [
        ((7, 0), None),
        ((7, 5), "native code of 7.5"),
        ((8, 6), "native code of 8.6"),
        ((8, 7), "PTX of 8.0"),
        ((8, 9), "native code of 8.9"),
        ((9, 0), "native code of 9.0"),
        ((10, 3), "native code of 10.0"),
        ((11, 0), "PTX of 10.0"),
        ((12, 1), "native code of 12.0"),
        ((13, 0), "PTX of 12.0"),
    ],
)
def test_the_wheel_serves_a_gpu_and_the_doctor_says_by_what(build, nvcc, capability, code, monkeypatch):
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    text = build.cuda_build_text(nvcc, *build.cuda_architectures(nvcc, for_wheel=True))
    cuda = _library._parse_cuda_build(text)
    assert cuda["toolkit"] == "13.0" and cuda["ptx"] == ["8.0", "10.0", "12.0"]
    found = doctor._code_for(capability, cuda)
    assert found is None if code is None else found.startswith(code)


def test_an_editable_install_without_a_gpu_takes_sm_90(build, nvcc, monkeypatch):
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    monkeypatch.setattr(build, "present_gpus", list)
    assert build.cuda_architectures(nvcc, for_wheel=False) == (["90"], ["90"])


def test_arch_list_overrides(build, nvcc, monkeypatch):
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.6;9.0+PTX")
    assert build.cuda_architectures(nvcc, for_wheel=True) == (["86", "90"], ["90"])


@pytest.mark.parametrize(
    "release, is_refused", [("11.8", True), ("12.3", True), ("12.4", False), ("13.5", False)]
)
def test_nvcc_is_12_4_or_newer(build, tmp_path, release, is_refused, monkeypatch, capsys):
    nvcc = stand_in_for_nvcc(tmp_path, release, CUDA_13)
    monkeypatch.setenv("CUDA_HOME", str(nvcc.parent.parent))
    monkeypatch.delenv("VISDET_CUDA", raising=False)
    assert build.cuda_decision(CUDA_TORCH) == (None if is_refused else nvcc)
    refusal = f"{nvcc} is of CUDA {release}, and visdet needs 12.4 or newer"
    assert (refusal in capsys.readouterr().err) == is_refused
    monkeypatch.setenv("VISDET_CUDA", "1")
    if is_refused:
        with pytest.raises(SystemExit, match=re.escape(refusal)):
            build.cuda_decision(CUDA_TORCH)


def test_nvcc_that_names_no_release_is_an_error(build, tmp_path):
    nvcc = stand_in_for_nvcc(tmp_path, "unknown", [])
    with pytest.raises(SystemExit, match="names no release"):
        build.nvcc_version(nvcc)


@pytest.mark.parametrize("cuda, version", [("0", "0.1.0+cpu"), ("1", "0.1.0")])
@pytest.mark.parametrize("command", ["bdist_wheel", "dist_info", "sdist"])
def test_a_wheel_without_the_cuda_library_is_another_version(
    build, nvcc, cuda, version, command, tmp_path, monkeypatch
):
    monkeypatch.setenv("CUDA_HOME", str(nvcc.parent.parent))
    monkeypatch.setenv("VISDET_CUDA", cuda)
    distribution = setuptools.Distribution({"name": "visdet-ops", "version": "0.1.0"})
    distribution.commands = [command]
    egg_info = build.EggInfo(distribution)
    egg_info.egg_base = str(tmp_path)
    egg_info.ensure_finalized()
    assert distribution.get_version() == ("0.1.0" if command == "sdist" else version)


def test_a_wheel_is_named_by_what_its_libraries_need(build, tmp_path, monkeypatch):
    (tmp_path / "visdet" / "ops").mkdir(parents=True)
    library = tmp_path / "visdet" / "ops" / "libvisdet_cpu.so"
    library.touch()
    wheel = build.Wheel(setuptools.Distribution({"name": "visdet-ops", "version": "0.1.0"}))
    wheel.bdist_dir = str(tmp_path)
    wheel.ensure_finalized()
    asked = []
    monkeypatch.setattr(
        build.manylinux, "platform_tag", lambda found: asked.append(found) or "manylinux_2_28_x86_64"
    )
    assert wheel.get_tag() == ("py3", "none", "manylinux_2_28_x86_64") and asked == [[library]]
    monkeypatch.setattr(build.manylinux, "platform_tag", lambda found: None)
    assert wheel.get_tag()[2].startswith("linux_")


def test_the_baseline_is_linked_before_the_other_instruction_sets(build, monkeypatch):
    monkeypatch.setattr(build.platform, "machine", lambda: "x86_64")
    rules = build.NinjaFile()
    library = Path("libvisdet_cpu.so")
    rules.add_cpu_library(library, Path("objects"), [])
    linked = re.findall(r"cpu_\w+_(baseline|avx2|avx512)\.o", rules.links[library])
    assert linked == sorted(linked, key=["baseline", "avx2", "avx512"].index) and len(set(linked)) == 3


def commands_of(rules):
    """Return the command that makes each target, and what it is made of."""
    texts = iter(rules.lines)
    commands, made = {}, {}
    for line in texts:
        if line.startswith("rule "):
            commands[line.split()[1]] = next(texts).split(" = ", 1)[1]
        elif line.startswith("build "):
            target, rule, inputs = re.fullmatch(r"build (\S+): (\S+) (.*)", line).groups()
            made[target] = (commands[rule], inputs)
    return made


def test_kernels_are_compiled_per_instruction_set_without_torch_and_host_code_once(build, monkeypatch):
    monkeypatch.setattr(build.platform, "machine", lambda: "x86_64")
    rules = build.NinjaFile()
    rules.add_cpu_library(Path("libvisdet_cpu.so"), Path("objects"), [])
    made = {target: command for target, command in commands_of(rules).items() if target.endswith(".o")}
    kernels = [
        target for target in made if target.startswith("objects/cpu_") and target != "objects/cpu_isa.o"
    ]
    sources = list((build.ROOT / build.CSRC / "cpu").rglob("*.cpp"))
    assert len(kernels) == 3 * len(sources)
    assert len(made) - len(kernels) == len(build.host_sources())
    for target, (command, inputs) in made.items():
        isa = target.removesuffix(".o").rsplit("_", 1)[1] if target in kernels else "host"
        assert (f"-DVISDET_ISA={isa}" in command) == (target in kernels)
        # The header that all of them include is compiled first, with the same flags, and found first.
        header = "cpu/precompiled.h" if target in kernels else "common/precompiled.h"
        compiled = f"objects/{isa}/{header}.gch"
        assert inputs.endswith(f" | {compiled}")
        assert command.index(f"-Iobjects/{isa} ") < command.index(f"-I{build.ROOT / build.CSRC} ")
        flags = set(command.split()) - {f"-Iobjects/{isa}", "-include", header}
        assert flags <= set(commands_of(rules)[compiled][0].replace(f"{compiled}.d", f"{target}.d").split())
    for source in [*sources, *(build.ROOT / build.CSRC / "cpu").rglob("*.h")]:
        if source.name not in ("dispatch.h", "images.h"):  # for host code
            assert "torch" not in re.findall(r"#include [<\"](\w+)", source.read_text()), source


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


def test_every_cuda_file_is_in_one_unit_and_both_libraries_have_the_common_objects(build, nvcc):
    rules = build.NinjaFile()
    libraries = Path("libvisdet_cuda.so"), Path("libvisdet_cpu.so")
    rules.add_cuda_library(libraries[0], Path("objects"), [], nvcc, ["90"], [])
    rules.add_cpu_library(libraries[1], Path("objects"), [])
    included = [name for text in rules.texts.values() for name in re.findall(r'#include "(.*)"', text)]
    csrc = build.ROOT / build.CSRC
    assert sorted(included) == sorted(str(p.relative_to(csrc)) for p in csrc.rglob("*.cu"))
    common = [f"objects/common_{source.stem}.o" for source in (csrc / "common").glob("*.cpp")]
    assert common and all(name in rules.links[library].split() for library in libraries for name in common)


def test_the_cuda_library_is_told_what_it_is_compiled_for(build, nvcc):
    rules = build.NinjaFile()
    rules.add_cuda_library(Path("libvisdet_cuda.so"), Path("objects"), [], nvcc, ["75", "90"], ["90"])
    assert sum("toolkit=13.0 native=7.5,9.0 ptx=9.0" in line for line in rules.lines) == 1


def test_unknown_architecture_is_an_error(build, nvcc, monkeypatch):
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "3.5")
    with pytest.raises(SystemExit, match=r"knows no architecture \['35'\]"):
        build.cuda_architectures(nvcc, for_wheel=True)


def test_nvcc_is_found_in_cuda_home_first(build, nvcc, monkeypatch):
    monkeypatch.setenv("CUDA_HOME", str(nvcc.parent.parent))
    assert build.find_nvcc() == nvcc
    assert build.cuda_decision(CUDA_TORCH) == nvcc


def test_nvcc_is_found_in_site_packages(build, tmp_path, monkeypatch):
    packaged = tmp_path / "nvidia" / "cu13" / "bin" / "nvcc"
    packaged.parent.mkdir(parents=True)
    packaged.touch()
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setattr(build.sysconfig, "get_path", lambda _: str(tmp_path))
    assert build.find_nvcc() == packaged


@pytest.mark.parametrize(
    "torch_build, reason", [(CUDA_TORCH, "no nvcc"), (CPU_TORCH, "no nvcc|CPU-only build")]
)
def test_what_is_not_built_is_said_aloud(build, torch_build, reason, monkeypatch, capsys):
    monkeypatch.delenv("VISDET_CUDA", raising=False)
    monkeypatch.setattr(build, "find_nvcc", lambda: None)
    assert build.cuda_decision(torch_build) is None
    message = capsys.readouterr().err
    assert "CUDA library is NOT built" in message and "====" in message
    monkeypatch.setenv("VISDET_CUDA", "1")
    with pytest.raises(SystemExit, match=reason):
        build.cuda_decision(torch_build)


def test_cpu_only_torch_builds_no_cuda_library_unless_told(build, nvcc, monkeypatch, capsys):
    monkeypatch.setattr(build, "find_nvcc", lambda: nvcc)
    monkeypatch.delenv("VISDET_CUDA", raising=False)
    assert build.cuda_decision(CPU_TORCH) is None
    assert "2.14.1+cpu is a CPU-only build" in capsys.readouterr().err
    monkeypatch.setenv("VISDET_CUDA", "1")
    assert build.cuda_decision(CPU_TORCH) == nvcc


def test_visdet_cuda_0_and_nonsense(build, nvcc, monkeypatch, capsys):
    monkeypatch.setattr(build, "find_nvcc", lambda: nvcc)
    monkeypatch.setenv("VISDET_CUDA", "0")
    assert build.cuda_decision(CUDA_TORCH) is None
    assert "VISDET_CUDA=0" in capsys.readouterr().err
    monkeypatch.setenv("VISDET_CUDA", "yes")
    with pytest.raises(SystemExit, match="must be 0, 1 or unset, got 'yes'"):
        build.cuda_decision(CUDA_TORCH)


def test_doctor_reports_versions_libraries_and_operators():
    done = subprocess.run([sys.executable, "-m", "visdet.doctor"], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    for part in (
        "torch ",
        "torchvision",
        "mmengine",
        "libvisdet_cpu.so",
        "loaded",
        "ms_deform_attn",
        "To do",
    ):
        assert part in done.stdout


def test_doctor_names_a_missing_library_once_and_says_where_it_is_built():
    missing = {"loaded": False, "problem": "/ops/lib.so does not exist", "path": "/ops/lib.so"}
    advice = []
    lines = doctor._libraries({"cpu": missing, "cuda": missing}, advice)
    assert [line.count("/ops/lib.so") for line in lines] == [1, 1] and "in a clone" in advice[0]


def test_doctor_says_who_serves_without_libraries():
    lines = doctor._operators({"cpu": {"loaded": False}, "cuda": {"loaded": False}})
    served = {line.split()[0]: line for line in lines[1:]}
    assert served["ms_deform_attn"].count("none: not built") == 2
    free = [name for name in served if getattr(getattr(ops, name), "needs_no_library", False)]
    assert free and all(served[name].count("plain torch") == 3 for name in free)


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
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (
        "the CPU library is not loaded" in done.stdout
        and "pip install --no-build-isolation -e ." in done.stdout
        and "torch.Size([3, 1, 2, 2])" in done.stdout
    )
