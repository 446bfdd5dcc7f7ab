"""How fast it is here: interleaved measurements against other libraries and against the limits.

`tp-kernels bench --help` is the way to run them.
"""
