"""Training loops and the batches of indices they iterate."""

from contextlib import nullcontext

import pytest
import torch
from disk import names_in
from mmengine.hooks import Hook
from mmengine.runner import EpochBasedTrainLoop, IterBasedTrainLoop, Runner
from mmengine.structures import InstanceData
from toy_run import losses, toy_config, toy_runner, train, validations

from visdet.engine import (
    ConfigError,
    build,
    enable_auto_scale_lr,
)
from visdet.engine.data.loaders import build_dataloader
from visdet.engine.monitored_metrics import check_metrics_are_apart
from visdet.engine.prepare import build_runner
from visdet.registry import METRICS
from visdet.structures import DetDataSample


@pytest.mark.parametrize(
    ("train_cfg", "loop"),
    [
        ({"by_epoch": False, "max_iters": 3}, IterBasedTrainLoop),
        ({"by_epoch": True, "max_epochs": 1}, EpochBasedTrainLoop),
    ],
)
def test_by_epoch_chooses_what_hooks_take_for_a_loop_of_mmengine(tmp_path, train_cfg, loop):
    runner = build_runner(toy_config(tmp_path, train_cfg={"_delete_": True, **train_cfg}))
    assert isinstance(runner.train_loop, loop)


def test_mmengines_own_runner_runs_the_same_config(tmp_path):
    """It is the way out for who has a loop of one's own."""
    options = {"runner_type": "mmengine.Runner", "default_hooks__checkpoint__by_epoch": False}
    options["default_hooks__checkpoint__interval"] = 2
    runner = build_runner(toy_config(tmp_path, train_cfg__max_iters=6, **options))
    runner.train()
    assert type(runner) is Runner and (tmp_path / "iter_6.pth").exists()


@pytest.mark.parametrize("stage", ["train", "val"])
def test_a_loop_of_ones_own_is_refused(tmp_path, stage):
    class Own(IterBasedTrainLoop):
        pass

    options = {"max_iters": 2} if stage == "train" else {}
    with pytest.raises(ConfigError, match=rf"{stage}_cfg\.type must be .*runner_type='mmengine\.Runner'"):
        train(tmp_path, **{f"{stage}_cfg": {"_delete_": True, "type": Own, **options}})


@pytest.mark.parametrize("part", ["train", "val", "test"])
def test_a_data_set_without_samples_is_refused_before_training(tmp_path, part):
    runner = toy_runner(tmp_path, **{f"{part}_dataloader__dataset__count": 0})
    with pytest.raises(ConfigError, match=rf"{part}_dataloader\.dataset \(ToyBoxes\) has no samples"):
        runner.test() if part == "test" else runner.train()
    assert losses(runner) == {}


def test_epochs_validate_and_save_when_due(tmp_path):
    runner = train(
        tmp_path,
        train_cfg={"_delete_": True, "type": "EpochBasedTrainLoop", "max_epochs": 3, "val_begin": 2},
        param_scheduler=[],
    )
    assert (runner.epoch, runner.iter) == (3, 18)
    assert names_in(tmp_path, "epoch_*") == [
        "epoch_1.pth",
        "epoch_2.pth",
        "epoch_3.pth",
    ]
    assert len(validations(runner)) == 2


def test_metrics_read_predictions_when_the_next_ones_are_on_their_way(tmp_path):
    class Count(Hook):
        def after_test_iter(self, runner, batch_idx, data_batch=None, outputs=None):
            counts.append(len(runner.test_evaluator.metrics[0].results))

    counts = []
    runner = toy_runner(tmp_path, test_dataloader__num_workers=1, test_dataloader__persistent_workers=True)
    runner.register_hook(Count())
    assert runner.test()["toy/images"] == runner.test()["toy/images"] == 13
    assert counts == [0, 5, 10] * 2
    assert runner.test_dataloader._iterator is None  # The data workers have ended.


@pytest.mark.parametrize(("given", "is_pinned"), [({}, True), ({"pin_memory": False}, False)])
def test_batches_are_in_pinned_memory_if_there_is_a_gpu(monkeypatch, given, is_pinned):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    config = {"dataset": [0], "sampler": {"type": "DefaultSampler"}, "batch_size": 1, **given}
    assert build_dataloader(config).pin_memory == is_pinned


def test_boxes_and_labels_are_pinned(monkeypatch):
    """A copy from other memory would wait for the work that the GPU has."""
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor + 1)
    sample = DetDataSample(gt_instances=InstanceData(labels=torch.zeros(2), names=["a", "b"]))
    sample.ignored_instances = InstanceData(bboxes=torch.zeros(3, 4))
    pinned = sample.pin_memory()
    assert pinned.gt_instances.labels.tolist() == [1, 1] and pinned.gt_instances.names == ["a", "b"]
    assert pinned.ignored_instances.bboxes.eq(1).all()


@pytest.mark.parametrize("counts", [1, 5])
def test_the_learning_rate_scales_with_the_images_of_an_update(tmp_path, counts):
    """Batches of 4, and updates of so many iterations."""
    options = {"param_scheduler": [], "train_cfg__max_iters": 2, "optim_wrapper__accumulative_counts": counts}
    cfg = toy_config(tmp_path, auto_scale_lr={"base_batch_size": 16}, **options)
    enable_auto_scale_lr(cfg)
    runner = build_runner(cfg)
    runner.train()
    assert runner.optim_wrapper.get_lr()["lr"] == [pytest.approx(1e-2 * 4 * counts / 16)]
    with pytest.raises(ConfigError, match="auto_scale_lr = dict"):
        enable_auto_scale_lr(toy_config(tmp_path))


