"""Build of visdet's two operator libraries; everything else is in pyproject.toml.

The libraries use libtorch's stable ABI (torch >= 2.10) and no Python API, so one ``py3-none`` wheel serves
every Python and torch. ``libvisdet_cpu.so`` is always built; ``libvisdet_cuda.so`` (static CUDA runtime)
where nvcc 12.4 or newer is found and torch is a CUDA build. A wheel is named by the systems that its libraries
load on (tools/manylinux.py), and one without the CUDA library has the version ``<version>+cpu``.

Environment:
    VISDET_CUDA            1: the CUDA library or an error; 0: no CUDA library; unset: as found.
    TORCH_CUDA_ARCH_LIST   GPU architectures as torch writes them: "8.6;9.0a+PTX", "Ampere Hopper" or "native". Unset:
                           those of WHEEL_ARCHITECTURES in a wheel; in an editable install those of the GPUs present,
                           or 9.0 without one.
    CUDA_HOME              the CUDA toolkit, before nvcc on PATH and the nvidia-cuda-nvcc package.
    CXX, CXXFLAGS, LDFLAGS the C++ compiler, further flags, and those of the linker, as a shell reads them. nvcc hands
                           them on to the C++ compiler. A compiler for another processor needs VISDET_CUDA=0, and -L
                           with the libraries of torch for it (make wheel-aarch64).
    MAX_JOBS               compilations at a time.
"""

import itertools
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.egg_info import egg_info

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "tools"))

import manylinux  # noqa: E402

CSRC = Path("visdet/ops/csrc")
# torch 2.10, the oldest supported: 0x02 major, 0x0a minor (0x0210 would be 2.16).
STABLE_ABI = "-DTORCH_TARGET_VERSION=0x020a000000000000"
CXX = os.environ.get("CXX", "g++")
# Every .cpp below cpu is compiled once per instruction set (see csrc/cpu/kernels.h).
X86_ISAS = {
    "baseline": ["-O1"],
    "avx2": ["-O3", "-march=x86-64-v3"],
    "avx512": ["-O3", "-march=x86-64-v4", "-mprefer-vector-width=512"],
}
# Native code runs on GPUs of its major capability from its minor one on: 100 serves 10.3, too. 87, 110 and 121 are
# embedded GPUs, for which native code of other GPUs is not promised to run. An nvcc before 13.0 lacks 110 and 121.
WHEEL_ARCHITECTURES = ["75", "80", "86", "87", "89", "90", "100", "110", "120", "121"]
# PTX is compiled by the driver for any later GPU: that of 80 for 8.8, that of 100 for 11.0 where the wheel lacks its
# native code, and that of 120 for what comes after it.
WHEEL_PTX = ["80", "100", "120"]
OLDEST_NVCC = (12, 4)  # __maxnreg__
# The .cu files that are compiled together, by the name of their object. Every compilation reads torch's headers, which
# takes nvcc some 3 s. Each of these takes it about as long as all other files together, which are "cuda_operators".
CUDA_UNITS = {
    "cuda_backward_and_sample": ["ms_deform_attn/backward.cu", "sample/sample_ops.cu"],
    "cuda_ms_deform_attn_forward": ["ms_deform_attn/forward.cu"],
}


def notice(*lines):
    """Print a message that stands out in a build log."""
    rule = "=" * 100
    print(rule, *lines, rule, sep="\n", file=sys.stderr, flush=True)


def find_nvcc():
    """Return the path of nvcc from CUDA_HOME, PATH or site-packages, or None."""
    homes = [os.environ.get(variable) for variable in ("CUDA_HOME", "CUDA_PATH")]
    candidates = [Path(home, "bin", "nvcc") for home in homes if home]
    candidates += [Path(path) for path in [shutil.which("nvcc")] if path]
    sites = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *sys.path} - {""}
    found = (sorted(Path(site).glob("nvidia/*/bin/nvcc"), reverse=True) for site in sites)
    candidates += itertools.chain.from_iterable(found)
    return next((path for path in candidates if path.is_file()), None)


def nvcc_version(nvcc):
    """Return nvcc's (major, minor)."""
    answer = subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout
    release = re.search(r"release (\d+)\.(\d+)", answer)
    if release is None:
        raise SystemExit(f"visdet: {nvcc} --version names no release: {answer.strip()!r}")
    return int(release[1]), int(release[2])


