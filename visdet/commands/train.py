"""Train the model of a config, or a model on a folder of pictures, and validate it.

visdet train --data FOLDER                              # pictures with boxes as COCO, YOLO, Pascal VOC or CSV
visdet train --data FOLDER --model dino-small --epochs 50 --batch-size 8
visdet train --from work_dirs/first/best.pth --iters 200
visdet train deformable_detr/deformable-detr_shapes
visdet train my_config.py --work-dir work_dirs/first --cfg-options train_cfg.max_iters=1000
visdet train my_config.py --deterministic               # the same bits in every run
visdet train my_config.py --from model.safetensors      # fine-tune published weights
torchrun --nproc-per-node 2 -m visdet train CONFIG      # on two GPUs
"""

import argparse
import os
from typing import Any

from visdet.command_line import add_config_arguments, positive_int, seed_number

_LOGGERS = {
    "wandb": {"type": "WandbVisBackend"},
    "mlflow": {
        "type": "MLflowVisBackend",
        "tracking_uri": os.environ.get("MLFLOW_TRACKING_URI", "sqlite:///mlflow.db"),
    },
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add = parser.add_argument
    add_config_arguments(parser, "--data", "--work-dir", "--graph", "--launcher", needs_config=False)
    add(
        "--model",
        help="model for --data: the name of a config of the package, without its folder and the end _coco "
        "(default: dino-small)",
    )
    length = parser.add_mutually_exclusive_group()
    length.add_argument(
        "--iters", type=positive_int, help="iterations of the run, over which the schedule stretches"
    )
    length.add_argument("--epochs", type=positive_int, help="epochs of the run")
    add("--batch-size", type=positive_int, help="images of a training iteration")
    add("--lr", type=float, help="learning rate")
    add("--workers", type=int, help="processes that read the images")
    add("--device", help="'cpu', 'cuda' or 'cuda:1' (default: the GPU if there is one)")
    add("--seed", type=seed_number, help="seed of all random numbers")
    add(
        "--deterministic",
        action="store_true",
        default=None,
        help="train to the same bits in every run, with the seed 0 if none is given; takes up to 1.4 times as long",
    )
    add(
        "--from",
        dest="from_",
        metavar="FILE|URL|NAME",
        help="start from weights of visdet, mmdet, transformers or an original implementation: a file, an address, or "
        "a name of docs/model_zoo.md; what does not fit, such as other classes, begins anew and is listed",
    )
    add(
        "--resume",
        nargs="?",
        const="auto",
        metavar="auto|PATH",
        help="continue from the newest checkpoint of the work_dir, if there is one, or from the file or folder PATH",
    )
    add(
        "--amp",
        action="store_true",
        help="train under bfloat16 autocast; a CPU without bfloat16 takes several times as long with it",
    )
    add(
        "--auto-scale-lr",
        action="store_true",
        help="multiply the learning rate by the total batch size divided by auto_scale_lr.base_batch_size",
    )
    add("--logger", choices=_LOGGERS, help="write the curves there, too; the package must be installed")


def run(config: str | None, cfg_options: dict[str, Any] | None, logger: str | None, **options: Any) -> None:
    """Run the command."""
    from visdet.data_folder import train

    values = cfg_options or {}
    if logger:
        backends = [{"type": "LocalVisBackend"}, {"type": "TensorboardVisBackend"}, _LOGGERS[logger]]
        values = {"visualizer.vis_backends": backends, **values}
    train(config, values, **options)
