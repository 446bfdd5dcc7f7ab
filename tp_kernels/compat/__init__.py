"""The names and arguments of other packages, for code that was written against them."""
