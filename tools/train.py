"""Train the model of a config, and validate it as the config says.

python tools/train.py configs/deformable_detr/deformable-detr_shapes.py
torchrun --nproc-per-node 2 tools/train.py CONFIG
"""

import argparse

from visdet.command_line import CfgOptions, check_installation


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", help="a Python config file")
    parser.add_argument("--work-dir", help="folder to write (default: work_dirs/<name of the config>)")
    parser.add_argument(
        "--resume",
        nargs="?",
        const="auto",
        metavar="auto|PATH",
        help="continue from the newest checkpoint of the work_dir, if there is one, or from the file or folder PATH",
    )
    parser.add_argument("--amp", action="store_true", help="train under bfloat16 autocast, on a CPU or a GPU")
    parser.add_argument(
        "--graph",
        action=argparse.BooleanOptionalAction,
        help="replay training steps and predictions as CUDA graphs on a GPU (default: the config's graph, True)",
    )
    parser.add_argument(
        "--auto-scale-lr",
        action="store_true",
        help="multiply the learning rate by the total batch size divided by auto_scale_lr.base_batch_size",
    )
    parser.add_argument(
        "--launcher",
        choices=("none", "pytorch"),
        help="launcher of the processes (default: 'pytorch' under torchrun, 'none' otherwise)",
    )
    parser.add_argument(
        "--cfg-options",
        nargs="+",
        action=CfgOptions,
        metavar="KEY=VALUE",
        help="change values of the config, such as train_cfg.max_iters=100",
    )
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    check_installation()
    from visdet.engine import (
        build_runner,
        check_required_keys,
        checked_launcher,
        enable_amp,
        enable_auto_scale_lr,
        load_config,
        say,
        set_resume,
        tool_session,
    )

    with tool_session():
        launcher = checked_launcher(args.launcher)
        cfg, remarks = load_config(args.config, args.cfg_options, args.work_dir)
        check_required_keys(cfg, for_training=True)
        cfg.launcher = launcher
        if args.amp:
            enable_amp(cfg)
        if args.graph is not None:
            cfg.graph = args.graph
        if args.auto_scale_lr:
            enable_auto_scale_lr(cfg)
        if args.resume:
            set_resume(cfg, args.resume)
        for remark in remarks:
            say(remark)
        build_runner(cfg).train()


if __name__ == "__main__":
    main()
