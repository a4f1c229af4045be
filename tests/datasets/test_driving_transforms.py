"""The pipeline of driving frames: what is seen and where it is stay together, whatever is augmented."""

import cv2
import numpy as np
import PIL.Image
import pytest
import torch
from datasets.driving_files import driving_scenes
from mmengine.dataset import pseudo_collate
from numpy.testing import assert_allclose, assert_array_equal
from PIL import ExifTags, ImageOps

from visdet.datasets import DrivingScenesDataset
from visdet.datasets import transforms as T
from visdet.datasets.synthetic.driving_renderer import Renderer
from visdet.registry import TRANSFORMS
from visdet.structures.poses import turn_about_z

CONFIG = dict(resize=1.0, crop=(0, 0, 64, 32), flip=False, rotate=0.0, rotate_3d=0.0)


def dataset(pipeline=None, split="train", **arguments):
    from datasets.driving_files import SMALL

    return DrivingScenesDataset(
        SMALL, driving_scenes(), ann_file=f"driving_infos_{split}.npz", pipeline=pipeline, **arguments
    )


def center_of(weight):
    """Return the centre (x, y) of the weights of pixels, which are counted from their centres."""
    rows, columns = np.indices(weight.shape)
    return np.array([(columns * weight).sum(), (rows * weight).sum()]) / weight.sum()


@pytest.mark.parametrize("suffix", ["jpg", "png"])
@pytest.mark.parametrize("resize", [1.2, 0.6, 0.5, 0.44, 0.2, 0.1])
def test_images_that_are_decoded_smaller_show_the_same(tmp_path, resize, suffix):
    """A point is projected to its blob, up to a third of a pixel, and the rest agrees with the full image."""
    image = np.full((601, 803, 3), 60, np.uint8)
    cv2.circle(image, (250, 310), 30, (255, 255, 255), -1, cv2.LINE_AA)
    cv2.imwrite(str(tmp_path / f"a.{suffix}"), image)
    crop = (-3, 5, int(803 * resize) - 7, int(601 * resize))
    results = []
    for reduces in (False, True):
        record = {
            "img_filename": [str(tmp_path / f"a.{suffix}")],
            "lidar2img": [np.eye(4)],
            "cam_intrinsic": [np.eye(3)],
            "aug_config": dict(resize=resize, crop=crop, flip=True, rotate=4.0),
        }
        record = T.LoadMultiViewImageFromFiles(reduces=reduces)(record)
        assert record["ori_shape"] == [(601, 803)]
        is_smaller = reduces and suffix == "jpg" and resize <= 0.5
        assert (record["img_shape"] != record["ori_shape"]) == is_smaller
        results.append(T.ResizeCropFlipImage()(record))
    full, reduced = (result["img"][0].astype(float) for result in results)
    assert np.array_equal(results[0]["lidar2img"], results[1]["lidar2img"])
    assert np.quantile(np.abs(full - reduced), 0.9) < 4
    u, v = (results[1]["lidar2img"][0] @ (250.5, 310.5, 1, 1))[:2]
    left, top, right, bottom = crop
    middle = complex(right - left, bottom - top) / 2
    mirrored = complex(right - 250.5 * resize, 310.5 * resize - top)
    place = middle + (mirrored - middle) * np.exp(-1j * np.deg2rad(4.0))  # y points down
    assert_allclose([u, v], [place.real, place.imag])
    for result, pixels in zip(results, (full, reduced), strict=True):
        weight = (pixels[..., 0] - 60).clip(30) - 30
        assert_allclose([u, v], center_of(weight) + 0.5, atol=0.33)
        assert result["cam_intrinsic"][0][0, 0] == resize and result["img"][0].dtype == np.uint8
        assert result["img_shape"] == [(bottom - top, right - left)]


def planar(record):
    """Return all places and directions in the plane of a record."""
    boxes, futures = record["gt_bboxes_3d"], (record["gt_ego_fut_trajs"], record["gt_agent_fut_trajs"])
    return [boxes[:, :2], boxes[:, 7:], *futures, record["map_annos"][1][0], record["fut_boxes"][0][:, :2]]


