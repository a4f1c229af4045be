"""Checkpoint files: plain types, read without running code, written whole."""

import functools
import hashlib
import io
import operator
import os
import pathlib
import pickle
import shutil
import zipfile
from collections import Counter
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from disk import names_in
from mmengine.hooks import EMAHook
from mmengine.logging import HistoryBuffer
from safetensors.torch import save_file
from torch.testing import assert_close
from toy_run import hooks_of, losses, toy_runner, train

from visdet.engine import (
    CheckpointError,
    UserError,
    newest_readable_checkpoint,
    read_checkpoint,
    write_checkpoint,
)
from visdet.engine.checkpoints.plain_state import restore_message_hub
from visdet.engine.checkpoints.weights import load_weights, weights_of
from visdet.engine.errors import DamagedCheckpointError
from visdet.registry import MODELS

BACKBONE = {"type": "ResNet", "depth": 18, "base_channels": 4}


class RunsCode:
    """Unpickling this creates the file ``ran`` in the current folder."""

    def __reduce__(self):
        return pathlib.Path.touch, (pathlib.Path("ran"),)


def test_our_checkpoint_is_tensors_and_plain_types(tmp_path):
    train(tmp_path, train_cfg__max_iters=10)
    torch.load(tmp_path / "best_toy_accuracy_iter_10.pth", weights_only=True)
    checkpoint = torch.load(tmp_path / "iter_10.pth", weights_only=True)
    meta = checkpoint["meta"]
    assert meta["iter"] == 10 and meta["dataset_meta"]["classes"] == ("dark", "bright")
    assert len(meta["random_states"]) == 1
    history = restore_message_hub(checkpoint["message_hub"])["log_scalars"]["train/loss"]
    assert isinstance(history, HistoryBuffer) and len(history.data[0]) == 10
    assert checkpoint["state_dict"]._metadata[""], "versions by which modules migrate old weights"


# What a checkpoint holds, and what comes back.
PLAIN = [
    (np.float64(0.5), 0.5),
    (np.int64(3), 3),
    (np.bool_(True), True),
    (np.arange(3), [0, 1, 2]),
    (pathlib.Path("a/b"), "a/b"),
    ({7}, [7]),
    (Counter({3: 1}), {3: 1}),
    ((1, [None, "x", b"y", 2.5, True]), (1, [None, "x", b"y", 2.5, True])),
]


def test_to_plain_converts_what_weights_only_would_refuse(tmp_path):
    given, expected = zip(*PLAIN, strict=True)
    parameter, history = torch.nn.Parameter(torch.ones(2)), HistoryBuffer([1.0, 2.0, 4.0], [1, 1, 2])
    write_checkpoint({"values": given, "w": parameter, "history": history}, tmp_path / "plain.pth")
    plain = torch.load(tmp_path / "plain.pth", weights_only=True)
    assert plain["values"] == expected and [*map(type, plain["values"])] == [*map(type, expected)]
    assert torch.equal(plain["w"], torch.ones(2)) and not plain["w"].requires_grad
    hub = {
        "log_scalars": {"h": plain["history"]},
        "runtime_info": {},
        "resumed_keys": {"h": True, "gone": True},
    }
    restored = restore_message_hub(hub)
    assert restored["log_scalars"]["h"].mean(2) == history.mean(2) == 2.0
    assert restored["resumed_keys"] == {"h": True}


def test_what_is_no_plain_type_is_an_error_at_save(tmp_path):
    path = tmp_path / "w.pth"
    write_checkpoint({"w": 1}, path)
    state = {"message_hub": {"runtime_info": {"ages": [1, {"rate": complex(1, 2)}]}}}
    where = r"checkpoint\['message_hub'\]\['runtime_info'\]\['ages'\]\[1\]\['rate'\] is a builtins.complex"
    with pytest.raises(TypeError, match=where):
        write_checkpoint(state, path)
    assert read_checkpoint(path) == {"w": 1}


