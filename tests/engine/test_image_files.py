"""Which files of a folder are images, and that the others are counted and named."""

import os
import re

import pytest
from PIL import Image

from visdet.engine import UserError, find_images
from visdet.engine.inference.image_files import pictures_folder


def save(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (4, 4)).save(path)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "in"


def found(folder, out_dir="out"):
    """Return the names of the images below a folder, and the remarks."""
    images, remarks = find_images([str(folder)], str(out_dir))
    return [os.path.relpath(image, folder) for image in images], remarks


def test_images_are_known_by_suffix(folder):
    """A file is taken at its word. The detector reports one that is empty, as these are."""
    names = [
        ".hidden.png",
        "a.jfif",
        "b.jpe",
        "c.jp2",
        "d.AVIF",
        "e.webp",
        "f.tif",
        "sub/name with spaces.png",
    ]
    (folder / "sub").mkdir(parents=True)
    for name in names:
        (folder / name).touch()
    assert found(folder) == (names, [])
    path = str(folder / "f.tif")
    assert find_images([path], "out")[0] == [path]


@pytest.mark.timeout(120)
def test_what_is_left_out_is_counted_and_named(folder, tmp_path):
    save(folder / "a.png")
    for number in range(7):
        (folder / f"{number}.txt").write_text("text")
    os.mkfifo(folder / "pipe.jpg")
    (images, remarks) = found(folder)
    assert images == ["a.png"]
    text = "\n".join(remarks).replace(f"{folder}/", "")
    assert "left out 8 (no images or videos): 0.txt, 1.txt, 2.txt, 3.txt, 4.txt, … 3 more" in text
    with pytest.raises(UserError, match="neither a file nor a folder"):
        find_images([str(folder / "pipe.jpg")], "out")


@pytest.mark.timeout(120)
def test_links_to_folders_are_followed_once(folder, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    save(folder / "a.png")
    save(elsewhere / "b.png")
    (folder / "link").symlink_to(elsewhere)
    (folder / "again").symlink_to(elsewhere)
    (folder / "loop").symlink_to(folder)
    (elsewhere / "up").symlink_to(folder)
    assert found(folder)[0] == ["a.png", "again/b.png"]


def test_pictures_of_earlier_runs_are_not_read(folder):
    save(folder / "a.png")
    for out_dir in (folder, folder / "out"):
        save(folder / os.path.relpath(pictures_folder(out_dir), folder) / "a.png")
        images, _ = found(folder, out_dir)
        assert images[-1] == "a.png" and not any(name.startswith("out") for name in images)
        (folder / "pictures" / "a.png").unlink(missing_ok=True)


@pytest.mark.parametrize("given", ["pictures", "pictures/a.png", "pictures/sub"])
def test_images_are_not_overwritten(tmp_path, given):
    save(tmp_path / "pictures" / "a.png")
    save(tmp_path / "pictures" / "sub" / "b.png")
    with pytest.raises(UserError, match="going to be written: choose another --out-dir"):
        find_images([str(tmp_path / given)], str(tmp_path))


def test_files_folders_and_patterns(folder):
    for name in ("a.png", "b.jpg", "sub/c.png", "[d].png"):
        save(folder / name)
    names = [str(folder / name) for name in ("*.png", "b.jpg", "sub", "[d].png")]
    assert find_images(names, "out")[0] == sorted(
        str(folder / name) for name in ("a.png", "b.jpg", "sub/c.png", "[d].png")
    )
    for one in (str(folder), folder, iter([folder])):
        assert len(find_images(one)[0]) == 4
    for nothing in ("*.bmp", "nowhere"):
        with pytest.raises(UserError, match=f"{re.escape(nothing)} does not exist"):
            find_images([nothing], "out")


def test_a_folder_without_images_names_what_it_has(folder):
    folder.mkdir()
    (folder / "notes.txt").write_text("")
    with pytest.raises(
        UserError, match=r"has no image and no video\nleft out 1 \(no images or videos\): .*notes\.txt"
    ):
        found(folder)


@pytest.mark.parametrize("name", ["a.mp4", "a b.MOV", "a.mkv", "a.webm", "a.avi"])
def test_videos_are_found_on_every_machine(folder, name):
    folder.mkdir()
    (folder / name).write_bytes(b"")
    for given in (folder, folder / name, folder / "a*"):
        assert find_images([str(given)], "out") == ([str(folder / name)], [])


def test_a_name_that_is_no_text_is_read(folder):
    folder.mkdir()
    name = os.fsencode(folder) + b"/\xff.png"
    Image.new("RGB", (4, 4)).save(folder / "a.png")
    os.rename(folder / "a.png", name)
    assert find_images([str(folder)], "out")[0] == [os.fsdecode(name)]