def cuda_architectures(nvcc, for_wheel):
    """Return the architectures to compile native code for and those to add PTX of: (["75", "90a"], ["90a"])."""
    wanted = os.environ.get("TORCH_CUDA_ARCH_LIST", "").replace(";", " ").split()
    if wanted and wanted != ["native"]:
        names, with_ptx = [], []
        for name in wanted:
            of_name, ptx_of_name = named_architectures(name)
            names += [one for one in of_name if one not in names]
            with_ptx += [one for one in ptx_of_name if one not in with_ptx]
    elif for_wheel and not wanted:
        listed = subprocess.run([nvcc, "--list-gpu-code"], capture_output=True, text=True, check=True).stdout
        known = {line.strip().removeprefix("sm_") for line in listed.splitlines() if line.startswith("sm_")}
        names = [name for name in WHEEL_ARCHITECTURES if name in known]
        is_served = names[-1][:-1] in [name[:-1] for name in WHEEL_PTX]
        with_ptx = [name for name in names if name in WHEEL_PTX or (name == names[-1] and not is_served)]
    else:
        names = present_gpus() or ["90"]
        with_ptx = [names[-1]]
    return names, with_ptx


def named_architectures(name):
    """Return the architectures that a word of TORCH_CUDA_ARCH_LIST names, and those of them with PTX.

    It is a capability with or without a letter, such as "9.0a+PTX", or a name that torch expands, such as "Hopper".
    """
    from torch.utils import cpp_extension

    if capability := re.fullmatch(r"(\d+)\.?(\d[af]?)(\+PTX)?", name):
        names = [capability[1] + capability[2]]
        return names, names if capability[3] else []
    before = os.environ["TORCH_CUDA_ARCH_LIST"]
    try:
        os.environ["TORCH_CUDA_ARCH_LIST"] = name
        flags = " ".join(cpp_extension._get_cuda_arch_flags())
    except ValueError:
        raise SystemExit(
            "visdet: TORCH_CUDA_ARCH_LIST must have capabilities such as 9.0, 9.0a or 9.0+PTX, or torch's names such "
            f"as Hopper, got {name!r}"
        ) from None
    finally:
        os.environ["TORCH_CUDA_ARCH_LIST"] = before
    return re.findall(r"code=sm_(\w+)", flags), re.findall(r"code=compute_(\w+)", flags)


def gencode_flags(names, with_ptx):
    """Return nvcc's -gencode flags."""
    flags = [f"-gencode=arch=compute_{name},code=sm_{name}" for name in names]
    return flags + [f"-gencode=arch=compute_{name},code=compute_{name}" for name in with_ptx]


def present_gpus():
    """Return the compute capabilities of this machine's GPUs, such as ['90']; empty without a GPU."""
    if not shutil.which("nvidia-smi"):
        return []
    query = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    answer = subprocess.run(query, capture_output=True, text=True)
    found = {line.strip().replace(".", "") for line in answer.stdout.splitlines() if answer.returncode == 0}
    return sorted((name for name in found if name.isdigit()), key=int)


def find_cuda(torch):
    """Return (nvcc's path, None), or (None, why there will be no CUDA library)."""
    wish = os.environ.get("VISDET_CUDA", "")
    if wish not in ("", "0", "1"):
        raise SystemExit(f"visdet: VISDET_CUDA must be 0, 1 or unset, got {wish!r}")
    if wish == "0":
        return None, "VISDET_CUDA=0"
    nvcc = find_nvcc()
    missing = None
    if nvcc is None:
        missing = "no nvcc in CUDA_HOME, on PATH or in site-packages (pip install nvidia-cuda-nvcc)"
    elif torch.version.cuda is None and wish != "1":
        missing = f"torch {torch.__version__} is a CPU-only build"
    elif nvcc_version(nvcc) < OLDEST_NVCC:
        found, oldest = (".".join(map(str, version)) for version in (nvcc_version(nvcc), OLDEST_NVCC))
        missing = f"{nvcc} is of CUDA {found}, and visdet needs {oldest} or newer (CUDA_HOME chooses another)"
    if missing is not None and wish == "1":
        raise SystemExit(f"visdet: VISDET_CUDA=1, but {missing}")
    return (nvcc, None) if missing is None else (None, missing)


def cuda_decision(torch):
    """Return nvcc's path, or None; say loudly why not."""
    nvcc, missing = find_cuda(torch)
    if missing == "VISDET_CUDA=0":
        notice("visdet: the CUDA library is NOT built: VISDET_CUDA=0.")
    elif missing is not None:
        notice(
            "visdet: the CUDA library is NOT built:",
            f"{missing}.",
            "Operators will run on the CPU only. VISDET_CUDA=1 makes this an error, VISDET_CUDA=0 a choice.",
        )
    return nvcc


