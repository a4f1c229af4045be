"""Reading image files of every kind, and annotations."""

from unittest.mock import Mock

import numpy as np
import pytest
import torch
from coco_files import turned
from PIL import Image, ImageOps
from PIL.PngImagePlugin import PngImageFile

from visdet.datasets.transforms import (
    FilterAnnotations,
    LoadAnnotations,
    LoadImageFromFile,
    LoadMultiViewImageFromFiles,
)
from visdet.engine.inference.given_images import each_image
from visdet.files import images
from visdet.files.images import extra_frames, open_image, sizes_of

RGB = np.random.default_rng(0).integers(0, 256, (6, 9, 3), dtype=np.uint8)


def load(path, height=None, width=None, **arguments):
    results = dict(img_path=str(path))
    if height is not None:
        results.update(height=height, width=width)
    return LoadImageFromFile(**arguments)(results)


def pixels(results):
    return results["img"].permute(1, 2, 0).numpy()


def test_grey_alpha_and_palette(tmp_path):
    picture_of = Image.fromarray
    grey = RGB[..., 0]
    alpha = np.random.default_rng(1).integers(0, 256, (6, 9), dtype=np.uint8)
    palette = picture_of(RGB).quantize(8)
    grey_as_rgb = np.repeat(grey[..., None], 3, 2)
    palette_as_rgb = np.array(palette.convert("RGB"))
    cases = {
        "grey": (picture_of(grey), grey_as_rgb),
        "grey-alpha": (picture_of(np.dstack([grey, alpha]), "LA"), grey_as_rgb),
        "palette": (palette, palette_as_rgb),
        "bilevel": (
            picture_of(grey > 127),
            np.repeat(255 * (grey > 127)[..., None].astype(np.uint8), 3, 2),
        ),
    }
    for name, (image, expected) in cases.items():
        path = tmp_path / f"{name}.png"
        image.save(path)
        assert np.array_equal(pixels(load(path, channel_order="rgb")), expected), name
    path = tmp_path / "transparent.png"
    palette.save(path, transparency=3)
    loaded = pixels(load(path, channel_order="rgb"))
    assert np.array_equal(loaded, palette_as_rgb)


def test_sixteen_bits_keep_the_upper_byte(tmp_path):
    values = np.random.default_rng(2).integers(0, 65536, (6, 9)).astype(np.uint16)
    for name in ("deep.png", "deep.tif"):
        Image.fromarray(values).save(tmp_path / name)
        expected = np.repeat((values >> 8).astype(np.uint8)[..., None], 3, 2)
        assert np.array_equal(pixels(load(tmp_path / name)), expected)
    Image.fromarray(values.astype(np.float32)).save(tmp_path / "float.tif")
    with pytest.raises(ValueError, match=r"float\.tif .*convert the file to 8 or 16 bits"):
        load(tmp_path / "float.tif")


@pytest.fixture
def said(monkeypatch, logged):
    """The list of what is said of images, as if nothing had been said before."""
    monkeypatch.setattr(images, "_HAVE_SAID", set())
    return logged(images)


@pytest.mark.parametrize(("highest", "is_said"), [(0, False), (4080, True), (4096, False)])
def test_sixteen_bits_that_leave_a_picture_nearly_black_are_said_once(tmp_path, said, highest, is_said):
    values = np.full((6, 9), highest, np.uint16)
    Image.fromarray(values).save(tmp_path / "grey.png")
    for _ in range(2):
        load(tmp_path / "grey.png")
        next(each_image(values))
    assert [message.split(" is nearly")[0] for message in said] == is_said * [
        f"LoadImageFromFile: image {tmp_path / 'grey.png'}",
        "infer: image images",
    ]


