# A volume of your own, [D0, D1, D2] in a .npy file or a .npz file (with several arrays: name one by `key`):
# tools/train.py configs/gaussian_field/gaussian-field_volume.py --cfg-options volume=scan.npy
_base_ = "./gaussian-field_synthetic.py"

volume = "data/volume.npy"
dataset = dict(_delete_=True, type="VolumeDataset", path="{{$VOLUME:data/volume.npy}}", volume_size=10.0)
model = dict(num_gaussians=1000)
train_dataloader = dict(dataset=dataset)
val_dataloader = dict(dataset=dataset)
test_dataloader = val_dataloader
