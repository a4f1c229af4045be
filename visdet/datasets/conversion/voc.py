"""Reading Pascal VOC: an XML file for each image."""

from collections.abc import Iterator
from pathlib import Path, PureWindowsPath
from xml.etree import ElementTree

from .source import Picture, Source, checked_box, counted, files_below, text_of

# Lists and the splits that they mean. The last list that names an image counts.
_LISTS = {"trainval": "train", "test": "test", "val": "val", "train": "train"}
_SIDES = ("xmin", "ymin", "xmax", "ymax")


def read_voc(source: Source) -> Iterator[Picture]:
    """Yield the picture of each XML file, or of those that the lists of ImageSets/Main name, if there are some."""
    split_of_stem: dict[str, str] = {}
    for name, split in _LISTS.items():
        for file in source.root.glob(f"**/ImageSets/Main/{name}.txt"):
            split_of_stem |= dict.fromkeys(text_of(file).split(), split)
    for file in files_below(source.root, "*.xml"):
        if not split_of_stem or file.stem in split_of_stem:
            with counted(source.left_out.pictures, file):
                yield _picture(file, split_of_stem.get(file.stem) or source.file_split(file), source)


def _picture(file: Path, split: str, source: Source) -> Picture:
    tree = ElementTree.parse(file)
    name = PureWindowsPath(tree.findtext("filename", "")).name or file.stem
    path = source.picture(name, file, split)
    if not path.is_file():
        like = source.picture_like(file, split)
        path = like if like.is_file() else path
    width, height = (float(tree.findtext(f"size/{side}") or 0) for side in ("width", "height"))
    picture = Picture(path, split, (width, height))
    for item in tree.iter("object"):
        text_of = item.findtext
        label = text_of("name", "")
        what = f"{file}: an object {label} has no class or no bndbox of four numbers"
        with counted(source.left_out.boxes, what):
            corners = [text_of(f"bndbox/{side}", "nothing") for side in _SIDES]
            others = {"ignore": 1} if text_of("difficult") == "1" else {}
            picture.boxes.append(checked_box(label, corners, **others))
    return picture
