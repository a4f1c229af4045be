# Sparse4D v3, which is SparseDrive's detection alone, with denoising and a total batch size of 48 frames.
_base_ = ["./sparsedrive_r50_stage1_8xb8_nuscenes.py"]

attention = dict(_base_.decoupled_attention, type="MultiheadAttention")
model = dict(
    type="Sparse4D",
    head=dict(
        _base_.det_head,
        _delete_=True,
        graph_model=attention,
        temp_graph_model=attention,
        sampler=dict(_base_.det_head.sampler, num_dn_groups=5, num_temp_dn_groups=3),
    ),
)

train_dataloader = dict(batch_size=6)
train_cfg = dict(max_iters=58600, val_interval=11720)
optim_wrapper = dict(optimizer=dict(lr=6e-4))
val_evaluator = [dict(type="NuScenesMetric")]
test_evaluator = val_evaluator
auto_scale_lr = dict(base_batch_size=48)
