"""Names that people try for the arguments of functions, and what the argument is called here."""

NAMES_OF_TRAINING = {
    "epochs": "train_cfg=dict(max_epochs=...)",
    "max_epochs": "train_cfg=dict(max_epochs=...)",
    "iterations": "train_cfg=dict(max_iters=...)",
    "max_iters": "train_cfg=dict(max_iters=...)",
    "batch": "train_dataloader=dict(batch_size=...)",
    "batch_size": "train_dataloader=dict(batch_size=...)",
    "workers": "train_dataloader=dict(num_workers=...)",
    "num_workers": "train_dataloader=dict(num_workers=...)",
    "lr": "optim_wrapper=dict(optimizer=dict(lr=...))",
    "lr0": "optim_wrapper=dict(optimizer=dict(lr=...))",
    "learning_rate": "optim_wrapper=dict(optimizer=dict(lr=...))",
    "seed": "randomness=dict(seed=...)",
    "output_dir": "work_dir=...",
    "project": "work_dir=...",
    "weights": "from_=...",
    "pretrained": "from_=...",
    "checkpoint": "from_=...",
    "fp16": "amp=True",
    "half": "amp=True",
    "gpus": "CUDA_VISIBLE_DEVICES in the environment, or torchrun",
    "device": "CUDA_VISIBLE_DEVICES in the environment",
}
NAMES_OF_DETECTING = {
    **dict.fromkeys(
        ("conf", "threshold", "thr", "score_thr", "pred_score_thr", "confidence"), "score_threshold=..."
    ),
    **dict.fromkeys(("batch", "bs"), "batch_size=..."),
    **dict.fromkeys(("half", "fp16"), "amp=True"),
    **dict.fromkeys(("save", "out_file", "out_dir"), "draw(FILE) or save(FILE) of the result"),
    "device": "device=... of init_detector",
    "iou": "nothing: the detectors have no suppression of overlapping boxes",
}
NAMES_OF_LOADING = {
    **dict.fromkeys(("weights", "model", "ckpt"), "checkpoint=..."),
    "cfg": "config=...",
}
