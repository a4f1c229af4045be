"""Check that unmodified mmdet 3.3 configs run on mmcv-lite and visdet's operators.

Each model runs one training step and one prediction. ``make check-mmdet`` makes an environment for it.
"""

import argparse
import contextlib
import importlib
import logging
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

CONFIGS = (
    "faster_rcnn/faster-rcnn_r50_fpn_1x_coco.py",
    "retinanet/retinanet_r50_fpn_1x_coco.py",
    "dcnv2/mask-rcnn_r50-mdconv-c3-c5_fpn_1x_coco.py",
    "dcn/faster-rcnn_r50-dconv-c3-c5_fpn_1x_coco.py",
    "deformable_detr/deformable-detr-refine-twostage_r50_16xb2-50e_coco.py",
    "dino/dino-4scale_r50_8xb2-12e_coco.py",
    "reppoints/reppoints-moment_r50_fpn_1x_coco.py",
    "vfnet/vfnet_r50_fpn_1x_coco.py",
    "guided_anchoring/ga-retinanet_r50-caffe_fpn_1x_coco.py",
    "carafe/faster-rcnn_r50_fpn-carafe_1x_coco.py",
    "cornernet/cornernet_hourglass104_8xb6-210e-mstest_coco.py",
    "pisa/faster-rcnn_r50_fpn_pisa_1x_coco.py",
    "dyhead/atss_r50-caffe_fpn_dyhead_1x_coco.py",
    "dyhead/atss_r50_fpn_dyhead_1x_coco.py",
    "atss/atss_r50_fpn_1x_coco.py",
    "cascade_rcnn/cascade-rcnn_r50_fpn_1x_coco.py",
    "mask_rcnn/mask-rcnn_r50_fpn_1x_coco.py",
    "fcos/fcos_r50-caffe_fpn_gn-head_1x_coco.py",
    "gfl/gfl_r50_fpn_1x_coco.py",
    "cascade_rpn/cascade-rpn_faster-rcnn_r50-caffe_fpn_1x_coco.py",
    "centernet/centernet_r18-dcnv2_8xb16-crop512-140e_coco.py",
    "centernet/centernet-update_r50-caffe_fpn_ms-1x_coco.py",
    "grid_rcnn/grid-rcnn_r50_fpn_gn-head_2x_coco.py",
    "groie/faste-rcnn_r50_fpn_groie_1x_coco.py",
    "libra_rcnn/libra-faster-rcnn_r50_fpn_1x_coco.py",
    "paa/paa_r50_fpn_1x_coco.py",
    "tood/tood_r50_fpn_1x_coco.py",
    "tood/tood_r50_fpn_anchor-based_1x_coco.py",
    "sabl/sabl-faster-rcnn_r50_fpn_1x_coco.py",
    "sabl/sabl-retinanet_r50_fpn_1x_coco.py",
    "sparse_rcnn/sparse-rcnn_r50_fpn_1x_coco.py",
    "fsaf/fsaf_r50_fpn_1x_coco.py",
    "foveabox/fovea_r50_fpn_4xb4-1x_coco.py",
    "free_anchor/freeanchor_r50_fpn_1x_coco.py",
    "ghm/retinanet_r50_fpn_ghm-1x_coco.py",
    "double_heads/dh-faster-rcnn_r50_fpn_1x_coco.py",
    "dynamic_rcnn/dynamic-rcnn_r50_fpn_1x_coco.py",
    "pafpn/faster-rcnn_r50_pafpn_1x_coco.py",
    "ms_rcnn/ms-rcnn_r50-caffe_fpn_1x_coco.py",
    "rpn/rpn_r50_fpn_1x_coco.py",
    "ddod/ddod_r50_fpn_1x_coco.py",
    "ddq/ddq-detr-4scale_r50_8xb2-12e_coco.py",
    "detr/detr_r50_8xb2-150e_coco.py",
    "conditional_detr/conditional-detr_r50_8xb2-50e_coco.py",
    "dab_detr/dab-detr_r50_8xb2-50e_coco.py",
    "yolof/yolof_r50-c5_8xb8-1x_coco.py",
    "yolox/yolox_tiny_8xb8-300e_coco.py",
    "yolox/yolox_s_8xb8-300e_coco.py",
    "yolo/yolov3_d53_8xb8-320-273e_coco.py",
    "nas_fpn/retinanet_r50_nasfpn_crop640-50e_coco.py",
    "rtmdet/rtmdet_tiny_8xb32-300e_coco.py",
    "autoassign/autoassign_r50-caffe_fpn_1x_coco.py",
    "crowddet/crowddet-rcnn_r50_fpn_8xb2-30e_crowdhuman.py",
    "empirical_attention/faster-rcnn_r50-attn1111_fpn_1x_coco.py",
    "gn/mask-rcnn_r50_fpn_gn-all_2x_coco.py",
    "point_rend/point-rend_r50-caffe_fpn_ms-1x_coco.py",
    "mask2former/mask2former_r50_8xb2-lsj-50e_coco.py",
    "mask2former/mask2former_r50_8xb2-lsj-50e_coco-panoptic.py",
    "maskformer/maskformer_r50_ms-16xb1-75e_coco.py",
    "swin/mask-rcnn_swin-t-p4-w7_fpn_1x_coco.py",
    "hrnet/faster-rcnn_hrnetv2p-w18-1x_coco.py",
    "regnet/retinanet_regnetx-1.6GF_fpn_1x_coco.py",
    "res2net/faster-rcnn_res2net-101_fpn_2x_coco.py",
    "resnest/faster-rcnn_s50_fpn_syncbn-backbone+head_ms-range-1x_coco.py",
    "pvt/retinanet_pvt-t_fpn_1x_coco.py",
    "nas_fcos/nas-fcos_r50-caffe_fpn_nashead-gn-head_4xb4-1x_coco.py",
    "nas_fcos/nas-fcos_r50-caffe_fpn_fcoshead-gn-head_4xb4-1x_coco.py",
    "detectors/cascade-rcnn_r50-rfp_1x_coco.py",
    "detectors/cascade-rcnn_r50-sac_1x_coco.py",
    "detectors/detectors_cascade-rcnn_r50_1x_coco.py",
    "guided_anchoring/ga-faster-rcnn_r50-caffe_fpn_1x_coco.py",
    "htc/htc_r50_fpn_1x_coco.py",
    "scnet/scnet_r50_fpn_1x_coco.py",
    "solov2/solov2_r50_fpn_1x_coco.py",
    "condinst/condinst_r50_fpn_ms-poly-90k_coco_instance.py",
    "yolact/yolact_r50_1xb8-55e_coco.py",
    "panoptic_fpn/panoptic-fpn_r50_fpn_1x_coco.py",
    "gcnet/mask-rcnn_r50-gcb-r16-c3-c5_fpn_1x_coco.py",
    "gn+ws/faster-rcnn_r50_fpn_gn-ws-all_1x_coco.py",
    "fpg/faster-rcnn_r50_fpg-chn128_crop640-50e_coco.py",
    "legacy_1.x/faster-rcnn_r50_fpn_1x_coco_v1.py",
    "ld/ld_r18-gflv1-r101_fpn_1x_coco.py",
    "seesaw_loss/mask-rcnn_r50_fpn_seesaw-loss_random-ms-2x_lvis-v1.py",
)
WEIGHTS = ("init_cfg", "pretrained", "teacher_ckpt")
# The thresholds for scores, masks, sizes and pairs of corners, with which an untrained model predicts nothing.
OPEN = dict(
    score_thr=0.0,
    score_threshold=0.0,
    filter_thr=0.0,
    mask_thr=0.0,
    min_bbox_size=-1,
    distance_threshold=float("inf"),
    corner_topk=1000,
)
# The numbers of regions that a head is trained on and given for a prediction, and of the sampled points of a mask.
FEW = dict(num=64, max_per_img=100, num_points=1024)
# The hourglass of CornerNet and CentripetalNet needs images of at least 511 pixels, and SSD of 300. DINO and DDQ select
# 900 positions of the pyramid.
SIZES = (("cornernet", 512), ("centripetalnet", 512), ("ssd300", 300), ("dino", 256), ("ddq", 256))