def common_sources():
    """Return the sources whose objects both libraries are linked from."""
    return sorted((ROOT / CSRC / "common").glob("*.cpp"))


def object_stem(source):
    """Return csrc/cuda/op/forward.cu as "cuda_op_forward"."""
    return "_".join(source.relative_to(ROOT / CSRC).with_suffix("").parts)


def common_flags(by_nvcc=False):
    """Return the flags of every compilation. ``by_nvcc`` says that nvcc gets them and calls the C++ compiler."""
    from torch.utils.cpp_extension import include_paths

    includes = [word for path in include_paths() for word in ("-isystem", str(path))]
    # torch's macros put the path of a source into the message of an error: it begins where all machines agree.
    paths = [f"-fmacro-prefix-map={path}/=" for path in (ROOT, *include_paths())]
    for_compiler = paths + shlex.split(os.environ.get("CXXFLAGS", ""))
    if by_nvcc:
        for_compiler = [handed_on(flag) for flag in for_compiler]
    return ["-std=c++20", STABLE_ABI, *includes, f"-I{ROOT / CSRC}", *for_compiler]


def handed_on(flag):
    """Return nvcc's flag that hands a flag on to the C++ compiler, which also links.

    nvcc splits what it hands on at commas without a backslash, and gives it to a shell.
    """
    if flag.startswith(("-L", "-l")) and len(flag) > 2:
        return flag
    if flag.startswith("-Wl,"):
        return f"-Xlinker={flag.removeprefix('-Wl,')}"
    return "-Xcompiler=" + shlex.quote(flag).replace(",", "\\,")


class BuildOps(build_ext):
    """Compile the libraries with ninja into the package folder (editable) or the build folder."""

    def run(self):
        import torch
        from torch.utils.cpp_extension import library_paths

        in_place = self.inplace or getattr(self, "editable_mode", False)
        out_dir = (ROOT if in_place else ROOT / self.build_lib) / "visdet" / "ops"
        kind = f"{'editable' if in_place else 'wheel'}-{manylinux.machine_of(CXX)}"
        objects = ROOT / "build" / f"ops-{kind}-torch{torch.__version__}"
        out_dir.mkdir(parents=True, exist_ok=True)
        objects.mkdir(parents=True, exist_ok=True)
        folders = shlex.split(os.environ.get("LDFLAGS", "")) + [f"-L{path}" for path in library_paths()]
        rpath_free_libraries = [*folders, "-lc10", "-ltorch_cpu", "-ltorch"]

        rules = NinjaFile()
        nvcc = cuda_decision(torch)
        cuda_library = out_dir / "libvisdet_cuda.so"
        if nvcc is not None:
            architectures = cuda_architectures(nvcc, for_wheel=not in_place)
            rules.add_cuda_library(cuda_library, objects, rpath_free_libraries, nvcc, *architectures)
            print("visdet: CUDA library with", nvcc, *gencode_flags(*architectures), flush=True)
        elif cuda_library.exists():
            cuda_library.unlink()  # left from an earlier build: it would not match these sources
        rules.add_cpu_library(out_dir / "libvisdet_cpu.so", objects, rpath_free_libraries)
        rules.run(objects)
        if not in_place:
            for library, command in rules.links.items():
                lower_glibc(library, command, objects)

    def get_outputs(self):
        return [str(path) for path in self.get_output_mapping()]

    def get_output_mapping(self):
        built = Path(self.build_lib) / "visdet" / "ops"
        return {str(path): str(Path("visdet/ops") / path.name) for path in built.glob("libvisdet_*.so")}


def in_ninja(path):
    """Return a path as the rules of ninja write it."""
    return re.sub(r"([$ :])", r"$\1", str(path))


def for_shell(words):
    """Return a command as the rules of ninja write it, which the shell splits into these words."""
    return shlex.join(map(str, words)).replace("$", "$$")


