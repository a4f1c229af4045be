"""Where the picture of an image goes, so that no two images share one."""

from pathlib import Path

__all__ = ["PicturePaths"]


class PicturePaths:
    """Gives every image a ``.png`` file of its own in a folder.

    The first image called ``a`` gets ``a.png``; another one whose picture would be the same gets ``a.jpg.png``, after
    its own suffix, and if that is taken too ``a.jpg_2.png``, and so on.

    Args:
        folder: of the pictures.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._image_of: dict[Path, str] = {}

    def path_of(self, image: str | Path, name: str | Path | None = None) -> Path:
        """Return the picture's path; an image that was asked for before keeps its own.

        Args:
            image: the path of the image, which tells it from others.
            name: what the picture is called after, below the folder; default: ``image``.
        """
        name = Path(image if name is None else name)
        candidates = [name.with_suffix(".png"), name.with_name(f"{name.name}.png")]
        number = 1
        while True:
            for candidate in candidates:
                if self._image_of.setdefault(candidate, str(image)) == str(image):
                    return self.folder / candidate
            number += 1
            candidates = [name.with_name(f"{name.name}_{number}.png")]
