"""How tensors are computed: captures of CUDA graphs, copies to the host, and trees of tensors."""
