"""Report versions, libraries, who computes the operators, and what should be done."""

import argparse
import importlib
import platform
import sys

from visdet.checks.installed import installed_version

# The distributions and their purposes.
_PACKAGES = {
    "torch": "everything",
    "torchvision": "transforms, backbones' weights, box operators",
    "mmengine": "registries, configs, the training loop",
    "numpy": "data",
    "scipy": "Hungarian matching",
    "opencv-python": "mmengine's visualizer",
    "faster-coco-eval": "COCO metrics (or pycocotools)",
    "tensorboard": "training curves",
}
# What is imported of a distribution, and what to do if that fails.
_REMEDIES = {
    "opencv-python": ("cv2", "pip install --force-reinstall opencv-python-headless"),
    "torchvision": ("torchvision", "install torch and torchvision as a matching pair"),
}
# docs/installation.md has the same table.
_MACHINES = {
    "Linux x86_64": "supported, with NVIDIA GPUs and without; not with ROCm",
    "Linux aarch64": "the CPU operators passed tests under emulation; GPUs are not tested",
}


def _packages(advice: list[str]) -> list[str]:
    machine = f"{platform.system()} {platform.machine()}"
    supported = _MACHINES.get(machine, "not supported: operators that need no library run in plain torch")
    rows = [("Python", platform.python_version(), sys.executable), ("system", machine, supported)]
    missing = []
    for name, purpose in _PACKAGES.items():
        version = installed_version(name)
        if name == "opencv-python":
            version = version or installed_version("opencv-python-headless")
        rows.append((name, version or "MISSING", purpose))
        if version is None:
            missing.append(name)
        elif name in _REMEDIES:
            module, remedy = _REMEDIES[name]
            try:
                importlib.import_module(module)
            except (ImportError, RuntimeError) as error:
                advice.append(f"{module} does not import ({error}): {remedy}")
    if missing:
        advice.append(
            f"for models, data sets and training: pip install 'visdet-ops[train]' (missing: {', '.join(missing)})"
        )
    if other := installed_version("visdet"):
        rows.append(("visdet", other, "ANOTHER PROJECT with the same import name"))
        advice.append(
            "the distribution visdet is another project, which overwrites files of visdet-ops: pip uninstall visdet, "
            "and then install visdet-ops again"
        )
    return [f"  {name:18} {version}  ({remark})" for name, version, remark in rows]


def _libraries(info: dict, advice: list[str]) -> list[str]:
    lines = []
    is_loaded = {}
    for name in ("cpu", "cuda"):
        fact = info[name].get
        isa, toolkit, loaded = fact("isa"), fact("toolkit"), fact("loaded")
        kernels = f", {isa} kernels" if isa else ""
        is_loaded[name] = loaded
        state = f"loaded{kernels}  ({fact('path')})" if loaded else f"NOT LOADED: {fact('problem')}"
        lines.append(f"  {name:5} {state}")
        if toolkit:
            native, ptx = (", ".join(fact(kind)) or "none" for kind in ("native", "ptx"))
            lines.append(
                f"        compiled with CUDA {toolkit} for GPUs of compute capability {native}; PTX of {ptx}"
            )
    if not is_loaded["cpu"]:
        advice.append(
            "build the operators, in a clone: pip install --no-build-isolation -e . (or make setup)"
        )
    elif not is_loaded["cuda"]:
        advice.append(
            "for CUDA operators: install a wheel without +cpu in its name; or a CUDA build of torch and nvcc "
            "(pip install nvidia-cuda-nvcc), then in a clone VISDET_CUDA=1 pip install --no-build-isolation -e ."
        )
    return lines


def _gpus(info: dict, advice: list[str]) -> list[str]:
    import torch

    gpus, cuda = torch.cuda, torch.version.cuda
    if not gpus.is_available():
        reason = "torch is a CPU-only build" if cuda is None else "torch finds no usable GPU or driver"
        return [f"  none ({reason}); everything runs on the CPU"]
    lines = [f"  CUDA {cuda} in torch"]
    for index in range(gpus.device_count()):
        properties = gpus.get_device_properties(index)
        capability = f"{properties.major}.{properties.minor}"
        memory = properties.total_memory / 2**30
        lines.append(f"  {index}: {properties.name}, compute capability {capability}, {memory:.0f} GiB")
        if info["cuda"]["loaded"]:
            lines.append(_kernels_on_gpu(index, capability, advice))
    return lines


def _kernels_on_gpu(index: int, capability: str, advice: list[str]) -> str:
    import torch

    try:
        probe = torch.ones(1, 1, 1, 1, 1, device=f"cuda:{index}")
        torch.ops.visdet.ms_deform_attn.default(
            probe[0],
            torch.tensor([[1, 1]]),
            torch.tensor([0]),
            probe.new_full((1, 1, 1, 1, 1, 2), 0.5),
            probe,
        )
        torch.cuda.synchronize(index)
    except RuntimeError as error:
        advice.append(
            f'update the NVIDIA driver, or rebuild for GPU {index}: TORCH_CUDA_ARCH_LIST="{capability}" pip install '
            "--no-build-isolation -e ."
        )
        return f"     visdet's kernels do NOT run on it: {error}"
    return "     visdet's kernels run on it"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command ``visdet doctor``: there are none."""


def run(_: argparse.Namespace) -> int:
    """Print the report and the list of things to do; return 1 if the CPU operators are missing, else 0."""
    import visdet
    from visdet.ops import build_info

    advice: list[str] = []
    info = build_info()
    cpu, cuda = (
        f"visdet ({language})" if info[device]["loaded"] else "none, but for those in plain torch"
        for device, language in (("cpu", "C++"), ("cuda", "CUDA"))
    )
    sections = {
        f"visdet {visdet.__version__}": _packages(advice),
        "Operator libraries": _libraries(info, advice),
        "Operators": [f"  CPU: {cpu}. CUDA: {cuda}. Other devices: plain torch"],
        "GPUs": _gpus(info, advice),
        "To do": [f"  {line}" for line in advice] or ["  nothing: all is well"],
    }
    print("\n".join("\n".join([title, *lines, ""]) for title, lines in sections.items()))
    return 0 if info["cpu"]["loaded"] else 1


if __name__ == "__main__":
    sys.exit(run(argparse.ArgumentParser(prog="python -m visdet.doctor", description=__doc__).parse_args()))
