# SparseDrive's second stage, which adds motion and planning to the weights of the first stage, with a total batch size
# of 48 frames.
# This command makes the anchors: visdet make-anchors data/infos/nuscenes_infos_train.npz --out-dir data/kmeans
_base_ = [
    "../_base_/models/sparsedrive_r50.py",
    "../_base_/datasets/nuscenes_driving.py",
    "../_base_/schedules/schedule_sparsedrive_stage2.py",
    "../_base_/default_runtime.py",
]

model = dict(
    data_preprocessor={{_base_.data_preprocessor}},
    head=dict(
        task_config=dict(with_motion_plan=True),
        map_head=dict(instance_bank=dict(num_temp_instances=33)),
        motion_plan_head={{_base_.motion_plan_head}},
    ),
)

train_dataloader = dict(batch_size=6)
val_evaluator = [
    *_base_.val_evaluator,
    dict(type="TrackingMetric"),
    dict(type="MotionMetric"),
    dict(type="PlanningMetric"),
]
test_evaluator = val_evaluator

visualizer = dict(type="DrivingVisualizer")
model_wrapper_cfg = dict(
    type="MMDistributedDataParallel", broadcast_buffers=False, find_unused_parameters=False
)
load_from = "work_dirs/sparsedrive_r50_stage1_8xb8_nuscenes/iter_43900.pth"
strict_load = False  # The first stage has no motion and planning.
