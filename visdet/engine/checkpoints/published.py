"""Published weights: where they are, and the rules by which those of other projects get visdet's names.

Rules are replacements by their regular expressions, which are applied to a name in turn. A replacement that
ends in ``@`` and a number makes its tensor that part of a larger one. ``{last}`` is the number of the last branch of
the head.
"""

import re
from collections import OrderedDict, defaultdict
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["PUBLISHED", "converted", "revised"]

# The config that the weights belong to, and their address, by the name that --from and the other commands take.
PUBLISHED = {
    "deformable-detr_r50_coco": (
        "deformable_detr/deformable-detr_r50_16xb2-50e_coco",
        "https://download.openmmlab.com/mmdetection/v3.0/deformable_detr/deformable-detr_r50_16xb2-50e_coco/deformable-detr_r50_16xb2-50e_coco_20221029_210934-6bc7d21b.pth",
    ),
    "deformable-detr-refine_r50_coco": (
        "deformable_detr/deformable-detr-refine_r50_16xb2-50e_coco",
        "https://download.openmmlab.com/mmdetection/v3.0/deformable_detr/deformable-detr-refine_r50_16xb2-50e_coco/deformable-detr-refine_r50_16xb2-50e_coco_20221022_225303-844e0f93.pth",
    ),
    "deformable-detr-refine-twostage_r50_coco": (
        "deformable_detr/deformable-detr-refine-twostage_r50_16xb2-50e_coco",
        "https://download.openmmlab.com/mmdetection/v3.0/deformable_detr/deformable-detr-refine-twostage_r50_16xb2-50e_coco/deformable-detr-refine-twostage_r50_16xb2-50e_coco_20221021_184714-acc8a5ff.pth",
    ),
    "dino-4scale_r50_coco": (
        "dino/dino-4scale_r50_8xb2-12e_coco",
        "https://download.openmmlab.com/mmdetection/v3.0/dino/dino-4scale_r50_8xb2-12e_coco/dino-4scale_r50_8xb2-12e_coco_20221202_182705-55b2bba2.pth",
    ),
    "dino-5scale_swin-l_coco": (
        "dino/dino-5scale_swin-l_8xb2-12e_coco",
        "https://download.openmmlab.com/mmdetection/v3.0/dino/dino-5scale_swin-l_8xb2-12e_coco/dino-5scale_swin-l_8xb2-12e_coco_20230228_072924-a654145f.pth",
    ),
    "hf-deformable-detr": (
        "deformable_detr/deformable-detr_r50_16xb2-50e_coco",
        "https://huggingface.co/SenseTime/deformable-detr/resolve/main/model.safetensors",
    ),
    "hf-deformable-detr-refine": (
        "deformable_detr/deformable-detr-refine_r50_16xb2-50e_coco",
        "https://huggingface.co/SenseTime/deformable-detr-with-box-refine/resolve/main/model.safetensors",
    ),
    "hf-deformable-detr-refine-twostage": (
        "deformable_detr/deformable-detr-refine-twostage_r50_16xb2-50e_coco",
        "https://huggingface.co/SenseTime/deformable-detr-with-box-refine-two-stage/resolve/main/model.safetensors",
    ),
    "sparse4dv3_r50": (
        "sparsedrive/sparse4dv3_r50_8xb6_nuscenes",
        "https://github.com/HorizonRobotics/Sparse4D/releases/download/v3.0/sparse4dv3_r50.pth",
    ),
    "sparsedrive_r50_stage1": (
        "sparsedrive/sparsedrive_r50_stage1_8xb8_nuscenes",
        "https://github.com/swc-17/SparseDrive/releases/download/v1.0/sparsedrive_stage1.pth",
    ),
    "sparsedrive_r50_stage2": (
        "sparsedrive/sparsedrive_r50_stage2_8xb6_nuscenes",
        "https://github.com/swc-17/SparseDrive/releases/download/v1.0/sparsedrive_stage2.pth",
    ),
}

