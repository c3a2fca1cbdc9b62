"""A fuzzer of faststep._C: every function and method, called with hostile arguments.

`make fuzz` runs it for long, test_fuzz.py for a short time from a fixed seed.
"""
