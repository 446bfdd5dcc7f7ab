"""`python -m tp_kernels.cli`, for launchers that want a module."""

from . import main

if __name__ == "__main__":
    main()