def test_a_checkpoint_of_mmengines_runner_resumes(tmp_path):
    """Saved by mmengine's own method, with its types."""
    from mmengine.runner import Runner

    runner = toy_runner(tmp_path, train_cfg__max_iters=10)
    runner.save_checkpoint = lambda *args, **kwargs: Runner.save_checkpoint(runner, *args, **kwargs)
    runner.train()
    with pytest.raises(pickle.UnpicklingError):
        torch.load(tmp_path / "iter_10.pth", weights_only=True)
    assert train(tmp_path, resume="auto").iter == 20


of_both_formats = pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
with_and_without_trust = pytest.mark.parametrize("trusted", [True, False])


@of_both_formats
def test_code_in_a_checkpoint_does_not_run(tmp_path, monkeypatch, zipped):
    monkeypatch.chdir(tmp_path)
    torch.save({"state_dict": {}, "extra": RunsCode()}, "bad.pth", _use_new_zipfile_serialization=zipped)
    with pytest.raises(CheckpointError, match=r"bad\.pth holds a pathlib.*trust_checkpoint=True"):
        read_checkpoint("bad.pth")
    assert not os.path.exists("ran")
    read_checkpoint("bad.pth", trust=True)
    assert os.path.exists("ran")


@of_both_formats
@with_and_without_trust
def test_a_type_that_does_not_exist_is_no_matter_of_trust(tmp_path, zipped, trusted):
    """As a flipped bit in a name makes one, which the checksum of an archive shows before, or a package that lacks."""
    path = tmp_path / "a.pth"
    torch.save({"w": torch.ones(2)}, path, _use_new_zipfile_serialization=zipped)
    content = path.read_bytes()
    for name in (b"_rebuild_tensor_v2", b"torch._utils"):
        assert name in content
        path.write_bytes(content.replace(name, name[:-1] + b"x"))
        with pytest.raises(
            CheckpointError, match=r"checksum|There is no such type here|cannot be read"
        ) as caught:
            read_checkpoint(path, trust=trusted)
        assert "trust" not in str(caught.value)


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("[enforce fail] can't allocate memory: you tried")]
)
def test_a_lack_of_memory_is_no_damage(tmp_path, monkeypatch, error):
    write_checkpoint({"w": torch.ones(2)}, tmp_path / "a.pth")
    monkeypatch.setattr(torch, "load", Mock(side_effect=error))
    with pytest.raises(
        CheckpointError, match="cannot be read now: the memory does not suffice for its"
    ) as caught:
        read_checkpoint(tmp_path / "a.pth")
    assert not isinstance(caught.value, DamagedCheckpointError)


def layers():
    return torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))


@pytest.mark.parametrize("dtype", [torch.bool, torch.int8, torch.int64, torch.complex64, torch.float8_e4m3fn])
def test_weights_of_another_kind_of_numbers_are_not_cast(dtype):
    model = layers()
    weight = model[0].weight
    weights = {**model.state_dict(), "0.weight": weight.to(dtype)}
    with pytest.raises(CheckpointError, match=f"1 of another type .0.weight {dtype} for torch.float32"):
        load_weights(model, weights, "a.pth")
    before = weight.clone()
    load_weights(model, weights, "a.pth", strict=False)
    assert torch.equal(weight, before), "it keeps its value"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_floats_of_other_widths_are_cast(dtype):
    load_weights(layers(), layers().to(dtype).state_dict(), "a.pth")


def test_an_error_of_a_real_disk_is_no_damage():
    """The memory of this process as a file: its beginning cannot be read."""
    with pytest.raises(CheckpointError, match=r"cannot be read now: Input/output error"):
        read_checkpoint("/proc/self/mem")


