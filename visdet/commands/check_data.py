"""Report what a config will train and validate on, and draw samples of it on a sheet.

visdet check-data CONFIG --out-dir work_dirs/check
"""

import argparse
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from visdet.command_line import add_config_arguments, folder_name


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add_config_arguments(parser)
    parser.add_argument(
        "--out-dir",
        "--output-dir",
        type=folder_name,
        help="folder of the pictures (default: work_dirs/browse/...)",
    )


_SHOWN_FAULTS = 50  # of each split


def run(config: str, cfg_options: dict[str, Any] | None, out_dir: str | None) -> int:
    """Run the command. The status is 1 if something keeps the config from training on its data."""
    from mmengine.registry import init_default_scope

    from visdet.engine import check_work_dir, load_config
    from visdet.engine.config.load import datasets_within

    from . import browse

    cfg, _ = load_config(config, cfg_options)
    if out_dir:
        check_work_dir(out_dir, "--out-dir")
    given = cfg.get
    init_default_scope(given("default_scope", "visdet"))
    heads = {
        f"model.{name}.num_classes": part["num_classes"]
        for name, part in given("model", {}).items()
        if isinstance(part, dict) and "num_classes" in part
    }
    splits = [split for split in ("train", "val", "test") if given(f"{split}_dataloader")]
    if "val" in splits and given("test_dataloader") == cfg.val_dataloader:
        splits.remove("test")
    seen: dict[str, str] = {}
    problems = 0
    for split in splits:
        found = []
        for part in datasets_within(cfg[f"{split}_dataloader"].dataset):
            found += problems_of_split(part, split, heads, seen)
        count = len(found)
        for problem in found[:_SHOWN_FAULTS]:
            print(f"{split}: a run stops here: {problem}")
        if count > _SHOWN_FAULTS:
            print(f"{split}: and at {count - _SHOWN_FAULTS} more places")
        problems += count
    if not problems:
        with _without_warnings():
            browse.run(config, cfg_options, out_dir, number=12)
    return min(problems, 1)


def problems_of_split(config: dict, split: str, heads: dict[str, int], seen: dict[str, str]) -> list[str]:
    """Print what the data set of a split holds, and return what keeps a run from using it with this model.

    Args:
        config: the config of the data set. split: its name.
        heads: the numbers of classes of the model. seen: the split of each image so far, to which those are added.
    """
    from visdet.datasets import CocoDataset
    from visdet.engine.config.checks import section_of
    from visdet.errors import UserError, listed
    from visdet.registry import DATASETS

    kind = DATASETS.get(config["type"])
    is_coco = isinstance(kind, type) and issubclass(kind, CocoDataset)
    try:
        dataset = DATASETS.build({**config, "lazy_init": True} if is_coco else config)
    except UserError as error:
        return [str(error)]
    problems = problems_of_coco(dataset, split) if is_coco else []
    if not problems:
        number = len(dataset)
        print(f"{split}: {number} samples")
        paths = [dataset.get_data_info(index)["img_path"] for index in range(number if is_coco else 0)]
        shared = [path for path in paths if path in seen]
        if shared:
            print(f"  images that {seen[shared[0]]} has, too: {len(shared)} ({listed(shared, 3)})")
        seen.update(dict.fromkeys(paths, split))
    count = len(section_of(getattr(dataset, "metainfo", {}), "classes"))
    wrong = [f"{name}={number}" for name, number in heads.items() if count and number != count]
    if wrong:
        problems.append(f"the data has {count} classes, but the model {', '.join(wrong)}; set {count}")
    return problems


def problems_of_coco(dataset: Any, split: str) -> list[str]:
    """Load a CocoDataset, print the report of its file, and return what keeps a run from using it."""
    from visdet.datasets.coco import add_sizes
    from visdet.datasets.coco_report import coco_report
    from visdet.errors import UserError
    from visdet.structures.coco_json import faults_of, load_coco_json, read_json

    path = dataset.ann_file
    needs_annotations = not dataset.test_mode
    backend = dataset.backend_args
    folder = dataset.data_prefix["img"]
    try:
        faults = faults_of(read_json(path, backend), needs_annotations)
        if faults:
            return [f"annotation file {path}{fault}" for fault in faults]
        content = load_coco_json(path, backend, needs_annotations)
        number = add_sizes(content["images"], folder, backend)
        lines = coco_report(content, folder, dataset.metainfo["classes"])
        if number:
            lines.append(f"images whose files were opened for their width and height: {number}")
        print(f"{split}, {path}: " + "\n  ".join(lines))
        with _without_warnings():
            dataset.full_init()
    except UserError as error:
        return [str(error)]
    return []


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Leave out the warnings on annotation files in the block, which the report says."""
    from mmengine.logging import MMLogger

    def is_other(record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith("annotation file ")

    logger = MMLogger.get_current_instance()
    logger.addFilter(is_other)
    try:
        yield
    finally:
        logger.removeFilter(is_other)
