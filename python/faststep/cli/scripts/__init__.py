"""Training scripts in plain torch, which the demo and `make bench-whole` run as programs.

They import each other as neighbours do: a script's own folder comes first on its path.
"""