def test_bbox_rotation_turns_everything():
    record, before = (dataset(test_mode=True)[2] for _ in range(2))
    angle = 0.7
    record |= {"aug_config": CONFIG | {"rotate_3d": angle}, "points": np.ones((3, 3), np.float32)}
    after = T.BBoxRotation()(record)
    turn = turn_about_z(angle)
    for old, new in zip(planar(before), planar(after), strict=True):
        assert_allclose(new, old @ turn.T, atol=1e-5)
    assert_allclose(after["points"][0, :2], turn @ [1, 1], atol=1e-6)
    boxes, turned = before["gt_bboxes_3d"], after["gt_bboxes_3d"]
    assert len(boxes) > 3
    assert_allclose(np.cos(turned[:, 6] - boxes[:, 6]), np.cos(angle), atol=1e-9)
    assert_array_equal(turned[:, 2:6], boxes[:, 2:6])
    # The same place in the images and in the world.
    ones = np.ones((len(boxes), 1))
    for old, new in zip(
        [*before["lidar2img"], before["lidar2global"]],
        [*after["lidar2img"], after["lidar2global"]],
        strict=True,
    ):
        was, now = np.hstack([boxes[:, :3], ones]) @ old.T, np.hstack([turned[:, :3], ones]) @ new.T
        assert_allclose(now, was, atol=1e-6)


def test_depth_maps_by_hand():
    projection = np.diag([10.0, 10.0, 1.0, 1.0])
    points = np.array(
        [
            [1.09, 0.58, 1.0],  # 10.9, 5.8, in pixel 10, 5
            [2.38, 1.16, 2.0],  # 11.9, 5.8, in pixel 11, 5: further away, the same cell at stride 4
            [300.0, 150.0, 100.0],  # pixel 30, 15, beyond the limit
            [1.0, 1.0, -1.0],  # behind the camera
            [3.2, 0.0, 1.0],  # pixel 32: outside
        ]
    )
    results = {"points": points, "lidar2img": [projection, projection], "img_shape": [(16, 32)] * 2}
    one, four = T.MultiScaleDepthMapGenerator([1, 4], max_depth=60)(results)["gt_depth"]
    assert one.shape == (2, 16, 32) and four.shape == (2, 4, 8) and one.dtype == np.float32
    assert_array_equal(one[0], one[1])
    expected = np.full((16, 32), -1.0)
    expected[5, 10], expected[5, 11], expected[15, 30] = 1, 2, 60
    assert_array_equal(one[0], expected)
    expected = np.full((4, 8), -1.0)
    expected[1, 2], expected[3, 7] = 1, 60
    assert_array_equal(four[0], expected)


def test_loading_errors(tmp_path):
    record = dataset()[0]
    missing = record | {
        "img_filename": [*record["img_filename"][:3], str(tmp_path / "no.jpg"), *record["img_filename"][4:]]
    }
    with pytest.raises(
        FileNotFoundError, match=r"no.jpg of camera CAM_BACK in frame train-0000-00 does not exist"
    ):
        T.LoadMultiViewImageFromFiles()(missing)
    (tmp_path / "bad.jpg").write_bytes(b"none")
    with pytest.raises(
        ValueError, match=r"cannot read image .*bad.jpg of camera CAM_FRONT in .* \(4 bytes\)"
    ):
        T.LoadMultiViewImageFromFiles()(record | {"img_filename": [str(tmp_path / "bad.jpg")] * 6})
    with pytest.raises(FileNotFoundError, match=r"LoadPointsFromFile: .* does not exist"):
        T.LoadPointsFromFile("LIDAR", 3)({"pts_filename": str(tmp_path / "no.bin")})
    (tmp_path / "bad.bin").write_bytes(b"1234567")
    with pytest.raises(ValueError, match="must hold rows of 5 float32, got 7 bytes"):
        T.LoadPointsFromFile("LIDAR", 5)({"pts_filename": str(tmp_path / "bad.bin")})
    with pytest.raises(ValueError, match=r"use_dim must be below load_dim 3, got \[0, 1, 2, 3\]"):
        T.LoadPointsFromFile("LIDAR", 3, use_dim=4)
    with pytest.raises(ValueError, match="images of all cameras must be of one size"):
        images = [np.zeros((4, 4, 3), np.uint8), np.zeros((4, 5, 3), np.uint8)]
        T.NuScenesSparse4DAdaptor()({"img": images})


