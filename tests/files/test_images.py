"""Strange image files: one message that names the file, by every reader, at once."""

import io
import os
import struct
import zlib

import pytest
from json_files import read_json
from PIL import ExifTags, Image

from visdet.datasets.conversion import convert
from visdet.datasets.transforms import LoadImageFromFile
from visdet.datasets.transforms.multi_view import LoadMultiViewImageFromFiles
from visdet.errors import InvalidInputError
from visdet.files.images import open_image, orientation_of


def saved(orientation, kind="JPEG"):
    """Return the bytes of an image 40 x 30, whose EXIF data hold a number or a text of one letter as orientation."""
    number = (
        struct.pack(">HHIHH", ExifTags.Base.Orientation, 3, 1, orientation, 0)
        if isinstance(orientation, int)
        else (struct.pack(">HHI4s", ExifTags.Base.Orientation, 2, 2, orientation))
    )
    exif = b"Exif\0\0MM\0*" + struct.pack(">IH", 8, 1) + number + bytes(4)
    Image.new("RGB", (40, 30)).save(content := io.BytesIO(), kind, exif=exif)
    return content.getvalue()


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize(("stored", "expected"), [(6, 6), (1, 1), (0, 1), (9, 1), (b"6", 1), (b"x", 1)])
def test_an_orientation_that_is_no_number_from_1_to_8_turns_nothing(stored, expected, kind):
    with open_image("a", saved(stored, kind)) as image:
        assert orientation_of(image) == expected


@pytest.mark.filterwarnings("ignore:Corrupt EXIF")
def test_damaged_exif_data_turn_nothing():
    content = saved(6)
    start = content.index(b"Exif\0\0") + 6
    for damaged in (b"\xff" * 8, b"II*\0\xff\xff\xff\x7f"):
        with open_image("a", content[:start] + damaged + content[start + 8 :]) as image:
            assert orientation_of(image) == 1


@pytest.mark.filterwarnings("ignore:Corrupt EXIF")
@pytest.mark.parametrize(
    "content", [b"", b"GIF89a", saved(1)[:300], saved(1, "PNG")[:50], b"II*\0" + b"\xff" * 20]
)
def test_damage_that_is_found_on_opening_or_on_decoding_names_the_file(tmp_path, content):
    path = tmp_path / "a.img"
    path.write_bytes(content)
    for given in (None, content):
        with (
            pytest.raises(InvalidInputError, match=rf"cannot read image {path}"),
            open_image(path, given) as image,
        ):
            image.load()


def load_one(path):
    LoadImageFromFile()({"img_path": str(path)})


def load_views(path):
    LoadMultiViewImageFromFiles()({"img_filename": [str(path)]})


def open_file(path):
    with open_image(path):
        pass


@pytest.mark.parametrize("read", [load_one, load_views, open_file])
def test_a_pipe_is_refused_without_waiting(tmp_path, read):
    os.mkfifo(tmp_path / "a.jpg")
    with pytest.raises(
        InvalidInputError, match=r"a\.jpg.* is a pipe, a socket or a device, but must be a file"
    ):
        read(tmp_path / "a.jpg")


@pytest.mark.filterwarnings("error")
def test_convert_goes_on_after_strange_pictures(tmp_path):
    """One is too large for OpenCV, one for Pillow's default, one has a text as its orientation, and one is a pipe."""
    for name, sides in (("huge", (70000, 70000)), ("large", (20000, 20000))):
        header = b"IHDR" + struct.pack(">II", *sides) + b"\x08\x02\0\0\0"
        start = b"\x89PNG\r\n\x1a\n\0\0\0\r" + header + struct.pack(">I", zlib.crc32(header))
        (tmp_path / f"{name}.png").write_bytes(
            start + b"\0\0\0\0IDAT" + struct.pack(">I", zlib.crc32(b"IDAT"))
        )
    (tmp_path / "text.jpg").write_bytes(saved(b"6"))
    os.mkfifo(tmp_path / "pipe.jpg")
    names = ["huge.png", "large.png", "text.jpg", "pipe.jpg"]
    rows = "".join(f"{name},cat,1,2,11,12\n" for name in names)
    (tmp_path / "boxes.csv").write_text("image,label,xmin,ymin,xmax,ymax\n" + rows)
    files, left_out = convert(tmp_path, tmp_path / "out", val_share=0, left_out_share=1)
    sizes = {row["file_name"]: (row["width"], row["height"]) for row in read_json(files[0])["images"]}
    assert sizes == {"large.png": (20000, 20000), "text.jpg": (40, 30)}
    assert [name for name in names if any(name in line for line in left_out)] == ["huge.png", "pipe.jpg"]
