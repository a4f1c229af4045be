# Motion and planning on the driving scenes, on top of what sparsedrive_toy_stage1.py learned and keeps, in minutes on
# two CPU cores. Anchors: as there.
_base_ = [
    "../_base_/models/sparsedrive_toy.py",
    "../_base_/datasets/driving_scenes.py",
    "../_base_/schedules/schedule_driving_scenes_stage2.py",
    "../_base_/default_runtime.py",
]

embed_dims = 96
step_s = 0.5
fut_ts, fut_mode = 12, 6  # steps and modes of agents
ego_fut_ts = 6
ego_fut_mode = 1  # of each command; to choose between several takes more training than minutes
layer = ["temp_gnn", "gnn", "norm", "cross_gnn", "norm", "ffn", "norm"]
motion_plan_head = dict(
    type="MotionPlanningHead",
    fut_ts=fut_ts,
    fut_mode=fut_mode,
    ego_fut_ts=ego_fut_ts,
    ego_fut_mode=ego_fut_mode,
    num_classes=5,
    motion_anchor="data/driving_scenes/kmeans_motion_6.npy",
    plan_anchor="data/driving_scenes/kmeans_plan_1.npy",
    embed_dims=embed_dims,
    decouple_attn=True,
    instance_queue=dict(
        type="InstanceQueue",
        embed_dims=embed_dims,
        queue_length=4,
        tracking_threshold=0.2,
        ego_motion_from_poses=True,
    ),
    operation_order=layer * 3 + ["refine"],
    temp_graph_model=dict(
        type="MultiheadAttention",
        embed_dims=embed_dims * 2,
        num_heads=4,
        batch_first=True,
        dropout=0.0,
    ),
    graph_model={{_base_.decoupled_attention}},
    cross_graph_model={{_base_.attention}},
    norm_layer={{_base_.norm_layer}},
    ffn=dict(
        type="AsymmetricFFN",
        in_channels=embed_dims,
        pre_norm=dict(type="LN"),
        embed_dims=embed_dims,
        feedforward_channels=embed_dims * 2,
        num_fcs=2,
        ffn_drop=0.0,
        act_cfg=dict(type="ReLU", inplace=True),
    ),
    refine_layer=dict(
        type="MotionPlanningRefinementModule",
        embed_dims=embed_dims,
        fut_ts=fut_ts,
        fut_mode=fut_mode,
        ego_fut_ts=ego_fut_ts,
        ego_fut_mode=ego_fut_mode,
    ),
    motion_sampler=dict(type="MotionTarget"),
    motion_loss_cls=dict(type="FocalLoss", use_sigmoid=True, gamma=2.0, alpha=0.25, loss_weight=0.2),
    motion_loss_reg=dict(type="L1Loss", loss_weight=0.2),
    planning_sampler=dict(type="PlanningTarget", ego_fut_ts=ego_fut_ts, ego_fut_mode=ego_fut_mode),
    plan_loss_cls=dict(type="FocalLoss", use_sigmoid=True, gamma=2.0, alpha=0.25, loss_weight=0.5),
    plan_loss_reg=dict(type="L1Loss", loss_weight=1.0),
    plan_loss_status=dict(type="L1Loss", loss_weight=1.0),
    motion_decoder=dict(type="SparseBox3DMotionDecoder"),
    planning_decoder=dict(
        type="HierarchicalPlanningDecoder",
        ego_fut_ts=ego_fut_ts,
        ego_fut_mode=ego_fut_mode,
        use_rescore=True,
    ),
    num_det=30,
    num_map=10,
    plan_step_s=step_s,
)

model = dict(
    data_preprocessor={{_base_.data_preprocessor}},
    head=dict(task_config=dict(with_motion_plan=True), motion_plan_head=motion_plan_head),
    freeze_perception=True,
)

# Frames of a sequence resemble each other: a step of planning learns from as many sequences as the batch is large.
train_dataloader = dict(batch_size=8)

val_evaluator = [
    dict(type="NuScenesMetric", class_range=30, anchors="data/driving_scenes/kmeans_det_128.npy"),
    dict(type="VectorMapMetric", anchors="data/driving_scenes/kmeans_map_30.npy"),
    dict(type="TrackingMetric", class_range=30),
    dict(type="MotionMetric", class_range=30),
    dict(type="PlanningMetric"),
]
test_evaluator = val_evaluator

default_hooks = dict(visualization=None)
randomness = dict(seed=0)
load_from = "work_dirs/sparsedrive_toy_stage1/iter_3500.pth"
strict_load = False  # the first stage has no motion and planning
