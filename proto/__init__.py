"""The wire contract: the `.proto` files, and the modules generated from them in `v1`.

`make proto` regenerates the modules; a test compares them with the `.proto` files.
"""
