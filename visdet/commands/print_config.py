"""Print a config after merging it with its bases.

visdet print-config CONFIG --cfg-options train_cfg.max_iters=100
"""

import argparse

from visdet.command_line import add_config_arguments


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add_config_arguments(parser)


def run(args: argparse.Namespace) -> None:
    """Run the command."""
    from visdet.engine import load_config
    from visdet.engine.config_text import config_text, values_without_code

    cfg, remarks = load_config(args.config, args.cfg_options)
    for remark in remarks:
        print(f"# {remark}")
    values = cfg.to_dict()
    for path in values_without_code(values):
        print(f"# {path} cannot be written as code")
    print(config_text(values), end="")
