"""Published weights: where they are, and the rules by which those of other projects get visdet's names.

The rules are pairs of a regular expression and its replacement, which are applied to a name in turn. A replacement that
ends in ``@`` and a number makes its tensor that part of a larger one. ``{last}`` is the number of the last branch of
the head.
"""

import re
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["PUBLISHED", "converted"]

_MMDET = "https://download.openmmlab.com/mmdetection/v3.0"
_HUB = "https://huggingface.co/SenseTime/{}/resolve/main/model.safetensors"
_SPARSEDRIVE = "https://github.com/swc-17/SparseDrive/releases/download/v1.0"
# The config that the weights belong to, and their address, by the name that --from and the other commands take.
PUBLISHED = {
    "deformable-detr_r50_coco": (
        "deformable_detr/deformable-detr_r50_16xb2-50e_coco",
        f"{_MMDET}/deformable_detr/deformable-detr_r50_16xb2-50e_coco/deformable-detr_r50_16xb2-50e_coco_20221029_210934-6bc7d21b.pth",
    ),
    "deformable-detr-refine_r50_coco": (
        "deformable_detr/deformable-detr-refine_r50_16xb2-50e_coco",
        f"{_MMDET}/deformable_detr/deformable-detr-refine_r50_16xb2-50e_coco/deformable-detr-refine_r50_16xb2-50e_coco_20221022_225303-844e0f93.pth",
    ),
    "deformable-detr-refine-twostage_r50_coco": (
        "deformable_detr/deformable-detr-refine-twostage_r50_16xb2-50e_coco",
        f"{_MMDET}/deformable_detr/deformable-detr-refine-twostage_r50_16xb2-50e_coco/deformable-detr-refine-twostage_r50_16xb2-50e_coco_20221021_184714-acc8a5ff.pth",
    ),
    "dino-4scale_r50_coco": (
        "dino/dino-4scale_r50_8xb2-12e_coco",
        f"{_MMDET}/dino/dino-4scale_r50_8xb2-12e_coco/dino-4scale_r50_8xb2-12e_coco_20221202_182705-55b2bba2.pth",
    ),
    "dino-5scale_swin-l_coco": (
        "dino/dino-5scale_swin-l_8xb2-12e_coco",
        f"{_MMDET}/dino/dino-5scale_swin-l_8xb2-12e_coco/dino-5scale_swin-l_8xb2-12e_coco_20230228_072924-a654145f.pth",
    ),
    "hf-deformable-detr": (
        "deformable_detr/deformable-detr_r50_16xb2-50e_coco",
        _HUB.format("deformable-detr"),
    ),
    "hf-deformable-detr-refine": (
        "deformable_detr/deformable-detr-refine_r50_16xb2-50e_coco",
        _HUB.format("deformable-detr-with-box-refine"),
    ),
    "hf-deformable-detr-refine-twostage": (
        "deformable_detr/deformable-detr-refine-twostage_r50_16xb2-50e_coco",
        _HUB.format("deformable-detr-with-box-refine-two-stage"),
    ),
    "sparse4dv3_r50": (
        "sparsedrive/sparse4dv3_r50_8xb6_nuscenes",
        "https://github.com/HorizonRobotics/Sparse4D/releases/download/v3.0/sparse4dv3_r50.pth",
    ),
    "sparsedrive_r50_stage1": (
        "sparsedrive/sparsedrive_r50_stage1_8xb8_nuscenes",
        f"{_SPARSEDRIVE}/sparsedrive_stage1.pth",
    ),
    "sparsedrive_r50_stage2": (
        "sparsedrive/sparsedrive_r50_stage2_8xb6_nuscenes",
        f"{_SPARSEDRIVE}/sparsedrive_stage2.pth",
    ),
}

