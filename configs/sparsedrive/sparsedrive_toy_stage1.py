# Detection, track ids and the vector map on the driving scenes, trained from scratch in minutes on two CPU cores.
# This command makes the anchors and draws the scenes: visdet make-anchors data/driving_scenes
# --out-dir data/driving_scenes --det 128 --map 30 --plan 1 --max-distance 33.
_base_ = [
    "../_base_/models/sparsedrive_toy.py",
    "../_base_/datasets/driving_scenes.py",
    "../_base_/schedules/schedule_driving_scenes.py",
    "../_base_/default_runtime.py",
]

model = dict(data_preprocessor={{_base_.data_preprocessor}})
val_evaluator = [
    *_base_.val_evaluator,
    dict(type="TrackingMetric", class_range={{_base_.class_range}}),
]
test_evaluator = val_evaluator

visualizer = dict(type="DrivingVisualizer")
randomness = dict(seed=0)
