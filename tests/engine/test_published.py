"""Weights of other projects: of transformers, compared by outputs, and of original implementations, by their names."""

import re

import pytest
import torch
from golden import published_shapes
from mmengine.registry import init_default_scope
from programs import ROOT
from torch.testing import assert_close
from toy_run import toy_config
from toy_run import train as toy_train

import visdet
from visdet.datasets import ShapesDataset, make_shapes
from visdet.engine import CheckpointError, Detector, load_config, read_checkpoint
from visdet.engine.checkpoints.published import PUBLISHED, converted
from visdet.engine.checkpoints.weights import load_weights, weights_of
from visdet.engine.config.packaged import packaged_configs
from visdet.registry import MODELS
from visdet.structures import DetDataSample

CATEGORIES = sorted({*range(1, 91)} - {12, 26, 29, 30, 45, 66, 68, 69, 71, 83})
VARIANTS = {"base": {}, "refine": {"with_box_refine": True}}
VARIANTS["two-stage"] = {"with_box_refine": True, "two_stage": True}


def of_transformers(variant, classes, basic=True):
    """Return a random model that fits the config of :func:`config_for`."""
    from transformers import DeformableDetrConfig, DeformableDetrForObjectDetection, ResNetConfig

    torch.manual_seed(0)
    widths, kind = ([32, 64, 128, 256], "basic") if basic else ([128, 256, 512, 1024], "bottleneck")
    backbone = ResNetConfig(
        embedding_size=32,
        hidden_sizes=widths,
        depths=[2, 2, 2, 2] if basic else [3, 4, 6, 3],
        layer_type=kind,
        out_features=["stage2", "stage3", "stage4"],
    )
    heads = {"encoder_attention_heads": 6, "decoder_attention_heads": 6}
    layers = {"encoder_layers": 2, "decoder_layers": 3, "encoder_ffn_dim": 256, "decoder_ffn_dim": 256}
    queries = {"num_queries": 30, "two_stage_num_proposals": 30, "num_feature_levels": 4}
    options = {"d_model": 96, "num_labels": classes, "use_timm_backbone": False, "backbone_config": backbone}
    config = DeformableDetrConfig(**options, **queries, **heads, **layers, **VARIANTS[variant])
    model = DeformableDetrForObjectDetection(config).eval()
    for parameter in model.parameters():
        parameter.data += torch.randn(parameter.shape) * 1.5 * max(parameter[0].numel(), 9) ** -0.5
    if (
        classes == 91
    ):  # Nothing is trained to be of a number that is no category, so that it is never the best.
        for branch in model.class_embed:
            branch.bias.data[sorted({*range(1, 91)} - {*CATEGORIES})] -= 50
    return model


def config_for(variant, classes, basic=True):
    levels = {"num_levels": 4}
    attention = {"self_attn_cfg": levels}
    model = {
        "num_feature_levels": 4,
        "with_box_refine": bool(VARIANTS[variant]),
        "as_two_stage": variant == "two-stage",
        "neck": {"num_outs": 4, "norm_cfg": {"num_groups": 32}},
        "encoder": {"layer_cfg": attention},
        "decoder": {"layer_cfg": {"cross_attn_cfg": levels}},
        "bbox_head": {"num_classes": classes},
    }
    if not basic:
        model["backbone"] = {"depth": 50}
        model["neck"]["in_channels"] = [256, 512, 1024]
    return load_config("deformable_detr/deformable-detr_shapes", {"model": model})[0]


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_outputs_are_those_of_transformers(tmp_path, variant, suffix):
    classes, basic = (80, True) if suffix == "safetensors" else (91, False)
    theirs = of_transformers(variant, classes, basic)
    if suffix == "safetensors":
        theirs.save_pretrained(tmp_path)
        path = str(tmp_path / "model.safetensors")
    else:
        path = str(tmp_path / "pytorch_model.bin")
        torch.save(theirs.state_dict(), path)
    init_default_scope("visdet")
    ours = MODELS.build(config_for(variant, 80, basic).model).eval()
    load_weights(ours, weights_of(read_checkpoint(path), path), path)
    images = torch.randn(2, 3, 96, 128)
    samples = [DetDataSample(metainfo={"img_shape": (96, 128), "batch_input_shape": (96, 128)})] * 2
    with torch.no_grad():
        expected = theirs(images, pixel_mask=torch.ones(2, 96, 128, dtype=torch.long))
        logits, boxes = ours(images, samples, mode="tensor")[:2]
    of_classes = expected.logits[..., CATEGORIES] if classes == 91 else expected.logits
    assert of_classes.std() > 0.1 and expected.pred_boxes.std() > 0.01
    assert_close(logits[-1], of_classes, atol=1e-4, rtol=0)
    assert_close(boxes[-1], expected.pred_boxes, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("deformable_detr_original_base", "deformable_detr/deformable-detr_r50_16xb2-50e_coco"),
        ("deformable_detr_original_refine", "deformable_detr/deformable-detr-refine_r50_16xb2-50e_coco"),
        ("deformable_detr_original_two_stage", PUBLISHED["deformable-detr-refine-twostage_r50_coco"][0]),
        ("dino-4scale_r50_original", "dino/dino-4scale_r50_8xb2-12e_coco"),
        ("dino-5scale_swin-l_original", "dino/dino-5scale_swin-l_8xb2-12e_coco"),
    ],
)
def test_names_of_the_original_implementations_become_ours(name, config):
    """The lists are those of the repositories' own models with two layers; their outputs were equal within 4e-5."""
    layers = {"model.encoder.num_layers": 2, "model.decoder.num_layers": 2}
    init_default_scope("visdet")
    with torch.device("meta"):
        model = MODELS.build(load_config(config, layers)[0].model)
        weights = {key: torch.empty(shape) for key, shape in published_shapes(name).items()}
    found = {key: tuple(value.shape) for key, value in converted(weights, model).items()}
    expected = {key: tuple(value.shape) for key, value in model.state_dict().items()}
    names = found.keys()
    of_model = expected.keys()
    biases = {key for key in names if re.fullmatch(r"neck\.\w+\.\d+\.conv\.bias", key)}
    assert len(biases) == len(model.level_embed) and not (names - of_model - biases)
    assert all(key.endswith("num_batches_tracked") for key in of_model - names)
    # These configs have their own number of queries in the lists.
    other = {key for key in names & of_model if found[key] != expected[key]}
    assert other <= {"query_embedding.weight"}


