"""Labels that grow from kernels of text to their neighbours, in the order of a queue."""

import torch
from torch import Tensor

from .._arguments import check_that, is_index, numbers_to
from .._declared import declared

__all__ = ["contour_expand", "pixel_group"]


def _grow(
    frontier: Tensor, labels: Tensor, is_open: Tensor, shape: torch.Size, fits: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Give the labels of a frontier to the open pixels without one that it reaches, in the order of a queue.

    Return these pixels and where each is reached from.
    """
    H, W = shape
    row, column = (frontier // W)[:, None], (frontier % W)[:, None]
    steps = frontier.new_tensor([[-1, 0], [1, 0], [0, -1], [0, 1]])
    row, column = row + steps[:, 0], column + steps[:, 1]
    is_inside = is_index(row, H) & is_index(column, W)
    source, direction = is_inside.nonzero(as_tuple=True)
    pixel = (row * W + column)[source, direction]
    reaches = (is_open & (labels == 0))[pixel]
    if fits is not None:
        reaches = reaches & fits[labels[frontier[source]], pixel]
    source, pixel = source[reaches], pixel[reaches]
    order = numbers_to(len(pixel), pixel)
    first = order.new_full((H * W,), len(pixel)).scatter_reduce(0, pixel, order, "amin")
    is_first = first[pixel] == order
    source, pixel = source[is_first], pixel[is_first]
    labels[pixel] = labels[frontier[source]]
    return pixel, source


@declared(
    score="floating [H, W]",
    mask="mask [H, W]",
    embedding="floating [H, W, C]",
    kernel_label="integers [H, W]",
    kernel_contour="mask [H, W]",
    kernel_region_num="integer, at least 0, at most 32768",
    distance_threshold="number",
)
def pixel_group(
    score: Tensor,  # [H, W]
    mask: Tensor,  # [H, W] bool
    embedding: Tensor,  # [H, W, C]
    kernel_label: Tensor,  # [H, W]
    kernel_contour: Tensor,  # [H, W]
    kernel_region_num: int,
    distance_threshold: float,
) -> list[list[float]]:
    """Return the pixels of each text: those of its kernel, and neighbours whose embedding is near the kernel's mean.

    Args:
        score: [H, W]. The confidence of each pixel.
        mask: [H, W]. Whether a pixel belongs to any text.
        embedding: [H, W, C]. The embedding of each pixel.
        kernel_label: [H, W]. The kernel 1..kernel_region_num - 1 of each pixel, or 0.
        kernel_contour: [H, W]. Not 0 for the pixels on the contours of kernels, from which texts grow.
        kernel_region_num: The number of kernels, with 0. At most 32768.
        distance_threshold: The distance of embeddings that is too large.

    Returns:
        For each kernel a list of the mean confidence, the number of pixels, and their x and y in the order of rows. The
        first list is that of no kernel, and has two zeros.

    It is not differentiable. It is deterministic.

    Raises:
        ValueError: A shape or a label does not fit. The message names the argument.

    Source: Paper "PAN" (Wang et al.). The signature is mmcv's, which takes NumPy arrays, too.
    """
    W = score.shape[1]
    labels = kernel_label.flatten().long().clamp(min=0)
    if len(labels):
        most, expected = int(labels.max()), "be below kernel_region_num {}"
        check_that(most < kernel_region_num, "pixel_group", "kernel_label", expected, most, kernel_region_num)
    values = embedding.flatten(0, 1).float()
    sums = values.new_zeros(kernel_region_num, values.shape[1]).index_add(0, labels, values)
    means = sums / labels.bincount(minlength=kernel_region_num)[:, None]
    fits = torch.stack([(values - mean).square().sum(1) < distance_threshold**2 for mean in means])
    frontier = ((labels > 0) & (kernel_contour.flatten() != 0)).nonzero()[:, 0]
    is_open = mask.flatten() != 0
    while len(frontier):
        frontier, _ = _grow(frontier, labels, is_open, score.shape, fits)
    texts = [[0.0, 0.0]]
    for label in range(1, kernel_region_num):
        pixels = (labels == label).nonzero()[:, 0]
        confidence = float(score.flatten()[pixels].float().mean()) if len(pixels) else 0.0
        places = torch.stack([pixels % W, pixels // W], 1).flatten().float().tolist()
        texts.append([confidence, float(len(pixels)), *places])
    return texts[:kernel_region_num]


@declared(
    kernel_mask="mask [K, H, W]",
    internal_kernel_label="integers [H, W]",
    min_kernel_area="integer",
    kernel_num="integer, at least 0",
)
def contour_expand(
    kernel_mask: Tensor,  # [K, H, W]
    internal_kernel_label: Tensor,  # [H, W]
    min_kernel_area: int,
    kernel_num: int,
) -> list[list[int]]:
    """Return labels that grow from the smallest kernels through each larger one.

    Args:
        kernel_mask: [K, H, W]. Not 0 within the kernels of each size, the largest first.
        internal_kernel_label: [H, W]. The labels 1..kernel_num of the smallest kernels, or 0.
        min_kernel_area: The number of pixels below which a label is dropped.
        kernel_num: The largest label.

    Returns:
        The labels as a list of rows.

    It is not differentiable. It is deterministic.

    Raises:
        ValueError: A shape does not fit. The message names the argument.

    Source: Paper "PSENet" (Wang et al.). The signature is mmcv's, which takes NumPy arrays, too.
    """
    shape = kernel_mask.shape[1:]
    given = internal_kernel_label.flatten().long()
    _, place, area = given.unique(return_inverse=True, return_counts=True)
    labels = torch.where((given > 0) & (area[place] >= min_kernel_area), given, 0)
    frontier = labels.nonzero()[:, 0]
    for kernel in reversed(kernel_mask[:-1].flatten(1)):
        edges = []
        while len(frontier):
            pixels, source = _grow(frontier, labels, kernel != 0, shape)
            is_edge = torch.ones_like(frontier, dtype=torch.bool)
            is_edge[source] = False
            edges.append(frontier[is_edge])
            frontier = pixels
        frontier = torch.cat([frontier, *edges])
    return labels.view(shape).tolist()