def without_weights(settings: Any) -> None:
    """Drop the paths of pretrained weights, open the thresholds that an untrained model does not pass, and keep few
    regions, because their heads take most of the time on a CPU."""
    if isinstance(settings, dict):
        for key in list(settings):
            if key in WEIGHTS and any(word in str(settings[key]) for word in ("Pretrained", "://")):
                settings[key] = None
            elif key in OPEN and settings[key] is not None:
                is_list = isinstance(settings[key], list)
                settings[key] = [OPEN[key]] * len(settings[key]) if is_list else OPEN[key]
            elif key in FEW and isinstance(settings[key], int):
                settings[key] = min(settings[key], FEW[key])
            else:
                without_weights(settings[key])
    elif isinstance(settings, (list, tuple)):
        for item in settings:
            without_weights(item)


def classes_of(settings: Any, name: str = "") -> int:
    """Return the smallest number of classes that the heads of a model's config have for boxes or masks, at most 80."""
    parts = settings if isinstance(settings, (list, tuple)) else []
    named = settings.items() if isinstance(settings, dict) else ((name, part) for part in parts)
    counts = [classes_of(part, key) for key, part in named if key not in ("rpn_head", "semantic_head")]
    if isinstance(settings, dict) and "head" in name and isinstance(settings.get("num_classes"), int):
        counts.append(settings["num_classes"])
    return min(counts, default=80)


