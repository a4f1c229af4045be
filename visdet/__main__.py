"""``python -m visdet`` is the program ``visdet``, for ``torchrun -m visdet train CONFIG``."""

from visdet.commands import main

if __name__ == "__main__":
    main()
