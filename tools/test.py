"""Evaluate a checkpoint on the test set of its config.

python tools/test.py CONFIG CHECKPOINT
"""

import argparse
from pathlib import Path

from visdet.command_line import CfgOptions, check_installation


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", help="the config that the checkpoint was trained with")
    parser.add_argument("checkpoint", help="a checkpoint file or its http(s) address")
    parser.add_argument("--work-dir", help="folder to write (default: work_dirs/<name of the config>)")
    parser.add_argument(
        "--out", metavar="FILE.json", help="write the predictions of every sample to this file"
    )
    parser.add_argument(
        "--show-dir", metavar="FOLDER", help="write pictures of predictions and ground truth to this folder"
    )
    parser.add_argument(
        "--graph",
        action=argparse.BooleanOptionalAction,
        help="replay predictions as CUDA graphs on a GPU (default: the config's graph, True)",
    )
    parser.add_argument(
        "--launcher",
        choices=("none", "pytorch"),
        help="launcher of the processes (default: 'pytorch' under torchrun, 'none' otherwise)",
    )
    parser.add_argument(
        "--cfg-options", nargs="+", action=CfgOptions, metavar="KEY=VALUE", help="change values of the config"
    )
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    check_installation()
    from visdet.engine import (
        build_runner,
        check_required_keys,
        check_work_dir,
        checked_launcher,
        draw_detections,
        load_config,
        say,
        tool_session,
        write_detections,
    )

    with tool_session():
        launcher = checked_launcher(args.launcher)
        cfg, remarks = load_config(args.config, args.cfg_options, args.work_dir)
        check_required_keys(cfg, for_training=False)
        cfg.launcher = launcher
        cfg.load_from, cfg.resume = args.checkpoint, False
        if args.graph is not None:
            cfg.graph = args.graph
        if args.out:
            write_detections(cfg, args.out)
            check_work_dir(Path(args.out).parent, "--out")
        if args.show_dir:
            check_work_dir(args.show_dir, "--show-dir")
            draw_detections(cfg, args.show_dir)
        for remark in remarks:
            say(remark)
        build_runner(cfg).test()
        for path, what in ((args.out, "predictions"), (args.show_dir, "pictures")):
            if path:
                say(f"{what}: {path}")


if __name__ == "__main__":
    main()
