"""Compile every .cu file for sm_90, with or without a GPU; fetch nvcc from the package registry if there is none."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

# The compiler, its headers and the CUDA runtime, as one release of the package registry.
NVCC_PACKAGES = [
    "nvidia-cuda-nvcc",
    "nvidia-cuda-crt",
    "nvidia-nvvm",
    "nvidia-cuda-runtime",
    "nvidia-cuda-cccl",
]


def main() -> int:
    import torch
    from setuptools import Distribution

    import setup as build

    if torch.version.cuda is None:
        print(f"cuda-check: skipped, torch {torch.__version__} has no CUDA headers")
        return 0
    if build.find_nvcc() is None:
        print("cuda-check: no nvcc here; installing it from the package registry", flush=True)
        release = f"=={torch.version.cuda}.*"
        packages = [package + release for package in NVCC_PACKAGES]
        subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", *packages], check=True)
    os.environ["VISDET_CUDA"] = "1"
    os.environ.setdefault("TORCH_CUDA_ARCH_LIST", "9.0+PTX")
    command = build.BuildOps(Distribution({"name": "visdet-ops", "ext_modules": []}))
    command.inplace = True
    command.ensure_finalized()
    command.run()
    print("cuda-check: every .cu file compiles")
    return 0


if __name__ == "__main__":
    sys.exit(main())
