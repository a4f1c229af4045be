"""CUDA graphs of training steps and predictions."""
