"""Pictures: boxes at the right pixels, in the right frame, in the right files."""

import numpy as np
import pytest
import torch
from instances import predictions_of, truth_of
from mmengine.structures import InstanceData
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from visdet.registry import VISUALIZERS
from visdet.structures import DetDataSample
from visdet.structures.class_names import class_palette
from visdet.visualization import DetLocalVisualizer, contact_sheet, draw_boxes, side_by_side

META = dict(classes=("cat", "dog"), palette=[(255, 0, 0), (0, 0, 255)])
GREY = np.full((60, 80, 3), 128, dtype=np.uint8)


def visualizer(**arguments):
    built = DetLocalVisualizer(**arguments)
    built.dataset_meta = META
    return built


def sample(truth=(), predictions=(), **metainfo):
    """Return a sample with boxes (label, xyxy) and predictions (label, xyxy, score)."""
    data_sample = DetDataSample(metainfo=dict(img_shape=(60, 80), ori_shape=(60, 80)) | metainfo)
    data_sample.gt_instances, data_sample.pred_instances = truth_of(truth), predictions_of(predictions)
    return data_sample


def extent(picture, colour, factor=1):
    """Return xyxy around the pixels of a colour, in pixels of the image before enlarging, or None."""
    box = Image.fromarray((picture == colour).all(axis=2)).getbbox()
    return box and [number / factor for number in box]


def test_a_box_is_drawn_where_it_is():
    drawn = draw_boxes(GREY, np.array([[10.0, 20, 50, 45]]), [""], [(255, 0, 0)], line_width=2)
    assert (GREY == 128).all()  # the image itself is left alone
    assert extent(drawn, (255, 0, 0)) == [10, 20, 50, 45]
    assert (drawn[22:43, 12:48] == 128).sum() > 0.8 * 21 * 36 * 3  # open inside
    assert extent(drawn, (0, 0, 0)) == [9, 19, 51, 46]  # the dark line around it


def test_a_turned_box_is_drawn_along_its_sides():
    turned = sample()
    turned.pred_instances = InstanceData(
        bboxes=torch.tensor([[80.0, 60, 60, 20, 0.5]]), labels=torch.tensor([0]), scores=torch.tensor([0.9])
    )
    turned.set_metainfo(dict(img_shape=(60, 80), ori_shape=(120, 160), scale_factor=(0.5, 0.5)))
    [drawn] = visualizer(min_side=1).draw_sample(GREY, turned, draw_gt=False)
    middles = np.array([40, 30]) + np.outer([15, -15], [np.cos(0.5), np.sin(0.5)])
    for x, y in middles.astype(int):
        assert tuple(drawn[y, x]) == (255, 0, 0)
    assert (drawn[30, 40] == 128).all() and tuple(drawn[45, 25]) != (255, 0, 0)


def test_boxes_that_are_not_finite_do_not_end_a_run():
    boxes = np.array([[10.0, 20, np.inf, 1e30], [np.nan, 0, 5, 5], [-np.inf, -1e30, 30, 40]])
    drawn = draw_boxes(GREY, boxes, ["a", "b", "c"], [(255, 0, 0), (0, 255, 0), (0, 0, 255)])
    assert [(drawn == colour).all(2).any() for colour in ((255, 0, 0), (0, 255, 0), (0, 0, 255))] == [
        True,
        False,
        True,
    ]


def test_labels_stay_on_the_image_and_apart():
    canvas = np.full((300, 400, 3), 128, dtype=np.uint8)
    boxes = np.array([[0.0, 0, 400, 300], [2, 2, 150, 120], [350, 250, 400, 300]])
    colours = [(255, 0, 0), (0, 255, 0), (0, 0, 255)]
    bare = draw_boxes(canvas, boxes, ["", "", ""], colours)
    drawn = draw_boxes(canvas, boxes, ["first", "second", "third one"], colours)
    assert drawn.shape == canvas.shape
    for colour in colours:
        added = ((drawn == colour).all(2) & ~(bare == colour).all(2)).sum()
        assert added > 300  # each label's plate can be seen


def test_truth_and_predictions():
    pictures = visualizer().draw_sample(
        GREY,
        sample([(0, [10, 20, 50, 45])], [(1, [12, 22, 52, 47], 0.9), (0, [0, 0, 5, 5], 0.2)]),
        pred_score_thr=0.3,
    )
    truth, prediction = pictures
    assert truth.shape == prediction.shape == (360, 480, 3)
    assert extent(truth, (0, 0, 255)) is None and extent(prediction, (255, 0, 0)) is None
    x1, y1, x2, y2 = extent(truth, (255, 0, 0), 6)
    assert (x2, y2) == (50, 45) and x1 <= 10 and y1 < 20  # the label is above the box
    assert extent(prediction, (0, 0, 255), 6)[2:] == [52, 47]


