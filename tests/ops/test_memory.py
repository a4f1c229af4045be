"""Memory that does not suffice within an operator raises what torch raises; and no library holds paths of a build."""

import functools
import re
from pathlib import Path

import pytest
import torch

from visdet import ops

OPS = Path(ops.__file__).parent


def roi_align(device):
    images = torch.ones(1, 1, 4, 4, device=device, requires_grad=True)
    return ops.roi_align(images, torch.ones(1, 5, device=device).expand(1 << 18, 5), 1 << 12, 1.0, 1)


# Each needs 16 TiB for its result.
CALLS = {
    "roi_align": roi_align,
    "roi_align without gradients": torch.no_grad()(roi_align),
    "box_iou_rotated": lambda on: ops.box_iou_rotated(*[torch.ones(1, 5, device=on).expand(1 << 21, 5)] * 2),
    "compiled": torch.compile(roi_align, backend="aot_eager"),
}


of_each_call = pytest.mark.parametrize("call", CALLS)


@of_each_call
def test_a_cpu_without_the_memory_raises_what_torch_raises(call):
    with pytest.raises(
        RuntimeError, match=r"DefaultCPUAllocator: can't allocate memory.* 17592186044416 byte"
    ) as raised:
        CALLS[call]("cpu")
    assert "/" not in str(raised.value) and "API call failed" not in str(raised.value)


@pytest.mark.cuda
@of_each_call
def test_a_gpu_without_the_memory_raises_torchs_error(call):
    with pytest.raises(torch.OutOfMemoryError, match=r"^CUDA out of memory. Tried to allocate"):
        CALLS[call]("cuda")


@pytest.fixture
def little_memory():
    torch.cuda.empty_cache()
    limit = torch.cuda.memory_reserved() + (256 << 20)  # Other tests of the process may have left tables.
    torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.get_device_properties(0).total_memory)
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.cuda
def test_a_backward_and_a_copy_without_memory_raise_torchs_error(little_memory):
    images = torch.ones(160 << 18, device="cuda")[None, None, None].requires_grad_()  # 160 MiB
    output = ops.roi_align(images, torch.ones(1, 5, device="cuda"), 1, 1.0, 1)
    is_refused = functools.partial(pytest.raises, torch.OutOfMemoryError, match="CUDA out of memory")
    with is_refused():
        output.sum().backward()
    with is_refused():  # of the contiguous copy
        ops.roi_align(images.view(1, 1, 1 << 12, -1).mT, torch.ones(1, 5, device="cuda"), 1, 1.0, 1)
    boxes = images.detach().view(-1, 4)
    with is_refused():
        ops.nms(boxes, boxes[:, 0], 0.5)


@pytest.mark.parametrize("library", sorted(OPS.glob("libvisdet_*.so")), ids=lambda path: path.name)
def test_the_libraries_hold_no_path_of_a_source(library):
    paths = set(re.findall(rb"(?<![\w.+-])/[\w/.+-]+\.(?:h|cpp|cuh?)\b", library.read_bytes()))
    assert not paths


def test_operators_are_called_by_their_overloads():
    """Only an overload raises torch's errors (``_library.explain_failures``)."""
    calls = re.compile(r"torch\.ops\.visdet\.\w+\(")
    assert not [
        path for path in OPS.rglob("*.py") if re.search(calls, path.read_text().replace("cpu_isa(", ""))
    ]
