"""Swin Transformer backbones with mmdet's parameter names."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from visdet.checks.arguments import also_takes
from visdet.errors import InvalidInputError
from visdet.execution.capture import keeps_tables, recomputed
from visdet.registry import MODELS

from ..layers.builders import build_dropout
from ..layers.feed_forward import FFN
from ..layers.normalization import build_norm_layer
from ..transfer import to_device
from .pretrained import Backbone

_LN = {"type": "LN"}
_GELU = {"type": "GELU"}
_INIT = [
    {"type": "TruncNormal", "layer": "Linear", "std": 0.02, "bias": 0},
    {"type": "Constant", "layer": "LayerNorm", "val": 1, "bias": 0},
]


class WindowAttention(nn.Module):
    """The weights of attention within windows of ``window`` x ``window`` pixels, and that attention."""

    def __init__(
        self,
        dims: int,
        heads: int,
        window: int,
        qkv_bias: bool,
        qk_scale: float | None,
        attn_drop: float,
        proj_drop: float,
    ) -> None:
        super().__init__()
        self.heads = heads
        self.scale = qk_scale
        self.attn_drop = attn_drop
        sides = 2 * window - 1
        self.relative_position_bias_table = nn.Parameter(torch.empty(sides**2, heads))
        nn.init.trunc_normal_(self.relative_position_bias_table, std=0.02)
        pixel = torch.arange(window)
        place = (pixel.unsqueeze(1) * sides + pixel).flatten()
        center = 2 * window * (window - 1)  # the entry of a pixel and itself
        self.relative_position_index: Tensor
        self.register_buffer("relative_position_index", place.unsqueeze(1) - place + center)
        self.qkv = nn.Linear(dims, dims * 3, bias=qkv_bias)
        self.proj = nn.Linear(dims, dims)
        self.proj_drop = nn.Dropout(proj_drop)

    def forward(self, windows: Tensor, mask: Tensor | None) -> Tensor:
        """Return [B·W, N, C] from the N pixels [B·W, N, C] of W windows, and the mask [W, N, N] that is added."""
        query, key, value = self.qkv(windows).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        bias = self.relative_position_bias_table[self.relative_position_index]
        bias = bias.permute(2, 0, 1).unsqueeze(0)
        if mask is not None:
            bias = (bias + mask.unsqueeze(1)).repeat(len(windows) // len(mask), 1, 1, 1)
        dropout = self.attn_drop if self.training else 0.0
        out = F.scaled_dot_product_attention(
            query, key, value, bias.to(query.dtype).contiguous(), dropout, scale=self.scale
        )
        return self.proj_drop(self.proj(out.transpose(1, 2).flatten(2)))


class ShiftedWindows(nn.Module):
    """Attention within windows that begin ``shift`` pixels from the corner, in both directions."""

    def __init__(self, window: int, shift: int, dropout_layer: nn.Module, attention: WindowAttention) -> None:
        super().__init__()
        self.window = window
        self.shift = shift
        self.w_msa = attention
        self.drop = dropout_layer

    def forward(self, x: Tensor) -> Tensor:
        """Return [B, H, W, C] from x [B, H, W, C]."""
        B, H, W, C = x.shape
        window = self.window
        x = F.pad(x, (0, 0, 0, -W % window, 0, -H % window))
        height, width = x.shape[1:3]
        mask = None
        shift = self.shift
        if shift:
            x = x.roll((-shift, -shift), dims=(1, 2))
            mask = _mask_of_parts(height, width, window, shift, x.device)
        windows = x.unflatten(2, (-1, window)).unflatten(1, (-1, window)).transpose(2, 3)
        out = self.w_msa(windows.flatten(3, 4).flatten(0, 2), mask)
        x = out.view(windows.shape).transpose(2, 3).reshape(B, height, width, C)
        if shift:
            x = x.roll((shift, shift), dims=(1, 2))
        return self.drop(x[:, :H, :W])


@keeps_tables(max_sizes=64)
def _mask_of_parts(height: int, width: int, window: int, shift: int, device: torch.device) -> Tensor:
    """Return the mask [W, N, N] of W windows: -100 for pixels from opposite borders of the image, otherwise 0."""
    with torch.inference_mode(False), torch.no_grad():
        parts = torch.zeros(height, width)
        for border in (window, shift):
            parts[-border:] += 3
            parts[:, -border:] += 1
        parts = parts.view(height // window, window, width // window, window)
        parts = parts.transpose(1, 2).reshape(-1, window * window)
        return to_device((parts.unsqueeze(1) != parts.unsqueeze(2)) * -100.0, device)


class SwinBlock(nn.Module):
    """Attention within windows, and a feed-forward block. A normalisation precedes each of them."""

    def __init__(
        self,
        dims: int,
        window: int,
        shift: int,
        drop_path: float,
        norm_cfg: dict[str, Any],
        attention: WindowAttention,
        ffn_cfg: dict[str, Any],
    ) -> None:
        super().__init__()
        dropout_layer = {"type": "DropPath", "drop_prob": drop_path}
        self.norm1 = build_norm_layer(norm_cfg, dims)
        self.attn = ShiftedWindows(window, shift, build_dropout(dropout_layer), attention)
        self.norm2 = build_norm_layer(norm_cfg, dims)
        self.ffn = FFN(dims, dropout_layer=dropout_layer, **ffn_cfg)

    def forward(self, x: Tensor) -> Tensor:
        """Return [B, H, W, C] from x [B, H, W, C]."""
        x = x + self.attn(self.norm1(x))
        return self.ffn(self.norm2(x), identity=x)


class PatchEmbed(nn.Module):
    """The embedding of the patches of an image, and its normalisation."""

    def __init__(self, in_channels: int, dims: int, patch: int, norm: nn.Module) -> None:
        super().__init__()
        self.patch = patch
        self.projection = nn.Conv2d(in_channels, dims, patch, patch)
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        """Return [B, H, W, C] from images [B, 3, H', W'], which are padded to whole patches."""
        height, width = x.shape[-2:]
        x = F.pad(x, (0, -width % self.patch, 0, -height % self.patch))
        return self.norm(self.projection(x).permute(0, 2, 3, 1))


class PatchMerging(nn.Module):
    """Squares of four pixels merged into one. The pixels of a channel follow one another."""

    def __init__(self, dims: int, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm
        self.reduction = nn.Linear(4 * dims, 2 * dims, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return [B, H / 2, W / 2, 2·C] from x [B, H, W, C]."""
        x = F.pad(x, (0, 0, 0, x.shape[2] % 2, 0, x.shape[1] % 2))
        x = F.pixel_unshuffle(x.permute(0, 3, 1, 2), 2).permute(0, 2, 3, 1)
        return self.reduction(self.norm(x))