_LAYER = r"^((?:en|de)coder\.layers\.\d+)\."
_DECODER = r"^(decoder\.layers\.\d+)\."
# What the original implementations and transformers call alike.
_SHARED = [
    (r"^(?:decoder\.)?class_embed\.", "bbox_head.cls_branches."),
    (r"^enc_out_class_embed\.", "bbox_head.cls_branches.{last}."),
    *(
        (rf"^(?:decoder\.)?bbox_embed\.(\d+)\.layers\.{k}\.", rf"bbox_head.reg_branches.\1.{2 * k}.")
        for k in range(3)
    ),
    *(
        (rf"^enc_out_bbox_embed\.layers\.{k}\.", f"bbox_head.reg_branches.{{last}}.{2 * k}.")
        for k in range(3)
    ),
    (r"^enc_output\.", "memory_trans_fc."),
    (r"^enc_output_norm\.", "memory_trans_norm."),
    (r"^pos_trans\.", "pos_trans_fc."),
    (r"^reference_points\.", "reference_points_fc."),
    (r"^(?:query_embed|tgt_embed|query_position_embeddings)\.", "query_embedding."),
    (r"^label_enc\.", "dn_query_generator.label_embedding."),
]
# A name that only the weights of a project have, and its rules. mmdet's names since version 3 are visdet's.
_FORMATS: list[tuple[str, list[tuple[str, str]]]] = [
    (  # transformers
        r"^model\.encoder\.layers\.0\.self_attn_layer_norm\.weight",
        [
            (r"^model\.", ""),
            (r"^backbone\.(?:conv_encoder\.)?model\.(?:_backbone\.)?", "backbone."),
            (r"^backbone\.embedder\.embedder\.convolution\.", "backbone.conv1."),
            (r"^backbone\.embedder\.embedder\.normalization\.", "backbone.bn1."),
            *((rf"^backbone\.encoder\.stages\.{k}\.layers\.", f"backbone.layer{k + 1}.") for k in range(4)),
            *((rf"\.layer\.{k}\.convolution\.", f".conv{k + 1}.") for k in range(3)),
            *((rf"\.layer\.{k}\.normalization\.", f".bn{k + 1}.") for k in range(3)),
            (r"\.shortcut\.convolution\.", ".downsample.0."),
            (r"\.shortcut\.normalization\.", ".downsample.1."),
            (rf"{_LAYER}self_attn_layer_norm\.", r"\1.norms.0."),
            (rf"{_DECODER}encoder_attn_layer_norm\.", r"\1.norms.1."),
            (rf"{_DECODER}final_layer_norm\.", r"\1.norms.2."),
            (rf"{_LAYER}final_layer_norm\.", r"\1.norms.1."),
            (rf"{_LAYER}(?:mlp\.)?fc1\.", r"\1.ffn.layers.0.0."),
            (rf"{_LAYER}(?:mlp\.)?fc2\.", r"\1.ffn.layers.1."),
            (rf"{_DECODER}encoder_attn\.", r"\1.cross_attn."),
            *(
                (rf"{_DECODER}self_attn\.{part}_proj\.(\w+)$", rf"\1.self_attn.attn.in_proj_\2@{index}")
                for index, part in enumerate("qkv")
            ),
            (rf"{_DECODER}self_attn\.o(?:ut)?_proj\.", r"\1.self_attn.attn.out_proj."),
            *_SHARED,
        ],
    ),
    (  # the original implementations
        r"^transformer\.encoder\.layers\.0\.linear1\.weight",
        [
            (r"^transformer\.", ""),
            (r"^backbone\.0\.(?:body\.)?", "backbone."),
            (rf"{_LAYER}linear1\.", r"\1.ffn.layers.0.0."),
            (rf"{_LAYER}linear2\.", r"\1.ffn.layers.1."),
            (rf"{_DECODER}self_attn\.", r"\1.self_attn.attn."),
            *((rf"{_DECODER}norm{old}\.", rf"\1.norms.{new}.") for old, new in ((2, 0), (1, 1), (3, 2))),
            *((rf"{_LAYER}norm{k}\.", rf"\1.norms.{k - 1}.") for k in (1, 2)),
            *_SHARED,
        ],
    ),
    (  # mmdet 2
        r"^bbox_head\.transformer\.",
        [
            (r"^bbox_head\.(?:transformer\.)?(?!cls_branches|reg_branches)", ""),
            (r"^level_embeds$", "level_embed"),
            (rf"{_LAYER}attentions\.0\.", r"\1.self_attn."),
            (rf"{_DECODER}attentions\.1\.", r"\1.cross_attn."),
            (rf"{_LAYER}ffns\.0\.", r"\1.ffn."),
            *_SHARED,
        ],
    ),
]
# COCO's categories have 80 of the numbers from 1 to 90. The original implementations have an output for each number.
_NO_CATEGORY = {12, 26, 29, 30, 45, 66, 68, 69, 71, 83}
_OF_COCO = [number for number in range(1, 91) if number not in _NO_CATEGORY]
_CLASSES = re.compile(r"bbox_head\.cls_branches\.(\d+)\.|dn_query_generator\.label_embedding\.")
_BRANCH = re.compile(r"(bbox_head\.(?:cls|reg)_branches\.)\d+\.")


