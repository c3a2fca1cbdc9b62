"""Tests of faststep.optim against torch's classes and against fp64 references."""