@pytest.mark.parametrize("suffix", ["pth", "safetensors"])
def test_every_cut_of_a_checkpoint_is_noticed(tmp_path, suffix):
    path, weights = tmp_path / f"a.{suffix}", {"w": torch.arange(2000.0)}
    write_checkpoint(weights, path) if suffix == "pth" else save_file(weights, path)
    whole = path.read_bytes()
    for length in (*range(0, len(whole), 611), len(whole) - 4):
        path.write_bytes(whole[:length])
        with pytest.raises(DamagedCheckpointError, match=rf"a\.{suffix} .*cannot be read"):
            read_checkpoint(path)


def test_a_missing_checkpoint_names_what_is_there(tmp_path):
    write_checkpoint({}, tmp_path / "iter_200.pth")
    with pytest.raises(CheckpointError, match=r"iter_20\.pth does not exist: did you mean iter_200\.pth\?"):
        read_checkpoint(tmp_path / "iter_20.pth")
    with pytest.raises(CheckpointError, match="does not exist: its folder has none"):
        read_checkpoint(tmp_path / "no" / "iter_20.pth")
    with pytest.raises(CheckpointError, match=r"is a folder; give one of its files: iter_200\.pth"):
        read_checkpoint(tmp_path)


def test_addresses_that_end_alike_are_two_files(tmp_path, monkeypatch):
    """A name with a checksum is one file wherever it comes from."""
    write_checkpoint({"w": 1}, tmp_path / "sent.pth")
    sent = (tmp_path / "sent.pth").read_bytes()
    named = f"model-{hashlib.sha256(sent).hexdigest()[:8]}.pth"
    fetched = []

    def answer(request):
        fetched.append(request.full_url)
        reply = io.BytesIO(sent)
        reply.headers = {"Content-Length": str(len(sent))}
        return reply

    monkeypatch.setattr("visdet.engine.checkpoints.checkpoint.urlopen", answer)
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    for host in ("a", "b", "a"):
        for name in ("model.pth", named):
            assert read_checkpoint(f"https://{host}/{name}") == {"w": 1}
    assert fetched == ["https://a/model.pth", f"https://a/{named}", "https://b/model.pth"]


def test_newest_readable_checkpoint_prefers_the_pointer_and_passes_over_weights(tmp_path):
    assert newest_readable_checkpoint(tmp_path) == (None, [])
    for age, name in enumerate(("iter_1.pth", "iter_2.pth", "weights.pth")):
        write_checkpoint({"state_dict" if name == "weights.pth" else "optimizer": {}}, tmp_path / name)
        os.utime(tmp_path / name, (age, age))
    assert newest_readable_checkpoint(tmp_path) == (str(tmp_path / "iter_2.pth"), [])
    (tmp_path / "last_checkpoint").write_text("/elsewhere/iter_1.pth")
    assert newest_readable_checkpoint(tmp_path) == (str(tmp_path / "iter_1.pth"), [])


def files_before_each(runner, pattern):
    """Return a dict that gets, for each checkpoint that the run saves, the files that are there before."""
    seen, save = {}, runner.save_checkpoint

    def save_and_look(out_dir, filename, *args, **kwargs):
        seen[filename] = names_in(out_dir, pattern)
        save(out_dir, filename, *args, **kwargs)

    runner.save_checkpoint = save_and_look
    return seen


def test_old_checkpoints_go_after_the_new_one_is_written(tmp_path):
    kept = {"default_hooks__checkpoint__max_keep_ckpts": 2, "default_hooks__checkpoint__interval": 5}
    runner = toy_runner(tmp_path, **kept)
    seen = files_before_each(runner, "iter_*.pth")
    runner.train()
    assert seen["iter_15.pth"] == ["iter_10.pth", "iter_5.pth"], "both were there until the third was written"
    assert names_in(tmp_path, "iter_*.pth") == ["iter_15.pth", "iter_20.pth"]
    assert (tmp_path / "last_checkpoint").read_text() == str(tmp_path / "iter_20.pth")