def check(config_path: Path, device: str) -> str:
    """Return a text with the loss of one training step and the number of predicted boxes."""
    import torch
    from mmdet.testing import demo_mm_inputs
    from mmengine.config import Config

    size = next((size for name, size in SIZES if name in config_path.name), 128)
    config = Config.fromfile(config_path)
    loading = str(config.get("train_dataloader"))
    is_panoptic = "LoadPanopticAnnotations" in loading

    def inputs(count: int) -> Any:
        return demo_mm_inputs(
            count,
            [[3, size, size]] * count,
            num_classes=classes_of(config.model),
            with_mask=is_panoptic or "'with_mask': True" in loading,
            with_semantic=is_panoptic or "'with_seg': True" in loading,
            sem_seg_output_strides=8 if "SegRescale" in loading else 1,
            device=device,
        )

    # RepPoints' assigner makes its indices on the default device (open-mmlab/mmdetection#10436).
    with torch.device(device) if "reppoints" in config_path.name else contextlib.nullcontext():
        return step_and_predict(config_path, device, inputs)


def step_and_predict(config_path: Path, device: str, inputs: Callable[[int], Any]) -> str:
    """Return a text with the loss of one training step and the number of predicted boxes.

    Args:
        inputs: a function that returns a batch of so many images.

    Raises:
        RuntimeError: the loss or a gradient is not finite, there are no gradients, or no box is predicted.
    """
    import torch
    from mmdet.registry import MODELS
    from mmengine.config import Config
    from mmengine.logging import MessageHub
    from mmengine.model import revert_sync_batchnorm

    torch.manual_seed(0)
    # mmengine's runner does so, and the losses of some heads depend on it.
    for name in ("epoch", "iter"):
        MessageHub.get_current_instance().update_info(name, 0)
    model_config = Config.fromfile(config_path).model
    without_weights(model_config)
    # These enlarge the images, to 1024 pixels in some configs.
    model_config.get("data_preprocessor", {}).pop("batch_augments", None)
    model = revert_sync_batchnorm(MODELS.build(model_config)).to(device)
    if hasattr(model, "init_weights"):
        model.init_weights()
    for part in model.modules():
        if (
            type(part).__name__ == "TridentConv"
        ):  # mmdet leaves its weight as the memory was, which may hold NaN.
            torch.nn.init.kaiming_uniform_(part.weight)
    loss, sample = train_and_predict(model, inputs)
    if "pred_panoptic_seg" in sample:
        return f"loss {loss:.3f}, {len(sample.pred_panoptic_seg.sem_seg.unique())} segments"
    boxes = len(sample.pred_instances)
    if boxes == 0:
        raise RuntimeError("no box is predicted")
    return f"loss {loss:.3f}, {boxes} boxes"


def train_and_predict(model: Any, inputs: Callable[[int], Any]) -> tuple[float, Any]:
    """Return the loss of one training step on two images and the prediction for one image.

    Raises:
        RuntimeError: the loss or a gradient is not finite, or there are no gradients.
    """
    import torch

    model.train()
    losses = model.forward(**model.data_preprocessor(inputs(2), True), mode="loss")
    total, _ = model.parse_losses(losses)
    if not total.isfinite():
        raise RuntimeError(f"the loss is {total.item()}: {losses}")
    total.backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    if not gradients or not all(bool(g.isfinite().all()) for g in gradients):
        raise RuntimeError("a gradient is missing or not finite")
    model.eval()
    with torch.no_grad():
        samples = model.forward(**model.data_preprocessor(inputs(1), False), mode="predict")
    return total.item(), samples[0]


def allow_cpu(device: str) -> None:
    """On the CPU, let code run that makes CUDA tensors, asks for the current device or moves to it."""
    import torch

    if device != "cpu":
        return
    torch.cuda.IntTensor, torch.cuda.FloatTensor = torch.IntTensor, torch.FloatTensor
    torch.cuda.current_device = lambda: -1
    torch.Tensor.cuda = lambda self, *arguments, **named: self


def check_configs(
    package: str, configs: Sequence[str], check: Callable[[Path, str], str], description: str | None
) -> int:
    """Check the configs of an mm-package that the command line names, or ``configs``; return the exit status."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(
        "configs",
        nargs="*",
        default=configs,
        help=f"paths of configs relative to {package}'s configs folder (default: a choice of {len(configs)})",
    )
    parser.add_argument(
        "--device", default="cpu", help="device to run on, such as 'cuda' (default: %(default)s)"
    )
    arguments = parser.parse_args()

    from visdet.compat import older_versions
    from visdet.compat.mmcv_ops import install

    older_versions.install()
    logging.disable(logging.INFO)  # mmengine logs the initialisation of each of thousands of weights.
    print("mmcv._ext:", "visdet" if install() else "mmcv's own")
    module = importlib.import_module(package)
    importlib.import_module(f"{package}.utils").register_all_modules(init_default_scope=True)
    folder = Path(module.__file__ or "").parent / ".mim" / "configs"
    os.chdir(folder.parent)  # Some configs name others by paths relative to the repository.
    failed = 0
    for name in arguments.configs:
        start = time.perf_counter()
        try:
            outcome = "ok    " + check(folder / name, arguments.device)
        except Exception:
            failed += 1
            outcome = "FAILED\n" + traceback.format_exc()
        print(f"{name}: {outcome} ({time.perf_counter() - start:.1f} s)", flush=True)
    print(f"{len(arguments.configs) - failed} of {len(arguments.configs)} pass")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(check_configs("mmdet", CONFIGS, check, __doc__))
