"""Make the small golden vectors of DINO and Swin in tests/data, by ``python tests/make_golden_dino.py``.

It runs mmdet's models and needs mmdet 3.3 and mmcv-lite 2.1 (docs/mmcv.md). In place of random noise, denoising
queries get drawn numbers. The names and shapes of the parameters of mmdet's configs are added to the lists of published
parameters.
"""

import copy
import json
import lzma
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from golden import OWN, drawn, drawn_noise, golden, golden_state
from make_golden import mmdet_models, mmdet_results, mmdet_samples, pack, store

# The numbers of boxes of two images, and a setting of the groups of denoising queries.
DINO_CASES = {
    "some": ((3, 2), {"dynamic": True, "num_dn_queries": 7}),
    "one_empty": ((0, 2), {"dynamic": True, "num_dn_queries": 7}),
    "all_empty": ((0, 0), {"dynamic": True, "num_dn_queries": 7}),
    "more_than_denoising_queries": ((9, 4), {"dynamic": True, "num_dn_queries": 7}),
    "static": ((2, 3), {"dynamic": False, "num_groups": 3}),
}


def main() -> None:
    """Run mmdet's DINO: outputs, and training steps with the numbers of boxes of ``DINO_CASES``."""
    MODELS = mmdet_models()
    arrays = {
        name: value
        for name, value in golden("deformable_detr_small_two_stage").items()
        if name.startswith(("input/", "state/", "drawn_gain")) and "images" not in name
    }
    arrays["drawn/input/images"] = np.array((2, 3, 96, 128))
    config = json.loads(str(golden("deformable_detr_small_two_stage")["config"]))
    config["positional_encoding"] = {"num_feats": 128, "normalize": True, "offset": 0.0, "temperature": 20}
    config["bbox_head"] |= {"type": "DINOHead"}
    config["bbox_head"]["loss_cls"] |= {"loss_weight": 1.0}
    config["dn_cfg"] = {"label_noise_scale": 0.5, "box_noise_scale": 1.0, "group_cfg": DINO_CASES["some"][1]}
    arrays["config"] = np.array(json.dumps({"type": "DINO", **config}))
    model = MODELS.build({"type": "DINO", **copy.deepcopy(config)}).eval()
    model.load_state_dict(golden_state(model, arrays))
    images = torch.from_numpy(2 * drawn("input/images", (2, 3, 96, 128)))
    for name, value in mmdet_results(model, images, arrays, []):
        store(arrays, name, value)
    for case, (counts, group_cfg) in DINO_CASES.items():
        arrays[f"case/{case}/config"] = np.array(json.dumps({"counts": counts, "group_cfg": group_cfg}))
        samples = mmdet_samples(arrays, padded=True, scaled=False)
        for i, (sample, boxes) in enumerate(zip(samples, drawn_boxes(counts), strict=True)):
            arrays[f"case/{case}/input/gt_bboxes/{i}"] = boxes
            arrays[f"case/{case}/input/gt_labels/{i}"] = np.arange(len(boxes)) % 5
            sample.gt_instances = type(sample.gt_instances)(
                bboxes=torch.from_numpy(boxes), labels=torch.arange(len(boxes)) % 5
            )
        for name, value in mmdet_denoising_step(model.train(), images, samples, group_cfg):
            store(arrays, f"case/{case}/{name}", value)
    pack("dino_small", arrays)
    add_published("dino-4scale_r50", mmdet_dino_shapes(MODELS, "dino-4scale_r50_8xb2-12e_coco", {}))
    add_published("dino-5scale_r50", mmdet_dino_shapes(MODELS, "dino-4scale_r50_8xb2-12e_coco", FIVE_SCALES))
    add_published("dino-5scale_swin-l", mmdet_dino_shapes(MODELS, "dino-5scale_swin-l_8xb2-12e_coco", {}))
    swin(MODELS)


def swin(models: object) -> None:
    """Run mmdet's Swin Transformer on images whose maps are padded to whole windows, and smaller than one."""
    config = {"embed_dims": 24, "depths": (2, 2, 2), "num_heads": (1, 2, 3), "out_indices": (0, 2)}
    config |= {"window_size": 7, "drop_path_rate": 0.0, "frozen_stages": 0}
    arrays = {"config": np.array(json.dumps(config)), "drawn_gain": np.array(1.0)}
    arrays["drawn/input/images"] = np.array((2, 3, 61, 90))
    model = models.build({"type": "SwinTransformer", **config})
    model.load_state_dict(golden_state(model, arrays))
    model.train()
    maps = model(torch.from_numpy(2 * drawn("input/images", (2, 3, 61, 90))))
    for index, output in enumerate(maps):
        store(arrays, f"output/{index}", output)
    sum((output**2).mean() for output in maps).backward()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            store(arrays, f"grad_norm/{name}", parameter.grad.norm().item())
    pack("swin_small", arrays)


