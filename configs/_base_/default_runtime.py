default_scope = "visdet"

# Hooks and log lines count epochs or iterations as the training loop does. Unless checkpoint.interval is set, a
# checkpoint is saved after every epoch, or whenever an iteration-based run validates.
default_hooks = dict(
    timer=dict(type="IterTimerHook"),
    logger=dict(type="LoggerHook", interval=50),
    param_scheduler=dict(type="ParamSchedulerHook"),
    checkpoint=dict(type="CheckpointHook", max_keep_ckpts=3, save_best="auto"),
    sampler_seed=dict(type="DistSamplerSeedHook"),
    visualization=dict(type="DetVisualizationHook"),
)

# Without a GPU, the process group uses gloo, whatever the backend is.
env_cfg = dict(
    cudnn_benchmark=False,
    mp_cfg=dict(mp_start_method="fork", opencv_num_threads=0),
    dist_cfg=dict(backend="nccl"),
)

# On a GPU, training steps and predictions are replayed as CUDA graphs. Each size of a batch has its own graphs, so that
# batches should have few sizes (PlannedBatchSampler). With graph=False, the model runs eagerly.
graph = True

vis_backends = [dict(type="LocalVisBackend"), dict(type="TensorboardVisBackend")]
visualizer = dict(type="DetLocalVisualizer", vis_backends=vis_backends)
log_processor = dict(type="LogProcessor", window_size=50)

log_level = "INFO"
load_from = None
resume = False
