"""Run ``visdet make-driving-scenes`` from a clone."""

import sys

from visdet.commands import main

if __name__ == "__main__":
    main(["make-driving-scenes", *sys.argv[1:]])
