"""A resumed run is the uninterrupted run."""

import shutil

import pytest
import torch
from toy_detection import ToyDetector
from toy_run import losses, toy_runner, train, weights

from visdet.engine import CheckpointError, read_checkpoint
from visdet.registry import MODELS

EPOCHS = {
    "train_cfg": {"_delete_": True, "type": "EpochBasedTrainLoop", "max_epochs": 4, "val_interval": 1},
    "param_scheduler": [{"type": "MultiStepLR", "milestones": [3], "by_epoch": True}],
}


def interrupted(work_dir, at: int, **options):
    """Train until iteration ``at`` with a checkpoint there, as a run killed right after writing it leaves behind."""

    class Killed(Exception):
        pass

    runner = toy_runner(work_dir, **options)
    save = runner.save_checkpoint

    def save_then_die(out_dir, filename, *args, **kwargs):
        save(out_dir, filename, *args, **kwargs)
        if filename == f"iter_{at}.pth":
            (work_dir / "last_checkpoint").write_text(str(work_dir / filename))
            raise Killed

    runner.save_checkpoint = save_then_die
    with pytest.raises(Killed):
        runner.train()


@pytest.mark.parametrize(
    ("loop", "sampler"),
    [
        pytest.param({"train_cfg__max_iters": 24}, "DefaultSampler", id="iterations-finite"),
        pytest.param({"train_cfg__max_iters": 24}, "InfiniteSampler", id="iterations-endless"),
        pytest.param(EPOCHS, "DefaultSampler", id="inside-an-epoch"),
    ],
)
def test_two_halves_equal_the_whole(tmp_path, loop, sampler):
    """24 images in batches of 4 are six iterations an epoch: 9 is inside the second epoch."""
    options = {
        **loop,
        "train_dataloader__sampler__type": sampler,
        "default_hooks__checkpoint": {
            "type": "CheckpointHook", "by_epoch": False, "interval": 9,
        },
    }  # fmt: skip
    whole = train(tmp_path / "whole", **options)
    interrupted(tmp_path / "halves", at=9, **options)
    rest = train(tmp_path / "halves", resume="auto", **options)

    assert list(losses(rest)) == list(range(10, 25))
    assert losses(rest) == {step: loss for step, loss in losses(whole).items() if step > 9}
    for name, value in weights(whole).items():
        assert torch.equal(value, weights(rest)[name]), name


@MODELS.register_module()
class ToyTracker(ToyDetector):
    """Remembers its last losses, outside of the weights, and adds them to the next."""

    memory = 0.0

    def forward(self, inputs, data_samples=None, mode="tensor"):
        outputs = super().forward(inputs, data_samples, mode)
        if mode == "loss":
            outputs["loss_memory"] = torch.as_tensor(self.memory) + 0 * self.conv.bias.sum()
            self.memory = 0.5 * float(sum(loss.detach() for loss in outputs.values()))
        return outputs

    def temporal_state_dict(self):
        return {"memory": self.memory}

    def load_temporal_state_dict(self, plain):
        self.memory = plain["memory"]


def test_a_model_of_sequences_remembers(tmp_path):
    options = {"model": {"type": "ToyTracker"}, "train_cfg__max_iters": 14}
    options["default_hooks__checkpoint"] = {"type": "CheckpointHook", "by_epoch": False, "interval": 9}
    whole = train(tmp_path / "whole", **options)
    interrupted(tmp_path / "halves", at=9, **options)
    rest = train(tmp_path / "halves", resume="auto", **options)
    assert losses(rest) == {step: loss for step, loss in losses(whole).items() if step > 9}


def test_the_seed_of_an_unseeded_run_is_resumed(tmp_path):
    """The order of the data follows the seed, which a config without one draws anew at every start."""
    options = {"randomness": {"seed": None}, "default_hooks__checkpoint__interval": 10}
    interrupted(tmp_path, at=10, **options)
    rest = train(tmp_path, resume="auto", **options)
    checkpoint = read_checkpoint(tmp_path / "iter_10.pth")
    assert rest.seed == checkpoint["meta"]["seed"]
    assert rest.train_dataloader.batch_sampler.sampler.seed == rest.seed


def test_a_checkpoint_written_after_validation_resumes_alike(tmp_path):
    """The hook writes the newest checkpoint again when validation found a best one."""
    whole = train(tmp_path / "whole")
    train(tmp_path / "halves", train_cfg__max_iters=10, param_scheduler__1__end=20)
    assert (tmp_path / "halves" / "best_toy_accuracy_iter_10.pth").exists()
    rest = train(tmp_path / "halves", resume="auto", param_scheduler__1__end=20)
    assert losses(rest) == {step: loss for step, loss in losses(whole).items() if step > 10}


def test_validation_does_not_change_training(tmp_path):
    often = train(tmp_path / "often", train_cfg__val_interval=3)
    never = train(tmp_path / "never", train_cfg__val_interval=1000)
    assert losses(often) == losses(never)


