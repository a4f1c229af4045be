"""Names that people try for the arguments of functions, and what the argument is called here."""

_SIZE = "the scale of Resize in the pipelines of the config; each model has a size of its own"
_EPOCHS = "train_cfg=dict(max_epochs=...), or epochs=... (--epochs)"
_ITERATIONS = "train_cfg=dict(max_iters=...), or iters=... (--iters)"
_BATCH = "train_dataloader=dict(batch_size=...), or batch_size=... (--batch-size)"
_WORKERS = "train_dataloader=dict(num_workers=...), or workers=... (--workers)"
_LR = "optim_wrapper=dict(optimizer=dict(lr=...)), or lr=... (--lr)"
_OUTPUT_DIR = "work_dir=... (--work-dir)"
_WEIGHTS = "from_=... (--from)"
_FP16 = "amp=True (--amp)"
_DATASET = "data=FOLDER (--data)"
_GPUS = "device=... (--device), or torchrun for several GPUs"
_TEST_BATCH = "--cfg-options test_dataloader.batch_size=..."
_TEST_WORKERS = "--cfg-options test_dataloader.num_workers=..."
_TEST_WEIGHTS = "the checkpoint without an option"
_TEST_OUTPUT_DIR = "--work-dir"
_TEST_FP16 = "--amp"
_DETECT_CONF = "score_threshold=..."
_DETECT_BATCH = "batch_size=..."
_DETECT_HALF = "amp=True"
_DETECT_SAVE = "draw(FILE) or save(FILE) of the result"
_LOAD_WEIGHTS = "checkpoint=..."

NAMES_OF_TRAINING = {
    "epochs": _EPOCHS,
    "max_epochs": _EPOCHS,
    "num_epochs": _EPOCHS,
    "iterations": _ITERATIONS,
    "max_iters": _ITERATIONS,
    "steps": _ITERATIONS,
    "max_steps": _ITERATIONS,
    "batch": _BATCH,
    "batch_size": _BATCH,
    "bs": _BATCH,
    "workers": _WORKERS,
    "num_workers": _WORKERS,
    "lr": _LR,
    "lr0": _LR,
    "learning_rate": _LR,
    "deterministic": "randomness=dict(deterministic=True), or deterministic=True (--deterministic)",
    "seed": "randomness=dict(seed=...), or seed=... (--seed)",
    "output_dir": _OUTPUT_DIR,
    "project": _OUTPUT_DIR,
    "save_dir": _OUTPUT_DIR,
    "out_dir": _OUTPUT_DIR,
    "weights": _WEIGHTS,
    "pretrained": _WEIGHTS,
    "checkpoint": _WEIGHTS,
    "pretrain_weights": _WEIGHTS,
    "fp16": _FP16,
    "half": _FP16,
    "mixed_precision": _FP16,
    "dataset": _DATASET,
    "dataset_dir": _DATASET,
    "data_root": _DATASET,
    "gpus": _GPUS,
    "devices": _GPUS,
    "device": _GPUS,
    "imgsz": _SIZE,
    "img_size": _SIZE,
    "image_size": _SIZE,
    "resolution": _SIZE,
    "grad_accum_steps": "optim_wrapper=dict(accumulative_counts=...)",
    "patience": "custom_hooks=[dict(type='EarlyStoppingHook', ...)]",
}
NAMES_OF_TESTING = {
    "imgsz": _SIZE,
    "img_size": _SIZE,
    "image_size": _SIZE,
    "resolution": _SIZE,
    "batch": _TEST_BATCH,
    "batch_size": _TEST_BATCH,
    "bs": _TEST_BATCH,
    "workers": _TEST_WORKERS,
    "num_workers": _TEST_WORKERS,
    "weights": _TEST_WEIGHTS,
    "checkpoint": _TEST_WEIGHTS,
    "model": _TEST_WEIGHTS,
    "output_dir": _TEST_OUTPUT_DIR,
    "project": _TEST_OUTPUT_DIR,
    "save_dir": _TEST_OUTPUT_DIR,
    "out_dir": _TEST_OUTPUT_DIR,
    "fp16": _TEST_FP16,
    "half": _TEST_FP16,
}
NAMES_OF_DETECTING = {
    "conf": _DETECT_CONF,
    "threshold": _DETECT_CONF,
    "thr": _DETECT_CONF,
    "score_thr": _DETECT_CONF,
    "pred_score_thr": _DETECT_CONF,
    "confidence": _DETECT_CONF,
    "batch": _DETECT_BATCH,
    "bs": _DETECT_BATCH,
    "half": _DETECT_HALF,
    "fp16": _DETECT_HALF,
    "save": _DETECT_SAVE,
    "out_file": _DETECT_SAVE,
    "out_dir": _DETECT_SAVE,
    "device": "device=... of init_detector",
    "iou": "nothing: the detectors have no suppression of overlapping boxes",
}
NAMES_OF_LOADING = {
    "weights": _LOAD_WEIGHTS,
    "model": _LOAD_WEIGHTS,
    "ckpt": _LOAD_WEIGHTS,
    "cfg": "config=...",
}