@pytest.mark.parametrize("kept", [-1, 1, 3])
def test_checkpoints_of_one_name_keep_the_newest(tmp_path, kept):
    def trained(**others):
        options = {f"default_hooks__checkpoint__{key}": value for key, value in checkpoint.items()}
        train(tmp_path, **options, **others)

    checkpoint = dict(filename_tmpl="last.pth", interval=5, max_keep_ckpts=kept)
    trained()
    assert read_checkpoint(tmp_path / "last.pth")["meta"]["iter"] == 20
    assert (tmp_path / "last_checkpoint").read_text() == str(tmp_path / "last.pth")
    checkpoint |= dict(max_keep_ckpts=1, interval=100, save_last=False)
    trained(resume="auto", train_cfg__max_iters=25)
    assert (tmp_path / "last.pth").exists()


def test_the_best_checkpoint_stays_until_a_better_one_is_written(tmp_path):
    runner = toy_runner(tmp_path, train_cfg__val_interval=5)
    accuracies, evaluate = iter((0.1, 0.3, 0.2, 0.4)), runner.val_loop.evaluator.evaluate
    runner.val_loop.evaluator.evaluate = lambda size: {**evaluate(size), "toy/accuracy": next(accuracies)}
    seen = files_before_each(runner, "best_*")
    runner.train()
    five, ten, twenty = (f"best_toy_accuracy_iter_{i}.pth" for i in (5, 10, 20))
    assert (seen[five], seen[ten], seen[twenty]) == ([], [five], [ten])
    assert names_in(tmp_path, "best_*") == [twenty]


def test_a_metric_without_ground_truth_chooses_no_best_checkpoint(tmp_path, stdout):
    """All boxes of the toy are small, so that COCO's AP of large ones is -1."""
    options = {"val_evaluator": [{"type": "CocoMetric"}], "train_cfg__max_iters": 10}
    train(tmp_path, default_hooks__checkpoint__save_best="coco/bbox_mAP_l", **options)
    assert not list(tmp_path.glob("best_*")) and (tmp_path / "best.pth").resolve().name == "iter_10.pth"
    assert "no best checkpoint is chosen by coco/bbox_mAP_l" in stdout()


def train_with_accuracy(accuracy: float, work_dir, **options) -> None:
    runner = toy_runner(work_dir, **options)
    evaluate = runner.val_loop.evaluator.evaluate
    runner.val_loop.evaluator.evaluate = lambda size: {**evaluate(size), "toy/accuracy": accuracy}
    runner.train()


@pytest.mark.parametrize("where", ["another", "copy", "moved"])
def test_the_best_checkpoint_of_another_folder_stays(tmp_path, where):
    """A resumed run finds a better one in a folder of its own."""
    first, second = tmp_path / "first", tmp_path / "second"
    train_with_accuracy(0.1, first, train_cfg__max_iters=10)
    if where != "another":
        shutil.copytree(first, second)
    if where == "moved":
        shutil.rmtree(first)
    resume = str(first) if where == "another" else "auto"
    train_with_accuracy(0.2, second, resume=resume, train_cfg__max_iters=20)
    if where != "moved":
        assert names_in(first, "best_*") == ["best_toy_accuracy_iter_10.pth"]
    assert names_in(second, "best_*") == ["best_toy_accuracy_iter_20.pth"]


def test_a_run_whose_folder_was_moved_publishes_what_is_there(tmp_path):
    train_with_accuracy(0.2, tmp_path / "first", train_cfg__max_iters=10)
    second = shutil.move(tmp_path / "first", tmp_path / "second")
    options = {"default_hooks__checkpoint__published_keys": ["meta", "state_dict"]}
    train_with_accuracy(0.1, second, resume="auto", train_cfg__max_iters=20, **options)
    published = {path.name.rpartition("-")[0] for path in second.glob("*-*.pth")}
    assert published == {"iter_20", "best_toy_accuracy_iter_10"}


