# SparseDrive's first stage, which is detection with track ids and the vector map, with a total batch size of 64 frames.
# This command makes the anchors: visdet make-anchors data/infos/nuscenes_infos_train.npz --out-dir data/kmeans
_base_ = [
    "../_base_/models/sparsedrive_r50.py",
    "../_base_/datasets/nuscenes_driving.py",
    "../_base_/schedules/schedule_sparsedrive_stage1.py",
    "../_base_/default_runtime.py",
]

model = dict(data_preprocessor={{_base_.data_preprocessor}})
visualizer = dict(type="DrivingVisualizer")
model_wrapper_cfg = dict(
    type="MMDistributedDataParallel", broadcast_buffers=False, find_unused_parameters=False
)
