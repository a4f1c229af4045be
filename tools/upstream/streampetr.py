"""StreamPETR on the driving scenes, with random boxes in the images."""

from pathlib import Path

import numpy as np

from .driving import Driving


class StreamPETR(Driving):
    """A model whose config is based on those of mmdet3d, which its repository expects in its folder."""

    def config_file(self, work: Path, scale: float) -> str:
        import mmdet3d

        text = Path(self.config).read_text()
        low, high = 0.38 * scale, 0.55 * scale
        height, width = (int(size * scale) // 32 * 32 for size in (256, 704))
        for old, new in (
            ("../../../mmdetection3d/configs", str(Path(mmdet3d.__file__).parent / ".mim" / "configs")),
            ('"resize_lim": (0.38, 0.55)', f'"resize_lim": ({low}, {high})'),
            ('"final_dim": (256, 704)', f'"final_dim": ({height}, {width})'),
        ):
            if old not in text:
                raise ValueError(f"{self.config} has no {old!r}, which is replaced for the check")
            text = text.replace(old, new)
        path = work / "smaller_streampetr.py"
        path.write_text(text)
        return str(path)

    def complete(self, infos: list[dict]) -> None:
        rng = np.random.default_rng(0)
        for index, info in enumerate(infos):
            cameras = info["cams"].values()
            corners = [rng.uniform((0, 0), (1200, 600), (3, 2)) for _ in cameras]
            boxes = [np.hstack([corner, corner + rng.uniform(80, 300, (3, 2))]) for corner in corners]
            info.update(
                sweeps=[{}] * min(index, 1),  # Only a scene's first frame has none.
                frame_idx=index,
                bboxes2d=[box.astype(np.float32) for box in boxes],
                labels2d=[rng.integers(0, 10, 3) for _ in cameras],
                centers2d=[((box[:, :2] + box[:, 2:]) / 2).astype(np.float32) for box in boxes],
                depths=[rng.uniform(5, 40, 3).astype(np.float32) for _ in cameras],
                bboxes_ignore=[np.zeros((0, 4), np.float32) for _ in cameras],
            )
            for camera in cameras:
                camera.setdefault("timestamp", info["timestamp"])
