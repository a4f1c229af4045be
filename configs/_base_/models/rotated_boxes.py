# Rotated boxes in place of upright ones, for the model, the data sets and the evaluators of a config that inherits this
# file and that of a detector. The weights of the losses stay.
rotated_data = dict(dataset=dict(box_type="rbox", angle_version="le90"))
rotated_metric = dict(type="DOTAMetric", metric="mAP")

l1 = dict(type="RotatedL1Loss")
distance = dict(type="GDLoss", loss_type="kld")  # or loss_type="probiou", or type="RotatedIoULoss"
rotated_boxes = dict(
    box_coder=dict(type="RotatedBoxCoder", angle_version="le90"),
    bbox_head=dict(loss_bbox=l1, loss_iou=distance),
    train_cfg=dict(
        assigner=dict(
            match_costs=[
                dict(type="FocalLossCost", weight=2.0),
                dict(type="RotatedBoxCost", loss=l1, weight=5.0),
                dict(type="RotatedBoxCost", loss=distance, weight=2.0),
            ]
        )
    ),
)
