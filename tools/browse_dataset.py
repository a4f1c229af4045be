"""Run ``visdet browse`` from a clone."""

from visdet.commands import main

if __name__ == "__main__":
    main("browse")
