"""The synthetic driving scenes as a data set, which is drawn at its first use."""

from typing import Any

from visdet.registry import DATASETS

from ..nuscenes import NuScenes3DDetTrackDataset
from .drawn_folder import claim_folder
from .driving_scenes import DRIVING_MAP_CLASSES, make_driving_scenes
from .driving_world import DRIVING_CLASSES


@DATASETS.register_module()
class DrivingScenesDataset(NuScenes3DDetTrackDataset):
    """A NuScenes3DDetTrackDataset of the driving scenes, which are made first if ``data_root`` does not hold them.

    Args:
        generator: arguments of :func:`make_driving_scenes` other than the folder. All data sets that share a
            ``data_root`` must have the same.
        data_root: the folder of the scenes.
        **nuscenes_arguments: arguments of NuScenes3DDetTrackDataset. ``ann_file`` is relative to ``data_root``.
    """

    METAINFO = {"classes": DRIVING_CLASSES, "map_classes": DRIVING_MAP_CLASSES}

    def __init__(
        self,
        generator: dict | None = None,
        data_root: str = "data/driving_scenes/",
        **nuscenes_arguments: Any,
    ) -> None:
        make_driving_scenes(data_root, **(generator or {}))
        claim_folder(self, data_root)
        super().__init__(data_root=data_root, **nuscenes_arguments)
