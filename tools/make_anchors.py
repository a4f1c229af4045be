"""Run ``visdet make-anchors`` from a clone."""

from visdet.commands import main

if __name__ == "__main__":
    main("make-anchors")
