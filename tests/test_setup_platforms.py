"""What the built libraries ask of a machine: its C library, its processor, its NVIDIA driver."""

import ctypes
import math
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import manylinux
import pytest
from programs import run_python

from visdet.ops import build_info

IS_X86_LINUX = platform.machine() == "x86_64" and sys.platform == "linux"


LIBRARY = """
#include <dlfcn.h>
#include <math.h>
#include <pthread.h>
#include <memory>

static void* twice(void* x) { *static_cast<double*>(x) *= 2; return nullptr; }

extern "C" double in_a_thread(double x) {
  std::shared_ptr<int> first = std::make_shared<int>(1), second = first;  // reads __libc_single_threaded
  double y = exp(x) + pow(x, 2.5) * first.use_count();
  pthread_t thread;
  if (pthread_create(&thread, nullptr, twice, &y) != 0) return -1;
  pthread_join(thread, nullptr);
  return dlsym(RTLD_DEFAULT, "no_such_symbol_anywhere") == nullptr ? y : -2;
}
"""


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_a_library_linked_again_needs_an_older_c_library_and_computes_the_same(tmp_path, machine):
    compiler = shutil.which(f"{machine}-linux-gnu-g++")
    if compiler is None:
        pytest.skip("there is no such compiler")
    source, library, assembly = tmp_path / "library.cpp", tmp_path / "library.so", tmp_path / "old.S"
    source.write_text(LIBRARY)
    command = [compiler, "-O2", "-shared", "-fPIC", str(source), "-o", str(library)]
    subprocess.run(command, check=True)
    oldest = f"manylinux_2_28_{machine}"
    if manylinux.platform_tag([library], compiler) == oldest:
        assert not manylinux.lower_glibc(library, assembly, compiler)  # a system as old as that
        return
    assert manylinux.lower_glibc(library, assembly, compiler)
    subprocess.run([*command, str(assembly), f"-Wl,{','.join(manylinux.LINKER_FLAGS)}"], check=True)
    assert manylinux.platform_tag([library], compiler) == oldest
    needed = {
        name: version for name, family, version in manylinux.needed_symbols(library) if family == "GLIBC"
    }
    assert needed["exp"] < (2, 28) and max(needed.values()) <= (2, 28)
    if machine != platform.machine():
        return
    function = ctypes.CDLL(str(library)).in_a_thread
    function.restype, function.argtypes = ctypes.c_double, [ctypes.c_double]
    assert function(1.5) == 2 * (math.exp(1.5) + 1.5**2.5 * 2)


V3 = {
    "avx",
    "avx2",
    "bmi1",
    "bmi2",
    "f16c",
    "fma",
    "abm",
    "movbe",
    "xsave",
    "popcnt",
    "sse4_2",
    "cx16",
    "lahf_lm",
}
V4 = V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}


@pytest.mark.skipif(not IS_X86_LINUX, reason="one instruction set elsewhere")
def test_the_instruction_set_is_the_best_of_which_the_processor_has_every_part():
    line = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags"))
    flags = set(line.split(":")[1].split())
    expected = "AVX-512" if flags >= V4 else "AVX2" if flags >= V3 else "baseline"
    code = "from visdet.ops import build_info; print(build_info()['cpu']['isa'])"
    assert run_python("-c", code, VISDET_CPU_ISA="")[0].strip() == expected


def test_an_unknown_instruction_set_is_an_error():
    code = "import torch, visdet.ops; torch.ops.visdet.cpu_isa()"
    _, said = run_python("-c", code, status=1, VISDET_CPU_ISA="avx10")
    assert "VISDET_CPU_ISA must be baseline, avx2 or avx512, got avx10" in said


DRIVER = """
int cuDriverGetVersion(int* version) { *version = 12040; return 0; }
int cuInit(unsigned flags) { return 0; }
"""


def test_with_an_old_driver_everything_on_the_cpu_works(tmp_path):
    (tmp_path / "driver.c").write_text(DRIVER)
    command = (
        f"g++ -x c -shared -fPIC {tmp_path}/driver.c -o {tmp_path}/libcuda.so.1 -Wl,-soname,libcuda.so.1"
    )
    subprocess.run(command.split(), check=True)
    code = (
        "import torch\n"
        "from visdet.ops import ms_deform_attn\n"
        "value, locations = torch.ones(1, 4, 1, 1), torch.full((1, 1, 1, 1, 1, 2), 0.5)\n"
        "print(ms_deform_attn(value, [(2, 2)], None, locations, torch.ones(1, 1, 1, 1, 1)).item())"
    )
    assert run_python("-c", code, LD_LIBRARY_PATH=str(tmp_path))[0].split() == ["1.0"]


def test_build_info_has_what_the_cuda_library_says_of_itself():
    cuda = build_info()["cuda"]
    if not cuda["loaded"]:
        assert cuda["toolkit"] is None and cuda["native"] == [] and cuda["ptx"] == []
    else:
        assert [int(part) for part in cuda["toolkit"].split(".")] >= [12, 4]
        assert cuda["native"] and all(
            float(name.rstrip("af")) >= 7.5 for name in cuda["native"] + cuda["ptx"]
        )
