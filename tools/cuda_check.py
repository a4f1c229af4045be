"""Compile every .cu file for the oldest supported GPU and for sm_90. No GPU is needed.

No source distinguishes GPUs newer than sm_90: the check of another would compile the same code (``make wheel`` compiles
for all). What ``make setup`` has compiled is not compiled again. If there is no nvcc, it is installed from the package
registry.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

CHECKED = ["75", "90"]
# The compiler, its headers and the CUDA runtime, which must all be of one release.
NVCC_PACKAGES = [
    "nvidia-cuda-nvcc",
    "nvidia-cuda-crt",
    "nvidia-nvvm",
    "nvidia-cuda-runtime",
    "nvidia-cuda-cccl",
]


def main() -> int:
    argparse.ArgumentParser(description=__doc__).parse_args()
    import torch
    from setuptools import Distribution

    import setup as build

    if torch.version.cuda is None:
        print(f"cuda-check: nothing is compiled, because torch {torch.__version__} has no CUDA headers")
        return 0
    if build.find_nvcc() is None:
        print("cuda-check: there is no nvcc, so that it is installed from the package registry", flush=True)
        release = f"=={torch.version.cuda}.*"
        packages = [package + release for package in NVCC_PACKAGES]
        subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", *packages], check=True)
    os.environ["VISDET_CUDA"] = "1"
    command = build.BuildOps(Distribution({"name": "visdet-ops", "ext_modules": []}))
    command.inplace = True
    command.ensure_finalized()
    command.run()

    nvcc = build.cuda_decision(torch)
    built, _ = build.cuda_architectures(nvcc, for_wheel=False)
    left = [name for name in CHECKED if name not in built]
    if left:
        print("cuda-check: compiling for", *(f"sm_{name}" for name in left), flush=True)
        objects = ROOT / "build" / f"cuda-check-torch{torch.__version__}"
        objects.mkdir(parents=True, exist_ok=True)
        rules = build.NinjaFile()
        # Device code alone, as host code is the same for all GPUs. It is never run, and most of a compilation is
        # optimisation.
        flags = ["-fatbin", "-Xcicc=-O0", "-Xptxas=-O0"]
        rules.add_cuda_objects(objects, nvcc, build.gencode_flags(left, []), *flags)
        rules.run(objects)
    print(
        "cuda-check: every .cu file compiles for",
        *(f"sm_{name}" for name in sorted({*built, *left}, key=int)),
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