def test_filters():
    record = {
        "gt_bboxes_3d": np.array([[3.0, 4.0], [30.0, 0.0], [0.0, 1.0], [0.0, 0.0]]),
        "gt_labels_3d": np.array([0, 0, 1, -1]),
        "instance_inds": np.arange(4),
        "gt_agent_fut_trajs": np.arange(4),
    }
    for keep, expected in (
        (T.CircleObjectRangeFilter([5.0, 0.5]), [0]),
        (T.CircleObjectRangeFilter([50.0]), [0, 1]),
        (T.CircleObjectRangeFilter(4.0), [2]),
        (T.InstanceNameFilter(["a", "b"]), [0, 1, 2]),
    ):
        kept = keep(dict(record))
        assert kept["instance_inds"].tolist() == kept["gt_agent_fut_trajs"].tolist() == expected
    assert T.InstanceNameFilter(["a"])(T.CircleObjectRangeFilter([5.0])({"token": "t"})) == {"token": "t"}
    empty = {"gt_bboxes_3d": np.zeros((0, 9)), "gt_labels_3d": np.zeros(0, np.int64)}
    assert T.InstanceNameFilter(["a"])(T.CircleObjectRangeFilter([5.0])(empty))["gt_bboxes_3d"].shape == (
        0,
        9,
    )


def test_orders_of_map_lines():
    line = np.array([[0.0, 0.0], [3.0, 0.0]])
    square = np.array([[0.0, 0.0], [3.0, 0.0], [3.0, 3.0], [0.0, 3.0], [0.0, 0.0]])
    vectorize = T.VectorizeMap((30, 60), False, sample_num=5, permute=True)
    results = vectorize({"map_annos": {0: [square], 1: [], 2: [line]}})
    assert results["gt_map_labels"].tolist() == [0, 2]
    points = results["gt_map_pts"]
    assert points.shape == (2, 8, 5, 2) and points.dtype == np.float32
    along = [0, 0.75, 1.5, 2.25, 3.0]
    assert_allclose(points[1, 0], [[x, 0] for x in along])
    assert_allclose(points[1, 1], [[x, 0] for x in along[::-1]])
    assert (points[1, 2:] == 1e5).all()
    corners = square[:4].tolist()
    for order in range(4):
        start = [corners[(k - order) % 4] for k in range(5)]
        assert_allclose(points[0, order], start)
        backwards = [corners[::-1][(k - order) % 4] for k in range(5)]
        assert_allclose(points[0, 4 + order], backwards)
    empty = vectorize({"map_annos": {0: [], 1: [], 2: []}})
    assert empty["gt_map_pts"].shape == (0, 8, 5, 2) and empty["gt_map_labels"].shape == (0,)


def test_vectors_and_normalisation():
    line = np.array([[-15.0, -30.0], [0.0, 0.05], [15.0, 30.0]])
    results = T.VectorizeMap((30, 60), True, simplify=True)({"map_annos": {1: [line, line[:1]]}})
    assert len(results["vectors"]) == 1  # A line of one point is none.
    assert_allclose(results["vectors"][0], [[0, 0], [1, 1]], atol=1e-5)
    results = T.VectorizeMap((30, 60), False, sample_num=31)({"map_annos": {1: [line[:, :2] * [1, 0]]}})
    assert results["vectors"][0].shape == (31, 2) and results["vector_labels"].tolist() == [1]


@pytest.mark.parametrize(
    "options", [{"sample_num": 3, "permute": True}, {"simplify": True}, {"sample_num": 3}]
)
def test_map_lines_are_cut_to_the_region(options):
    """Long and far lines, a crossing that stays closed, a ring that is a boundary, and heights."""
    away = np.array([[500.0, 500.0], [600.0, 600.0]])
    lane = np.array([[-3.0, -200.0], [3.0, 200.0]])
    square = np.array([[10.0, 0.0], [20.0, 0.0], [20.0, 4.0], [10.0, 4.0], [10.0, 0.0]])
    inside = np.array([[0.0, 0.0], [15.0, 30.0]])
    vectorize = T.VectorizeMap((30, 60), False, **options)
    results = vectorize({"map_annos": {0: [square], 1: [lane, away, inside], 2: [square * 3]}})
    permute = "gt_map_pts" in results
    lines = results["gt_map_pts"][:, 0] if permute else results["vectors"]
    labels = results["gt_map_labels" if permute else "vector_labels"]
    assert labels.tolist() == [0, 1, 1]  # The ring of class 2 passes outside.
    for line, ends in zip(lines, ([[10, 0]] * 2, [[-0.45, -30], [0.45, 30]], inside), strict=True):
        assert_allclose(line[[0, -1]], ends, atol=1e-5)
        assert (np.abs(line) <= [15.001, 30.001]).all()
    high = T.VectorizeMap((30, 60), False, coords_dim=3, simplify=True)
    climb = np.array([[0.0, -60.0, 0.0], [0.0, 60.0, 12.0]])
    turned = {
        "map_annos": {1: [climb]},
        "aug_config": {"rotate_3d": 2 * np.pi},
        "lidar2img": [],
        "lidar2global": np.eye(4),
    }
    (line,) = high(T.BBoxRotation()(turned))["vectors"]
    assert_allclose(line, [[0, -30, 3], [0, 30, 9]], atol=1e-6)