def test_checkpoints_in_a_folder_of_their_own_are_resumed(tmp_path):
    options = {"default_hooks__checkpoint__out_dir": str(tmp_path / "store")}
    train(tmp_path / "run", train_cfg__max_iters=10, **options)
    assert (tmp_path / "store" / "run" / "iter_10.pth").is_file()
    again = train(tmp_path / "run", resume="auto", load_from="gone.pth", **options)
    assert next(iter(losses(again))) == 11
    file = tmp_path / "file"
    file.touch()
    options["default_hooks__checkpoint__out_dir"] = str(file)
    with pytest.raises(UserError, match=r"cannot be written: .* default_hooks\.checkpoint\.out_dir"):
        train(tmp_path / "third", **options)


def test_a_wrong_architecture_is_refused_and_counted(tmp_path):
    train(tmp_path / "wide", train_cfg__max_iters=5, model__channels=12)
    with pytest.raises(CheckpointError) as caught:
        train(tmp_path / "narrow", load_from=str(tmp_path / "wide" / "iter_5.pth"))
    message = str(caught.value)
    assert "iter_5.pth does not fit ToyDetector" in message
    assert "8 of another shape (conv.weight [12, 3, 3, 3] for [8, 3, 3, 3], " in message
    assert "4 more" in message and "strict_load=False" in message


def test_strict_load_false_loads_what_fits(tmp_path):
    train(tmp_path / "two", train_cfg__max_iters=5)
    runner = toy_runner(
        tmp_path / "three",
        load_from=str(tmp_path / "two" / "iter_5.pth"),
        strict_load=False,
        model__num_classes=3,
    )
    runner.load_checkpoint(runner.load_from)
    saved = read_checkpoint(tmp_path / "two" / "iter_5.pth")["state_dict"]
    assert torch.equal(runner.model.conv.weight, saved["conv.weight"])
    assert runner.model.bbox_head.cls.weight.shape == (3, 8)
    torch.save({"other": torch.ones(2)}, tmp_path / "nothing.pth")
    with pytest.raises(CheckpointError, match="does not fit"):
        train(tmp_path / "four", load_from=str(tmp_path / "nothing.pth"), strict_load=False)


@with_and_without_trust
def test_trust_holds_for_pretrained_backbones_too(tmp_path, monkeypatch, trusted):
    monkeypatch.chdir(tmp_path)
    weights = MODELS.build(BACKBONE).state_dict()
    torch.save({"state_dict": weights, "extra": RunsCode()}, tmp_path / "foreign.pth")
    toy_runner(tmp_path / "run", trust_checkpoint=trusted)
    pretrained = {"type": "Pretrained", "checkpoint": str(tmp_path / "foreign.pth")}
    model = MODELS.build({**BACKBONE, "init_cfg": pretrained})
    if trusted:
        model.init_weights()
        assert torch.equal(model.conv1.weight, weights["conv1.weight"]) and os.path.exists("ran")
    else:
        with pytest.raises(CheckpointError, match="trust_checkpoint=True"):
            model.init_weights()
        assert not os.path.exists("ran")


