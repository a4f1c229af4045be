"""Print a config after merging it with its bases.

visdet print-config CONFIG --cfg-options train_cfg.max_iters=100
visdet print-config CONFIG --summary
"""

import argparse
from typing import Any

from visdet.command_line import add_config_arguments


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add_config_arguments(parser, "--shape")
    parser.add_argument(
        "--summary", action="store_true", help="print the parameters and the FLOPs of the model instead"
    )


def run(config: str, cfg_options: dict[str, Any] | None, shape: Any, summary: bool) -> None:
    """Run the command."""
    from visdet.engine import load_config
    from visdet.engine.config.text import config_text, values_without_code

    cfg, remarks = load_config(config, cfg_options)
    if summary:
        from visdet.engine.summary import model_summary

        print(model_summary(cfg, shape and tuple(shape)))
        return
    for remark in remarks:
        print(f"# {remark}")
    values = cfg.to_dict()
    for path in values_without_code(values):
        print(f"# {path} cannot be written as code")
    print(config_text(values), end="")
