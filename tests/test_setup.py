"""setup.py's decisions, and the doctor's report. The build itself is what `make setup` and `make cuda-check` run."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from visdet import doctor

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def build():
    spec = importlib.util.spec_from_file_location("visdet_setup", ROOT / "setup.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def nvcc(tmp_path):
    """A stand-in for nvcc that knows sm_75 to sm_100."""
    path = tmp_path / "cuda" / "bin" / "nvcc"
    path.parent.mkdir(parents=True)
    path.write_text("#!/bin/sh\nprintf 'sm_75\\nsm_80\\nsm_86\\nsm_89\\nsm_90\\nsm_100\\n'\n")
    path.chmod(0o755)
    return path


CUDA_TORCH = SimpleNamespace(__version__="2.14.1", version=SimpleNamespace(cuda="13.0"))
CPU_TORCH = SimpleNamespace(__version__="2.14.1+cpu", version=SimpleNamespace(cuda=None))


def test_targets_torch_2_10(build):
    value = int(build.STABLE_ABI.split("=")[1], 16)
    assert (value >> 56, value >> 48 & 0xFF) == (2, 10)


def test_architectures_of_a_wheel_are_those_nvcc_knows_and_ptx_of_the_last(build, nvcc, monkeypatch):
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    flags = build.cuda_architectures(nvcc, for_wheel=True)
    assert flags == [
        *(f"-gencode=arch=compute_{name},code=sm_{name}" for name in ("75", "80", "86", "89", "90", "100")),
        "-gencode=arch=compute_100,code=compute_100",
    ]


def test_an_editable_install_without_a_gpu_takes_sm_90(build, nvcc, monkeypatch):
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    monkeypatch.setattr(build, "present_gpus", list)
    flags = build.cuda_architectures(nvcc, for_wheel=False)
    assert flags == ["-gencode=arch=compute_90,code=sm_90", "-gencode=arch=compute_90,code=compute_90"]


def test_arch_list_overrides(build, nvcc, monkeypatch):
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.6;9.0+PTX")
    flags = build.cuda_architectures(nvcc, for_wheel=True)
    assert flags == [
        "-gencode=arch=compute_86,code=sm_86",
        "-gencode=arch=compute_90,code=sm_90",
        "-gencode=arch=compute_90,code=compute_90",
    ]


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


def test_doctor_says_who_serves_without_libraries():
    lines = doctor._operators({"cpu": {"loaded": False}, "cuda": {"loaded": False}})
    served = {line.split()[0]: line for line in lines[1:]}
    assert served["ms_deform_attn"].count("none: not built") == 2
    assert served["box_key_points"].count("plain torch") == 3


def test_missing_libraries_raise_one_clear_error(tmp_path):
    package = tmp_path / "visdet"
    (package / "ops").mkdir(parents=True)
    (package / "__init__.py").touch()
    for source in (ROOT / "visdet" / "ops").glob("*.py"):
        (package / "ops" / source.name).write_text(source.read_text())
    code = (
        "import torch\n"
        "from visdet import ops\n"
        "value = torch.zeros(1, 1, 1, 1)\n"
        "try:\n"
        "    ops.ms_deform_attn(value, [(1, 1)], None, torch.zeros(1, 1, 1, 1, 1, 2), torch.zeros(1, 1, 1, 1, 1))\n"
        "except ops.NotBuiltError as error:\n"
        "    print(error)\n"
        "print(ops.box_key_points(torch.zeros(1, 2, 11), torch.zeros(3, 3)).shape)\n"
        "from visdet.ops.ms_deform_attn_projected import ms_deform_attn_projected\n"
        "print('separate layers:', ms_deform_attn_projected(*[value] * 10))\n"
    )
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{code}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (
        "the CPU library is not loaded" in done.stdout
        and "pip install --no-build-isolation -e ." in done.stdout
        and "torch.Size([1, 2, 3, 3])" in done.stdout
        and "separate layers: None" in done.stdout
    )
