"""Which devices operators run on, and the few numbers of a real or an imaginary GPU that choose between kernels."""

from dataclasses import astuple, dataclass

import torch

from ._library import is_loaded, require

__all__ = ["DEVICES", "Device", "is_loaded", "present_device", "require"]


@dataclass(frozen=True)
class Device:
    """The properties of a GPU on which the operators' choice between CUDA kernels depends.

    Args:
        multiprocessors: number of streaming multiprocessors.
        shared_block: number of bytes of shared memory that a block may have after opting in.
        shared_multiprocessor: number of bytes of shared memory of a multiprocessor.
        threads_multiprocessor: largest number of resident threads of a multiprocessor.
        l2_bytes: size of the second-level cache in bytes.
        capability: the compute capability as major * 10 + minor.
    """

    multiprocessors: int
    shared_block: int
    shared_multiprocessor: int
    threads_multiprocessor: int
    l2_bytes: int
    capability: int

    def numbers(self) -> list[int]:
        """Return the fields in the order in which the library expects them."""
        return list(astuple(self))


def _device(
    multiprocessors: int, shared_kib: int, threads: int, l2_mib: int, capability: int, reserved_kib: int = 1
) -> Device:
    return Device(
        multiprocessors,
        (shared_kib - reserved_kib) << 10,
        shared_kib << 10,
        threads,
        l2_mib << 20,
        capability,
    )


# The numbers are from NVIDIA's data sheets and the tables of compute capabilities in the CUDA programming guide.
DEVICES: dict[str, Device] = {
    "T4": _device(40, 64, 1024, 4, 75, reserved_kib=0),
    "A100": _device(108, 164, 2048, 40, 80),
    "RTX 3090": _device(82, 100, 1536, 6, 86),
    "L4": _device(58, 100, 1536, 48, 89),
    "RTX 4090": _device(128, 100, 1536, 72, 89),
    "H100": _device(132, 228, 2048, 50, 90),
    "H200": _device(132, 228, 2048, 60, 90),
    "B200": _device(148, 228, 2048, 126, 100),
    "RTX 5090": _device(170, 100, 1536, 96, 120),
}


def present_device(index: int = 0) -> Device:
    """Return the numbers of the CUDA device ``index``.

    Raises:
        NotBuiltError: the CUDA library is not loaded.
        RuntimeError: there is no such device.
    """
    require("cuda")
    return Device(*torch.ops.visdet_plan.numbers_of_device(index))
