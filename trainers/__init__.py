"""Training: Monarch actors, vLLM generators, the TorchTitan trainer, the transfer of weights, losses and loops.

The only package that imports torch. Other packages reach it through the `forge_env.trainers` entry points, not by
import.
"""