class SwinStage(nn.Module):
    """Blocks, every other one with shifted windows, and what merges patches for the next stage."""

    def __init__(self, blocks: list[SwinBlock], downsample: PatchMerging | None, with_cp: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.downsample = downsample
        self.with_cp = with_cp

    def forward(self, x: Tensor) -> Tensor:
        """Return [B, H, W, C] from x [B, H, W, C]."""
        for block in self.blocks:
            x = recomputed(block, x) if self.with_cp and x.requires_grad else block(x)
        return x


@MODELS.register_module()
class SwinTransformer(Backbone):
    """Swin Transformer, which returns the normalised feature maps of chosen stages.

    Args:
        pretrain_img_size: accepted for mmdet's configs, without effect.
        in_channels: channels of the image. embed_dims: channels of the first stage. Each further stage has twice as
            many.
        patch_size: side of a patch. strides: that of the patches, and that of the merging before each further stage,
            which must be 2.
        window_size: side of a window in patches. mlp_ratio: hidden channels of a feed-forward block per channel.
        depths, num_heads: number of blocks and of heads of each stage.
        out_indices: the stages to return, counted from 0.
        qkv_bias: whether the projections have a bias. qk_scale: replaces 1 / sqrt(channels of a head).
        patch_norm: whether patches are normalised before they are merged, and after they are embedded.
        drop_rate, attn_drop_rate: dropout of outputs and of attention weights.
        drop_path_rate: probability that the last block is left out. It grows linearly from 0 for the first block.
        act_cfg, norm_cfg: configs of activations and normalisations.
        with_cp: recompute each block's activations in the backward pass instead of keeping them. A CUDA graph keeps
            them nevertheless while anything is dropped.
        convert_weights: whether the checkpoint of ``init_cfg`` has the names of the original implementation.
        frozen_stages: number of stages that are frozen together with the embedding, or -1.
        init_cfg: ``dict(type='Pretrained', checkpoint=...)`` (see ``load_pretrained``) or mmengine's initialisers.

    Raises:
        ValueError: the numbers of stages differ, or a stride is not supported.

    Source: Liu et al., Swin Transformer, ICCV 2021; keywords and parameter names are mmdet's.
    """

    @also_takes(use_abs_pos_embed=False, pretrained=None)
    def __init__(
        self,
        pretrain_img_size: int | Sequence[int] = 224,
        in_channels: int = 3,
        embed_dims: int = 96,
        patch_size: int = 4,
        window_size: int = 7,
        mlp_ratio: int = 4,
        depths: Sequence[int] = (2, 2, 6, 2),
        num_heads: Sequence[int] = (3, 6, 12, 24),
        strides: Sequence[int] = (4, 2, 2, 2),
        out_indices: Sequence[int] = (0, 1, 2, 3),
        qkv_bias: bool = True,
        qk_scale: float | None = None,
        patch_norm: bool = True,
        drop_rate: float = 0.0,
        attn_drop_rate: float = 0.0,
        drop_path_rate: float = 0.1,
        act_cfg: dict[str, Any] = _GELU,
        norm_cfg: dict[str, Any] = _LN,
        with_cp: bool = False,
        convert_weights: bool = False,
        frozen_stages: int = -1,
        init_cfg: dict[str, Any] | list[dict[str, Any]] | None = None,
    ) -> None:
        num_stages = len(depths)
        super().__init__(init_cfg, _INIT, num_stages, out_indices, frozen_stages)
        expected_strides = (patch_size, 2, 2, 2)[:num_stages]
        if len(num_heads) != num_stages or tuple(strides[:num_stages]) != expected_strides:
            raise InvalidInputError(
                "SwinTransformer: depths and num_heads must have one number for each stage, and strides must be "
                f"patch_size, 2, 2, 2, got {tuple(depths)}, {tuple(num_heads)}, {tuple(strides)}"
            )
        self.convert_weights = convert_weights

        patch_norm_cfg = norm_cfg if patch_norm else {"type": "Identity"}
        embed_norm = build_norm_layer(patch_norm_cfg, embed_dims)
        self.patch_embed = PatchEmbed(in_channels, embed_dims, patch_size, embed_norm)
        self.drop_after_pos = nn.Dropout(drop_rate)
        self.stages = nn.ModuleList()
        drop_path_step = drop_path_rate / max(sum(depths) - 1, 1)
        for stage, (depth, heads) in enumerate(zip(depths, num_heads, strict=True)):
            dims = embed_dims * 2**stage
            ffn_cfg = {"feedforward_channels": mlp_ratio * dims, "act_cfg": act_cfg, "ffn_drop": drop_rate}
            blocks = []
            for index in range(depth):
                attention = WindowAttention(
                    dims, heads, window_size, qkv_bias, qk_scale, attn_drop_rate, drop_rate
                )
                shift = window_size // 2 * (index % 2)
                drop_path = drop_path_step * (sum(depths[:stage]) + index)
                blocks.append(SwinBlock(dims, window_size, shift, drop_path, norm_cfg, attention, ffn_cfg))
            is_last = stage == num_stages - 1
            downsample = None if is_last else PatchMerging(dims, build_norm_layer(patch_norm_cfg, 4 * dims))
            self.stages.append(SwinStage(blocks, downsample, with_cp))
        for stage in self.out_indices:
            self.add_module(f"norm{stage}", build_norm_layer(norm_cfg, embed_dims * 2**stage))
        self.freeze()

    def init_weights(self) -> None:
        """Initialise all weights, then load the pretrained weights that the config names."""
        super().init_weights()
        self.load_pretrained(self.converted if self.convert_weights else None)

    def converted(self, original: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return a state dict of the original implementation with the names and the order of channels of this one."""
        converted = {name: value for name, value in self.state_dict().items() if name.startswith("norm")}
        renamed = {
            "layers.": "stages.",
            "attn.": "attn.w_msa.",
            "mlp.fc1.": "ffn.layers.0.0.",
            "mlp.fc2.": "ffn.layers.1.",
            "patch_embed.proj.": "patch_embed.projection.",
        }
        for name, value in original.items():
            if name.startswith(("head.", "norm.")) or name.endswith("attn_mask"):
                continue
            if "downsample" in name:  # The original merges pixels before channels, and columns before rows.
                value = value.unflatten(-1, (2, 2, -1)).transpose(-3, -1).flatten(-3)
            for old, new in renamed.items():
                name = name.replace(old, new)
            converted[name] = value
        return converted

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return the maps [B, C_i, H_i, W_i] of stages ``out_indices`` from images x [B, in_channels, H, W]."""
        x = self.drop_after_pos(self.patch_embed(x))
        outs = []
        for index, stage in enumerate(self.stages):
            x = stage(x)
            if index in self.out_indices:
                outs.append(getattr(self, f"norm{index}")(x).permute(0, 3, 1, 2).contiguous())
            downsample: Any = stage.downsample
            x = x if downsample is None else downsample(x)
        return tuple(outs)

    def frozen_parts(self) -> list[nn.Module]:
        norms = [getattr(self, f"norm{i}") for i in self.out_indices if i < self.frozen_stages]
        return [self.patch_embed, self.drop_after_pos, *self.stages[: self.frozen_stages], *norms]