def test_frames():
    """Truth is in pixels of img_shape, predictions in pixels of ori_shape: either image shows both in place."""
    data_sample = sample(
        [(0, [100, 300, 500, 675])],
        [(1, [50, 100, 250, 225], 0.9)],
        ori_shape=(300, 400),
        img_shape=(900, 800),
        scale_factor=(2.0, 3.0),
    )
    for shape, expected in (((300, 400, 3), [250, 225]), ((900, 800, 3), [500, 675])):
        truth, prediction = visualizer(min_side=1).draw_sample(np.full(shape, 128, np.uint8), data_sample)
        assert extent(truth, (255, 0, 0))[2:] == expected
        assert extent(prediction, (0, 0, 255))[2:] == expected


def test_crowds_are_grey_and_names_optional():
    data_sample = sample([(0, [10, 20, 50, 45])])
    data_sample.ignored_instances = InstanceData(
        bboxes=torch.tensor([[30.0, 5, 79, 58]]), labels=torch.tensor([1])
    )
    picture = visualizer(min_side=1).draw_sample(GREY, data_sample, draw_pred=False)[0]
    assert extent(picture, (150, 150, 150))[2:] == [79, 58]
    bare = DetLocalVisualizer(min_side=1)
    picture = bare.draw_sample(GREY[..., 0], sample([(1, [10, 20, 50, 45])]), draw_pred=False)[0]
    assert extent(picture, class_palette(2)[1])[2:] == [50, 45]


def test_backends(tmp_path):
    config = dict(
        type="DetLocalVisualizer",
        vis_backends=[dict(type="LocalVisBackend"), dict(type="TensorboardVisBackend")],
        save_dir=str(tmp_path),
    )
    built = VISUALIZERS.build(dict(config, name="test_backends"))
    built.dataset_meta = META
    built.add_datasample("val/picture", GREY, sample([(0, [1, 1, 9, 9])]), step=3)
    built.add_scalar("loss", 0.5, step=7)
    built.add_scalars(dict(lr=0.1), step=7)
    built.close()
    with Image.open(tmp_path / "vis_data" / "vis_image" / "val_picture_3.png") as image:
        assert image.width > 960
    events = EventAccumulator(str(tmp_path / "vis_data"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(7, 0.5)]
    assert events.Images("val_picture")[0].step == 3


def test_contact_sheet(tmp_path):
    samples = [sample([(0, [1, 1, 40, 40])], [(1, [1, 1, 40, 40], 0.9)]) for _ in range(5)]
    visualizer().add_contact_sheet("sheet", [GREY] * 5, samples, columns=2, out_file=tmp_path / "sheet.png")
    with Image.open(tmp_path / "sheet.png") as image:
        assert image.width > 4 * 480 and image.height > 3 * 360
        assert image.width < 4 * 480 + 100 and image.height < 3 * 360 + 120
    rows = [[GREY, GREY], [np.zeros((20, 30, 3), np.uint8)]]
    assert contact_sheet(rows, gap=5).shape == (2 * 60 + 15, 2 * 80 + 15, 3)
    assert side_by_side([GREY, GREY]).shape[0] < 75
    with pytest.raises(ValueError, match="contact_sheet: rows must hold at least one image"):
        contact_sheet([])


def test_palette():
    colours = class_palette(80)
    assert colours[:6] == class_palette(6)
    assert len(set(colours)) == 80
    first = np.array(colours[:10], dtype=float)
    distances = np.linalg.norm(first[:, None] - first[None], axis=2) + 1e3 * np.eye(10)
    assert distances.min() > 50


def test_the_drawing_functions_of_mmengine_draw_on_a_picture():
    for built in (visualizer(), visualizer(image=GREY)):
        built.set_image(GREY)
        assert (built.get_image() == GREY).all()
        built.draw_bboxes(torch.tensor([[20, 10, 50, 40]]), edge_colors="r", line_widths=4)
        drawn = built.get_image()
        assert drawn.shape == GREY.shape
        assert drawn[25, 20, 0] > 200 > 60 > drawn[25, 20, 1] and (drawn[25, 35] == 128).all()
