"""Engines: tensor operations without Python's overhead, for training and predictions; traced, compiled, captured as CUDA graphs."""
