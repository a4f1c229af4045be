# Gaussians on a volume of your own: [D0, D1, D2] in a .npy file, or the only array of a .npz file.
# VOLUME=scan.npy visdet train gaussian_field/gaussian-field_volume
_base_ = "./gaussian-field_synthetic.py"

dataset = dict(
    _delete_=True, type="VolumeDataset", path="{{$VOLUME:data/volume.npy}}", key=None, volume_size=10.0
)
model = dict(num_gaussians=1000)
train_dataloader = dict(dataset=dataset)
val_dataloader = dict(dataset=dict(dataset, test_mode=True))
test_dataloader = val_dataloader
