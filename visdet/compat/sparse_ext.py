"""The functions of ``sparse_conv_ext``, the extension of ``mmdet3d.ops`` up to mmdet3d 0.18."""

from typing import Any

from torch import Tensor

from visdet import ops
from visdet.ops.mmcv import sparse_conv

from . import _mmcv_functions as own
from ._served import serves


@serves(
    ops.get_indice_pairs,
    "sparse_conv_ext.get_indice_pairs_2d",
    "sparse_conv_ext.get_indice_pairs_3d",
    "sparse_conv_ext.get_indice_pairs_4d",
)
def get_indice_pairs_2d(
    indices: Tensor,
    batch_size: int,
    out_shape: Any,
    spatial_shape: Any,
    ksize: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    out_padding: object,
    subm: bool,
    transpose: bool,
) -> Any: ...


@serves(
    ops.get_indice_pairs,
    "sparse_conv_ext.get_indice_pairs_grid_2d",
    "sparse_conv_ext.get_indice_pairs_grid_3d",
)
def get_indice_pairs_grid_2d(
    indices: Tensor,
    grid: object,
    batch_size: int,
    out_shape: Any,
    spatial_shape: Any,
    ksize: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    out_padding: object,
    subm: bool,
    transpose: bool,
) -> Any: ...


@serves(ops.indice_conv, "sparse_conv_ext.indice_conv_fp32", "sparse_conv_ext.indice_conv_half")
def indice_conv_fp32(
    features: Tensor,
    filters: Tensor,
    indice_pairs: Tensor,
    indice_pair_num: Tensor,
    num_activate_out: int,
    inverse: bool,
    subm: object,
) -> Any: ...


@serves(
    sparse_conv.indice_conv_gradients,
    "sparse_conv_ext.indice_conv_backward_fp32",
    "sparse_conv_ext.indice_conv_backward_half",
)
def indice_conv_backward_fp32(
    features: Tensor,
    filters: Tensor,
    grad_output: Tensor,
    indice_pairs: Tensor,
    indice_pair_num: Tensor,
    inverse: bool,
    subm: object,
) -> Any: ...


@serves(
    own.biased_indice_conv, "sparse_conv_ext.fused_indice_conv_fp32", "sparse_conv_ext.fused_indice_conv_half"
)
def fused_indice_conv_fp32(
    features: Tensor,
    filters: Tensor,
    bias: Tensor,
    indice_pairs: Tensor,
    indice_pair_num: Tensor,
    num_activate_out: int,
    inverse: bool,
    subm: object,
) -> Any: ...


@serves(ops.indice_maxpool, "sparse_conv_ext.indice_maxpool_fp32", "sparse_conv_ext.indice_maxpool_half")
def indice_maxpool_fp32(
    features: Tensor, indice_pairs: Tensor, indice_pair_num: Tensor, num_activate_out: int
) -> Any: ...


@serves(
    sparse_conv.indice_maxpool_gradient,
    "sparse_conv_ext.indice_maxpool_backward_fp32",
    "sparse_conv_ext.indice_maxpool_backward_half",
)
def indice_maxpool_backward_fp32(
    features: Tensor, output: Tensor, grad_output: Tensor, indice_pairs: Tensor, indice_pair_num: Tensor
) -> Any: ...
