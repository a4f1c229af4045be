"""Print a config after merging it with its bases.

python tools/print_config.py CONFIG --cfg-options train_cfg.max_iters=100
"""

import argparse

from visdet.command_line import CfgOptions, check_installation


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", help="a Python config file")
    parser.add_argument(
        "--cfg-options", nargs="+", action=CfgOptions, metavar="KEY=VALUE", help="change values of the config"
    )
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    check_installation()
    from visdet.engine import load_config, tool_session
    from visdet.engine.config_text import config_text, values_without_code

    with tool_session():
        cfg, remarks = load_config(args.config, args.cfg_options)
        for remark in remarks:
            print(f"# {remark}")
        values = cfg.to_dict()
        for path in values_without_code(values):
            print(f"# {path} cannot be written as code")
        print(config_text(values), end="")


if __name__ == "__main__":
    main()
