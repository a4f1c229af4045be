"""The stages of SparseDrive on a few driving scenes, small enough to train in seconds."""

import numpy as np
from datasets.driving_files import SMALL, driving_scenes
from toolbox import ROOT

STAGE = str(ROOT / "configs/sparsedrive/sparsedrive_toy_stage{}.py")
NUM_DET, NUM_MAP = 32, 8
ITERATIONS = 2


def small_config(folder, stage, **changes):
    """Write a config of a stage with few anchors, thin features and small images, and return its path."""
    scenes = driving_scenes()
    dataset = dict(data_root=scenes, generator=SMALL, data_aug_conf=dict(final_dim=(48, 128), H=48, W=128))
    rng = np.random.default_rng(0)
    boxes = np.zeros((NUM_DET, 11), dtype=np.float32)
    boxes[:, :3] = rng.uniform((-20, -20, -2), (20, 20, 0), (NUM_DET, 3))
    boxes[:, 3:7] = 1
    lines = rng.uniform((-15, -30), (15, 30), (NUM_MAP, 1, 2)) + np.linspace(0, 4, 20)[:, None]
    arrays = {
        "det": boxes,
        "map": lines.astype(np.float32),
        "motion": rng.normal(0, 3, (5, 6, 12, 2)).astype(np.float32),
        "plan": rng.normal(0, 3, (3, 1, 6, 2)).astype(np.float32),
    }
    files = {name: str(folder / f"{name}.npy") for name in arrays}
    for name, array in arrays.items():
        np.save(files[name], array)
    head = dict(
        det_head=dict(instance_bank=dict(num_anchor=NUM_DET, num_temp_instances=12, anchor=files["det"])),
        map_head=dict(instance_bank=dict(num_anchor=NUM_MAP, num_temp_instances=3, anchor=files["map"])),
    )
    if stage == 2:
        head["motion_plan_head"] = dict(motion_anchor=files["motion"], plan_anchor=files["plan"])
    config = dict(
        _base_=STAGE.format(stage),
        model=dict(img_backbone=dict(base_channels=8), img_neck=dict(in_channels=[8, 16, 32]), head=head),
        train_dataloader=dict(batch_size=2, dataset=dataset),
        val_dataloader=dict(dataset=dataset),
        test_dataloader=dict(dataset=dataset),
        train_cfg=dict(max_iters=ITERATIONS, val_interval=ITERATIONS),
        default_hooks=dict(logger=dict(interval=1), visualization=dict(num_val_pictures=2)),
        log_processor=dict(window_size=1),
        visualizer=dict(name=f"stage{stage}_{folder.name}"),  # mmengine keeps one per name and process
        **changes,
    )
    path = folder / f"small_stage{stage}.py"
    path.write_text("".join(f"{key} = {value!r}\n" for key, value in config.items()))
    return str(path)
