"""Training: Monarch actors, vLLM generators, the TorchTitan trainer, the weight store, losses and loops.

The only room that imports torch; nothing outside imports it by hand (`forge_env.trainers` entry points find it).
"""