Rules = dict[str, str]
# What the original implementations and transformers call alike.
_SHARED: Rules = {
    r"^(?:decoder\.)?class_embed\.": "bbox_head.cls_branches.",
    r"^enc_out_class_embed\.": "bbox_head.cls_branches.{last}.",
    r"^(?:decoder\.)?bbox_embed\.(\d+)\.layers\.0\.": r"bbox_head.reg_branches.\1.0.",
    r"^(?:decoder\.)?bbox_embed\.(\d+)\.layers\.1\.": r"bbox_head.reg_branches.\1.2.",
    r"^(?:decoder\.)?bbox_embed\.(\d+)\.layers\.2\.": r"bbox_head.reg_branches.\1.4.",
    r"^enc_out_bbox_embed\.layers\.0\.": "bbox_head.reg_branches.{last}.0.",
    r"^enc_out_bbox_embed\.layers\.1\.": "bbox_head.reg_branches.{last}.2.",
    r"^enc_out_bbox_embed\.layers\.2\.": "bbox_head.reg_branches.{last}.4.",
    r"^enc_output\.": "memory_trans_fc.",
    r"^enc_output_norm\.": "memory_trans_norm.",
    r"^pos_trans\.": "pos_trans_fc.",
    r"^reference_points\.": "reference_points_fc.",
    r"^(?:query_embed|tgt_embed|query_position_embeddings)\.": "query_embedding.",
    r"^label_enc\.": "dn_query_generator.label_embedding.",
}
_TRANSFORMERS: Rules = {
    r"^model\.": "",
    r"^backbone\.(?:conv_encoder\.)?model\.(?:_backbone\.)?": "backbone.",
    r"^backbone\.embedder\.embedder\.convolution\.": "backbone.conv1.",
    r"^backbone\.embedder\.embedder\.normalization\.": "backbone.bn1.",
    r"^backbone\.encoder\.stages\.0\.layers\.": "backbone.layer1.",
    r"^backbone\.encoder\.stages\.1\.layers\.": "backbone.layer2.",
    r"^backbone\.encoder\.stages\.2\.layers\.": "backbone.layer3.",
    r"^backbone\.encoder\.stages\.3\.layers\.": "backbone.layer4.",
    r"\.layer\.0\.convolution\.": ".conv1.",
    r"\.layer\.1\.convolution\.": ".conv2.",
    r"\.layer\.2\.convolution\.": ".conv3.",
    r"\.layer\.0\.normalization\.": ".bn1.",
    r"\.layer\.1\.normalization\.": ".bn2.",
    r"\.layer\.2\.normalization\.": ".bn3.",
    r"\.shortcut\.convolution\.": ".downsample.0.",
    r"\.shortcut\.normalization\.": ".downsample.1.",
    r"^((?:en|de)coder\.layers\.\d+)\.self_attn_layer_norm\.": r"\1.norms.0.",
    r"^(decoder\.layers\.\d+)\.encoder_attn_layer_norm\.": r"\1.norms.1.",
    r"^(decoder\.layers\.\d+)\.final_layer_norm\.": r"\1.norms.2.",
    r"^((?:en|de)coder\.layers\.\d+)\.final_layer_norm\.": r"\1.norms.1.",
    r"^((?:en|de)coder\.layers\.\d+)\.(?:mlp\.)?fc1\.": r"\1.ffn.layers.0.0.",
    r"^((?:en|de)coder\.layers\.\d+)\.(?:mlp\.)?fc2\.": r"\1.ffn.layers.1.",
    r"^(decoder\.layers\.\d+)\.encoder_attn\.": r"\1.cross_attn.",
    r"^(decoder\.layers\.\d+)\.self_attn\.q_proj\.(\w+)$": r"\1.self_attn.attn.in_proj_\2@0",
    r"^(decoder\.layers\.\d+)\.self_attn\.k_proj\.(\w+)$": r"\1.self_attn.attn.in_proj_\2@1",
    r"^(decoder\.layers\.\d+)\.self_attn\.v_proj\.(\w+)$": r"\1.self_attn.attn.in_proj_\2@2",
    r"^(decoder\.layers\.\d+)\.self_attn\.o(?:ut)?_proj\.": r"\1.self_attn.attn.out_proj.",
    **_SHARED,
}
_ORIGINAL: Rules = {
    r"^transformer\.": "",
    r"^backbone\.0\.(?:body\.)?": "backbone.",
    r"^((?:en|de)coder\.layers\.\d+)\.linear1\.": r"\1.ffn.layers.0.0.",
    r"^((?:en|de)coder\.layers\.\d+)\.linear2\.": r"\1.ffn.layers.1.",
    r"^(decoder\.layers\.\d+)\.self_attn\.": r"\1.self_attn.attn.",
    r"^(decoder\.layers\.\d+)\.norm2\.": r"\1.norms.0.",
    r"^(decoder\.layers\.\d+)\.norm1\.": r"\1.norms.1.",
    r"^(decoder\.layers\.\d+)\.norm3\.": r"\1.norms.2.",
    r"^((?:en|de)coder\.layers\.\d+)\.norm1\.": r"\1.norms.0.",
    r"^((?:en|de)coder\.layers\.\d+)\.norm2\.": r"\1.norms.1.",
    **_SHARED,
}
_MMDET_2: Rules = {
    r"^bbox_head\.(?:transformer\.)?(?!cls_branches|reg_branches)": "",
    "^level_embeds$": "level_embed",
    r"^((?:en|de)coder\.layers\.\d+)\.attentions\.0\.": r"\1.self_attn.",
    r"^(decoder\.layers\.\d+)\.attentions\.1\.": r"\1.cross_attn.",
    r"^((?:en|de)coder\.layers\.\d+)\.ffns\.0\.": r"\1.ffn.",
    **_SHARED,
}
# A name that only the weights of a project have, and its rules. mmdet's names since version 3 are visdet's.
_FORMATS = {
    r"^model\.encoder\.layers\.0\.self_attn_layer_norm\.weight": _TRANSFORMERS,
    r"^transformer\.encoder\.layers\.0\.linear1\.weight": _ORIGINAL,
    r"^bbox_head\.transformer\.": _MMDET_2,
}
# COCO's categories have 80 of the numbers from 1 to 90. The original implementations have an output for each number.
_NO_CATEGORY = {12, 26, 29, 30, 45, 66, 68, 69, 71, 83}
_OF_COCO = [number for number in range(1, 91) if number not in _NO_CATEGORY]
_CLASSES = re.compile(r"bbox_head\.cls_branches\.(\d+)\.|dn_query_generator\.label_embedding\.")
_BRANCH = re.compile(r"(bbox_head\.(?:cls|reg)_branches\.)\d+\.")