def drawn_boxes(counts: tuple[int, ...]) -> list[np.ndarray]:
    """Return boxes (x1, y1, x2, y2) in images of 72 x 100 pixels."""
    boxes = []
    for i, count in enumerate(counts):
        numbers = (drawn(f"boxes/{count}/{i}", (count, 4)) + 1) / 2
        corners = numbers[:, :2] * np.float32([60, 40])
        boxes.append(np.concatenate((corners, corners + 4 + numbers[:, 2:] * np.float32([36, 28])), axis=1))
    return boxes


def mmdet_denoising_step(
    model: torch.nn.Module, images: torch.Tensor, samples: list, group_cfg: dict
) -> Iterable[tuple[str, object]]:
    """Yield denoising queries, losses and norms of gradients of a step with the drawn noise."""
    generator = model.dn_query_generator
    generator.dynamic_dn_groups = group_cfg["dynamic"]
    generator.num_dn_queries, generator.num_groups = (
        group_cfg.get("num_dn_queries"),
        group_cfg.get("num_groups"),
    )
    counts = [len(sample.gt_instances.labels) for sample in samples]
    repeats = 2 * generator.get_num_groups(max(counts))
    noise = drawn_noise(len(counts), repeats * max(counts), generator.num_classes)
    chance, label, sign, size = (
        torch.cat(
            [
                values[i, repeat * max(counts) :][:count]
                for repeat in range(repeats)
                for i, count in enumerate(counts)
            ]
        )
        for values in noise
    )

    def labels_or_signs(like: torch.Tensor, *arguments: object, **options: object) -> torch.Tensor:
        return label[like] if like.dim() == 1 else (sign + 1) / 2

    own = torch.rand_like, torch.randint_like
    torch.rand_like = lambda like: chance.clone() if like.dim() == 1 else size.clone()
    torch.randint_like = labels_or_signs
    try:
        query, boxes, mask, meta = generator(samples)
        yield "query", query
        yield "box_logits", boxes
        yield "mask", mask
        yield "num_queries", meta["num_denoising_queries"]
        model.zero_grad()
        losses = model(images, samples, mode="loss")
    finally:
        torch.rand_like, torch.randint_like = own
    yield from ((f"loss/{name}", value.reshape(())) for name, value in losses.items())
    sum(value.sum() for value in losses.values()).backward()
    for name, parameter in model.named_parameters():
        yield f"grad_norm/{name}", 0.0 if parameter.grad is None else parameter.grad.norm().item()
    for name in ("dn_query_generator.label_embedding.weight", "decoder.ref_point_head.layers.0.bias"):
        yield f"grad/{name}", model.get_parameter(name).grad
    yield "grad/bbox_head.reg_branches.0.4.bias", model.bbox_head.reg_branches[0][4].bias.grad


FIVE_SCALES = {
    "num_feature_levels": 5,
    "backbone": {"out_indices": (0, 1, 2, 3)},
    "neck": {"in_channels": [256, 512, 1024, 2048], "num_outs": 5},
    "encoder": {"layer_cfg": {"self_attn_cfg": {"num_levels": 5}}},
    "decoder": {"layer_cfg": {"cross_attn_cfg": {"num_levels": 5}}},
}


def mmdet_dino_shapes(models: object, name: str, changes: dict) -> dict[str, list[int]]:
    """Return names and shapes of the state of mmdet's config with changes."""
    import mmdet
    from mmengine.config import Config

    config = Config.fromfile(Path(mmdet.__file__).parent / f".mim/configs/dino/{name}.py")
    config.merge_from_dict({"model": changes})
    return {key: list(value.shape) for key, value in models.build(config.model).state_dict().items()}


def add_published(name: str, shapes: dict[str, list[int]]) -> None:
    """Add a list of parameters to tests/data/state_dicts.json.xz."""
    path = OWN / "state_dicts.json.xz"
    known = json.loads(lzma.decompress(path.read_bytes())) | {name: shapes}
    path.write_bytes(lzma.compress(json.dumps(known, separators=(",", ":")).encode(), preset=9))


if __name__ == "__main__":
    main()
