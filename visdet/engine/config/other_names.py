"""Names that people try for the arguments of functions, and what the argument is called here."""

_SIZES = dict.fromkeys(
    ("imgsz", "img_size", "image_size", "resolution"),
    "the scale of Resize in the pipelines of the config; each model has a size of its own",
)
NAMES_OF_TRAINING = {
    **dict.fromkeys(
        ("epochs", "max_epochs", "num_epochs"), "train_cfg=dict(max_epochs=...), or epochs=... (--epochs)"
    ),
    **dict.fromkeys(
        ("iterations", "max_iters", "steps", "max_steps"),
        "train_cfg=dict(max_iters=...), or iters=... (--iters)",
    ),
    **dict.fromkeys(
        ("batch", "batch_size", "bs"),
        "train_dataloader=dict(batch_size=...), or batch_size=... (--batch-size)",
    ),
    **dict.fromkeys(
        ("workers", "num_workers"), "train_dataloader=dict(num_workers=...), or workers=... (--workers)"
    ),
    **dict.fromkeys(
        ("lr", "lr0", "learning_rate"), "optim_wrapper=dict(optimizer=dict(lr=...)), or lr=... (--lr)"
    ),
    "deterministic": "randomness=dict(deterministic=True), or deterministic=True (--deterministic)",
    "seed": "randomness=dict(seed=...), or seed=... (--seed)",
    **dict.fromkeys(("output_dir", "project", "save_dir", "out_dir"), "work_dir=... (--work-dir)"),
    **dict.fromkeys(("weights", "pretrained", "checkpoint", "pretrain_weights"), "from_=... (--from)"),
    **dict.fromkeys(("fp16", "half", "mixed_precision"), "amp=True (--amp)"),
    **dict.fromkeys(("dataset", "dataset_dir", "data_root"), "data=FOLDER (--data)"),
    **dict.fromkeys(("gpus", "devices", "device"), "device=... (--device), or torchrun for several GPUs"),
    **_SIZES,
    "grad_accum_steps": "optim_wrapper=dict(accumulative_counts=...)",
    "patience": "custom_hooks=[dict(type='EarlyStoppingHook', ...)]",
}
NAMES_OF_TESTING = {
    **_SIZES,
    **dict.fromkeys(("batch", "batch_size", "bs"), "--cfg-options test_dataloader.batch_size=..."),
    **dict.fromkeys(("workers", "num_workers"), "--cfg-options test_dataloader.num_workers=..."),
    **dict.fromkeys(("weights", "checkpoint", "model"), "the checkpoint without an option"),
    **dict.fromkeys(("output_dir", "project", "save_dir", "out_dir"), "--work-dir"),
    **dict.fromkeys(("fp16", "half"), "--amp"),
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