def test_photometric_distortion_keeps_bytes_and_changes_colours():
    image = np.tile(np.array([30, 120, 200], np.uint8), (8, 8, 1))

    def changed(*options):
        return T.PhotoMetricDistortionMultiViewImage(*options)({"img": [image.copy()]})["img"][0]

    seen = [changed() for _ in range(60)]
    assert all(picture.dtype == np.uint8 and picture.shape == image.shape for picture in seen)
    assert all((picture == picture[0, 0]).all() for picture in seen)
    assert len({tuple(picture[0, 0]) for picture in seen}) > 40
    same = [changed(0, (1, 1), (1, 1), 0)[0, 0] for _ in range(20)]
    assert all(np.abs(np.sort(color).astype(int) - [30, 120, 200]).max() <= 1 for color in same)
    assert len({tuple(color) for color in same}) > 2  # channels change places


PUBLISHED = [
    dict(type="LoadMultiViewImageFromFiles", to_float32=True),
    dict(
        type="LoadPointsFromFile",
        coord_type="LIDAR",
        load_dim=3,
        use_dim=3,
        file_client_args=dict(backend="disk"),
    ),
    dict(type="ResizeCropFlipImage"),
    dict(type="MultiScaleDepthMapGenerator", downsample=[4, 8, 16]),
    dict(type="BBoxRotation"),
    dict(type="PhotoMetricDistortionMultiViewImage"),
    dict(
        type="NormalizeMultiviewImage",
        mean=[123.675, 116.28, 103.53],
        std=[58.395, 57.12, 57.375],
        to_rgb=True,
    ),
    dict(type="CircleObjectRangeFilter", class_dist_thred=[55] * 5),
    dict(type="InstanceNameFilter", classes=["car", "truck", "pedestrian", "bicycle", "traffic_cone"]),
    dict(
        type="VectorizeMap", roi_size=(30, 60), simplify=False, normalize=False, sample_num=20, permute=True
    ),
    dict(type="NuScenesSparse4DAdaptor"),
    dict(
        type="Collect",
        keys=[
            "img",
            "timestamp",
            "projection_mat",
            "image_wh",
            "gt_depth",
            "focal",
            "gt_bboxes_3d",
            "gt_labels_3d",
            "gt_map_labels",
            "gt_map_pts",
            "gt_agent_fut_trajs",
            "gt_agent_fut_masks",
            "gt_ego_fut_trajs",
            "gt_ego_fut_masks",
            "gt_ego_fut_cmd",
            "ego_status",
        ],
        meta_keys=["T_global", "T_global_inv", "timestamp", "instance_id"],
    ),
]


