"""Report what a config will train and validate on, and draw samples of it on a sheet.

visdet check-data CONFIG --out-dir work_dirs/check
"""

import argparse

from visdet.command_line import add_config_arguments, folder_name


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add_config_arguments(parser)
    parser.add_argument(
        "--out-dir", type=folder_name, help="folder of the pictures (default: work_dirs/browse/...)"
    )


def run(args: argparse.Namespace) -> int:
    """Run the command. The status is 1 if something keeps the config from training on its data."""
    from mmengine.registry import init_default_scope

    from visdet.engine import UserError, dataset_config, load_config

    from . import browse

    cfg, _ = load_config(args.config, args.cfg_options)
    init_default_scope(cfg.get("default_scope", "visdet"))
    heads = {
        f"model.{name}.num_classes": part["num_classes"]
        for name, part in cfg.get("model", {}).items()
        if isinstance(part, dict) and "num_classes" in part
    }
    seen: dict[str, str] = {}
    problems = 0
    for split in ("train", "val", "test"):
        if not cfg.get(f"{split}_dataloader") or (
            split == "test" and cfg.test_dataloader == cfg.get("val_dataloader")
        ):
            continue
        try:
            say_split(dataset_config(cfg, split), split, heads, seen)
        except UserError as error:
            problems += 1
            print(f"{split}: a run stops here: {error}")
    if not problems:
        browse.run(
            argparse.Namespace(
                config=args.config,
                cfg_options=args.cfg_options,
                output_dir=args.out_dir,
                number=12,
                not_show=True,
                split="train",
                show_interval=0.0,
                seed=0,
            )
        )
    return min(problems, 1)


def say_split(config: dict, split: str, heads: dict[str, int], seen: dict[str, str]) -> None:
    """Print what the data set of a split holds.

    Args:
        config: the config of the data set. split: its name.
        heads: the numbers of classes of the model. seen: the split of each image so far, to which those are added.

    Raises:
        UserError: the data set cannot be used with this model.
    """
    from visdet.datasets import CocoDataset
    from visdet.datasets.coco_report import coco_report
    from visdet.errors import ConfigError, UserError, listed
    from visdet.registry import DATASETS
    from visdet.structures.coco_json import load_coco_json

    kind = DATASETS.get(config["type"])
    is_coco = isinstance(kind, type) and issubclass(kind, CocoDataset)
    dataset = DATASETS.build({**config, "lazy_init": True} if is_coco else config)
    problem: UserError | None = None
    if is_coco:
        try:
            dataset.full_init()
        except UserError as error:
            problem = error
        content = load_coco_json(dataset.ann_file, dataset.backend_args, not dataset.test_mode)
        lines = coco_report(content, dataset.data_prefix["img"], dataset.metainfo["classes"])
        print(f"{split}, {dataset.ann_file}: " + "\n  ".join(lines))
    if problem:
        raise problem
    print(f"{split}: {len(dataset)} samples")
    if is_coco:
        paths = [dataset.get_data_info(index)["img_path"] for index in range(len(dataset))]
        shared = [path for path in paths if path in seen]
        if shared:
            print(f"  images that {seen[shared[0]]} has, too: {len(shared)} ({listed(shared, 3)})")
        seen.update(dict.fromkeys(paths, split))
    count = len(dataset.metainfo.get("classes") or ()) if hasattr(dataset, "metainfo") else 0
    wrong = [f"{name}={number}" for name, number in heads.items() if count and number != count]
    if wrong:
        raise ConfigError(f"the data has {count} classes, but the model {', '.join(wrong)}; set {count}")