class NinjaFile:
    """The rules of one build. A command is a list of words."""

    def __init__(self):
        self.lines = []
        self.outputs = []
        self.links = {}  # library: its link command
        self.texts = {}  # path: the text of a source that the build writes itself

    def compile(self, command, source, target, needs=""):
        name = f"r{len(self.outputs)}"
        depfile = f"{target}.d"
        inputs = in_ninja(source) + (f" | {in_ninja(needs)}" if needs else "")
        self.lines += [
            f"rule {name}",
            f"  description = {in_ninja(Path(target).name)}",
            f"  command = {for_shell([*command, '-MD', '-MF', depfile, '-c'])} $in -o $out",
            f"  depfile = {depfile.replace('$', '$$')}",
            "  deps = gcc",
            f"build {in_ninja(target)}: {name} {inputs}",
        ]
        self.outputs.append(target)
        return str(target)

    def compile_all(self, command, sources, header, folder, target_of):
        """Add the compilation of sources that all include a header, which is compiled once, into a folder.

        The folder is searched before csrc: a compiler that cannot use what it finds there reads the header itself.
        """
        compiled = self.compile(
            [*command, "-x", "c++-header"], ROOT / CSRC / header, folder / f"{header}.gch"
        )
        first = command.index(f"-I{ROOT / CSRC}")
        command = [*command[:first], f"-I{folder}", *command[first:], "-include", header]
        return [self.compile(command, source, target_of(source), compiled) for source in sources]

    def link(self, command, objects, target, libraries):
        name = f"r{len(self.outputs)}"
        words = [*command, *objects, "-o", target, *libraries]
        self.links[target] = shlex.join(map(str, words))
        self.lines += [f"rule {name}", f"  description = {in_ninja(Path(target).name)}"]
        self.lines += [f"  command = {for_shell(words)}"]
        self.lines += [f"build {in_ninja(target)}: {name} {' '.join(map(in_ninja, objects))}"]
        self.outputs.append(target)

    def add_cpu_library(self, library, objects, libraries):
        flags = [*common_flags(), "-fPIC", "-fvisibility=hidden", "-Wall"]
        # Selects instead of branches need the licence to evaluate both sides.
        flags += ["-fno-math-errno", "-fno-trapping-math"]
        flags += ["-Wno-psabi", "-Wno-unknown-pragmas", "-Wno-maybe-uninitialized"]
        is_x86 = manylinux.machine_of(CXX) == "x86_64"
        flags += ["-DVISDET_HAS_X86_ISAS"] if is_x86 else []
        # Host code takes the compiler twice as long at -O3, and runs no faster. Results at borders are those of plain
        # torch only if operations are rounded one by one (common/rounded.h).
        built = self.compile_all(
            [*shlex.split(CXX), *flags, "-O2", "-ffp-contract=off"],
            [*sorted((ROOT / CSRC).glob("*.cpp")), *common_sources()],
            "common/precompiled.h",
            objects / "host",
            lambda source: objects / f"{object_stem(source)}.o",
        )
        # Of a function of the standard library that several files compile, the linker keeps the first copy: the
        # baseline's come first, so that no processor meets instructions it does not have.
        # x86 processors without AVX2 are old or small. Their kernels take the compiler less than half the time at -O1.
        for isa, isa_flags in X86_ISAS.items() if is_x86 else [("baseline", ["-O3"])]:
            built += self.compile_all(
                [*shlex.split(CXX), *flags, *isa_flags, f"-DVISDET_ISA={isa}"],
                sorted((ROOT / CSRC / "cpu").rglob("*.cpp")),
                "cpu/precompiled.h",
                objects / isa,
                lambda source, isa=isa: objects / f"{object_stem(source)}_{isa}.o",
            )
        self.link([*shlex.split(CXX), "-shared"], built, library, libraries)

    def add_cuda_objects(self, objects, nvcc, gencode, *flags):
        """Add the compilation of every .cu file, in units; return the objects."""
        # USE_CUDA: the stable headers declare the stream shims only then. -O1 is for host code, which launches kernels;
        # device code is always compiled at -O3.
        flags = [
            *common_flags(by_nvcc=True),
            "-O1",
            "-DUSE_CUDA",
            "-Xcompiler=-fPIC,-fvisibility=hidden,-Wall,-Wno-unknown-pragmas",
            "--expt-relaxed-constexpr",
            "-Xfatbin=-compress-all",  # without it some files come out more than twice as large
            *gencode,
            *flags,
        ]
        command = [nvcc, *flags]
        cuda = ROOT / CSRC / "cuda"
        units = {name: [cuda / source for source in sources] for name, sources in CUDA_UNITS.items()}
        others = {*cuda.rglob("*.cu")} - {source for sources in units.values() for source in sources}
        built = []
        for name, sources in {"cuda_operators": sorted(others), **units}.items():
            unit = objects / f"{name}.cu"
            self.texts[unit] = "".join(
                f'#include "{source.relative_to(ROOT / CSRC)}"\n' for source in sources
            )
            built.append(self.compile(command, unit, objects / f"{name}.o"))
        return built

    def add_cuda_library(self, library, objects, libraries, nvcc, names, with_ptx):
        gencode = gencode_flags(names, with_ptx)
        built = self.add_cuda_objects(objects, nvcc, gencode)
        built += [str(objects / f"{object_stem(source)}.o") for source in common_sources()]
        define = f'-DVISDET_CUDA_BUILD="{cuda_build_text(nvcc, names, with_ptx)}"'
        command = [*shlex.split(CXX), "-O2", "-fPIC", "-fvisibility=hidden", define]
        built.append(
            self.compile(command, ROOT / CSRC / "cuda" / "build_info.cpp", objects / "cuda_build_info.o")
        )
        roots = [nvcc.resolve().parent.parent, nvcc.parent.parent]
        toolkit = [f"-L{root / lib}" for root in roots for lib in ("lib64", "lib") if (root / lib).is_dir()]
        self.link(
            [nvcc, "-shared", "-cudart", "static", gencode[0]],
            built,
            library,
            [*toolkit, *map(handed_on, libraries), "-ltorch_cuda"],
        )

    def run(self, objects):
        for source, text in self.texts.items():
            if not source.is_file() or source.read_text() != text:
                source.write_text(text)
        path = objects / "build.ninja"
        path.write_text(
            "\n".join(
                [
                    f"builddir = {in_ninja(objects)}",
                    *self.lines,
                    "default " + " ".join(map(in_ninja, self.outputs)),
                    "",
                ]
            )
        )
        ninja = shutil.which("ninja") or next(iter(Path(sysconfig.get_path("scripts")).glob("ninja*")), None)
        if ninja is None:
            raise SystemExit("visdet: ninja is needed to build the operators: pip install ninja")
        jobs = ["-j", os.environ["MAX_JOBS"]] if os.environ.get("MAX_JOBS") else []
        # ninja 1.13 takes make's job server from MAKEFLAGS, whose file descriptors do not come this far.
        environment = {"NINJA_STATUS": "visdet: compiled %f of %t in %e s: "}
        environment |= {name: value for name, value in os.environ.items() if name != "MAKEFLAGS"}
        if subprocess.run([str(ninja), "-f", str(path), *jobs], env=environment).returncode != 0:
            raise SystemExit("visdet: the operators did not build; the compiler's messages are above.")


