"""Check that unmodified mmrotate 1.x configs run on mmcv-lite and visdet's operators.

Each model runs one training step and one prediction. ``make check-mmrotate`` makes an environment for it. SASM calls
the points_in_polygons of mmcv 2.0, which makes its result on a GPU; in a check on the CPU it makes a CPU tensor.
"""

import sys
from pathlib import Path

from check_mmdet_configs import allow_cpu, check_configs, classes_of, step_and_predict

CONFIGS = (
    "rotated_retinanet/rotated-retinanet-rbox-le90_r50_fpn_1x_dota.py",
    "rotated_fcos/rotated-fcos-le90_r50_fpn_1x_dota.py",
    "rotated_faster_rcnn/rotated-faster-rcnn-le90_r50_fpn_1x_dota.py",
    "oriented_rcnn/oriented-rcnn-le90_r50_fpn_1x_dota.py",
    "roi_trans/roi-trans-le90_r50_fpn_1x_dota.py",
    "redet/redet-le90_re50_refpn_1x_dota.py",
    "s2anet/s2anet-le135_r50_fpn_1x_dota.py",
    "s2anet/cascade-s2anet-le135_r50_fpn_1x_dota.py",
    "r3det/r3det-oc_r50_fpn_1x_dota.py",
    "r3det/r3det-refine-oc_r50_fpn_1x_dota.py",
    "gwd/rotated-retinanet-hbox-oc_r50_fpn_gwd_1x_dota.py",
    "kld/rotated-retinanet-rbox-le90_r50_fpn_kld_1x_dota.py",
    "kfiou/rotated-retinanet-hbox-le90_r50_fpn_kfiou_1x_dota.py",
    "gliding_vertex/gliding-vertex-rbox_r50_fpn_1x_dota.py",
    "oriented_reppoints/oriented-reppoints-qbox_r50_fpn_1x_dota.py",
    "rotated_reppoints/rotated-reppoints-qbox_r50_fpn_1x_dota.py",
    "cfa/cfa-qbox_r50_fpn_1x_dota.py",
    "rotated_atss/rotated-atss-le90_r50_fpn_1x_dota.py",
    "psc/rotated-retinanet-rbox-le90_r50_fpn_psc-dual_amp-1x_dota.py",
    "csl/rotated-retinanet-rbox-le90_r50_fpn_csl-gaussian_amp-1x_dota.py",
    "rotated_rtmdet/rotated_rtmdet_tiny-3x-dota.py",
    # The last one, because what allow_cpu replaces stays replaced.
    "sasm_reppoints/sasm-reppoints-qbox_r50_fpn_1x_dota.py",
)


def check(config_path: Path, device: str) -> str:
    """Return a text with the loss of one training step and the number of predicted boxes."""
    from mmengine.config import Config
    from mmrotate.testing import demo_mm_inputs

    is_sasm = "sasm" in config_path.name
    if is_sasm:
        allow_cpu(device)
    config = Config.fromfile(config_path)
    steps = config.train_pipeline
    box_types = [step.get("box_type") or step.get("box_type_mapping", {}).get("gt_bboxes") for step in steps]
    size = 512 if is_sasm else 128  # SASM selects nine positions of every level.

    def inputs(count: int) -> list:
        return demo_mm_inputs(
            count,
            [[3, size, size]] * count,
            num_classes=classes_of(config.model),
            use_box_type=True,
            use_qbox=[name for name in box_types if name][-1] == "qbox",
            device=device,
        )

    return step_and_predict(config_path, device, inputs)


if __name__ == "__main__":
    sys.exit(check_configs("mmrotate", CONFIGS, check, __doc__))
