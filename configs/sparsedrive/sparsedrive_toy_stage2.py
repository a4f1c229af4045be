# Motion and planning on the driving scenes, trained in minutes on two CPU cores. The weights of
# sparsedrive_toy_stage1.py stay as they are. The anchors are those of that config, too.
_base_ = [
    "../_base_/models/sparsedrive_toy.py",
    "../_base_/datasets/driving_scenes.py",
    "../_base_/schedules/schedule_driving_scenes_stage2.py",
    "../_base_/default_runtime.py",
]

model = dict(
    data_preprocessor={{_base_.data_preprocessor}},
    head=dict(task_config=dict(with_motion_plan=True), motion_plan_head={{_base_.motion_plan_head}}),
    freeze_perception=True,
)

# Frames of a sequence resemble each other, so that a training step of planning needs as many sequences as possible.
# Those of a frozen first stage need no depth maps.
depth_steps = ("LoadPointsFromFile", "MultiScaleDepthMapGenerator")
train_pipeline = [step for step in _base_.train_pipeline if step["type"] not in depth_steps]
train_dataloader = dict(batch_size=8, dataset=dict(pipeline=train_pipeline))

val_evaluator = [
    *_base_.val_evaluator,
    dict(type="TrackingMetric", class_range={{_base_.class_range}}),
    dict(type="MotionMetric", class_range=dict(car=30, pedestrian=24)),
    dict(type="PlanningMetric"),
]
test_evaluator = val_evaluator

visualizer = dict(type="DrivingVisualizer")
randomness = dict(seed=0)
load_from = "work_dirs/sparsedrive_toy_stage1/iter_1200.pth"
strict_load = False  # The first stage has no motion and planning.
