"""Every class of the detector families takes the numbers that published configs give to it."""

import pytest

import visdet.models  # noqa: F401  (registers)
from visdet.registry import MODELS, TASK_UTILS

_ATTENTION = {"embed_dims": 256, "num_heads": 8}
_BOXES = {"type": "SparseBox3DKeyPointsGenerator"}
_COST = {"type": "FocalLossCost", "weight": 1.0}
_FFN = {"embed_dims": 256, "feedforward_channels": 1024, "num_fcs": 2, "ffn_drop": 0.1}
_LINES = {"type": "LinesL1Cost", "weight": 10.0, "beta": 0.01, "permute": True}
_NOISE = [2.0] * 3 + [0.5] * 7
_BANK = {"num_anchor": 4, "embed_dims": 256, "anchor": [[0.0] * 11] * 4, "confidence_decay": 0.6}
_LEVELS = {"in_channels": [512, 1024, 2048], "kernel_size": 1, "out_channels": 256, "act_cfg": None}
_PYRAMID = {"in_channels": [256, 512, 1024, 2048], "out_channels": 256, "add_extra_convs": "on_output"}
_SWIN = {"embed_dims": 24, "depths": [2, 2, 2, 2], "qk_scale": None, "drop_rate": 0.0, "with_cp": True}
_PUBLISHED = {
    "AsymmetricFFN": [{"in_channels": 512, "pre_norm": {"type": "LN"}, **_FFN}, {"in_channels": 256, **_FFN}],
    "BBoxL1Cost": [{"weight": 5.0, "box_format": "xywh"}],
    "CdnQueryGenerator": [
        {"group_cfg": {"dynamic": True, "num_groups": None, "num_dn_queries": 100}, "box_noise_scale": 1.0},
        {"group_cfg": {"dynamic": False, "num_groups": 5}, "label_noise_scale": 0, "box_noise_scale": 0.4},
    ],
    "ChannelMapper": [{**_LEVELS, "num_outs": 4}, {**_LEVELS, "num_outs": 5}, {**_LEVELS, "num_outs": None}],
    "CrossEntropyLoss": [{"use_sigmoid": True}, {"class_weight": None, "loss_weight": 1}],
    "DeformableFeatureAggregation": [
        {
            "embed_dims": 256,
            "num_groups": 8,
            "num_levels": 4,
            "num_cams": 6,
            "attn_drop": 0.15,
            "kps_generator": {**_BOXES, "num_learnable_pts": 6, "fix_scale": [[0, 0, 0], [0.45, 0, 0]]},
        }
    ],
    "DenseDepthNet": [{"embed_dims": 256, "num_depth_layers": 3, "loss_weight": 0.2}],
    "DetDataPreprocessor": [
        {"pad_size_divisor": 1, "pad_mask": True, "mean": [103.53] * 3, "std": [1.0] * 3}
    ],
    "FFN": [{**_FFN, "ffn_drop": 0}, {"feedforward_channels": 2048}],
    "FPN": [
        {**_PYRAMID, "num_outs": 4, "start_level": 0, "relu_before_extra_convs": True},
        {**_PYRAMID, "num_outs": 5, "start_level": 1},
        {"in_channels": [2048], "out_channels": 256, "num_outs": 1, "add_extra_convs": "on_output"},
        {**_PYRAMID, "num_outs": 4, "end_level": -1, "add_extra_convs": False},
    ],
    "FocalLoss": [{"gamma": 2.0, "alpha": 0.25, "loss_weight": 0.2}, {"gamma": 2, "loss_weight": 1}],
    "GIoULoss": [{"loss_weight": 0.0}, {"loss_weight": 2}],
    "GaussianFocalLoss": [{"loss_weight": 1.0}],
    "HierarchicalPlanningDecoder": [{"ego_fut_ts": 6, "ego_fut_mode": 6, "use_rescore": True}],
    "HungarianAssigner": [{"match_costs": [_COST, {"type": "IoUCost", "iou_mode": "giou", "weight": 0.0}]}],
    "InstanceBank": [
        {**_BANK, "anchor_handler": _BOXES, "num_temp_instances": -1, "feat_grad": False},
        {**_BANK, "num_temp_instances": 0, "max_time_interval": 2, "default_time_interval": 0.5},
        {**_BANK, "num_temp_instances": 3.0},
    ],
    "InstanceQueue": [
        {"embed_dims": 256, "queue_length": 4, "tracking_threshold": 0.2, "feature_map_scale": (8.0, 22.0)},
        {"embed_dims": 256, "queue_length": 4, "tracking_threshold": 0, "feature_map_scale": None},
    ],
    "L1Loss": [{"loss_weight": 0.25}, {"loss_weight": 5}],
    "LinesL1Loss": [{"loss_weight": 10.0, "beta": 0.01}],
    "MotionPlanningRefinementModule": [{"fut_ts": 12, "fut_mode": 6, "ego_fut_ts": 6, "ego_fut_mode": 6}],
    "MultiScaleDeformableAttention": [
        {"embed_dims": 256, "num_levels": 4, "num_points": 4, "dropout": 0.0, "im2col_step": 64},
        {"embed_dims": 256, "num_levels": 5, "value_proj_ratio": 1.0},
        {"embed_dims": 256, "num_levels": 3, "num_points": [3, 6, 3], "dropout": 0},
        {"embed_dims": 256, "num_levels": 1, "num_points": 8},
    ],
    "MultiheadAttention": [{**_ATTENTION, "dropout": 0.0}, {**_ATTENTION, "attn_drop": 0, "dropout": None}],
    "MultiheadFlashAttention": [{**_ATTENTION, "batch_first": True, "dropout": 0.1}],
    "PlanningTarget": [{"ego_fut_ts": 6, "ego_fut_mode": 6}],
    "ResNet": [
        {"depth": 50, "num_stages": 4, "frozen_stages": 1, "out_indices": (1, 2, 3), "norm_eval": True},
        {"depth": 101, "frozen_stages": -1, "out_indices": [3], "style": "caffe", "with_cp": True},
        {"depth": 18, "frozen_stages": 0, "stem_channels": None, "strides": [1, 2, 2, 2]},
    ],
    "SinePositionalEncoding": [
        {"num_feats": 128, "normalize": True, "offset": -0.5, "temperature": 20},
        {"num_feats": 128.0, "normalize": True, "temperature": 10000, "offset": 0},
    ],
    "SparseBox3DDecoder": [{}, {"num_output": 300, "score_threshold": None}, {"score_threshold": 0.2}],
    "SparseBox3DEncoder": [
        {"embed_dims": [128, 32, 32, 64], "mode": "cat", "output_fc": False, "in_loops": 1, "out_loops": 4},
        {"embed_dims": 256, "vel_dims": 3},
        {"embed_dims": 256, "vel_dims": 0, "out_loops": 2},
    ],
    "SparseBox3DLoss": [{"loss_box": {"type": "L1Loss", "loss_weight": 0.25}, "cls_allow_reverse": [5]}],
    "SparseBox3DMotionDecoder": [{}, {"num_output": 300}],
    "SparseBox3DRefinementModule": [{"num_cls": 10, "refine_yaw": True, "with_quality_estimation": True}],
    "SparseBox3DTarget": [
        {
            "num_dn_groups": 5,
            "num_temp_dn_groups": 3,
            "dn_noise_scale": _NOISE,
            "max_dn_gt": 32,
            "cls_weight": 2.0,
            "box_weight": 0.25,
            "reg_weights": [2.0] * 3 + [0.5] * 3 + [0.0] * 4,
            "cls_wise_reg_weights": {9: [2.0, 2.0, 2.0, 1.0, 1.0, 1.0, 0.0, 0.0, 1.0, 1.0]},
        },
        {"num_dn_groups": 0, "num_temp_dn_groups": 0, "dn_noise_scale": 0.5, "add_neg_dn": False},
        {"num_dn_groups": -1, "max_dn_gt": -1, "gamma": 2, "eps": 1e-12},
    ],
    "SparseLineLoss": [{"loss_line": {"type": "LinesL1Loss"}, "num_sample": 20, "roi_size": (30, 60)}],
    "SparsePoint3DDecoder": [{}, {"score_threshold": None}, {"coords_dim": 2, "score_threshold": 0.0}],
    "SparsePoint3DEncoder": [{"embed_dims": 256, "num_sample": 20}],
    "SparsePoint3DKeyPointsGenerator": [
        {"num_learnable_pts": 3, "fix_height": (0, 0.5, -0.5, 1, -1), "ground_height": -1.84023},
        {"num_learnable_pts": 0, "fix_height": [0], "ground_height": 0},
    ],
    "SparsePoint3DRefinementModule": [{"embed_dims": 256, "num_sample": 20, "num_cls": 3}],
    "SparsePoint3DTarget": [
        {
            "num_cls": 3,
            "num_sample": 20,
            "roi_size": [30, 60],
            "num_dn_groups": 5,
            "max_dn_gt": 32,
            "assigner": {
                "type": "HungarianLinesAssigner",
                "cost": {"type": "MapQueriesCost", "cls_cost": _COST, "reg_cost": _LINES},
            },
        }
    ],
    "SwinTransformer": [
        {**_SWIN, "num_heads": [6, 12, 24, 48], "window_size": 12, "pretrain_img_size": 384, "mlp_ratio": 4},
        {
            **_SWIN,
            "num_heads": [3, 6, 12, 24],
            "frozen_stages": -1,
            "out_indices": (1, 2, 3),
            "mlp_ratio": 4.0,
        },
    ],
}
_REQUIRED = {"CdnQueryGenerator": {"num_classes": 80, "embed_dims": 256}}


@pytest.mark.parametrize("name", _PUBLISHED)
def test_numbers_of_published_configs_are_taken(name):
    registry = MODELS if name in MODELS else TASK_UTILS
    for values in _PUBLISHED[name]:
        registry.build({"type": name, **_REQUIRED.get(name, {}), **values})
