"""How the names of checkpoints begin or end."""

# The first two are those of addresses, and the others those of names in mmengine's lists of addresses.
URL_SCHEMES = (
    "http://",
    "https://",
    "open-mmlab://",
    "openmmlab://",
    "mmcls://",
    "modelzoo://",
    "torchvision://",
)
SUFFIXES = (".pth", ".pt", ".safetensors", ".bin")
