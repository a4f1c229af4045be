"""Paths of the pictures that are drawn for images. No two images share a path."""

from itertools import chain, count
from pathlib import Path

__all__ = ["PicturePaths"]


class PicturePaths:
    """Gives every image a file of its own in a folder.

    The first image with the stem ``a`` gets ``a.png``. If that path is taken, ``a.jpg`` gets ``a.jpg.png``; if that
    is taken, too, it gets ``a.jpg_2.png``, and so on.

    Args:
        folder: the folder of the pictures.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._image_of: dict[Path, str] = {}

    def path_of(self, image: str | Path, name: str | Path, suffix: str = ".png") -> Path:
        """Return the path of an image's picture. The same image always gets the same path.

        Args:
            image: the path of the image, which identifies it.
            name: the path below the folder from which the picture gets its name.
            suffix: the suffix of the picture.
        """
        name = Path(name)
        numbered = (name.with_name(f"{name.name}_{number}{suffix}") for number in count(2))
        free = chain([name.with_suffix(suffix), name.with_name(f"{name.name}{suffix}")], numbered)
        place = next(path for path in free if self._image_of.setdefault(path, str(image)) == str(image))
        return self.folder / place
