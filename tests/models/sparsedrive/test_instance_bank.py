"""The instance bank: what it carries from frame to frame, and when it forgets."""

import numpy as np
import pytest
import torch
from refused import assert_refused
from sparsedrive_golden import close, module_case

from tests.fuzz.problem import generator_of
from visdet.models.sparsedrive import InstanceBank, InstanceBankState
from visdet.models.sparsedrive.temporal.frame_clock import FrameClock
from visdet.registry import MODELS


def metas_of(timestamps, poses=None, scenes=None):
    poses = [np.eye(4)] * len(timestamps) if poses is None else poses
    img_metas = [{"T_global": np.asarray(pose), "T_global_inv": np.linalg.inv(pose)} for pose in poses]
    for meta, scene in zip(img_metas, scenes or (), strict=False):
        meta["scene_token"] = scene
    return {"timestamp": torch.tensor(timestamps, dtype=torch.float64), "img_metas": img_metas}


def make_bank(num_anchor=6, num_temp=3, dims=11, **options):
    handler = {"type": "SparseBox3DKeyPointsGenerator"}
    anchors = torch.randn(num_anchor, dims, generator=generator_of(0))
    return InstanceBank(
        num_anchor, 4, anchors, anchor_handler=handler, num_temp_instances=num_temp, **options
    ).eval()


class Memory:
    """What is kept between the frames of a test: the bank's state and the clock of the last frame."""

    def __init__(self):
        self.bank, self.clock = InstanceBankState(), None

    def get(self, bank, metas):
        """Enter a frame, and return what it starts with."""
        clock = FrameClock.of(metas)
        entered = bank.enter(self.bank, len(clock.timestamp), clock.since(self.clock))
        self.clock = clock
        feature, anchor, interval, self.bank = bank.get(entered, len(clock.timestamp))
        return feature, anchor, interval


def frame(bank, memory, metas, seed, threshold=None):
    """Run one frame on random numbers; each sample draws its own, whatever the batch. Returns what came out."""
    B, N = len(metas["img_metas"]), bank.num_anchor
    draw = [generator_of(s) for s in seed]

    def random(*shape):
        return torch.stack([torch.randn(*shape, generator=g) for g in draw])

    feature, anchor, interval = memory.get(bank, metas)
    feature, anchor, kept = bank.update(
        memory.bank, feature + random(N, 4), anchor + random(N, 11), random(N, 3)
    )
    logits = random(N, 3)
    kept = bank.cache(kept, feature, anchor, logits)
    ids, memory.bank = bank.get_instance_id(kept, logits, threshold)
    assert len(ids) == B
    return {"feature": feature, "anchor": anchor, "interval": interval, "ids": ids}


@pytest.mark.parametrize("case", ["InstanceBank", "InstanceBank_id_threshold_0.7"])
def test_three_frames_match_golden(case):
    config, state, given, expected = module_case(case)
    anchors = np.zeros((config["num_anchor"], config.pop("anchor_dim")), dtype=np.float32)
    bank = MODELS.build({"type": "InstanceBank", "anchor": anchors, **config})
    bank.load_state_dict(state, strict=True)
    threshold = 0.7 if case.endswith("0.7") else None
    memory = Memory()
    for i in range(3):
        metas = metas_of(given["timestamp"][i].tolist(), given["T_global"][i].numpy())

        def check(name, actual, i=i):
            if f"frame{i}/{name}" in expected:
                close(actual, expected[f"frame{i}/{name}"])

        feature, anchor, interval = memory.get(bank, metas)
        check("get_feature", feature)
        check("get_anchor", anchor)
        check("get_time_interval", interval)
        if i:
            check("get_temp_feature", memory.bank.cached_feature)
            check("get_temp_anchor", memory.bank.cached_anchor)
            check("mask", memory.bank.mask)
        first = [given[f"frame{i}/{name}"] for name in ("feature_first", "anchor_first", "first_cls")]
        feature, anchor, kept = bank.update(memory.bank, *first)
        check("update_feature", feature)
        check("update_anchor", anchor)
        feature = feature + given[f"frame{i}/feature_delta"]
        anchor = anchor + given[f"frame{i}/anchor_delta"]
        kept = bank.cache(kept, feature, anchor, given[f"frame{i}/last_cls"])
        for name in ("cached_feature", "cached_anchor", "confidence", "temp_confidence"):
            check(name, getattr(kept, name))
        ids, memory.bank = bank.get_instance_id(kept, given[f"frame{i}/last_cls"], threshold)
        check("instance_id", ids)
        check("kept_instance_id", memory.bank.instance_id)
    check(
        "prev_id", memory.bank.prev_id
    )  # the peer counted in place: only its last number is of its own frame


