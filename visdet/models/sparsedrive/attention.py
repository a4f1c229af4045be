"""Attention among instances."""

from typing import Any, Literal

from visdet.registry import MODELS

from ..layers.multihead_attention import MultiheadAttention


@MODELS.register_module()
class MultiheadFlashAttention(MultiheadAttention):
    """``MultiheadAttention`` with batch first, under SparseDrive's type name and with its parameter names.

    The arguments are those of ``MultiheadAttention``, but ``batch_first`` must be True.

    Source: names and defaults are SparseDrive's. Differences: ``scaled_dot_product_attention`` allows any floating type
    on any device; ``attn_mask`` has an effect, so that denoising works; True in ``key_padding_mask`` means padding, as
    everywhere else.
    """

    def __init__(
        self,
        embed_dims: int,
        num_heads: int,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
        dropout_layer: dict[str, Any] | None = None,
        init_cfg: dict[str, Any] | None = None,
        batch_first: Literal[True] = True,
        dropout: float | None = None,
        bias: bool = True,
    ) -> None:
        super().__init__(
            embed_dims,
            num_heads,
            attn_drop,
            proj_drop,
            dropout_layer,
            batch_first,
            dropout,
            bias,
            init_cfg,
        )