def test_an_average_of_weights_begins_with_weights_whose_keys_are_revised(tmp_path):
    """EMAHook loads them as the model does, although their keys begin with "module."."""
    runner = train(tmp_path / "a", train_cfg__max_iters=5)
    state = {f"module.{key}": value for key, value in runner.model.state_dict().items()}
    torch.save({"state_dict": state}, tmp_path / "wrapped.pth")
    ema = [dict(type="EMAHook")]
    tested = toy_runner(tmp_path / "b", custom_hooks=ema, load_from=str(tmp_path / "wrapped.pth"))
    found = tested.test()
    assert found == toy_runner(tmp_path / "c", load_from=str(tmp_path / "wrapped.pth")).test()
    averaged = hooks_of(tested, EMAHook)[0].ema_model.module
    assert_close(averaged.state_dict(), runner.model.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("trust", [False, True])
def test_a_flipped_bit_in_any_part_is_noticed(tmp_path, trust):
    write_checkpoint(
        {"state_dict": {"w": torch.arange(500.0)}, "meta": {"epoch": 3}}, path := tmp_path / "a.pth"
    )
    whole = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        parts = {part.filename: (part.header_offset, archive.read(part)) for part in archive.infolist()}
    for name, (header, data) in parts.items():
        start = whole.index(data, header + len(name)) if data else 0
        for place in {start, start + len(data) // 2, start + len(data) - 1} if data else ():
            path.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
            with pytest.raises(DamagedCheckpointError, match=f"checksum of its part {name} is wrong"):
                read_checkpoint(path, trust=trust)


@pytest.mark.parametrize(
    "prefix", ["", "module.", "model.", "student.", "ema_model.module.", "module.model."]
)
@pytest.mark.parametrize("places", [(), ("state_dict",), ("model",), ("model", "state_dict")])
def test_prefixes_and_the_layouts_of_other_projects_do_not_matter(prefix, places):
    model = layers()
    weights = {key: torch.full_like(value, 7) for key, value in model.state_dict().items()}
    content = {prefix + key: value for key, value in weights.items()}
    for place in reversed(places):
        content = {place: content}
    load_weights(model, weights_of(content, "other.pth"), "other.pth")
    assert_close(model.state_dict(), weights, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("part", "key", "named"),
    [
        ("state_dict", ("conv.weight",), "conv.weight"),
        ("ema_state_dict", ("module.conv.weight",), "ema_state_dict"),
        ("optimizer", ("state", 0, "exp_avg"), "optimizer.state.0"),
    ],
)
def test_weights_that_are_not_finite_are_named_and_refused(tmp_path, part, key, named):
    """This holds for load_from and for a test, and for averaged weights and optimizers of a run that is resumed."""
    ema = [dict(type="EMAHook")]
    train(tmp_path / "a", train_cfg__max_iters=5, custom_hooks=ema)
    content = read_checkpoint(str(tmp_path / "a" / "iter_5.pth"))
    functools.reduce(operator.getitem, key, content[part]).view(-1)[0] = float("nan")
    bad = str(tmp_path / "nan.pth")
    write_checkpoint(content, bad)
    with pytest.raises(CheckpointError, match=rf"nan\.pth has NaN.*{named}.*allow_nonfinite_weights=True"):
        train(tmp_path / "b", resume=bad, custom_hooks=ema)
    if part == "state_dict":
        with pytest.raises(CheckpointError, match="allow_nonfinite_weights=True"):
            toy_runner(tmp_path / "c", load_from=bad).test()
        toy_runner(tmp_path / "d", load_from=bad, allow_nonfinite_weights=True).test()


def test_a_mask_of_the_model_itself_may_be_infinite():
    model = torch.nn.Linear(2, 2)
    model.register_buffer("mask", torch.full((2, 2), float("-inf")).triu(1))
    load_weights(model, model.state_dict(), "own.pth")
    state = {**model.state_dict(), "bias": torch.tensor([0.0, float("inf")])}
    with pytest.raises(CheckpointError, match=r"in 1 tensors \(bias\)"):
        load_weights(model, state, "own.pth")


def test_pretrained_weights_that_are_not_finite_or_have_a_prefix(tmp_path):
    state = MODELS.build(BACKBONE).state_dict()
    toy_runner(tmp_path / "run")
    bad = {**state, "bn1.weight": torch.full_like(state["bn1.weight"], float("nan"))}
    for weights, told in (
        (bad, r"NaN .*bn1\.weight"),
        ({f"student.backbone.{key}": value for key, value in state.items()}, r"prefix='student\.backbone\.'"),
        ([1], "holds a list"),
    ):
        torch.save({"state_dict": weights} if isinstance(weights, dict) else weights, tmp_path / "w.pth")
        pretrained = {"type": "Pretrained", "checkpoint": str(tmp_path / "w.pth")}
        with pytest.raises(UserError, match=told):
            MODELS.build({**BACKBONE, "init_cfg": pretrained}).init_weights()