def test_another_batch_size_forgets_everything_but_the_next_id():
    bank, memory = make_bank(), Memory()
    frame(bank, memory, metas_of([0.0, 0.0]), [1, 2])
    memory.get(bank, metas_of([0.5]))
    assert memory.bank == InstanceBankState(prev_id=12)


@pytest.mark.parametrize(
    "with_update", [True, False], ids=["temporal decoder", "single-frame decoders alone"]
)
def test_ids_come_again_over_links_alone(with_update):
    """New scenes, other batch sizes, missing frames, and decoders that the instances of the past never join."""
    bank, memory, seen = make_bank(), Memory(), set()
    frames = [
        ([0.0, 0.0], "ab"),
        ([0.5, 0.5], "cd"),
        ([1.0], "c"),
        ([9.0], "c"),
        ([9.5], "c"),
        ([9.5, 9.5], "cd"),
    ]
    for number, (times, scenes) in enumerate(frames):
        feature, anchor, _ = memory.get(bank, metas_of(times, scenes=scenes))
        kept, logits = memory.bank, torch.randn(len(times), 6, 3)
        if with_update:
            feature, anchor, kept = bank.update(kept, feature, anchor, torch.randn(len(times), 6, 3))
        ids, memory.bank = bank.get_instance_id(bank.cache(kept, feature, anchor, logits), logits)
        found = ids.flatten().tolist()
        linked = 3 if with_update and number == 4 else 0  # only the fifth frame continues the one before
        assert len(set(found)) == len(found) and len(seen & set(found)) == linked
        seen |= set(found)


def test_nothing_is_carried_without_temporal_instances():
    for num_temp in (0, -1):
        bank, memory = make_bank(num_temp=num_temp), Memory()
        frame(bank, memory, metas_of([0.0]), [1])
        assert memory.bank.cached_anchor is None
        assert frame(bank, memory, metas_of([0.5]), [1])["ids"].tolist() == [[-1] * 6]


def test_missing_anchor_file(tmp_path):
    path = str(tmp_path / "kmeans.npy")
    handler = {"type": "SparseBox3DKeyPointsGenerator"}
    with pytest.warns(UserWarning, match="InstanceBank: no anchor file .*npy.*zeros"):
        bank = InstanceBank(5, 4, path, anchor_handler=handler)
    with pytest.raises(FileNotFoundError, match=r"visdet make-anchors, or load a checkpoint"):
        bank.get(InstanceBankState(), 1)
    bank.load_state_dict(bank.state_dict())
    assert bank.get(InstanceBankState(), 1)[1].shape == (1, 5, 11)
    np.save(path, np.ones((7, 20, 2)))
    assert InstanceBank(5, 4, path).anchor.shape == (5, 40)


def test_rejections_of_the_bank():
    assert_refused(
        ValueError,
        (
            lambda: InstanceBank(2, 4, torch.zeros(2, 11), num_temp_instances=3),
            "num_temp_instances must be at most the number of anchors 2, got 3",
        ),
        (lambda: FrameClock.of(metas_of([float("nan")])), "timestamps and T_global must be finite"),
    )