def test_a_cosine_without_an_end_ends_with_training(tmp_path):
    runner = train(tmp_path, train_cfg__max_iters=12)
    assert runner.param_schedulers[1].end == 12
    assert runner.optim_wrapper.get_lr()["lr"][0] < 0.1 * 1e-2
    assert set(losses(runner)) == set(range(1, 13))


@pytest.mark.parametrize(
    ("schedule", "is_fine"),
    [
        ({"type": "MultiStepLR", "milestones": [2]}, False),
        ({"type": "MultiStepLR", "milestones": [2], "by_epoch": False}, True),
        ({"type": "MultiStepLR", "milestones": [2], "convert_to_iter_based": True}, True),
        ({"type": "ReduceOnPlateauLR", "monitor": "toy/accuracy"}, True),
    ],
)
def test_a_schedule_that_counts_epochs_where_there_are_none_is_refused(tmp_path, schedule, is_fine):
    message = r"param_scheduler \(MultiStepLR\) counts epochs, but train_cfg counts iterations"
    with nullcontext() if is_fine else pytest.raises(ConfigError, match=message):
        train(tmp_path, param_scheduler=[schedule], train_cfg__max_iters=4)


def test_milestones_after_the_end_are_told(tmp_path, logged):
    said = logged(build, "warn")
    steps = {"type": "MultiStepLR", "by_epoch": False, "milestones": [3, 4]}
    train(tmp_path, param_scheduler=[steps], train_cfg__max_iters=4)
    assert said == [
        "param_scheduler: MultiStepLR never comes to its milestones [4], because the run ends at 4"
    ]


@pytest.mark.parametrize("loader", ["val_dataloader", "test_dataloader"])
def test_scenes_are_played_one_frame_at_a_time(tmp_path, loader):
    options = {f"{loader}__sampler__type": "SceneSampler", f"{loader}__batch_size": 5}
    runner = toy_runner(tmp_path, **options)
    with pytest.raises(ConfigError, match=rf"{loader}\.batch_size must be 1 with SceneSampler, .* got 5"):
        (runner.train if loader == "val_dataloader" else runner.test)()
    one = toy_runner(tmp_path, **{**options, f"{loader}__batch_size": 1})
    (one.train if loader == "val_dataloader" else one.test)()


def built_metrics(*cfgs):
    return [METRICS.build({"type": "CocoMetric"} | cfg) for cfg in cfgs]


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ({"outfile_prefix": "a"}, {"outfile_prefix": "./a", "prefix": "b"}, "outfile_prefix='/"),
        ({}, {}, "prefix='coco'"),
        ({"prefix": "a", "metric_items": ["mAP"]}, {"prefix": "a"}, "prefix='a'"),
        (
            {"type": "DumpDetections", "out_file": "a"},
            {"type": "DumpDetections", "out_file": "a"},
            "out_file='/",
        ),
    ],
)
def test_metrics_of_an_evaluator_stay_apart(first, second, message):
    built = built_metrics(first, second)
    with pytest.raises(ConfigError, match=rf"val_evaluator: two metrics, .* have {message}"):
        check_metrics_are_apart(built, "val_evaluator")


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({}, {"prefix": "b"}),
        ({"metric_items": ["mAP"]}, {"metric_items": ["AR@100"]}),
        ({}, {"outfile_prefix": "c", "format_only": True}),
    ],
)
def test_metrics_that_are_apart_are_accepted(first, second):
    check_metrics_are_apart(built_metrics(first, second), "")


def test_a_schedule_of_iterations_may_begin_after_a_short_run_of_epochs(tmp_path):
    epochs = {"_delete_": True, "type": "EpochBasedTrainLoop", "max_epochs": 1}
    schedules = [
        {"type": "LinearLR", "start_factor": 0.5, "begin": 0, "end": 50, "by_epoch": False},
        {"type": "CosineAnnealingLR", "begin": 50, "by_epoch": False},
    ]
    assert train(tmp_path, train_cfg=epochs, param_scheduler=schedules).iter > 0


def test_an_endless_sampler_in_an_epoch_loop_is_refused(tmp_path):
    options = {"train_cfg": {"_delete_": True, "max_epochs": 2}, "param_scheduler": []}
    for batch_sampler in (None, {"type": "AspectRatioBatchSampler"}):
        options["train_dataloader__batch_sampler"] = batch_sampler
        with pytest.raises(ConfigError, match="InfiniteSampler gives batches without end"):
            train(tmp_path, train_dataloader__sampler__type="InfiniteSampler", **options)


@pytest.mark.parametrize("loop", [{"max_epochs": 2}, {"by_epoch": False, "max_iters": 2}])
def test_a_batch_larger_than_the_data_set_is_refused_where_nothing_is_left(tmp_path, loop):
    options = {"train_cfg": {"_delete_": True, **loop}, "param_scheduler": []}
    with pytest.raises(ConfigError, match="24 samples, BatchSampler makes batches of 25 and drops"):
        train(tmp_path, train_dataloader__batch_size=25, train_dataloader__drop_last=True, **options)
    assert train(tmp_path / "small_batch", train_dataloader__batch_size=25, **options).iter == 2