def revised(state_dict: dict[str, Tensor], revise_keys: Collection[tuple[str, str]]) -> dict[str, Tensor]:
    """Return the weights with other keys: each regular expression is replaced in all keys, in turn."""
    weights: Any = OrderedDict()
    for key, value in state_dict.items():
        for pattern, replacement in revise_keys:
            key = re.sub(pattern, replacement, key)
        weights[key] = value
    if hasattr(state_dict, "_metadata"):
        weights._metadata = state_dict._metadata
    return weights


def converted(weights: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Return weights of another project under visdet's names, and weights of visdet or mmdet 3 as they are.

    Outputs for the numbers of COCO's categories become those of its 80 classes if the model has so many. Branches of
    the head that the other project shares are repeated.
    """
    found = [rules for name, rules in _FORMATS.items() if any(re.match(name, key) for key in weights)]
    if not found:
        return weights
    expected = model.state_dict()
    last = str(max((int(match[1] or 0) for key in expected if (match := _CLASSES.match(key))), default=0))
    count = sum(re.fullmatch(r"neck\.convs\.\d+\.conv\.weight", key) is not None for key in expected)
    rules = {old: new.replace("{last}", last) for old, new in found[0].items()}
    for k in range(8):
        level = f"convs.{k}." if k < count else f"extra_convs.{k - count}."
        rules[rf"^input_proj\.{k}\.0\."] = f"neck.{level}conv."
        rules[rf"^input_proj\.{k}\.1\."] = f"neck.{level}gn."
    result = {}
    parts: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for key, value in revised(weights, rules.items()).items():
        whole, mark, number = key.partition("@")
        if mark:
            parts[whole][number] = value
        else:
            result[whole] = value
    for key, those in parts.items():
        result[key] = torch.cat([those[number] for number in sorted(those)])
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