def cuda_build_text(nvcc, names, with_ptx):
    """Return what the CUDA library says of itself: "toolkit=13.0 native=7.5,9.0a ptx=9.0a"."""
    lists = [re.sub(r"(\d[af]?)\b", r".\1", ",".join(listed)) for listed in (names, with_ptx)]
    return f"toolkit={'.'.join(map(str, nvcc_version(nvcc)))} native={lists[0]} ptx={lists[1]}"


def lower_glibc(library, link_command, objects):
    """Link a library of a wheel again so that it loads on older systems (see tools/manylinux.py)."""
    assembly, compiled, linked = (objects / f"{library.stem}_glibc{suffix}" for suffix in (".S", ".o", ".so"))
    if not manylinux.lower_glibc(library, assembly, CXX):
        return
    command = [linked if word == str(library) else word for word in shlex.split(link_command)]
    flags = "-Xlinker=" if "nvcc" in command[0] else "-Wl,"
    commands = [
        [*shlex.split(CXX), "-c", assembly, "-o", compiled],
        [*command, compiled, flags + ",".join(manylinux.LINKER_FLAGS)],
    ]
    if all(subprocess.run(command).returncode == 0 for command in commands):
        shutil.move(linked, library)
    else:
        notice(
            f"visdet: {library.name} could not be linked for older systems: it will load on new ones only."
        )


class EggInfo(egg_info):
    """A wheel without the CUDA library is another version, as torch's are: pip tells 0.1.0 from 0.1.0+cpu."""

    def finalize_options(self):
        if {"bdist_wheel", "dist_info", "editable_wheel"} & set(self.distribution.commands):
            import torch

            if find_cuda(torch)[0] is None:
                self.tag_build = "+cpu"
        super().finalize_options()


class Wheel(bdist_wheel):
    """One wheel for every Python: the libraries use no Python API."""

    def finalize_options(self):
        super().finalize_options()
        self.root_is_pure = False

    def get_tag(self):
        if self.plat_name_supplied:
            return "py3", "none", super().get_tag()[2]
        libraries = sorted((ROOT / self.bdist_dir / "visdet" / "ops").glob("libvisdet_*.so"))
        return "py3", "none", manylinux.platform_tag(libraries, CXX) or super().get_tag()[2]


if __name__ == "__main__":
    setup(
        ext_modules=[Extension("visdet.ops._libraries", sources=[])],
        cmdclass={"build_ext": BuildOps, "bdist_wheel": Wheel, "egg_info": EggInfo},
    )
