"""Check that unmodified mmdet 3.3 configs run on mmcv-lite and visdet's operators.

Each model runs one training step and one prediction. The environment needs mmcv-lite and mmdet.
"""

import argparse
import contextlib
import importlib
import logging
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
)
OPEN = dict(score_thr=0.0, distance_threshold=float("inf"), corner_topk=1000)


def keep_every_box(settings: Any) -> None:
    """Disable the thresholds for scores and for pairs of corners, with which an untrained model predicts nothing."""
    if isinstance(settings, dict):
        for key, value in settings.items():
            settings[key] = OPEN.get(key, value)
            keep_every_box(value)


def check(config_path: Path, device: str) -> str:
    """Return a text with the loss of one training step and the number of predicted boxes."""
    import torch
    from mmdet.testing import demo_mm_inputs

    # CornerNet's hourglass needs images of at least 511 pixels. DINO selects 900 positions of the pyramid.
    size = next((size for name, size in (("cornernet", 512), ("dino", 256)) if name in config_path.name), 128)

    def inputs(count: int) -> Any:
        has_masks = "mask" in config_path.name
        return demo_mm_inputs(
            count, [[3, size, size]] * count, num_classes=80, with_mask=has_masks, device=device
        )

    # RepPoints' assigner makes its indices on the default device (open-mmlab/mmdetection#10436).
    with torch.device(device) if "reppoints" in config_path.name else contextlib.nullcontext():
        return step_and_predict(config_path, device, inputs)


def step_and_predict(config_path: Path, device: str, inputs: Callable[[int], Any]) -> str:
    """Return a text with the loss of one training step and the number of predicted boxes.

    Args:
        inputs: a function that returns a batch of so many images.

    Raises:
        RuntimeError: a gradient is missing or not finite, or no box is predicted.
    """
    import torch
    from mmdet.registry import MODELS
    from mmengine.config import Config
    from mmengine.model import revert_sync_batchnorm

    torch.manual_seed(0)
    model_config = Config.fromfile(config_path).model
    for part in (model_config, model_config.get("backbone", {})):
        part.pop("init_cfg", None)  # The check does not need pretrained weights, which would be downloaded.
    keep_every_box(model_config.get("test_cfg"))
    model = revert_sync_batchnorm(MODELS.build(model_config)).to(device)
    if hasattr(model, "init_weights"):
        model.init_weights()
    loss, sample = train_and_predict(model, inputs)
    boxes = len(sample.pred_instances)
    if boxes == 0:
        raise RuntimeError("no box is predicted")
    return f"loss {loss:.3f}, {boxes} boxes"


def train_and_predict(model: Any, inputs: Callable[[int], Any]) -> tuple[float, Any]:
    """Return the loss of one training step on two images and the prediction for one image.

    Raises:
        RuntimeError: a gradient is missing or not finite.
    """
    import torch

    model.train()
    losses = model.forward(**model.data_preprocessor(inputs(2), True), mode="loss")
    total, _ = model.parse_losses(losses)
    total.backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    if not gradients or not all(bool(g.isfinite().all()) for g in gradients):
        raise RuntimeError("a gradient is missing or not finite")
    model.eval()
    with torch.no_grad():
        samples = model.forward(**model.data_preprocessor(inputs(1), False), mode="predict")
    return total.item(), samples[0]


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
