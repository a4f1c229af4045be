"""Make a kernel repository in the layout of Hugging Face's ``kernels`` from the operators that have been built.

The repository has a folder ``build/torch-stable-abi<torch>-<backend>-<machine>-linux`` for the CPU and, if the CUDA
library has been built, one for CUDA. Such a folder holds the libraries, the package ``visdet.ops`` without its C++ and
CUDA sources, the layers, and metadata.json.
"""

import argparse
import json
import platform
import re
import shutil
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
OPS = ROOT / "visdet" / "ops"
NAME = "visdet-ops"
# The files of visdet.ops that are left out. registration.py is among them because it needs mmengine.
NO_PART = shutil.ignore_patterns("csrc", "__pycache__", "*.so", "registration.py")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--out",
        type=Path,
        default=ROOT / "dist" / "hf-kernel",
        help="folder to write, which is replaced (default: %(default)s)",
    )
    out = parser.parse_args().out
    for variant in make(out):
        print(f"wrote {variant}")


def make(out: Path) -> list[Path]:
    """Write the repository to ``out``, replacing an older one, and return the folders of its variants.

    Raises:
        SystemExit: the operators are not built, or ``out`` holds files that do not belong to a kernel repository.
    """
    from visdet import __version__
    from visdet.ops import build_info

    info = build_info()
    if not info["cpu"]["loaded"]:
        raise SystemExit(f"make_hf_kernel: the CPU library is not loaded: {info['cpu']['problem']}")
    if out.exists():
        if not {path.name for path in out.iterdir()} <= {"build", "README.md", "LICENSE"}:
            raise SystemExit(
                f"make_hf_kernel: {out} has files that do not belong to a kernel repository, so that it is not replaced"
            )
        shutil.rmtree(out)
    backends = {"cpu": ["cpu"]}
    if info["cuda"]["loaded"]:
        backends[f"cu{info['cuda']['toolkit'].replace('.', '')}"] = ["cpu", "cuda"]
    variants = []
    for backend, libraries in backends.items():
        variant = out / "build" / f"torch-stable-abi{oldest_torch()}-{backend}-{platform.machine()}-linux"
        shutil.copytree(OPS, variant / "ops", ignore=NO_PART)
        for library in libraries:
            shutil.copy2(OPS / f"libvisdet_{library}.so", variant / "ops")
        for part in ("__init__.py", "layers.py"):
            shutil.copy2(ROOT / "tools" / "hf_kernel" / part, variant)
        (variant / "metadata.json").write_text(
            json.dumps(metadata(__version__, libraries[-1], info), indent=2) + "\n"
        )
        variants.append(variant)
    shutil.copy2(ROOT / "tools" / "hf_kernel" / "README.md", out)
    shutil.copy2(ROOT / "LICENSE", out)
    return variants


def oldest_torch() -> str:
    """Return the oldest torch that the libraries' stable ABI supports, such as "210" for 2.10. setup.py sets it."""
    major, minor = re.search(r"TORCH_TARGET_VERSION=0x(..)(..)", (ROOT / "setup.py").read_text()).groups()
    return f"{int(major, 16)}{int(minor, 16)}"


def metadata(version: str, backend: str, info: dict[str, Any]) -> dict[str, Any]:
    """Return the contents of metadata.json."""
    backend_info: dict[str, Any] = {"type": backend}
    if backend == "cuda":
        backend_info["archs"] = info["cuda"]["native"]
    return {
        "id": f"{NAME}-{backend}-{version}".replace("-", "_").replace(".", "_"),
        "name": NAME,
        "version": int(version.split(".")[0]),
        "license": "Apache-2.0",
        "python-depends": [],
        "backend": backend_info,
    }


if __name__ == "__main__":
    main()
