"""Reading logs and drawing them."""

import json
import re
import warnings

import pytest
from PIL import Image
from toy_run import train

from visdet.engine import UserError, draw_curves, read_scalars


def write(path, records) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def test_a_resumed_run_is_one_curve(tmp_path):
    """The second log starts at step 30, so what the first one had from there on was trained again."""
    write(
        tmp_path / "a" / "vis_data" / "scalars.json",
        [{"loss": 1.0 / s, "lr": 0.1, "step": s} for s in (10, 20, 30, 40)],
    )
    write(
        tmp_path / "b" / "vis_data" / "scalars.json",
        [{"loss": 9.0, "lr": 0.1, "step": 30}, {"coco/bbox_mAP": 0.5, "step": 30}],
    )
    curves = read_scalars(str(tmp_path))
    assert curves["loss"] == {10: 0.1, 20: 0.05, 30: 9.0}
    assert curves["coco/bbox_mAP"] == {30: 0.5}


def test_a_run_that_began_anew_replaces_the_curves(tmp_path):
    runs = {
        "a": ("", [{"loss": 1.0, "step": 10}, {"coco/bbox_mAP": 0.5, "step": 40}]),
        "b": ("", [{"loss": 9.0, "step": 50}]),
        "c": ("resumed from x", [{"loss": 8.0, "step": 60}]),
    }
    for name, (said, lines) in runs.items():
        write(tmp_path / name / "vis_data" / "scalars.json", lines)
        (tmp_path / name / f"{name}.log").write_text(said)
    assert read_scalars(str(tmp_path)) == {"loss": {50: 9.0, 60: 8.0}}


def test_a_folder_of_several_runs_is_no_run(tmp_path):
    for run in ("a", "b"):
        write(tmp_path / run / "1" / "vis_data" / "scalars.json", [{"loss": 1.0, "step": 1}])
    with pytest.raises(UserError, match=r"has the logs of several runs; name the runs to draw: .*/a, .*/b"):
        read_scalars(str(tmp_path))
    assert read_scalars(str(tmp_path / "a")) == {"loss": {1: 1.0}}


def test_runs_of_one_process_write_logs_of_their_own(tmp_path):
    for name in ("a", "b"):
        train(tmp_path / name, visualizer__name="visualizer", train_cfg__max_iters=5)
        assert list(read_scalars(str(tmp_path / name))["loss"]) == [5]


def test_a_killed_run_may_end_in_half_a_line(tmp_path):
    path = write(tmp_path / "scalars.json", [{"loss": 1.0, "step": 1}])
    with open(path, "a") as file:
        file.write('{"loss": 0.5, "st')
    assert read_scalars(path) == {"loss": {1: 1.0}}


def test_what_is_no_log(tmp_path):
    path = tmp_path / "x.json"
    with pytest.raises(UserError, match=re.escape(str(tmp_path))):
        read_scalars(str(tmp_path))
    with pytest.raises(UserError, match="line 1 is not a record of scalars: 'hello'"):
        path.write_text("hello")
        read_scalars(str(path))
    for content in (b"\x86\x80\x04", b'{"step": "x", "loss": 1}', b'{"step": NaN, "loss": 1}'):
        path.write_bytes(content)
        with pytest.raises(UserError, match="line 1 is not a record of scalars"):
            read_scalars(str(path))
    with pytest.raises(UserError, match=r"y\.json"):
        read_scalars(write(tmp_path / "y.json", []))


def test_the_picture_has_a_panel_for_what_there_is(tmp_path):
    loss = {"loss": {1: 2.0, 2: 1.0}}
    full = {**loss, "lr": {1: 0.1, 2: 0.1}, "coco/bbox_mAP": {2: 0.3}, "coco/bbox_mAP/cat": {2: 0.3}}
    widths = []
    for name, runs in {"one": {"a": loss}, "three": {"a": full, "b": loss}}.items():
        draw_curves(runs, str(tmp_path / "out" / f"{name}.png"))
        with Image.open(tmp_path / "out" / f"{name}.png") as picture:
            widths.append(picture.width)
    assert widths[1] == pytest.approx(3 * widths[0], rel=0.05)


def test_negative_losses_are_drawn(tmp_path):
    """No warning says that an axis leaves them out."""
    log = write(tmp_path / "scalars.json", [{"loss": value, "step": -value} for value in (-1.0, -2.0)])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        draw_curves({"run": read_scalars(log)}, str(tmp_path / "curves.png"))


def test_a_log_without_any_known_curve(tmp_path):
    with pytest.raises(UserError, match=r"a: .*learning rate"):
        draw_curves({"a": {"memory": {1: 2.0}}}, str(tmp_path / "x.png"))


def test_a_file_of_an_unknown_format_is_one_message(tmp_path):
    path = write(tmp_path / "scalars.json", [{"loss": 1.0, "step": 1}, {"loss": 0.5, "step": 2}])
    with pytest.raises(UserError, match=r"must end in one of .*\.png.*, got .*curves\.txt"):
        draw_curves({"run": read_scalars(path)}, str(tmp_path / "curves.txt"))
