# Sparse4D v3, which is SparseDrive's detection alone, with denoising and a total batch size of 48 frames.
_base_ = ["./sparsedrive_r50_stage1_8xb8_nuscenes.py"]

attention = dict(type="MultiheadAttention", embed_dims=512, num_heads=8, batch_first=True, dropout=0.1)
model = dict(
    type="Sparse4D",
    head=dict(
        _delete_=True,
        type="Sparse4DHead",
        cls_threshold_to_reg=0.05,
        decouple_attn=True,
        instance_bank={{_base_.det_head.instance_bank}},
        anchor_encoder={{_base_.det_head.anchor_encoder}},
        num_decoder=6,
        num_single_frame_decoder=1,
        operation_order={{_base_.det_head.operation_order}},
        graph_model=attention,
        temp_graph_model=attention,
        norm_layer={{_base_.norm_layer}},
        ffn={{_base_.ffn}},
        deformable_model={{_base_.det_head.deformable_model}},
        refine_layer={{_base_.det_head.refine_layer}},
        sampler=dict(
            type="SparseBox3DTarget",
            num_dn_groups=5,
            num_temp_dn_groups=3,
            dn_noise_scale=[2.0] * 3 + [0.5] * 7,
            max_dn_gt=32,
            add_neg_dn=True,
            cls_weight=2.0,
            box_weight=0.25,
            reg_weights=[2.0] * 3 + [0.5] * 3 + [0.0] * 4,
            cls_wise_reg_weights={9: [2.0] * 3 + [1.0] * 3 + [0.0] * 2 + [1.0] * 2},
        ),
        loss_cls={{_base_.det_head.loss_cls}},
        loss_reg={{_base_.det_head.loss_reg}},
        decoder=dict(type="SparseBox3DDecoder"),
        reg_weights=[2.0] * 3 + [1.0] * 7,
    ),
)

train_dataloader = dict(batch_size=6)
train_cfg = dict(max_iters=58600, val_interval=11720)
optim_wrapper = dict(optimizer=dict(lr=6e-4))
val_evaluator = [dict(type="NuScenesMetric")]
test_evaluator = val_evaluator
auto_scale_lr = dict(base_batch_size=48)
