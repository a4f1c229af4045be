"""Make info files from raw nuScenes data, convert a published info file to a safe format, or check an info file.

visdet prepare-nuscenes data/nuscenes --version v1.0-trainval --can-bus data/nuscenes --out-dir data/infos
visdet prepare-nuscenes --convert data/infos/nuscenes_infos_train.pkl
visdet prepare-nuscenes --check data/mine/infos_train.npz --data-root data/mine

The command needs nuScenes' tables, samples and map expansion (maps/expansion/*.json), and the package shapely for the
map. With --no-map, it needs neither the map expansion nor shapely. The status of the vehicle comes from the CAN bus
expansion (can_bus/*.json) and is zero without it. The command writes nuscenes_infos_{train,val,test}.npz. Training
reads these files without unpickling anything.
"""

import argparse
from collections import defaultdict
from pathlib import Path
from typing import Any

from visdet.command_line import add_options


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add = parser.add_argument
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("root", nargs="?", help="the folder of nuScenes, with v1.0-…/, samples/ and maps/")
    add_options(
        parser,
        version=("v1.0-trainval", "version of nuScenes"),
        out_dir=("data/infos", "folder to write"),
    )
    add("--can-bus", metavar="FOLDER", help="the folder that holds can_bus/")
    add("--no-map", action="store_true", help="write no map elements")
    source.add_argument(
        "--convert", metavar="PKL", help="convert this published info file to an .npz file beside it"
    )
    source.add_argument(
        "--check",
        metavar="INFOS",
        help="check every frame of this info file and every image, and print what a config must say about it",
    )
    add("--data-root", help="for --check: the folder that the paths in the file are relative to")


def run(
    root: Any,
    version: str,
    out_dir: str,
    can_bus: str | None,
    no_map: bool,
    convert: str | None,
    check: str | None,
    data_root: str | None,
) -> None:
    """Run the command."""
    from rich.progress import track

    from visdet.datasets.info_files import load_infos
    from visdet.datasets.nuscenes_converter import NuScenesConverter, split_of_scene
    from visdet.engine import check_out_file, check_work_dir

    if check:
        from visdet.datasets.recording_report import recording_report

        print("\n".join(recording_report(check, data_root)))
        return
    if convert:
        file = Path(convert).with_suffix(".npz")
        check_out_file(file, "a copy of the file elsewhere")
        infos, metadata = load_infos(convert)
        write(file, list(infos), metadata)
        return
    check_work_dir(out_dir, "--out-dir")
    converter = NuScenesConverter(root, version, can_bus, with_map=not no_map)
    infos_of_split: dict[str, list[dict]] = defaultdict(list)
    for scene in track(converter.tables.scenes(), description="scenes"):
        infos_of_split[split_of_scene(version, scene["name"])] += converter.infos_of_scene(scene)
    if silent := converter.scenes_without_can_bus:
        print(f"{len(silent)} scenes have no CAN bus messages, so that their ego_status is 0")
    for split, frames in infos_of_split.items():
        write(Path(out_dir, f"nuscenes_infos_{split}.npz"), frames, {"version": version})


def write(path: Path, infos: list[dict], metadata: dict) -> None:
    from visdet.datasets.info_files import save_infos

    save_infos(path, infos, metadata)
    print(f"wrote {len(infos)} frames to {path}")
