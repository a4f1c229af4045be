"""Run ``visdet prepare-nuscenes`` from a clone."""

from visdet.commands import main

if __name__ == "__main__":
    main("prepare-nuscenes")