def test_names_of_mmdet_2_become_those_of_mmdet_3():
    init_default_scope("visdet")
    with torch.device("meta"):
        model = MODELS.build(load_config(PUBLISHED["deformable-detr-refine-twostage_r50_coco"][0])[0].model)
    of_version_2 = {
        r"^((en|de)coder)": r"bbox_head.transformer.\1",
        r"layers\.(\d+)\.self_attn\.": r"layers.\1.attentions.0.",
        r"layers\.(\d+)\.cross_attn\.": r"layers.\1.attentions.1.",
        r"\.ffn\.": ".ffns.0.",
        r"^level_embed": "bbox_head.transformer.level_embeds",
        r"^memory_trans_fc": "bbox_head.transformer.enc_output",
        r"^memory_trans_norm": "bbox_head.transformer.enc_output_norm",
        r"^pos_trans_fc": "bbox_head.transformer.pos_trans",
        r"^pos_trans_norm": "bbox_head.transformer.pos_trans_norm",
    }
    weights = model.state_dict()
    for new, old in of_version_2.items():
        weights = {re.sub(new, old, key): value for key, value in weights.items()}
    assert converted(weights, model).keys() == model.state_dict().keys()


def test_training_starts_from_weights_of_other_classes(tmp_path, stdout):
    """The weights of transformers have 91 classes, the data 6. Biases before the neck's normalisation are kept."""
    torch.save(of_transformers("two-stage", 91).state_dict(), tmp_path / "pytorch_model.bin")
    cfg = config_for("two-stage", 6)
    cfg.merge_from_dict(
        {
            "train_cfg": {"max_iters": 2, "val_begin": 9, "val_interval": 9},
            "train_dataloader": {"batch_size": 2, "num_workers": 0, "persistent_workers": False},
            "graph": False,
        }
    )
    folder = make_shapes(tmp_path / "shapes", num_train=4, num_val=2, num_workers=1)
    for split in ("train", "val", "test"):
        dataset = cfg[f"{split}_dataloader"].dataset
        dataset.type, dataset.metainfo = "CocoDataset", dict(ShapesDataset.METAINFO)
        dataset.data_root = str(folder)
        cfg.val_evaluator.ann_file = f"{folder}/annotations/instances_val.json"
    result = visdet.train(cfg, work_dir=tmp_path / "run", from_=tmp_path / "pytorch_model.bin")
    shown = stdout()
    assert "bbox_head.cls_branches.3.bias [91] for [6]" in shown and "missing" not in shown
    theirs = of_transformers("two-stage", 91).state_dict()
    saved = read_checkpoint(result.last_checkpoint)["state_dict"]
    bias = "model.input_proj.3.0.bias"
    assert torch.equal(saved["neck.extra_convs.0.conv.bias"], theirs[bias]) and theirs[bias].any()
    assert Detector(cfg, result.last_checkpoint, "cpu").dataset_meta["classes"]


def test_from_lists_what_begins_anew(tmp_path, stdout):
    toy_train(tmp_path / "two", train_cfg__max_iters=5)
    options = {"train_cfg__max_iters": 5, "model__num_classes": 3}
    data = {
        f"{split}_dataloader__dataset__metainfo": {"classes": ("a", "b", "c")} for split in ("train", "val")
    }
    three = toy_config(tmp_path / "three", **options, **data)
    visdet.train(three, from_=tmp_path / "two" / "iter_5.pth")
    assert "bbox_head.cls.weight [2, 8] for [3, 8]" in stdout()
    for wrong, message in (
        ("dino-4scale_r50_coc", "dino-4scale_r50_coco"),
        (tmp_path, "give one of its files"),
    ):
        with pytest.raises(CheckpointError, match=message):
            visdet.train(three, work_dir=tmp_path / "four", from_=wrong)


def test_published_weights_belong_to_configs_and_are_listed():
    """Whether the addresses exist is for who has a network."""
    assert {config for config, _ in PUBLISHED.values()} <= set(packaged_configs())
    page = (ROOT / "docs/model_zoo.md").read_text()
    for name, (config, address) in PUBLISHED.items():
        assert f"| [`{name}`]({address}) | `{config}` |" in page