def converted(weights: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Return weights of another project under visdet's names, and weights of visdet or mmdet 3 as they are.

    Outputs for the numbers of COCO's categories become those of its 80 classes if the model has so many. Branches of
    the head that the other project shares are repeated.
    """
    found = [rules for name, rules in _FORMATS if any(re.match(name, key) for key in weights)]
    if not found:
        return weights
    expected = model.state_dict()
    last = str(max((int(match[1] or 0) for key in expected if (match := _CLASSES.match(key))), default=0))
    count = sum(re.fullmatch(r"neck\.convs\.\d+\.conv\.weight", key) is not None for key in expected)
    levels = [f"convs.{k}." if k < count else f"extra_convs.{k - count}." for k in range(8)]
    rules = [(old, new.replace("{last}", last)) for old, new in found[0]]
    for k, level in enumerate(levels):
        rules += [
            (rf"^input_proj\.{k}\.0\.", f"neck.{level}conv."),
            (rf"^input_proj\.{k}\.1\.", f"neck.{level}gn."),
        ]
    parts: dict[str, dict[str, Tensor]] = {}
    for key, value in weights.items():
        for old, new in rules:
            key = re.sub(old, new, key)
        key, _, part = key.partition("@")
        parts.setdefault(key, {})[part] = value
    result = {
        key: those[""] if "" in those else torch.cat([those[number] for number in sorted(those)])
        for key, those in parts.items()
    }
    adapted = _of_classes(_of_backbone(result, model), expected, last)
    # Branches of the head that are missing are those of the first layer.
    firsts = {key: _BRANCH.sub(r"\g<1>0.", key) for key in expected if key not in adapted}
    return adapted | {key: adapted[first] for key, first in firsts.items() if first in adapted}


def _of_backbone(weights: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Return weights whose Swin transformer, if they have one, has the names and the order of channels of visdet's."""
    own = {key[9:]: value for key, value in weights.items() if key.startswith("backbone.")}
    backbone: Any = model.backbone
    if "layers.0.blocks.0.norm1.weight" not in own or not hasattr(backbone, "converted"):
        return weights
    others = {key: value for key, value in weights.items() if not key.startswith("backbone.")}
    return others | {f"backbone.{key}": value for key, value in backbone.converted(own).items()}


def _of_classes(weights: dict[str, Tensor], expected: dict[str, Tensor], last: str) -> dict[str, Tensor]:
    """Return weights in which COCO's 80 classes replace the numbers of its categories."""
    result = dict(weights)
    for key, value in weights.items():
        match = _CLASSES.match(key)
        if match and len(value) in (91, 92) and key in expected and len(expected[key]) == 80:
            # The proposals of Deformable DETR have one class, the first one.
            are_proposals = match[1] == last and "pos_trans_fc.weight" in expected
            result[key] = value[:80] if are_proposals else value[_OF_COCO]
    return result