def test_the_published_pipeline_runs():
    augmentation = dict(
        resize_lim=(1.0, 1.2),
        final_dim=(48, 112),
        bot_pct_lim=(0.0, 0.0),
        rot_lim=(-5.4, 5.4),
        H=48,
        W=128,
        rand_flip=True,
        rot3d_range=(-0.3, 0.3),
    )
    item = dataset(PUBLISHED, data_aug_conf=augmentation)[3]
    image, samples = item["inputs"], item["data_samples"]
    assert image.shape == (6, 3, 48, 112) and image.dtype == torch.float32 and abs(image.mean()) < 2
    assert samples.projection_mat.shape == (6, 4, 4) and samples.projection_mat.dtype == torch.float32
    assert samples.image_wh.tolist() == [[112.0, 48.0]] * 6
    assert [level.shape for level in samples.gt_depth] == [(6, 12, 28), (6, 6, 14), (6, 3, 7)]
    count = len(samples.gt_labels_3d)
    assert samples.gt_bboxes_3d.shape == (count, 9) and samples.gt_agent_fut_trajs.shape == (
        count,
        12,
        2,
    )
    assert samples.gt_map_pts.shape == (len(samples.gt_map_labels), 38, 20, 2)
    assert samples.gt_ego_fut_trajs.shape == (6, 2) and samples.ego_status.shape == (10,)
    assert_allclose(samples.T_global @ samples.T_global_inv, np.eye(4), atol=1e-9)
    assert len(samples.instance_id) == count and samples.token == "train-0000-03"
    with pytest.raises(KeyError, match="frame None has no gt_depth"):
        TRANSFORMS.build(PUBLISHED[-1])({"img": 0, "timestamp": 0, "projection_mat": 0, "image_wh": 0})


def test_frames_of_unequal_content_collate():
    pipeline = [
        T.LoadMultiViewImageFromFiles(),
        T.InstanceNameFilter(list("abcde")),
        T.VectorizeMap((30, 60), False, simplify=True),
        T.NuScenesSparse4DAdaptor(),
        T.PackDrivingInputs(),
    ]
    frames = dataset(pipeline, split="val", test_mode=True)
    batch = pseudo_collate([frames[i] for i in (0, 6, 9)])
    samples = batch["data_samples"]
    assert [len(sample.fut_boxes) for sample in samples] == [6, 1, 6]
    assert len({len(sample.vectors) for sample in samples}) > 1
    assert [sample.token for sample in samples] == ["val-0000-00", "val-0000-06", "val-0001-01"]


@pytest.mark.parametrize("suffix", ["jpg", "png", "webp", "tiff"])
@pytest.mark.parametrize("orientation", [None, *range(1, 9)])
def test_a_camera_image_is_the_stored_raster(tmp_path, suffix, orientation):
    """Camera matrices are for what is stored, whatever an orientation says. ``'color'`` turns as a viewer does."""
    raster = np.zeros((48, 80, 3), np.uint8)
    raster[:12, :20], raster[:12, 60:] = 255, 120
    path, exif = tmp_path / f"a.{suffix}", PIL.Image.Exif()
    if orientation is not None:
        exif[ExifTags.Base.Orientation] = orientation
    PIL.Image.fromarray(raster).save(path, exif=exif)

    def loaded(**arguments):
        record = {"img_filename": [str(path)], "token": "s", "aug_config": dict(resize=0.5)}
        return T.LoadMultiViewImageFromFiles(**arguments)(record)

    for color_type in ("unchanged", "color_ignore_orientation"):
        assert_allclose(loaded(color_type=color_type)["img"][0], raster, atol=24)
    assert np.array_equal(loaded()["img"][0], loaded(color_type="unchanged")["img"][0])
    smaller = loaded(reduces=True)
    assert smaller["ori_shape"] == [(48, 80)]
    assert_allclose(cv2.resize(smaller["img"][0], (40, 24))[:5, :9].mean(), 255, atol=24)
    turned = loaded(color_type="color")["img"][0]
    viewer = np.asarray(ImageOps.exif_transpose(PIL.Image.open(path)).convert("RGB"))[..., ::-1]
    assert_allclose(turned, viewer, atol=24)


@pytest.mark.parametrize("config", [{}, dict(flip=True), dict(resize=0.5), dict(resize=0.5, flip=True)])
def test_drawn_cameras_have_the_convention_of_augmentations(config):
    """The axis of a camera stays in the middle of the image."""
    camera = Renderer(64, 32).cameras[0].intrinsic
    matrix = np.eye(4)
    matrix[:3, :3] = camera
    resize = config.get("resize", 1)
    crop = (0, 0, round(64 * resize), round(32 * resize))
    results = {
        "img": [np.zeros((32, 64, 3), np.uint8)],
        "lidar2img": [matrix.copy()],
        "aug_config": CONFIG | {"crop": crop} | config,
    }
    results = T.ResizeCropFlipImage()(results)
    u, v, depth = (results["lidar2img"][0] @ [0, 0, 1, 1])[:3]
    assert_allclose([u / depth, v / depth], [32 * resize, (0.42 * 32 + 0.5) * resize], atol=1e-9)
