"""Deformable DETR and DINO at toy size, batches for them, and their steps on a GPU."""

import torch
from mmengine.structures import InstanceData

from visdet.engine.graphs.methods import GraphedLoss
from visdet.engine.stages import StagedModel
from visdet.registry import MODELS
from visdet.structures import DetDataSample

VARIANTS = {
    "base": {},
    "refine": {"with_box_refine": True},
    "two_stage": {"with_box_refine": True, "as_two_stage": True},
    "shared_two_stage": {"as_two_stage": True},
    "dino": {
        "type": "DINO",
        "with_box_refine": True,
        "as_two_stage": True,
        "dn_cfg": {"group_cfg": {"dynamic": True, "num_dn_queries": 10}},
        "bbox_head": {"type": "DINOHead", "num_classes": 3},
    },
}


BATCH = (64, 96)  # height, width


def config(embed_dims=16, **options):
    attention = {"embed_dims": embed_dims, "num_heads": 2, "num_levels": 3, "num_points": 2, "dropout": 0.0}
    feed_forward = {"embed_dims": embed_dims, "feedforward_channels": 24}
    return {
        "type": "DeformableDETR",
        "num_queries": 7,
        "num_feature_levels": 3,
        "data_preprocessor": {"type": "DetDataPreprocessor"},
        "backbone": {"type": "ResNet", "depth": 18, "base_channels": 4, "out_indices": (2, 3)},
        "neck": {
            "type": "ChannelMapper",
            "in_channels": [16, 32],
            "kernel_size": 1,
            "out_channels": embed_dims,
            "act_cfg": None,
            "norm_cfg": {"type": "GN", "num_groups": 4},
            "num_outs": 3,
        },
        "encoder": {"num_layers": 2, "layer_cfg": {"self_attn_cfg": attention, "ffn_cfg": feed_forward}},
        "decoder": {
            "num_layers": 2,
            "layer_cfg": {
                "self_attn_cfg": {"embed_dims": embed_dims, "num_heads": 2, "dropout": 0.0},
                "cross_attn_cfg": attention,
                "ffn_cfg": feed_forward,
            },
        },
        "positional_encoding": {"num_feats": embed_dims // 2, "normalize": True, "offset": -0.5},
        "bbox_head": {"type": "DeformableDETRHead", "num_classes": 3},
        "train_cfg": {
            "assigner": {
                "type": "HungarianAssigner",
                "match_costs": [
                    {"type": "FocalLossCost", "weight": 2.0},
                    {"type": "BBoxL1Cost", "weight": 5.0, "box_format": "xywh"},
                    {"type": "IoUCost", "iou_mode": "giou", "weight": 2.0},
                ],
            }
        },
        "test_cfg": {"max_per_img": 5},
        **options,
    }


def build(variant="two_stage", **options):
    """Return the model of ``config``, initialised and in training."""
    return started(config(**VARIANTS[variant], **options))


def started(settings):
    torch.manual_seed(0)
    model = MODELS.build(settings)
    model.init_weights()
    for branch in model.bbox_head.reg_branches:  # a start of zeros would hide errors
        torch.nn.init.normal_(branch[-1].weight, std=0.2)
    return model.train()


def batch(counts=(3, 1), sizes=(BATCH, BATCH)):
    torch.manual_seed(1)
    images = torch.randn(len(counts), 3, *BATCH)
    samples = []
    for image, count, (height, width) in zip(images, counts, sizes, strict=True):
        image[:, height:], image[:, :, width:] = 0, 0
        sample = DetDataSample(metainfo={"img_shape": (height, width)})
        corner, size = torch.rand(count, 2) * 30, 4 + torch.rand(count, 2) * 20
        sample.gt_instances = InstanceData(
            bboxes=torch.cat((corner, corner + size), dim=-1), labels=torch.randint(0, 3, (count,))
        )
        samples.append(sample)
    return images, samples


STEPS = 12


def batches():
    """Batches of two shapes in turns: without padding, and with, and numbers of boxes that change within a shape."""
    found = []
    for index in range(STEPS):
        sizes = (BATCH, BATCH) if index % 2 else ((64, 80 - index), (50 + index, 96))
        images, samples = batch(counts=(index % 4, 3), sizes=sizes)
        found.append({"inputs": images.cuda(), "data_samples": [sample.to("cuda") for sample in samples]})
    return found


def train(model, wrapper, graphs=None, steps=STEPS, data=None, **options):
    """Return the losses of training steps, as the runner makes them."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    wrapper = wrapper(optimizer, clip_grad={"max_norm": 1.0}, **options)
    wrapper.initialize_count_status(model, 0, steps)
    torch.manual_seed(5)
    losses = []
    for one in (data or batches())[:steps]:
        losses.append(step_of(StagedModel(model, graphs and {"loss": graphs}), wrapper, one))
    return torch.stack(losses)


def train_by_graphs(model, wrapper, **options):
    """Return the losses of ``train`` by CUDA graphs, which replay all steps but the first of each of two shapes."""
    graphs = GraphedLoss(model)
    losses = train(model, wrapper, graphs, **options)
    assert graphs.counts == {"of a new shape": 2, "replayed": STEPS - 2}, graphs.report()
    return losses


def step_of(staged, wrapper, data):
    model = staged.model
    with wrapper.optim_context(model):
        losses = staged.losses(**data)
    total, log = model.parse_losses(losses)
    wrapper.update_params(total)
    return torch.stack([value.detach() for value in log.values()])
