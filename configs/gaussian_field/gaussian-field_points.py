# Gaussians on point samples of your own: [M, 4] rows of x, y, z, value in a .npy file, or a .npz file with points and
# values.
# POINTS=samples.npz visdet train gaussian_field/gaussian-field_points
_base_ = "./gaussian-field_synthetic.py"

dataset = dict(_delete_=True, type="PointSampleDataset", path="{{$POINTS:data/points.npz}}", volume_size=10.0)
train_dataloader = dict(dataset=dataset)
val_dataloader = dict(dataset=dict(dataset, test_mode=True))
test_dataloader = val_dataloader