def test_resume_skips_by_index_and_reads_no_image(tmp_path):
    options = {"default_hooks__checkpoint__interval": 10}
    interrupted(tmp_path, at=10, **options)
    runner = toy_runner(tmp_path, resume="auto", **options)
    runner.train_loop.dataloader.dataset.full_init()
    dataset = runner.train_loop.dataloader.dataset
    read, prepare = [], dataset.prepare_data
    dataset.prepare_data = lambda idx: read.append(idx) or prepare(idx)
    runner.train()
    assert len(read) == 10 * 4


def test_a_cut_checkpoint_is_passed_over(tmp_path, capsys):
    train(tmp_path, default_hooks__checkpoint__interval=5)
    newest = tmp_path / "iter_20.pth"
    newest.write_bytes(newest.read_bytes()[:3000])
    flipped = bytearray((tmp_path / "iter_15.pth").read_bytes())
    flipped[len(flipped) // 2] ^= 0xFF
    (tmp_path / "iter_15.pth").write_bytes(flipped)
    runner = train(tmp_path, resume="auto", default_hooks__checkpoint__interval=5)
    printed = capsys.readouterr().out
    assert f"resumed from {tmp_path}/iter_10.pth at iteration 10" in printed
    assert "iter_20.pth (3000 bytes) cannot be read" in printed and "iter_15.pth" in printed
    assert runner.iter == 20
    assert read_checkpoint(newest)["meta"]["iter"] == 20


def test_an_empty_pointer_is_survived(tmp_path):
    """A kill while the pointer is written leaves it empty where the writer is not atomic: other tools' are not."""
    train(tmp_path, train_cfg__max_iters=10)
    (tmp_path / "last_checkpoint").write_text("")
    assert train(tmp_path, resume="auto").iter == 20


def test_a_moved_run_resumes_where_it_is_now(tmp_path):
    train(tmp_path / "before", train_cfg__max_iters=10)
    shutil.move(tmp_path / "before", tmp_path / "after")
    runner = train(tmp_path / "after", resume="auto")
    assert runner._load_from == str(tmp_path / "after" / "iter_10.pth")


def test_resume_from_a_folder_and_from_a_file(tmp_path):
    train(tmp_path / "first", train_cfg__max_iters=10)
    for resume in (tmp_path / "first", tmp_path / "first" / "iter_10.pth"):
        runner = train(tmp_path / f"again_{resume.name}", resume=str(resume))
        assert next(iter(losses(runner))) == 11


def test_auto_without_a_checkpoint_starts_from_scratch(tmp_path, capsys):
    runner = train(tmp_path, resume="auto", train_cfg__max_iters=5)
    assert runner.iter == 5
    assert f"no checkpoint in {tmp_path}, starting from scratch" in capsys.readouterr().out


@pytest.mark.parametrize("loop", [{}, {**EPOCHS, "train_cfg__max_epochs": 1}], ids=["iterations", "epochs"])
def test_resume_of_a_finished_run_validates_and_trains_nothing(tmp_path, loop, capsys):
    """The run may have been killed after its last checkpoint and before its last validation."""
    finished = train(tmp_path, **loop)
    capsys.readouterr()
    again = train(tmp_path, resume="auto", **loop)
    assert again.iter == finished.iter and losses(again) == {}
    assert capsys.readouterr().out.count("toy/accuracy") == 1


def test_weights_alone_cannot_be_resumed(tmp_path):
    train(tmp_path, train_cfg__max_iters=5)
    weights_only = tmp_path / "weights.pth"
    torch.save({"state_dict": read_checkpoint(tmp_path / "iter_5.pth")["state_dict"]}, weights_only)
    with pytest.raises(CheckpointError, match="cannot be resumed: it has no optimizer, message_hub, meta"):
        train(tmp_path, resume=str(weights_only))


def test_ema_and_its_counter_are_resumed(tmp_path):
    options = {
        "custom_hooks": [{"type": "EMAHook", "momentum": 0.05}],
        "default_hooks__checkpoint__interval": 10,
    }
    whole = train(tmp_path / "whole", **options)
    interrupted(tmp_path / "halves", at=10, **options)
    rest = train(tmp_path / "halves", resume="auto", **options)
    averages = [
        next(hook for hook in runner.hooks if hasattr(hook, "ema_model")).ema_model
        for runner in (whole, rest)
    ]
    assert averages[0].steps == averages[1].steps == 20
    for first, second in zip(averages[0].parameters(), averages[1].parameters(), strict=True):
        assert torch.equal(first, second)
    saved = read_checkpoint(tmp_path / "whole" / "iter_20.pth")["state_dict"]["conv.weight"]
    assert torch.equal(saved, averages[0].module.conv.weight.cpu()), (
        "the checkpoint's weights are the average"
    )


def test_workers_do_not_repeat_their_random_numbers(tmp_path):
    """Workers that start on a resume draw on from new seeds; the order of the data is that of the whole run."""
    options = {
        "train_dataloader__num_workers": 1,
        "train_dataloader__persistent_workers": True,
        "default_hooks__checkpoint__interval": 10,
    }
    seeds = []
    for resume in (None, "auto"):
        runner = train(tmp_path, resume, **options, train_cfg__max_iters=20 if resume else 10)
        seeds.append(runner.train_dataloader.worker_init_fn.keywords["seed"])
    assert seeds[0] == runner.seed != seeds[1]
