"""The wire protocol: the `.proto` files, and the Python modules in `v1` that are generated from them.

`make proto` regenerates the modules; a test checks that they are up to date.
"""
