"""The instance bank: what it carries from frame to frame, and when it forgets."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from sparsedrive_golden import close, module_case

from visdet.models.sparsedrive import InstanceBank, InstanceBankState
from visdet.models.sparsedrive.instance_bank import topk
from visdet.registry import MODELS


def metas_of(timestamps, poses=None, scenes=None):
    poses = [np.eye(4)] * len(timestamps) if poses is None else poses
    img_metas = [
        {"T_global": np.asarray(pose), "T_global_inv": np.linalg.inv(pose), "timestamp": float(time)}
        for time, pose in zip(timestamps, poses, strict=True)
    ]
    for meta, scene in zip(img_metas, scenes or (), strict=False):
        meta["scene_token"] = scene
    return {"timestamp": torch.tensor(timestamps, dtype=torch.float64), "img_metas": img_metas}


def make_bank(num_anchor=6, num_temp=3, dims=11, **options):
    handler = {"type": "SparseBox3DKeyPointsGenerator"}
    anchors = torch.randn(num_anchor, dims, generator=torch.Generator().manual_seed(0))
    return InstanceBank(
        num_anchor, 4, anchors, anchor_handler=handler, num_temp_instances=num_temp, **options
    ).eval()


def frame(bank, metas, seed, threshold=None):
    """Run one frame on random numbers; each sample draws its own, whatever the batch. Returns what came out."""
    B, N = len(metas["img_metas"]), bank.num_anchor
    draw = [torch.Generator().manual_seed(s) for s in seed]

    def random(*shape):
        return torch.stack([torch.randn(*shape, generator=g) for g in draw])

    feature, anchor, _, _, interval = bank.get(B, metas)
    feature, anchor = bank.update(feature + random(N, 4), anchor + random(N, 11), random(N, 3))
    logits = random(N, 3)
    bank.cache(feature, anchor, logits, metas)
    ids = bank.get_instance_id(logits, threshold=threshold)
    return {"feature": feature, "anchor": anchor, "interval": interval, "ids": ids}


@pytest.mark.parametrize("case", ["InstanceBank", "InstanceBank_id_threshold_0.7"])
def test_three_frames_match_golden(case):
    config, state, given, expected = module_case(case)
    anchors = np.zeros((config["num_anchor"], config.pop("anchor_dim")), dtype=np.float32)
    bank = MODELS.build({"type": "InstanceBank", "anchor": anchors, **config})
    bank.load_state_dict(state, strict=True)
    threshold = 0.7 if case.endswith("0.7") else None
    for i in range(3):
        metas = metas_of(given["timestamp"][i].tolist(), given["T_global"][i].numpy())

        def check(name, actual, i=i):
            if f"frame{i}/{name}" in expected:
                close(actual, expected[f"frame{i}/{name}"])

        feature, anchor, temp_feature, temp_anchor, interval = bank.get(2, metas)
        check("get_feature", feature)
        check("get_anchor", anchor)
        check("get_time_interval", interval)
        if i:
            check("get_temp_feature", temp_feature)
            check("get_temp_anchor", temp_anchor)
            check("mask", bank.mask)
        feature, anchor = bank.update(
            given[f"frame{i}/feature_first"], given[f"frame{i}/anchor_first"], given[f"frame{i}/first_cls"]
        )
        check("update_feature", feature)
        check("update_anchor", anchor)
        feature = feature + given[f"frame{i}/feature_delta"]
        anchor = anchor + given[f"frame{i}/anchor_delta"]
        bank.cache(feature, anchor, given[f"frame{i}/last_cls"], metas)
        for name in ("cached_feature", "cached_anchor", "confidence", "temp_confidence"):
            check(name, getattr(bank, name))
        check("instance_id", bank.get_instance_id(given[f"frame{i}/last_cls"], threshold=threshold))
        check("kept_instance_id", bank.instance_id)
    check("prev_id", bank.prev_id)  # the peer counted in place: only its last number is of its own frame


def test_ids_stay_with_their_instances():
    bank = make_bank()
    first = frame(bank, metas_of([0.0]), [1])
    assert first["ids"].tolist() == [list(range(6))]
    kept = bank.instance_id[0, :3].tolist()
    second = frame(bank, metas_of([0.5]), [2])
    assert second["ids"][0].tolist() == [*kept, 6, 7, 8]
    assert int(bank.prev_id) == 9


def test_threshold_starts_no_track_below_it():
    bank = make_bank()
    logits = torch.tensor([[[3.0], [-3.0], [3.0], [-3.0], [-3.0], [3.0]]])
    assert bank.get_instance_id(logits, threshold=0.5).tolist() == [[0, -1, 1, -1, -1, 2]]


def test_a_batch_of_two_sequences_equals_two_single_runs():
    both, single = make_bank(), [make_bank(), make_bank()]
    times = [
        (0.0, 7.0),
        (0.5, 7.4),
        (9.0, 7.8),
        (9.5, 8.2),
    ]  # the first sequence breaks before the third frame
    turn = np.array([[0, -1, 0, 2], [1, 0, 0, 3], [0, 0, 1, 0], [0, 0, 0, 1.0]])
    for i, pair in enumerate(times):
        poses = [np.linalg.matrix_power(turn, i), np.eye(4)]
        together = frame(both, metas_of(pair, poses), [i, 50 + i])
        for sample in range(2):
            if sample == 0 and i == 2:
                single[0].state = InstanceBankState()
            alone = frame(single[sample], metas_of([pair[sample]], [poses[sample]]), [i + 50 * sample])
            for name in ("feature", "anchor", "interval"):
                torch.testing.assert_close(together[name][sample], alone[name][0])
            torch.testing.assert_close(both.cached_anchor[sample], single[sample].cached_anchor[0])
            torch.testing.assert_close(both.confidence[sample], single[sample].confidence[0])


def test_a_new_scene_drops_only_its_sample():
    bank = make_bank()
    frame(bank, metas_of([0.0, 0.0], scenes=["a", "b"]), [1, 2])
    bank.get(2, metas_of([0.5, 0.5], scenes=["a", "c"]))
    assert bank.mask.tolist() == [True, False] and bank.state.history == (True, False)


def test_another_batch_size_forgets_everything():
    bank = make_bank()
    frame(bank, metas_of([0.0, 0.0]), [1, 2])
    assert bank.get(1, metas_of([0.5]))[2] is None
    assert replace(bank.state, frame=None) == InstanceBankState()


def test_the_state_is_a_value():
    bank = make_bank()
    frame(bank, metas_of([0.0]), [1])
    state = bank.state
    copy = {name: value.clone() for name, value in vars(state).items() if isinstance(value, torch.Tensor)}
    first = frame(bank, metas_of([0.5]), [2])
    bank.state = state
    for name, value in copy.items():
        assert torch.equal(getattr(state, name), value)
    again = frame(bank, metas_of([0.5]), [2])
    for name, value in first.items():
        assert torch.equal(value, again[name])


def test_denoising_rows_are_left_where_they_are():
    bank = make_bank()
    frame(bank, metas_of([0.0]), [1])
    bank.get(1, metas_of([0.5]))
    feature, anchor, logits = torch.randn(1, 8, 4), torch.randn(1, 8, 11), torch.randn(1, 8, 3)
    new_feature, new_anchor = bank.update(feature, anchor, logits)
    assert torch.equal(new_feature[:, 6:], feature[:, 6:]) and torch.equal(new_anchor[:, 6:], anchor[:, 6:])
    assert torch.equal(new_feature[:, :3], bank.cached_feature)


def test_nothing_is_carried_without_temporal_instances():
    for num_temp in (0, -1):
        bank = make_bank(num_temp=num_temp)
        frame(bank, metas_of([0.0]), [1])
        assert bank.get(1, metas_of([0.5]))[2] is None
        assert frame(bank, metas_of([0.5]), [1])["ids"].tolist() == [list(range(6))]


def test_moving_anchors_are_met_where_they_went():
    bank = make_bank(num_anchor=1, num_temp=1)
    anchor = torch.zeros(1, 1, 11)
    anchor[..., 8] = 4.0  # metres per second along x
    bank.cache(torch.zeros(1, 1, 4), anchor, torch.zeros(1, 1, 1), metas_of([0.0]))
    ahead = np.eye(4)
    ahead[0, 3] = 10.0
    temp_anchor = bank.get(1, metas_of([0.5], [ahead]))[3]
    assert temp_anchor[0, 0, 0].item() == pytest.approx(-8.0)


def test_missing_anchor_file(tmp_path):
    path = str(tmp_path / "kmeans.npy")
    handler = {"type": "SparseBox3DKeyPointsGenerator"}
    with pytest.warns(UserWarning, match="InstanceBank: no anchor file .*npy.*zeros"):
        bank = InstanceBank(5, 4, path, anchor_handler=handler)
    with pytest.raises(FileNotFoundError, match=r"tools/make_anchors\.py, or load a checkpoint"):
        bank.get(1, metas_of([0.0]))
    bank.load_state_dict(bank.state_dict())
    assert bank.get(1, metas_of([0.0]))[1].shape == (1, 5, 11)
    np.save(path, np.ones((7, 20, 2)))
    assert InstanceBank(5, 4, path).anchor.shape == (5, 40)


def test_rejections_of_the_bank():
    with pytest.raises(TypeError, match="anchor_handler must have anchor_projection, got Identity"):
        InstanceBank(2, 4, torch.zeros(2, 11), anchor_handler=torch.nn.Identity())
    with pytest.raises(ValueError, match="num_temp_instances must be at most the number of anchors 2, got 3"):
        InstanceBank(2, 4, torch.zeros(2, 11), num_temp_instances=3)
    bank = make_bank()
    with pytest.raises(ValueError, match="timestamps and T_global must be finite"):
        frame(bank, metas_of([float("nan")]), [1])
    with pytest.raises(ValueError, match="metas with timestamp and img_metas are needed"):
        bank.cache(torch.zeros(1, 6, 4), torch.zeros(1, 6, 11), torch.zeros(1, 6, 3))


def test_topk_takes_the_same_rows_everywhere():
    best, (rows, flat) = topk(
        torch.tensor([[1.0, 3, 2]]), 2, torch.arange(6.0).view(1, 3, 2), torch.arange(3)[None]
    )
    assert best.tolist() == [[3, 2]]
    assert rows.tolist() == [[[2, 3], [4, 5]]] and flat.tolist() == [[[1], [2]]]