@pytest.mark.parametrize("suffix", [".png", ".tif", ".webp"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_the_orientation_of_a_file(tmp_path, orientation, suffix):
    path = tmp_path / f"a{suffix}"
    Image.fromarray(RGB).convert("RGBA").save(path, exif=turned(orientation), lossless=True)
    with path.open("rb") as file, Image.open(file) as stored:
        upright = np.array(ImageOps.exif_transpose(stored))[..., :3]
    with Image.open(path) as shown:
        assert np.array_equal(LoadImageFromFile().rgb_of(shown, "a"), upright)
    with open_image(path) as image:
        assert sizes_of(image) == (upright.shape[1::-1], (9, 6))
    assert np.array_equal(pixels(load(path, channel_order="rgb")), upright)
    assert np.array_equal(pixels(load(path, *upright.shape[:2], channel_order="rgb")), upright)
    as_stored = load(path, channel_order="rgb", color_type="color_ignore_orientation")
    assert np.array_equal(pixels(as_stored), RGB)
    if orientation >= 5:  # the annotation file has the stored size: its boxes were drawn on that image
        assert np.array_equal(pixels(load(path, 6, 9, channel_order="rgb")), RGB)


def test_a_size_that_contradicts_the_annotation_file(tmp_path):
    Image.fromarray(RGB).save(tmp_path / "a.png")
    with pytest.raises(ValueError, match=r"a\.png is 9x6 pixels .* says 10x6"):
        load(tmp_path / "a.png", 6, 10)


def test_a_file_of_several_frames_is_said_once_and_its_first_one_is_read(tmp_path, said):
    frames = [Image.new("RGB", (9, 6), colour) for colour in ("red", "lime", "blue")]
    for name in ("a.tif", "b.gif", "c.png", "d.webp"):
        frames[0].save(tmp_path / name, save_all=True, append_images=frames[1:], lossless=True)
        assert np.array_equal(pixels(load(tmp_path / name, channel_order="rgb"))[0, 0], [255, 0, 0])
    assert len(said) == 1 and "a.tif holds 3 pages or frames, of which the first is read" in said[0]
    cameras = [str(tmp_path / name) for name in ("c.png", "a.tif")]
    found = LoadMultiViewImageFromFiles()({"img_filename": cameras})["img"]
    assert all(np.array_equal(image[0, 0], [0, 0, 255]) for image in found)
    assert (
        len(said) == 2 and said[1].startswith("LoadMultiViewImageFromFiles: ") and "c.png holds 3" in said[1]
    )
    frames[0].save(tmp_path / "phone.jpg", "MPO", save_all=True, append_images=frames[1:2])
    with open_image(tmp_path / "phone.jpg") as image:
        assert extra_frames(image) == 0


def test_damaged_and_missing_files_are_named(tmp_path, monkeypatch):
    text = tmp_path / "text.jpg"
    text.write_text("not an image")
    with pytest.raises(ValueError, match=rf"cannot read image {text} \(12 bytes\)"):
        load(text)
    assert load(text, ignore_empty=True) is None
    damaged = tmp_path / "damaged.png"
    Image.fromarray(RGB).save(damaged)
    error = RuntimeError("Failed to decode frame 0")  # as Pillow answers to damaged AVIF
    monkeypatch.setattr(PngImageFile, "load", Mock(side_effect=error))
    with pytest.raises(ValueError, match=r"cannot read image .*damaged\.png .*Failed to decode frame 0"):
        load(damaged)
    with pytest.raises(FileNotFoundError, match=r"image .*gone\.jpg does not exist"):
        load(tmp_path / "gone.jpg")


def test_the_limit_of_pixels(tmp_path, monkeypatch):
    """Pillow's limit, which belongs to the whole process, is not asked and does not change."""
    path = tmp_path / "large.png"
    Image.fromarray(RGB).save(path)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1)
    height, width = RGB.shape[:2]
    assert load(path)["img"].shape[1:] == (height, width)
    with pytest.raises(
        ValueError, match=rf"large\.png .*{width}x{height} pixels are more than max_pixels=5; set"
    ):
        load(path, max_pixels=5)
    assert load(path, max_pixels=None)["img"].shape[2] == width
    assert Image.MAX_IMAGE_PIXELS == 1


INSTANCES = [
    dict(bbox=[1.0, 2.0, 5.0, 4.0], bbox_label=2, ignore_flag=0),
    dict(bbox=[0.0, 0.0, 9.0, 6.0], bbox_label=0, ignore_flag=1),
]


def test_annotations():
    results = LoadAnnotations()(dict(img_shape=(6, 9), instances=INSTANCES))
    assert results["gt_bboxes"].tolist() == [[1, 2, 5, 4], [0, 0, 9, 6]]
    assert results["gt_bboxes"].canvas_size == (6, 9)
    assert results["gt_bboxes_labels"].tolist() == [2, 0]
    assert results["gt_ignore_flags"].tolist() == [False, True]


def test_annotations_of_a_resized_or_an_empty_image():
    results = LoadAnnotations()(dict(img_shape=(12, 27), scale_factor=(3.0, 2.0), instances=INSTANCES))
    assert results["gt_bboxes"].tolist() == [[3, 4, 15, 8], [0, 0, 27, 12]]
    empty = LoadAnnotations()(dict(img_shape=(6, 9), instances=[]))
    assert empty["gt_bboxes"].shape == (0, 4) and empty["gt_bboxes"].dtype == torch.float32
    assert empty["gt_bboxes_labels"].dtype == torch.int64 and empty["gt_ignore_flags"].dtype == torch.bool


def test_filter_annotations():
    def results():
        return LoadAnnotations()(dict(img_shape=(6, 9), instances=INSTANCES))

    kept = FilterAnnotations(min_gt_bbox_wh=(4, 2))(results())  # a box stays only if it is larger
    assert kept["gt_bboxes"].tolist() == [[0, 0, 9, 6]]
    assert kept["gt_bboxes_labels"].tolist() == [0] and kept["gt_ignore_flags"].tolist() == [True]
    assert FilterAnnotations(min_gt_bbox_wh=(9, 9))(results()) is None
    assert len(FilterAnnotations(min_gt_bbox_wh=(9, 9), keep_empty=False)(results())["gt_bboxes"]) == 0
    empty = LoadAnnotations()(dict(img_shape=(6, 9), instances=[]))
    assert FilterAnnotations()(empty) is empty
